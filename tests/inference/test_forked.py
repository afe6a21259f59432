"""Logits processors whose state forks along trees: the text of plain decoding, with drafts, and the tokens that they force."""

import math
from typing import Any

import pytest
import torch
from families import VOCAB, Scripted, backbone, heads, left_padded, prompts, say, unpadded
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

ROW, ROWS = left_padded(prompts((9,))), left_padded(prompts((9, 4, 6)))
LENGTH = 24


class Automaton(LogitsProcessor):
    """A grammar over tokens: from state s token t leads to state (3 s + t + 1) mod 8; states allow some tokens, every third a single one.

    Strict as matchers are: it wants one token more at every call, none that it has ruled out, and undoes no more than it has done.
    """

    def __init__(self, row: int = 0, most: int = 6) -> None:
        self.row, self.most = row, most
        self.states: list[int] = []
        self.ids: list[int] = []
        self.calls = 0

    def allowed(self, state: int) -> list[int]:
        return [(11 * state + 7 * i + 3 * self.row) % VOCAB for i in range(1 if state % 3 == 1 else self.most)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        ids = input_ids[0].tolist()
        if self.states:
            assert ids[:-1] == self.ids, "a call is one token further than the last"
            assert ids[-1] in self.allowed(self.states[-1]), "a token that was ruled out"
            self.states.append((3 * self.states[-1] + ids[-1] + 1) % 8)
        else:
            self.states.append(self.row % 8)
        self.ids, self.calls = ids, self.calls + 1
        mask = torch.full_like(scores, -math.inf)
        mask[:, self.allowed(self.states[-1])] = 0
        return scores + mask


class Undoable(Automaton):
    undone = 0

    def rollback(self, n: int) -> None:
        assert 0 < n < len(self.states)
        del self.states[-n:]
        self.ids, self.undone = self.ids[:-n], self.undone + n


class Forcing(Undoable):
    """Names the tokens that follow where a single one is allowed."""

    def forced(self, input_ids: Tensor) -> list[int]:
        ids, state, tokens = input_ids[0].tolist(), self.states[-1], []
        for token in ids[len(self.ids) :]:
            state = (3 * state + token + 1) % 8
        while len(allowed := self.allowed(state)) == 1 and len(tokens) < 5:
            tokens += allowed
            state = (3 * state + allowed[0] + 1) % 8
        return tokens


class Batched(LogitsProcessor):
    def __init__(self, rows: int, kind: type[Automaton] = Undoable) -> None:
        self.rows = [kind(row) for row in range(rows)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([self.rows[i](input_ids[i : i + 1], scores[i : i + 1]) for i in range(len(scores))])

    def rollback(self, n: int) -> None:
        raise AssertionError("rows roll back each by itself")

    def of_row(self, row: int) -> Automaton:
        return self.rows[row]


def nearly(truth: Tensor, rows: dict[str, Tensor]) -> SpeculativeModel:
    """Heads that draft mostly what the text will be, and others beside it."""
    return SpeculativeModel(backbone("shallow"), Scripted(backbone("shallow"), unpadded(truth, rows), "nearly"), capture="off")


@pytest.mark.matrix
@pytest.mark.parametrize("tree", ["auto", TreeShape(20, 6), TreeShape(5, 1), TreeShape(60, 8)], ids=["auto", "tree", "chain", "large"])
@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.4}, {"forced_eos_token_id": 60}], ids=["alone", "penalty", "end"])
def test_greedy_text_is_transformers_own_and_drafted(tree: Any, others: dict[str, Any]) -> None:
    how = {"max_new_tokens": LENGTH, "do_sample": False} | others
    theirs = Automaton()
    truth = backbone("shallow").model.generate(**ROW, **how, logits_processor=LogitsProcessorList([theirs]))
    for of in (nearly(truth, ROW), heads("shallow", "eagle3", "off")):
        ours = Undoable()
        out = say(of, ROW, tree=tree, return_dict_in_generate=True, **how, logits_processor=LogitsProcessorList([ours]))
        assert torch.equal(out.sequences, truth)
        assert (ours.states, ours.ids) == (theirs.states, theirs.ids), "its state is that after transformers' calls"
        assert max(out.nodes) > 1 or tree == "auto"
    assert ours.undone or tree == "auto"


