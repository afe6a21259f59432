"""Speculative beam search returns the same beams as transformers in fewer forward passes.

Shape suffixes: B batch, N nodes.
"""

import copy
from typing import Any

import pytest
import torch
from arguments import tokenizer
from errors import refuses
from families import DRAFTERS, FAMILIES, ROW, VOCAB, backbone, heads, left_padded, prompts, random_drafter, say, texts, tiny
from test_generate import After, own
from torch import Tensor
from transformers import StoppingCriteriaList

import headstart
from headstart import Backbone, Features, SpeculativeModel, TreeShape
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.draft_model import DraftModel
from headstart.inference.early_exit import EarlyExit
from headstart.inference.engine.recycling import RecyclingProposer
from headstart.inference.engine.suffix import SuffixProposer

WIDE = TreeShape(32, 5)
TRUTHS: dict[str, Any] = {}
"""Results of transformers by request."""


class Knowing(Drafter):
    """Drafts with the backbone itself, which reads every path from the start, so any continuation of any beam is drafted exactly."""

    def __init__(self, on: Backbone, depth: int = 3) -> None:
        super().__init__(on, DrafterConfig(depth=depth))

    def begin(self, features: Features, state: list[Any] | None = None) -> list[Any]:
        counts = features.lengths_B.tolist()
        before = [text for text, _ in state] if state is not None else [[] for _ in counts]
        return [(old + row[:count], []) for old, row, count in zip(before, features.tokens_BT.tolist(), counts, strict=True)]

    def select(self, state: list[Any], rows_B: Tensor) -> list[Any]:
        return [state[row] for row in rows_B.tolist()]

    def step(self, state: list[Any], tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, list[Any]]:
        logits, states = [], []
        for (text, above), tokens, parents in zip(state, tokens_BN.tolist(), parents_BN.tolist(), strict=True):
            paths = [(above[parent] if depth else text) + [token] for token, parent in zip(tokens, parents, strict=True)]
            logits.append(self.backbone.model(torch.tensor(paths)).logits[:, -1])
            states.append((text, paths))
        return torch.stack(logits), states

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return hidden


def drafting(family: str, kind: str) -> SpeculativeModel:
    if kind in DRAFTERS:
        return heads(family, kind, "off")
    return SpeculativeModel(backbone(family), Knowing(backbone(family)) if kind == "knowing" else None, capture="off")


def same(of: SpeculativeModel, rows: dict[str, Tensor], ours: dict[str, Any] | None = None, **options: Any) -> Any:
    """The output, checked against transformers."""
    options = {"do_sample": False, "max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True} | options
    request = f"{type(of.backbone.model).__name__} {rows} {options}"
    if request not in TRUTHS or " at 0x" in request:  # a function's repr holds an address, which may be reused
        TRUTHS[request] = own(of, rows, **options)
    expected, out = TRUTHS[request], say(of, rows, **{"tree": WIDE} | (ours or {}), **options)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(out.beam_indices, expected.beam_indices) and out.beam_indices.dtype == expected.beam_indices.dtype
    return out


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*DRAFTERS, "knowing", "none"])
@pytest.mark.parametrize("beams", [2, 3, 5])
def test_drafters_and_numbers_of_beams(kind: str, beams: int) -> None:
    of = drafting("shallow", kind)
    for rows, tree in ((ROW, WIDE), (left_padded(prompts((9, 1, 6))), TreeShape(5 * beams, 3)), (ROW, "auto")):
        out = same(of, rows, {"tree": tree}, num_beams=beams)
        assert out.passes <= 9 and out.tau >= 1 and all(sum(runs) == 9 for runs in out.accept_lengths)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    rows = left_padded(prompts((9, 4, 14)))
    for kind in ("eagle3", "knowing"):
        same(drafting(family, kind), rows, num_beams=5)


@pytest.mark.parametrize("beams", [2, 3, 5])
def test_a_drafter_that_knows_needs_fewer_passes(beams: int) -> None:
    of, options = drafting("shallow", "knowing"), {"num_beams": beams, "max_new_tokens": 17}
    out = same(of, ROW, {"tree": TreeShape(12 * beams, 8)}, **options)
    assert out.passes <= 6 and out.tau == 16 / out.passes and max(out.accept_lengths[0]) == 4
    assert all(beams < nodes <= 12 * beams for nodes in out.nodes[:-1])
    plain = same(of, ROW, {"speculate": False}, **options)
    assert plain.passes == 16 and plain.tau == 1 and set(plain.nodes) == {beams}


