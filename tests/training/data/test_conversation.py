"""Conversations: the exact label tokens under templates of every style, and every kind of malformed row."""

import json

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, PHI3, QWEN3, TURNS, VICUNA, chat, make_samples, make_tokenizer
from errors import refusal, refuses

from headstart.chat.messages import read_messages
from headstart.support.errors import UserError
from headstart.training.data.data import Sample
from headstart.training.recipe.recipe import Data


def learned(tokenizer, sample: Sample) -> list[str]:
    """The runs of label tokens, decoded."""
    edges = [0, *(i for i in range(1, len(sample.loss_mask)) if sample.loss_mask[i] != sample.loss_mask[i - 1]), len(sample.loss_mask)]
    runs = [sample.tokens[a:b] for a, b in zip(edges, edges[1:], strict=False) if sample.loss_mask[a]]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def samples_of(tokenizer, *conversations: list[dict], **data) -> list[Sample]:
    return make_samples([{"messages": turns} for turns in conversations], tokenizer, Data(train="x", **data), source="x.jsonl")[0]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(("template", "runs"), [
    (CHATML, ["It is four.<|im_end|>", "Six, ünder one condition.<|im_end|>"]),
    (LLAMA3, ["It is four.<|eot_id|>", "Six, ünder one condition.<|eot_id|>"]),
    (VICUNA, [" It is four.</s>", " Six, ünder one condition.</s>"]),
    (GEMMA, ["It is four.<end_of_turn>", "Six, ünder one condition.<end_of_turn>"]),
    (PHI3, ["It is four.<|end|>", "Six, ünder one condition.<|end|>"]),
], ids=["chatml", "llama3", "vicuna", "gemma", "phi3"])  # fmt: skip
def test_the_assistants_turns_and_their_ends_are_learned(template, runs, trim_offsets):
    tokenizer = make_tokenizer(template, trim_offsets)
    (sample,) = samples_of(tokenizer, chat(*TURNS))
    assert learned(tokenizer, sample) == runs
    whole = tokenizer.apply_chat_template(chat(*TURNS), return_dict=False)
    assert sample.tokens.tolist() == whole[: len(sample.tokens)] and sample.loss_mask[-1]  # up to the last end, with at most one <s>


def test_generation_blocks_of_a_template_that_drops_thoughts_make_one_sample_per_turn():
    tokenizer = make_tokenizer(QWEN3)
    start, end = "{%- if m.role == 'assistant' and", "{{- text + '<|im_end|>\n' }}"
    assert start in QWEN3 and end in QWEN3
    opened = QWEN3.replace(start, "{%- generation %}" + start.replace("{%-", "{%"))
    tokenizer.chat_template = opened.replace(end, end + "{% endgeneration %}")
    samples, stats = make_samples([{"messages": chat(*TURNS)}], tokenizer, Data(train="x"), source="x")
    assert len(samples) == 2 and stats.rows_split == 1 and "1 rows split by turn" in str(stats)
    tokenizer.__class__ = type("Slow", (type(tokenizer),), {"is_fast": False})
    with pytest.raises(UserError, match="is a slow one"):  # blocks are of characters
        samples_of(tokenizer, chat(*TURNS))


def test_what_is_not_an_answer_is_not_learned():
    tokenizer = make_tokenizer(CHATML)
    opening = [("assistant", "Hello there"), ("system", "user"), ("user", "Hi"), ("assistant", "Six"), ("user", "And three?")]
    (sample,) = samples_of(tokenizer, chat(*opening))
    assert learned(tokenizer, sample) == ["Six<|im_end|>"]  # without the greeting, which answers no question
    assert "three" not in tokenizer.decode(sample.tokens)  # an unanswered question is dropped
    (everything,) = samples_of(tokenizer, chat(*opening), loss_on="all")
    assert everything.loss_mask.all() and "three" in tokenizer.decode(everything.tokens)


