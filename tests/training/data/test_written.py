"""What is trained on is the prompt of decoding and then the tokens that the model writes: templates that make this hard."""

from typing import Any

import pytest
from chat_templates import CHATML, QWEN3, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from headstart.chat.conversation import Chat
from headstart.chat.template import ChatSettings

IM = "<|im_start|> <|im_end|>"
ROLES = "<|user|> <|assistant|> <|system|> <|tool|> <|end|>"
ASKED = [{"role": "user", "content": "Two and two?"}]


def maker(template: str, special: str, ends: str = "", **settings: Any) -> Chat:
    """A template, its special tokens, and those at which the model stops."""
    tokenizer = make_tokenizer(template, special=special)
    ids = tuple(tokenizer.convert_tokens_to_ids(ends.split()))
    return Chat(tokenizer, ChatSettings(ends=ids, **settings))


def expect(chat: Chat, messages: list[dict[str, Any]], *answers: str, tools: Any = None) -> None:
    """Each turn is transformers' own prompt and then the tokens of the answer's text; samples hold nothing else."""
    tokenizer, turns = chat.tokenizer, [i for i, one in enumerate(messages) if one["role"] == "assistant" and i > 0]
    found = chat.turns(messages, tools)
    assert [chat.text(turn.answer) for turn in found] == list(answers)
    made = chat.samples(messages, tools)
    for i, turn, text in zip(turns, found, answers, strict=True):
        asked = tokenizer.apply_chat_template(
            messages[:i], tools=tools, add_generation_prompt=True, return_dict=False, **chat.settings.variables
        )  # fmt: skip
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (turn.prompt, turn.answer) == (asked, written)
        whole = [*asked, *written]
        tokens, labels = next(one for one in made if one[0][: len(whole)] == whole)
        assert labels[len(asked) : len(whole)] == turn.labels and not labels[len(asked) - 1]
        assert chat.answer(messages[: i + 1], tools) == written
    assert sum(sum(labels) for _, labels in made) == sum(sum(turn.labels) for turn in found)


BY_ROLE = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + '<|end|>\n' }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
FOUR = [*ASKED, {"role": "assistant", "content": "Four."}]
AGAIN = [*FOUR, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Five."}]


@pytest.mark.parametrize(
    ("template", "ends", "answer", "warned"),
    [
        (BY_ROLE + ASK, "<|end|>", "Four.<|end|>", False),
        (BY_ROLE + ASK, "</s> <|end|>", "Four.<|end|>", False),
        (BY_ROLE + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}" + ASK, "<|end|>", "Four.<|end|>", False),
        (BY_ROLE + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}" + ASK, "<|end|> </s>", "Four.<|end|>", False),
        (BY_ROLE + ASK, "<|system|>", "Four.<|end|>", True),
        (BY_ROLE.replace("<|end|>\n", "") + ASK, "</s> <|user|>", "Four.<|user|>", False),
        (BY_ROLE.replace("<|end|>\n", "\n") + ASK, "<|user|> </s>", "Four.\n<|user|>", False),
        (BY_ROLE.replace("<|end|>", "") + ASK, "</s>", "Four.", True),
        (BY_ROLE.replace("<|end|>", " ###") + ASK, "</s>", "Four.", True),
        (BY_ROLE.replace("'<|end|>\n'", "eos_token + '<|end|>\n'") + ASK, "</s>", "Four.</s>", False),
    ],
    ids=["one", "list", "more after it", "more after it, also an end", "not an end", "next role", "its line", "none", "text", "first"],
)
def test_an_answer_ends_with_the_first_token_at_which_decoding_stops(template: str, ends: str, answer: str, warned: bool) -> None:
    chat = maker(template, ROLES, ends)
    expect(chat, FOUR, answer)
    assert bool(chat.ending.warning) == warned
    expect(chat, AGAIN, answer, answer.replace("Four", "Five"))


def test_a_closing_token_at_which_decoding_does_not_stop_is_a_label_and_ends_no_answer() -> None:
    """Decoding writes it and goes on: an answer that has it in the middle is kept whole."""
    chat = maker(BY_ROLE + ASK, ROLES, "<|system|>")
    assert "at which decoding does not stop" in chat.ending.warning and chat.ending.ends == set(chat.settings.ends)
    expect(chat, [*ASKED, {"role": "assistant", "content": "Four.<|end|>Or so."}], "Four.<|end|>Or so.<|end|>")


def test_calls_that_a_template_leaves_open_end_as_answers_do() -> None:
    shown = "{{ (m.content or '') + ('[' + m.tool_calls[0].function.name + ']' if m.tool_calls else '<|end|>\n') }}"
    chat = maker("{% for m in messages %}{{ '<|' + m.role + '|>\n' }}" + shown + "{% endfor %}" + ASK, ROLES, "<|end|>")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    expect(chat, [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], "[add]<|end|>")


THINKS = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content.split('</think>')[-1] + '<|end|>\n' }}{% endfor %}"
OPENS = "{% if add_generation_prompt %}{{ '<|assistant|>\n<think>\n' }}{% endif %}"
EMPTY = "{% if add_generation_prompt %}{{ '<|assistant|>\n' + ('<think>\n' if think else '<think>\n\n</think>\n\n') }}{% endif %}"
SPLITS = """{% for m in messages %}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}
{%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '') %}
{{- '<|assistant|>\n<think>\n' + thought + '\n</think>\n\n' + parts[-1].lstrip('\n') + '<|end|>\n' }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"""
"""Writes the last answer's thought, from a field of its own or from the content, as Qwen3 does."""
THOUGHT = "It adds.\n</think>\n\nFour."