@pytest.mark.matrix
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_when_to_stop(early_stopping: bool | str, length_penalty: float) -> None:
    rows, ended = left_padded(prompts((9, 4, 6))), set()
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "pad_token_id": 60, "max_new_tokens": 12}
    for eos, kind in ((12, "none"), ([16, 27, 15, 51, 37], "medusa")):
        options |= {"eos_token_id": eos, "early_stopping": early_stopping, "length_penalty": length_penalty}
        out = same(drafting("shallow", kind), rows, **options)
        assert out.sequences.shape[0] == 6
        ended |= {int(length) for length in (out.beam_indices >= 0).sum(1)}
    assert len(ended) > 1 or length_penalty == 2, "texts of several lengths"


def test_many_end_tokens() -> None:
    """The number of candidates grows with the number of end tokens, so that enough beams continue."""
    options: dict[str, Any] = {"num_return_sequences": 3, "early_stopping": "never", "length_penalty": 3.0}
    for eos in ([0, 12, 16, 27, 15, 51, 37], list(range(VOCAB - 9))):
        same(drafting("shallow", "knowing"), left_padded(prompts((9, 4, 6))), num_beams=3, eos_token_id=eos, **options)


@pytest.mark.parametrize("returned,eos,pad", [(1, None, 0), (3, None, 60), (3, 5, 0), (2, [5], 60)])
def test_padding_after_the_end(returned: int, eos: Any, pad: int) -> None:
    """transformers pads with -1, the end token or the padding token."""
    stop = StoppingCriteriaList([Ends(9)])
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": returned, "eos_token_id": eos, "pad_token_id": pad}
    same(drafting("shallow", "none"), left_padded(prompts((9, 4))), stopping_criteria=stop, **options)


