"""The tokenizer of a GGUF file gives llama.cpp's ids, and its own template and texts."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from gguf_models import chat_model, write_gguf
from gguf_vocabularies import TEXTS, of_bytes, of_pieces, write_vocabulary
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_header import LETTERS, RULES

LLAMA = json.loads((Path(__file__).parent / "llama_ids.json").read_text())
MARKS_APART = {"tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}
"""llama.cpp parts combining marks from their letters, which the original rules of these vocabularies do not."""


def tokenizer_of(folder: Path, keys: dict[str, Any], architecture: str = "llama") -> PreTrainedTokenizerBase:
    return load_tokenizer(str(write_vocabulary(folder / "small.gguf", keys, architecture)))


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", LLAMA["names"])
def test_every_id_is_llama_cpps(name: str, tmp_path: Path) -> None:
    keys = of_pieces() | {"add_space_prefix": name != "pieces false"} if name.startswith("pieces") else of_bytes() | {"pre": name}
    tokenizer = tokenizer_of(tmp_path, keys, "phi3" if name == "pieces phi3" else "llama")
    place, begins = LLAMA["names"][name]
    assert (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) == begins and len(LLAMA["ids"][place]) == len(TEXTS)
    for text, right in zip(TEXTS, LLAMA["ids"][place], strict=True):
        if not (name in MARKS_APART and any(unicodedata.combining(letter) or unicodedata.category(letter) == "Mc" for letter in text)):
            assert ids(tokenizer, text) == right, text


def test_no_two_rules_are_alike_for_these_texts() -> None:
    """Else a rule could be another's, and no text would show it."""
    asked = {names.split()[0] for names in RULES} - {"dbrx"}
    places = [LLAMA["names"][name][0] for name in asked]
    assert len({*places}) == len(places) == len(RULES) - 1


def test_a_rule_that_is_not_known_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = tokenizer_of(tmp_path, of_bytes() | {"pre": "gpt-2"})
    assert not caplog.messages
    for keys, said in (
        ({"pre": "zebra"}, "an unknown rule of splitting text (tokenizer.ggml.pre = zebra)"),
        ({}, "no rule of splitting text"),
    ):
        caplog.clear()
        assert [*map(ids, [tokenizer_of(tmp_path, of_bytes() | keys)] * 2, TEXTS[:2])] == [*map(ids, [known] * 2, TEXTS[:2])]
        assert len(caplog.messages) == 1 and f"small.gguf names {said}: it is split as for GPT-2;" in caplog.text


def test_special_tokens_in_other_letters_have_their_ids(tmp_path: Path) -> None:
    """transformers adds them behind the vocabulary, so beyond the model's embedding."""
    keys = of_bytes() | {"pre": "deepseek-llm", "bos_token_id": of_bytes()["tokens"].index("<｜begin▁of▁sentence｜>")}
    tokenizer = tokenizer_of(tmp_path, keys)
    assert len(tokenizer) == len(keys["tokens"]) and tokenizer.bos_token_id == keys["bos_token_id"]
    assert ids(tokenizer, "<｜User｜>") == [keys["tokens"].index("<｜User｜>")]
    assert tokenizer.decode(ids(tokenizer, "<｜User｜>Hi"), skip_special_tokens=True) == "Hi"


@pytest.mark.parametrize("keys", [of_bytes() | {"pre": "smollm"}, of_pieces()], ids=["bytes", "pieces"])
def test_texts_come_back_and_so_does_a_saved_tokenizer(keys: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, keys)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert ids(again, text) == ids(tokenizer, text)
        if not any(whole in text for whole in ("<", "\n\n", "     ")):  # a space stands behind these too
            assert tokenizer.decode(ids(tokenizer, text)) == text


def test_templates_by_name_are_read(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "two.gguf", *chat_model(), tokenizer__chat_template__tool_use="with {{ tools }}")
    named = load_tokenizer(str(file)).chat_template
    assert isinstance(named, dict) and named == {"default": chat_model()[1].chat_template, "tool_use": "with {{ tools }}"}


def test_white_space_behind_the_special_tokens_of_phi3(tmp_path: Path) -> None:
    """As in its own tokenizer, by its architecture: files name the model in several ways."""
    for architecture, kept in (("llama", True), ("phi3", False)):
        tokenizer = tokenizer_of(tmp_path, of_pieces(), architecture)
        assert (ids(tokenizer, "<|user|>\nHi") != ids(tokenizer, "<|user|>Hi")) == kept


def test_deepseeks_letters_are_those_that_it_lists() -> None:
    split = pre_tokenizers.Split(Regex(LETTERS), "removed")
    found = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000 and not split.pre_tokenize_str(chr(code))]
    assert (len(found), sum(found)) == (2729, 54770958)