def test_other_fields_of_a_message_reach_the_template_and_nulls_do_not():
    answer = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "reasoning": None}]
    assert read_messages(answer, "x") == [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert read_messages([{"from": "human", "value": "Hi", "weight": 1}], "x") == [{"role": "user", "content": "Hi", "weight": 1}]
    template = "{{ tools[0].name }}{% for m in messages %}{{ m.role + m.content + (m.extra or '') }}{% endfor %}"
    tokenizer = make_tokenizer(template)
    rows = [{"messages": [*chat(*TURNS[:1]), {"role": "assistant", "content": "a", "extra": "b"}], "tools": [{"name": "Add"}]}]
    (sample,), _ = make_samples(rows, tokenizer, Data(train="x"), source="x")
    assert tokenizer.decode(sample.tokens) == "AdduserWhat is two?assistantab"


@pytest.mark.parametrize("text", ["It is four.", "<s>It is four."])
def test_plain_text_is_learned_whole_with_the_tokenizers_own_special_tokens(text):
    tokenizer = make_tokenizer()
    (sample,), stats = make_samples([{"text": text}], tokenizer, Data(train="x"), source="x")
    assert tokenizer.decode(sample.tokens) == "<s>It is four." and sample.loss_mask.all()
    assert (stats.rows, stats.samples, stats.tokens, stats.label_tokens) == (1, 1, len(sample.tokens), len(sample.tokens))
    assert str(stats) == f"1 rows, 1 samples, {stats.tokens} tokens, {stats.tokens} label tokens"


def test_a_recipes_template_serves_a_tokenizer_without():
    tokenizer = make_tokenizer()
    refuses("has no chat template.*set data.chat_template", samples_of, tokenizer, chat(*TURNS))
    (sample,) = samples_of(tokenizer, chat(*TURNS), chat_template=VICUNA)
    assert learned(tokenizer, sample)[0] == " It is four.</s>"


def test_rows_that_cannot_be_used_are_counted():
    tokenizer = make_tokenizer(GEMMA)
    good, twice, unanswered = chat(*TURNS), chat(TURNS[0], *TURNS), chat(TURNS[0])
    rows = [{"messages": turns} for turns in (good, twice, unanswered, good)]
    samples, stats = make_samples(rows, tokenizer, Data(train="x"), source="x")
    assert (len(samples), stats.rows_refused, stats.rows_without_assistant) == (2, 1, 1)
    assert "1 rows refused by the chat template (roles must alternate)" in str(stats)
    with pytest.raises(UserError, match=r"no label tokens in x: .*1 rows refused by the chat template \(roles must alternate\)"):
        make_samples(rows[1:2], tokenizer, Data(train="x"), source="x")
    with pytest.raises(UserError, match="no label tokens in x: .*1 samples without label tokens"):
        make_samples(rows[:1], tokenizer, Data(train="x", max_length=4), source="x")  # the whole answer is cut off
    texts = [{"text": "a"}, {"text": ""}, {"text": "It is four."}]
    assert make_samples(texts, make_tokenizer(), Data(train="x"), source="x")[1].samples_empty == 2


def test_no_assistant_turn_anywhere_is_refused():
    with pytest.raises(UserError, match=r"no assistant turn to train on in any of the 2 rows of x.jsonl \(roles found: user, system\)"):
        samples_of(make_tokenizer(CHATML), chat(TURNS[0]), chat(("system", "x"), TURNS[0]))


@pytest.mark.parametrize(("row", "data", "message"), [
    ({"messages": []}, {"column": "turns"}, "x has the columns messages, not turns; set data.column to one it has"),
    ({"text": "a"}, {"format": "messages"}, "x has the columns text, not messages"),
    ({"text": 3}, {"format": "text"}, "x, row 1: plain text expected; got int"),
    ({"messages": [{"from": "human", "value": "x"}]}, {"format": "messages"}, "a turn has role and content; this one has from, value"),
])  # fmt: skip
def test_rows_that_are_not_what_the_recipe_says_are_named(row, data, message):
    assert message in refusal(make_samples, [row], make_tokenizer(CHATML), Data(train="x", **data), source="x")


TALK, ANSWER = chat(*TURNS), {"role": "assistant", "content": "Four."}
IDS, MASK = [5, 6, 7, 8, 9], [0, 0, 1, 1, 0]


def with_call(value):
    """A conversation in the form of ShareGPT whose third turn is a call."""
    return {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}, {"from": "function_call", "value": value}]}