def test_accepted_chains_are_not_called_twice() -> None:
    how = {"max_new_tokens": LENGTH, "do_sample": False}
    truth = backbone("shallow").model.generate(**ROW, **how, logits_processor=LogitsProcessorList([Automaton()]))
    of = SpeculativeModel(backbone("shallow"), Scripted(backbone("shallow"), truth.tolist(), "oracle"))
    ours = Undoable()
    say(of, ROW, tree=TreeShape(5, 1), **how, logits_processor=LogitsProcessorList([ours]))
    assert ours.calls <= LENGTH + 4, "those past the end"


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"temperature": 2.0, "top_p": 0.8}])
def test_sampled_text_is_that_without_drafts(filters: dict[str, Any]) -> None:
    how = {"max_new_tokens": LENGTH, "do_sample": True, "seed": 5} | filters
    plain = say(heads("shallow", "eagle3", "off"), ROW, speculate=False, **how, logits_processor=LogitsProcessorList([Undoable()]))
    for of in (nearly(plain, ROW), heads("shallow", "medusa", "off")):
        for tree in (TreeShape(20, 6), TreeShape(4, 1)):
            assert torch.equal(say(of, ROW, tree=tree, **how, logits_processor=LogitsProcessorList([Undoable()])), plain)


def test_batches_fork_by_row_or_go_without_drafts() -> None:
    how = {"max_new_tokens": LENGTH, "do_sample": False}
    truth = backbone("shallow").model.generate(**ROWS, **how, logits_processor=LogitsProcessorList([Batched(3)]))
    of = nearly(truth, ROWS)
    out = say(of, ROWS, tree=TreeShape(12, 4), return_dict_in_generate=True, **how, logits_processor=LogitsProcessorList([Batched(3)]))
    assert torch.equal(out.sequences, truth) and out.tau > 1.5
    assert torch.equal(say(of, ROWS, batch_size=2, **how, logits_processor=LogitsProcessorList([Batched(3)])), truth)
    whole = type("Whole", (Batched,), {"of_row": None})  # only all rows together
    given = LogitsProcessorList([whole(3, Automaton)])
    out = say(of, ROWS, tree=TreeShape(12, 4), return_dict_in_generate=True, **how, logits_processor=given)
    assert torch.equal(out.sequences, truth) and out.tau == 1


@pytest.mark.parametrize("options", [{}, {"tree": TreeShape(8, 2), "do_sample": True, "seed": 2}])
def test_forced_tokens_are_drafted_without_any_heads(options: dict[str, Any]) -> None:
    of, how = SpeculativeModel(backbone("shallow")), {"max_new_tokens": 60, "return_dict_in_generate": True} | options
    plain = say(of, ROW, speculate=False, **how, logits_processor=LogitsProcessorList([Undoable()]))
    forced = say(of, ROW, **how, logits_processor=LogitsProcessorList([Forcing()]))
    assert torch.equal(forced.sequences, plain.sequences) and plain.tau == 1 < forced.tau
    rows = say(of, ROWS, **how, logits_processor=LogitsProcessorList([Batched(3, Forcing)]))
    alone = say(of, ROWS, speculate=False, **how, logits_processor=LogitsProcessorList([Batched(3)]))
    assert torch.equal(rows.sequences, alone.sequences) and rows.tau > 1
    assert say(of, ROW, max_new_tokens=5, return_dict_in_generate=True).tau == 1, "the next call is without"


def test_beams_call_it_in_order() -> None:
    class Stepping(LogitsProcessor):
        def __init__(self) -> None:
            self.step = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.step += 1
            return scores + torch.arange(VOCAB).roll(self.step) % 5

        def rollback(self, n: int) -> None:
            raise AssertionError("beams are no tree of one row")

    how = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    truth = backbone("shallow").model.generate(**ROW, **how, logits_processor=LogitsProcessorList([Stepping()]))
    assert torch.equal(say(heads("shallow", "eagle3", "off"), ROW, **how, logits_processor=LogitsProcessorList([Stepping()])), truth)
