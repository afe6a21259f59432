"""Tokens as text, one after another: the pieces make up the whole text, and no character is broken."""

from chat_templates import make_tokenizer

from headstart.support.text import TokenTextStream, token_texts


def test_pieces_make_up_the_text() -> None:
    tokenizer = make_tokenizer()
    tokens = tokenizer("What is two? Six, ünder one condition.\n\n  日本 two")["input_ids"]
    strings = token_texts(tokenizer, tokens)
    assert len(strings) == len(tokens) and "".join(strings) == tokenizer.decode(tokens) and "\ufffd" not in "".join(strings)
    assert strings[0] == "<s>" and token_texts(tokenizer, []) == []
    half = token_texts(tokenizer, tokenizer("日", add_special_tokens=False)["input_ids"][:2])
    assert half[0] == "" and "\ufffd" in half[1]  # the incomplete character
    pieces = TokenTextStream(tokenizer, skip_special_tokens=True)
    assert "".join(map(pieces.add, tokens)) + pieces.end() == tokenizer.decode(tokens, skip_special_tokens=True)