@pytest.mark.parametrize(("row", "message"), [
    ({"ask": "a", "told": "b"}, "columns ask, told, not messages or conversations or prompt with completion or text; name yours with"),
    ({"messages": [{"role": "user"}, {"text": "x"}]}, "x, row 1, turn 1: a turn has role and content, or from and value; this"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "x, row 1, turn 0: unknown speaker 'alien'; known: human, user, gpt"),
    (
        {"messages": [{"role": "user", "content": "Two?", "value": "Three?"}]},
        "row 1, turn 0: content and value are names of the same; got 'Two?' and 'Three?': keep one",
    ),
    (
        {"messages": [ANSWER | {"from": "Bo"}, ANSWER | {"from": "human"}]},
        "row 1, turn 1: role and from are names of the same; got 'assistant' and 'user'",
    ),
    ({"messages": [ANSWER | {"weight": 0.5}]}, "x, row 1, turn 0: weight is 0 or 1, whether the turn is learned; got 0.5"),
    (
        {"messages": [ANSWER | {"content": [{"type": "text", "text": "Four.", "weight": 0}]}]},
        "turn 0: a part of content has weight, which is read of whole turns: mark the turn, or remove it",
    ),
    # what goes on from an instruction
    *(
        (
            {"instruction": "Double it.", "input": value, "output": "84"},
            "x, row 1: instruction, input go together where all are text; got input",
        )
        for value in (0, ["a fact"], {"city": "Oslo"}, json.dumps(TALK))
    ),
    ({"instruction": TALK[:1], "context": "Oslo", "output": "84"}, "context go together where all are text; got instruction [{'role'"),
    # JSON text
    ({"messages": "Two?"}, "row 1: a conversation is a list of turns, each a mapping; got 'Two?'; data.format=text trains on plain text"),
    ({"messages": str(TALK)}, "; write it with json.dumps, not as Python prints it: got "),
    ({"messages": json.dumps(TALK)[:-9]}, "row 1: not valid JSON"),
    ({"text": str(TALK)}, "row 1: not valid JSON"),
    ({"messages": TALK, "tools": "search"}, "row 1: tools are a list of mappings, or JSON text of one; got 'search'"),
    ({"messages": TALK, "tools": "[{]"}, "row 1, tools: not valid JSON"),
    (with_call("add(1)"), "row 1, turn 2, its call: not valid JSON"),
    (with_call('{"a": 1}'), "turn 2: a call is a mapping with name and argum"),
    (with_call(None), "turn 2: a call is a mapping with name"),
    # tokens
    ({"input_ids": IDS}, "x, row 1 has input_ids without loss_mask; add it (1 for tokens to learn), or set data.loss_on=all"),
    ({"input_ids": IDS, "loss_mask": MASK[1:]}, "row 1: loss_mask is a list of zeros and ones, one for each of the 5 tokens"),
    ({"input_ids": IDS, "loss_mask": [0, 0, 2, 1, 0]}, "loss_mask is a list of zeros and ones"),
    ({"input_ids": IDS, "loss_mask": "00110"}, "got str"),
    ({"input_ids": [5, "6"], "loss_mask": [0, 1]}, "input_ids is a list of token ids, whole numbers of at least 0; got [5, '6']"),
    ({"input_ids": [5, -6], "loss_mask": [0, 1]}, "got [5, -6]"),
    ({"input_ids": [5, True], "loss_mask": [0, 1]}, "got [5, True]"),
    ({"input_ids": "5 6", "loss_mask": [0, 1]}, "got '5 6'"),
    ({"input_ids": [IDS, IDS], "loss_mask": [MASK]}, "row 1: input_ids has 2 samples and loss_mask 1; give as many"),
    ({"input_ids": IDS, "labels": [6, 7, 8, 9, -100]}, "labels is a list of the tokens of input_ids, or -100 for those not to learn"),
    ({"input_ids": IDS, "loss_mask": [0] * 5}, "no label tokens in x"),
])  # fmt: skip
def test_wrong_rows_are_named(row, message):
    assert message in refusal(make_samples, [row], make_tokenizer(CHATML), Data(train="x"), source="x")


def test_a_column_of_another_name():
    tokenizer = make_tokenizer(CHATML)
    for row in ({"story": "It is four."}, {"story": chat(*TURNS)}):
        assert make_samples([row], tokenizer, Data(train="x", column="story"), source="x")[0]
    with pytest.raises(UserError, match="x, row 2 has no story; it has other"):
        make_samples([row, {"other": 1}], tokenizer, Data(train="x", column="story"), source="x")