class Ends(After):
    """Ends sequences whose last token is even, once they are long enough."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return super().__call__(input_ids, scores) & (input_ids[:, -1] % 2 == 0)


def test_criteria_are_asked_once_a_step() -> None:
    criterion = After(17)
    same(drafting("shallow", "knowing"), ROW, num_beams=3, stopping_criteria=StoppingCriteriaList([criterion]))
    assert criterion.seen == 2 * list(range(10, 18)), "by transformers and by us"


def test_stop_strings() -> None:
    same(drafting("shallow", "knowing"), ROW, num_beams=3, stop_strings=["a", "k", "Z", "7"], tokenizer=tokenizer())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_short_texts(count: int) -> None:
    out = same(drafting("shallow", "knowing"), ROW, num_beams=3, max_new_tokens=count)
    assert out.sequences.shape == (1, 9 + count) and out.passes <= count - 1
    assert out.tau == ((count - 1) / out.passes if out.passes else 1.0)


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 6, "eos_token_id": [3, 7, 11, 20]},
    {"bad_words_ids": [[4], [9, 3], [20, 21]]}, {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 7},
    {"suppress_tokens": [1, 2, 3], "renormalize_logits": True}, {"forced_eos_token_id": 9, "eos_token_id": 9},
    {"forced_bos_token_id": 8, "repetition_penalty": 1.3},
])  # fmt: skip
def test_processors_see_each_beam(options: dict[str, Any]) -> None:
    same(drafting("shallow", "knowing"), left_padded(prompts((9, 4, 6))), num_beams=3, **options)


def test_processors_that_know_the_prompt() -> None:
    of = drafting("shallow", "knowing")
    for few in (2, 5, 40):  # also fewer than there are beams
        allow = lambda b, ids, few=few: [(int(ids[-1]) * 7 + i) % VOCAB for i in range(few)]  # noqa: E731
        same(of, ROW, num_beams=3, prefix_allowed_tokens_fn=allow)
        same(of, ROW, num_beams=3, prefix_allowed_tokens_fn=headstart.stateless(allow))
    same(of, ROW, num_beams=3, encoder_no_repeat_ngram_size=1)
    same(of, left_padded(prompts((9, 4))), num_beams=3, encoder_repetition_penalty=1.3, encoder_no_repeat_ngram_size=2)
    four = lambda b, ids: [4]  # noqa: E731
    same(of, ROW, num_beams=2, prefix_allowed_tokens_fn=four, bad_words_ids=[[4]])  # transformers then allows it nevertheless
    refuses("rule out every token", say, of, ROW, num_beams=2, max_new_tokens=5, prefix_allowed_tokens_fn=four, suppress_tokens=[4])
    with pytest.raises(ValueError, match="empty list"):
        say(of, ROW, num_beams=2, max_new_tokens=5, prefix_allowed_tokens_fn=lambda b, ids: [])


def test_scores_and_logits() -> None:
    """Scores and logits of every beam and step; zeros for a finished row."""
    options: dict[str, Any] = {"num_beams": 3, "repetition_penalty": 1.4, "output_logits": True}
    rows = left_padded(prompts((9, 4)))
    out = same(drafting("shallow", "knowing"), rows, **options)
    options |= {"do_sample": False, "max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True}
    expected = own(drafting("shallow", "none"), rows, **options)
    for kind in ("scores", "logits"):
        assert len(out[kind]) == len(expected[kind]) == 10
        for one, other in zip(out[kind], expected[kind], strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
    transitions = backbone("shallow").model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    torch.testing.assert_close(transitions.sum(1) / 10, out.sequences_scores, atol=1e-4, rtol=1e-4)
    bare = say(drafting("shallow", "none"), rows, **options | {"output_scores": False, "output_logits": False})
    assert bare.sequences_scores is None and bare.scores is None and bare.beam_indices is not None


def test_ids_alone_small_batches_and_captured_passes() -> None:
    rows, options = left_padded(prompts((9, 4, 59))), {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    truth = own(drafting("shallow", "none"), rows, **options)
    for of in (
        heads("shallow", "eagle3"),
        SpeculativeModel(backbone("shallow"), random_drafter("medusa", backbone("shallow")), capture="trace"),
    ):
        for ours in (
            {}, {"batch_size": 1}, {"batch_size": 2, "tree": WIDE}, {"tree": TreeShape(12, 3), "timed": True}, {"speculate": False},
        ):  # fmt: skip
            assert torch.equal(say(of, rows, **ours, **options), truth), ours
    assert of.engine(True).reader.read.made


def test_proposers() -> None:
    """Top-k tokens that the backbone gave after a token yield drafts of some breadth; a continuation of the sequence does not."""
    rows = {"input_ids": texts(1, 3).repeat(1, 6)}
    for proposers in ([RecyclingProposer()], [SuffixProposer()], [SuffixProposer(), RecyclingProposer()]):
        of = SpeculativeModel(backbone("shallow"), proposers=proposers, capture="off")
        for tree in (WIDE, "auto"):
            out = same(of, rows, {"tree": tree}, num_beams=3)
            assert (max(out.nodes) > 3) == isinstance(proposers[-1], RecyclingProposer) or tree == "auto"


def test_draft_models_and_early_exits() -> None:
    """A draft model that is always right, and an early exit that drafts on the backbone's own cache, which beams share."""
    on = backbone("llama")
    for drafter, drafts in ((DraftModel.of(on, tiny("llama"), depth=3), True), (EarlyExit(on, layers=3), False)):
        for rows, new in ((ROW, 14), (left_padded(prompts((62, 9))), 8)):
            out = same(SpeculativeModel(on, drafter), rows, {"tree": TreeShape(40, 8)}, num_beams=3, max_new_tokens=new)
            assert out.passes < new - 3 if drafts else out.nodes == [3] * (new - 1)


def test_rows_of_different_lengths_near_the_end_of_their_slots() -> None:
    """There are 64 slots; tries of short rows are as long as those of long ones."""
    for lengths in ((62,), (61, 4, 30)):
        for kind in ("eagle3", "knowing"):
            same(drafting("shallow", kind), left_padded(prompts(lengths)), {"tree": TreeShape(60, 6)}, num_beams=3)


def test_gpt2_near_its_last_position() -> None:
    of, rows = drafting("gpt2", "eagle3"), {"input_ids": texts(1, 80)}
    same(of, rows, num_beams=3, max_new_tokens=16)


def test_recurrent_layers_are_refused() -> None:
    hybrid = copy.copy(backbone("shallow"))
    hybrid.recurrent = "layers"
    refuses("recurrent layers of LlamaForCausalLM", say, SpeculativeModel(hybrid), ROW, num_beams=3, max_new_tokens=5)
