"""Texts are tokenised in pieces as they are whole."""

import random
from typing import Any

import pytest
from chat_templates import CHATML, TURNS, chat, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headstart.chat.conversation import Chat, Pieces, tokenise

PARTS = ["<|im_start|>", "<|im_end|>", "<s>", "<s", " a b", "\n", "user", "\u00fcnder", "<|im", "four.", "  ", "x<|im_end|>x", "Added"]


def blanks(scheme: str, normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    bpe.decoder = decoders.Metaspace(prepend_scheme=scheme)
    bpe.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<s>", "<|im_start|>", "<|im_end|>"], show_progress=False)
    bpe.train_from_iterator(["user a b four. \u00fcnder", "a b a b x ed Added"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", extra_special_tokens=["<|im_start|>", "<|im_end|>"])


def more(*tokens: AddedToken) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "pieces"),
    [
        (make_tokenizer(CHATML), 3), (blanks("first"), 3), (blanks("always"), 3), (blanks("never"), 3),
        (blanks("first", normalizers.Sequence([normalizers.Prepend("_"), normalizers.Lowercase()])), 3),
        (more(AddedToken("Added"), AddedToken("a<s>b", normalized=False), AddedToken("x<|im", normalized=False)), 1),
        (more(AddedToken("four.", lstrip=True)), 1), (more(AddedToken("user", single_word=True)), 1),
    ],
)  # fmt: skip
def test_pieces_have_the_tokens_of_the_whole(tokenizer: PreTrainedTokenizerFast, pieces: int) -> None:
    def called(texts: list[str]) -> list[list[int]]:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    rng, cutter = random.Random(0), Pieces(tokenizer)
    assert len(cutter.cut("a<s>b<s>c".replace("b<s>", "b" if pieces == 1 else "b<s>"))) == pieces and cutter.cut("") == []
    for _ in range(200):
        texts = ["".join(rng.choices(PARTS, k=rng.randrange(12))) for _ in range(3)]
        assert cutter.tokens(texts, called) == called(texts) == tokenise(tokenizer, texts)
        assert all("".join(cutter.cut(text)) == text for text in texts)


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer whose class changes what a call gives, as code that comes with a model may."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus([one.upper() for one in text], *args, **kwargs)


def test_a_tokenizer_that_changes_calls_cuts_or_pads_is_called() -> None:
    plain = make_tokenizer(CHATML)
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert tokenise(shouting, ["four."]) == tokenise(plain, ["FOUR."]) != tokenise(plain, ["four."])
    expected = tokenise(plain, ["four. " * 9, "a"])
    plain.backend_tokenizer.enable_truncation(3)
    plain.backend_tokenizer.enable_padding()
    assert tokenise(plain, ["four. " * 9, "a"]) == expected and tokenise(plain, []) == []
    plain.split_special_tokens = True
    assert tokenise(plain, ["<s>a"]) == plain(["<s>a"], add_special_tokens=False)["input_ids"] and len(tokenise(plain, ["<s>a"])[0]) > 2


def test_what_turns_have_in_common_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, read = Chat(make_tokenizer(CHATML)), 0
    tokens = conversation.tokens

    def counted(texts: list[str]) -> list[list[int]]:
        nonlocal read
        read += sum(map(len, texts))
        return tokens(texts)

    assert conversation.ending
    monkeypatch.setitem(conversation.__dict__, "tokens", counted)
    messages = chat(*TURNS * 20)
    ((ids, _),) = conversation.samples(messages)
    assert ids and read < 2.5 * len(conversation.template.render(messages).text)
