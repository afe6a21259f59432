"""What is trained on is the prompt of decoding and then the tokens written, for the shapes of published templates in every situation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published import SITUATIONS, Shape, decoded, refused, shapes, tally, tools_of, trained, wrong

from headstart.support.chat.conversation import Chat
from headstart.support.chat.settings import ChatSettings
from headstart.support.errors import UserError
from headstart.training.data.check import Source, compare


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_what_is_trained_on_is_what_decoding_writes(shape: Shape) -> None:
    """Each turn is transformers' own prompt, without a label, and then exactly what the model writes, with its first end last."""
    assert {situation: found for situation in SITUATIONS if (found := wrong(shape, situation))} == {}


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_what_a_template_refuses_is_refused_in_one_line(shape: Shape) -> None:
    assert "plain" not in refused(shape)
    for situation in shape.refuses:
        with pytest.raises(UserError, match="1 rows refused by the chat template") as caught:
            trained(shape, situation)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_every_answer_ends_with_a_token_at_which_decoding_stops(shape: Shape) -> None:
    for situation in SITUATIONS.keys() - refused(shape):
        for _, written in decoded(shape, situation):
            assert written[-1] in shape.end_ids and not set(written[:-1]) & set(shape.end_ids)


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_the_check_before_training_finds_nothing_amiss(shape: Shape) -> None:
    """As `inspect` and the start of `train` say it."""
    conversations = [shape.conversation(situation) for situation in SITUATIONS if situation not in refused(shape)]
    rows = [{"messages": messages, "tools": tools_of(messages)} for messages in conversations]
    chat = Chat(shape.tokenizer, ChatSettings(variables=dict(shape.variables), ends=shape.end_ids))
    check = compare(rows, Source("x", "messages", "auto", exact=False), chat)
    assert (check.same, check.warning) == (check.answers, ""), check.first
    assert check.answers == tally(shape.name)[1]


def test_a_wrong_expectation_is_found() -> None:
    """The comparison itself: another end, a blank more, or a label in the prompt would be seen."""
    shape = shapes()["qwen3"]
    for changes in ({"answer": "{}"}, {"answer": " {}<|im_end|>"}, {"bare": ""}, {"answer": "{}<|im_end|>\n"}):
        assert wrong(replace(shape, **changes), "plain")
