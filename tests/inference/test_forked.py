"""Logits processors whose state forks along trees, those of grammars among them: the text of plain decoding, and tokens they force."""

import json
import math
import re
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, output_of, refuses
from families import VOCAB, Scripted, backbone, heads, left_padded, prompts, say, tiny, unpadded
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

import headstart
from headstart import SpeculativeModel, TreeShape

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


# Text of a JSON schema or a regular expression: that of plain constrained decoding, with drafts, in batches and sampled.

END = VOCAB - 1
HOW: dict[str, Any] = {"max_new_tokens": 70, "eos_token_id": END, "pad_token_id": 0}
PIECES = ['"n', "am", "ame", '"a', "ge", '":', '",', ',"', '{"', '"}', "an", "na", "bo", "ob", "  "]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["anna", "bob", "carol"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS: dict[str, dict[str, Any]] = {"schema": {"json_schema": SCHEMA}, "regex": {"regex": r"(ab?|[c-f]{2,3}){4}[0-9]{1,9}(yes|no)?"}}


def tokenizer(end: str | None = "</s>") -> PreTrainedTokenizerFast:
    """Letters, digits and punctuation, some pairs of them, and an end token: as many as the small models have."""
    letters = ["Ġ", *'{}[]":,-', *string.digits, *string.ascii_lowercase]
    pieces = [piece.replace(" ", "Ġ") for piece in PIECES]
    vocab = {piece: number for number, piece in enumerate([*letters, *pieces])}
    merges = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece)) if {piece[:cut], piece[cut:]} <= {*vocab}]
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)


def given(kind: str) -> LogitsProcessorList:
    return LogitsProcessorList([headstart.grammar(tokenizer(), **GRAMMARS[kind])])


def fits(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(GRAMMARS[kind]["regex"], text) is not None
    row = json.loads(text)
    return set(row) == {"name", "age"} and row["name"] in SCHEMA["properties"]["name"]["enum"] and 0 <= row["age"] <= 99  # type: ignore[index]


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["row", "batch"])
def test_text_is_that_of_plain_constrained_decoding(kind: str, rows: dict[str, torch.Tensor]) -> None:
    truth = backbone("shallow").model.generate(**rows, **HOW, do_sample=False, logits_processor=given(kind))
    for row in truth[:, rows["input_ids"].shape[1] :]:
        written = row.tolist()
        assert END in written and fits(kind, tokenizer().decode(written[: written.index(END)]))
    for of in (nearly(truth, rows), heads("shallow", "eagle3", "off")):
        for tree in ("auto", TreeShape(12, 4), TreeShape(4, 1)):
            processors = given(kind)
            for _ in range(2):  # the second call begins anew
                out = say(of, rows, tree=tree, return_dict_in_generate=True, **HOW, logits_processor=processors)
                assert torch.equal(out.sequences, truth)
    assert out.tau > 1 and torch.equal(say(of, rows, **HOW, batch_size=1, logits_processor=given(kind)), truth)


def test_end_tokens_of_the_call_and_text_after_the_end() -> None:
    other = LogitsProcessorList([headstart.grammar(tokenizer(), regex="[c-z]{3}", end_tokens=[END, 3])])
    out = say(heads("shallow", "eagle3", "off"), ROW, **HOW | {"eos_token_id": [END, 3]}, logits_processor=other)
    assert out.shape[1] <= 9 + 3 + 1 and out[0, -1] in (END, 3)
    how = {"max_new_tokens": 20, "do_sample": False}  # nothing ends the text, which goes on freely after the end token
    truth = backbone("shallow").model.generate(**ROW, **how, logits_processor=given("regex"))
    assert torch.equal(say(heads("shallow", "eagle3", "off"), ROW, tree=TreeShape(8, 3), **how, logits_processor=given("regex")), truth)


def test_a_matcher_that_gave_up_is_one_line_and_the_next_call_begins_anew() -> None:
    processors = given("regex")
    truth = say(heads("shallow", "eagle3", "off"), ROW, **HOW, logits_processor=processors)
    row = processors[0].of_row(0)
    row.matcher.consume_tokens([1, 1])
    refuses("the grammar cannot be followed further: ", row.forced, ROW["input_ids"])
    assert torch.equal(say(heads("shallow", "eagle3", "off"), ROW, **HOW, logits_processor=processors), truth)


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "got neither: give one of them"),
    ({"regex": "a", "json_schema": {}}, "got both: give one of them"),
    ({"regex": "(a"}, r"the regular expression '\(a' cannot be used \(unclosed group\)"),
    ({"json_schema": {"type": "strin"}}, r"the JSON schema cannot be used \(Invalid type: strin\)"),
    ({"json_schema": {"unevaluatedItems": 1}}, "Unimplemented keys"),
    ({"json_schema": '{"type": '}, r"the JSON schema is not JSON \(Expecting value: line 1 column 10"),
    ({"json_schema": [1]}, "the JSON schema cannot be used .schema must be an object or boolean"),
    ({"json_schema": {"enum": {1}}}, "the JSON schema is not JSON .Object of type set"),
    ({"regex": "a", "end_tokens": []}, "has no end token"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_line(arguments: dict[str, Any], message: str) -> None:
    refuses(message, headstart.grammar, tokenizer(), **arguments)


def test_a_missing_package_or_end_token_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("has no end token", headstart.grammar, tokenizer(end=None), regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refuses(r"llguidance, which is not installed; run: pip install 'headstart\[grammar\]'", headstart.grammar, tokenizer(), regex="a")


def test_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama")
    model.generation_config.eos_token_id = END
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    generate = ["generate", "--backbone", str(tmp_path / "model"), "--dtype", "fp32", "--max-new-tokens", "70"]
    for asked, kind in ((["--json-schema", str(schema)], "schema"), (["--regex", GRAMMARS["regex"]["regex"]], "regex")):
        texts = []
        for drafting in (["--propose", "suffix", "recycling"], ["--no-draft"]):
            texts.append(output_of(capsys, *generate, "name", *asked, *drafting).strip())
        assert texts[0] == texts[1] and fits(kind, texts[0])
    for asked, said in (
        (["--regex", "(a"], "unclosed group"), (["--json-schema", str(tmp_path / "none")], "--json-schema"),
        (["--regex", "a", "--json-schema", str(schema)], "not allowed with"),
    ):  # fmt: skip
        assert said in error_of(capsys, *generate, *asked, "name")
