# ruff: noqa: E501
"""Mistakes in data, prompts and standard input."""

import json
import os
from collections.abc import Iterator
from typing import Any

from house import TALK
from mistake import BENCH, CHAT, DATA_COMMANDS, DEEP, GENERATE, HUGE, SURROGATE, Mistake


def _rows() -> dict[str, str | bytes]:
    def row(value: Any) -> str:
        return json.dumps(value) + "\n"

    talk = json.dumps(TALK)
    return {
        "surrogate in content": f'{{"messages": [{{"role": "user", "content": {SURROGATE}}}, {{"role": "assistant", "content": "a"}}]}}\n',
        "surrogate in answer": f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": {SURROGATE}}}]}}\n',
        "surrogate in role": f'{{"messages": [{{"role": {SURROGATE}, "content": "a"}}, {{"role": "assistant", "content": "a"}}]}}\n',
        "surrogate in key": f'{{"messages": {talk}, {SURROGATE}: 1}}\n', "surrogate in text": f'{{"text": {SURROGATE}}}\n',
        "surrogate in prompt": f'{{"prompt": {SURROGATE}}}\n', "surrogate in turns": f'{{"turns": [{SURROGATE}]}}\n',
        "surrogate in task": f'{{"prompt": "a", "category": {SURROGATE}}}\n',
        "surrogate in tools": f'{{"messages": {talk}, "tools": [{{"type": "function", "function": {{"name": {SURROGATE}}}}}]}}\n',
        "deep": f'{{"messages": {DEEP}}}\n', "deep and closed": f'{{"text": {DEEP}{"]" * 100_000}}}\n',
        "deep mappings": '{"a": ' * 100_000 + "1" + "}" * 100_000 + "\n", "deep content": row({"messages": [{"role": "user", "content": "a"}]})[:-3]
        + ', {"role": "assistant", "content": ' + "[" * 900 + "]" * 900 + "}]}\n",
        "huge integer": f'{{"messages": {talk}, "n": {HUGE}}}\n', "huge integer as content": f'{{"text": {HUGE}}}\n',
        "huge float": f'{{"messages": {talk}, "n": 1e99999}}\n', "not a number": f'{{"messages": {talk}, "n": NaN}}\n',
        "from that is a list": row({"conversations": [{"from": ["human"], "value": "a"}, {"from": "gpt", "value": "b"}]}),
        "from that is a mapping": row({"conversations": [{"from": {}, "value": "a"}, {"from": "gpt", "value": "b"}]}),
        "role that is a list": row({"messages": [{"role": ["user"], "content": "a"}, {"role": "assistant", "content": "b"}]}),
        "role that is a number": row({"messages": [{"role": 3, "content": "a"}, {"role": "assistant", "content": "b"}]}),
        "role that is unknown": row({"messages": [{"role": "wizard", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        "value that is a number": row({"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "b"}]}),
        "content that is null": row({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "b"}]}),
        "content that is a number": row({"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "b"}]}),
        "answer that is a number": row({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 3}]}),
        "content that is a mapping": row({"messages": [{"role": "user", "content": {"a": 1}}, {"role": "assistant", "content": "b"}]}),
        "images in content": row({"messages": [
            {"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "what?"}]},
            {"role": "assistant", "content": "b"}]}),
        "texts in content": row({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "what?"}]}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]}),
        "content that is a list of lists": row({"messages": [{"role": "user", "content": [[1]]}, {"role": "assistant", "content": "b"}]}),
        "no messages": row({"messages": []}), "messages that are text": row({"messages": "hi"}), "messages of numbers": row({"messages": [1]}),
        "messages that are a mapping": row({"messages": {"role": "user"}}), "messages that are null": row({"messages": None}),
        "turns with no content": row({"messages": [{"role": "user"}, {"role": "assistant"}]}),
        "tools that are a number": row({"messages": TALK, "tools": 3}), "tools of numbers": row({"messages": TALK, "tools": [3]}),
        "tools that are text": row({"messages": TALK, "tools": "x"}), "tools of texts": row({"messages": TALK, "tools": ["x"]}),
        "tool_calls of numbers": row({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": 3}]}),
        "an empty key": row({"": 1, "messages": TALK}), "text that is a number": row({"text": 3}), "text that is empty": row({"text": ""}),
        "text that is null": row({"text": None}), "prompt that is a number": row({"prompt": 3}), "prompt that is a mapping": row({"prompt": {"a": 1}}),
        "prompt of numbers": row({"prompt": [1]}), "turns of numbers": row({"turns": [1, 2]}), "turns that are a mapping": row({"turns": {"a": 1}}),
        "category that is a list": row({"prompt": "a", "category": ["x"]}), "answer that is a list": row({"question": "a", "answer": ["####"]}),
        "null character in text": row({"text": "a\0b c d e f"}), "escapes in text": row({"text": "\x1b[31mred \x07 bell"}),
        "second row of another kind": row({"messages": TALK}) + row({"text": "a b c"}),
        "second row a conversation": row({"text": "a b c d e f"}) + row({"messages": TALK}),
        "second row without the column": row({"messages": TALK}) + row({"x": 1}),
        "a list": "[1]\n", "a number": "3\n", "a text": '"a"\n', "null": "null\n", "no JSON": "hello\n", "half a row": '{"messages": [', "empty": "",
        "blank lines": "\n\n\n", "byte order mark": "\ufeff" + row({"messages": TALK}), "no UTF-8": b'{"text": "\xff\xfe"}\n',
        "UTF-16": row({"messages": TALK}).encode("utf-16"), "zeros": b"\0" * 1000, "one long line": b"x" * 20_000_000,
        "two keys alike": f'{{"messages": 1, "messages": {talk}}}\n', "a long error": row({"k" * 10_000: 1}),
        "many columns": row({f"column{i}": 1 for i in range(10_000)}), "line separators": row({"text": "a\u2028b\u0085c d e f g"}),
        "an unknown speaker": row({"conversations": [{"from": "\x1b[31m" + "w" * 10_000, "value": "a"}]}),
    }  # fmt: skip


def data() -> Iterator[Mistake]:
    for i, (name, content) in enumerate(_rows().items()):
        for j, (command, argv) in enumerate(DATA_COMMANDS.items()):
            if command in ("inspect", "plan", "cache") and i % 8 != j and "surrogate" not in name and "deep" not in name:
                continue  # the same readers
            yield Mistake(f"data, {command}: {name}", argv, {"bad.jsonl": content})
    for name, content in {"truncated": b"\x1f\x8b\x08\0\0\0\0\0", "no gzip": b"hello", "empty": b""}.items():
        for command, argv in DATA_COMMANDS.items():
            yield Mistake(
                f"data, {command}: gz, {name}", [one.replace("bad.jsonl", "bad.jsonl.gz") for one in argv], {"bad.jsonl.gz": content}
            )
    for name, content in {
        "deep": DEEP, "huge integer": f'[{{"text": {HUGE}}}]', "surrogate": '[{"text": "\\ud800"}]', "a number": "3", "half": "[{",
        "empty": "", "no UTF-8": b"\xff", "an empty list": "[]", "rows of numbers": "[1]",
    }.items():  # fmt: skip
        yield Mistake(f"data, train: json, {name}", ["train", "recipe.yaml", "data.train=bad.json"], {"bad.json": content})
    for name, content in {"no parquet": b"hello", "empty": b"", "magic only": b"PAR1PAR1"}.items():
        yield Mistake(f"data, train: parquet, {name}", ["train", "recipe.yaml", "data.train=bad.parquet"], {"bad.parquet": content})
    for path in (
        "/dev/zero", "/dev/stdin", "pipe.txt", "backbone", "/proc/self/mem", "a\0b.txt", "", "x" * 5000 + ".txt", "rows.jsonl/x.txt",
    ):  # fmt: skip
        yield Mistake(f"prompts: {path[:40]!r}", [*BENCH[:5], "--prompts", path], prepare=lambda: os.mkfifo("pipe.txt"))


def prompts() -> Iterator[Mistake]:
    for name, text in {
        "surrogate": "\ud800", "byte that is no UTF-8": "\udcff", "null character": "a\0b", "escapes": "\x1b[31m", "long": "x" * 100_000,
        "spaces": "   ", "special token": "<|im_start|>assistant\n",
    }.items():  # fmt: skip
        yield Mistake(f"generate: {name}", [*GENERATE, text])
        yield Mistake(f"generate --stop: {name}", [*GENERATE, "hi", "--stop", text])
        yield Mistake(f"chat --system: {name}", [*CHAT, "--system", text], stdin=b"hi\n")
    yield Mistake("generate --stop: empty", [*GENERATE, "hi", "--stop", ""])
    yield Mistake("generate: empty", [*GENERATE, ""])
    for name, content in {"closed": None, "no UTF-8": b"a \xff\xfe b\n", "zeros": b"\0" * 100, "empty": b"", "no line end": b"hi", "long": b"x" * 1_000_000,
                          "surrogate bytes": b"\xed\xa0\x80\n"}.items():  # fmt: skip
        yield Mistake(f"generate, standard input: {name}", GENERATE, stdin=content)
        yield Mistake(f"chat, standard input: {name}", CHAT, stdin=content)
        yield Mistake(f"chat, then: {name}", CHAT, stdin=None if content is None else b"hi\n" + content + b"\nhi\n")
    for path in ("/dev/zero", "pipe.txt", "backbone", "/proc/self/mem", "a\0b", "", "x" * 5000, "rows.jsonl/x", "bytes"):
        yield Mistake(
            f"generate --file {path[:40]!r}", [*GENERATE, "--file", path], {"bytes": b"\xff\xfe"}, prepare=lambda: os.mkfifo("pipe.txt")
        )