@pytest.mark.parametrize(("template", "message", "answer"), [
    (THINKS + OPENS, {"content": THOUGHT}, f"{THOUGHT}<|end|>"),
    (THINKS + OPENS, {"content": f"<think>\n{THOUGHT}"}, f"{THOUGHT}<|end|>"),
    (THINKS + OPENS, {"content": f"<think>{THOUGHT}"}, f"{THOUGHT}<|end|>"),
    (THINKS + OPENS, {"content": "Four.", "reasoning_content": "It adds."}, f"{THOUGHT}<|end|>"),
    (THINKS + OPENS, {"content": "Four.", "reasoning": "It adds."}, f"{THOUGHT}<|end|>"),
    (THINKS + OPENS, {"content": "Four."}, "Four.<|end|>"),
    (THINKS + OPENS, {"content": ""}, "<|end|>"),
    (THINKS + ASK, {"content": f"<think>\n{THOUGHT}"}, f"<think>\n{THOUGHT}<|end|>"),
    (THINKS + ASK, {"content": "Four.", "reasoning_content": "It adds."}, f"<think>\n{THOUGHT}<|end|>"),
    (BY_ROLE + EMPTY, {"content": "Four."}, "Four.<|end|>"),
    (BY_ROLE + ASK, {"content": "Four.", "reasoning_content": "unknown to the template"}, "Four.<|end|>"),
    (SPLITS + OPENS, {"content": f"<think>\n{THOUGHT}"}, f"{THOUGHT}<|end|>"),
    (SPLITS + OPENS, {"content": THOUGHT}, f"{THOUGHT}<|end|>"),
    (SPLITS + OPENS, {"content": "Four.", "reasoning_content": "It adds."}, f"{THOUGHT}<|end|>"),
    (SPLITS + OPENS, {"content": "Four."}, "\n</think>\n\nFour.<|end|>"),
    (SPLITS + ASK, {"content": f"<think>\n{THOUGHT}"}, f"<think>\n{THOUGHT}<|end|>"),
    (SPLITS + EMPTY, {"content": "Four."}, "Four.<|end|>"),
    (SPLITS + EMPTY, {"content": "Four.", "reasoning_content": "It adds."}, "Four.<|end|>"),
    (BY_ROLE + EMPTY, {"content": "Four.", "reasoning_content": "It adds."}, "Four.<|end|>"),
])  # fmt: skip
def test_thoughts_follow_what_the_generation_prompt_opens(template: str, message: dict[str, str], answer: str) -> None:
    expect(maker(template, ROLES, "<|end|>"), [*ASKED, {"role": "assistant", **message}], answer)


def test_a_template_that_drops_earlier_thoughts_gives_a_sample_a_turn() -> None:
    said = {"role": "assistant", "content": THOUGHT}
    chat = maker(THINKS + OPENS, ROLES, "<|end|>")
    expect(chat, [*ASKED, said, {"role": "user", "content": "And?"}, said], *2 * [f"{THOUGHT}<|end|>"])
    assert len(chat.samples([*ASKED, said, *ASKED, said])) == 2
    plain = maker(BY_ROLE + ASK, ROLES, "<|end|>")
    assert len(plain.samples(AGAIN)) == 1 and len(plain.samples([*AGAIN, *ASKED, said, *ASKED, said])) == 1
    one = maker(QWEN3, IM, "<|im_end|>")  # the last two turns, of one question, agree
    four = FOUR[1]
    with_tool = [*ASKED, four | {"reasoning_content": "a"}, {"role": "tool", "content": "4"}, four | {"reasoning_content": "b"}]
    assert len(one.samples(with_tool)) == 1 and len(one.samples([*AGAIN, *with_tool])) == 3


def test_variables_choose_the_prompt_that_is_trained_on() -> None:
    for think, opened in ((True, "<think>\n"), (False, "<think>\n\n</think>\n\n")):
        chat = maker(BY_ROLE + EMPTY, ROLES, "<|end|>", variables={"think": think})
        expect(chat, FOUR, "Four.<|end|>")
        assert chat.tokenizer.decode(chat.prompt(ASKED)).endswith(f"<|assistant|>\n{opened}")
        assert chat.with_variables(think=not think).prompt(ASKED) != chat.prompt(ASKED)


def test_prompt_and_answer_are_tokenised_apart() -> None:
    """Line breaks of both sides would merge, and an answer that begins with a blank would be another token."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(["\n\n\n", "\n\n"])
    chat = Chat(tokenizer)
    for content in ("\nFour.", "\n\nFour.", " Four.", "\n"):
        (turn,) = chat.turns([*ASKED, {"role": "assistant", "content": content}])
        assert turn.prompt == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
        assert turn.answer == tokenizer(f"{content}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(chat.samples([*ASKED, {"role": "assistant", "content": "\nFour."}, *ASKED, {"role": "assistant", "content": "a"}])) == 2


def test_a_tokenizer_that_adds_a_blank_to_texts_adds_none_to_answers() -> None:
    """As the sentencepiece tokenizers of Llama-2 and Mistral do."""
    pieces = ["<unk>", "<s>", "</s>", "\n", *"▁aeiouFTWdnrstw.?:ASIN", "▁F", "Four", "▁Four", "Fo", "ou", "our", "▁Fo", "ur"]
    merges = [("▁", "F"), ("F", "o"), ("o", "u"), ("▁F", "o"), ("u", "r")]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    bpe = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}{% else %}{{ ' ASSISTANT:' + m.content + eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
    )
    chat = Chat(tokenizer)
    for content, first in (("Four.", ["Fo"]), (" Four.", ["▁F"])):
        (turn,) = chat.turns([*ASKED, {"role": "assistant", "content": content}])
        assert tokenizer.convert_ids_to_tokens(turn.answer)[:1] == first and chat.text(turn.answer) == f"{content}</s>"
        whole = tokenizer.apply_chat_template([*ASKED, {"role": "assistant", "content": content}], return_dict=False)
        assert turn.prompt + turn.answer == whole, "as in the whole text"


def test_templates_without_a_generation_prompt_and_with_a_bos_of_their_own() -> None:
    ignores = "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    chat = maker(ignores, ROLES, "<|end|>")
    expect(chat, FOUR, "<|assistant|>Four.<|end|>")  # the model writes the header too
    assert chat.prompt(ASKED).count(chat.tokenizer.bos_token_id) == 1
    instructs = "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    expect(maker(instructs, "[INST] [/INST]", "</s>"), AGAIN, "Four.</s>", "Five.</s>")
