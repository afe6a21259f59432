# ruff: noqa: E501
"""Damaged checkpoints, backbones, feature caches and other files that the project itself writes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mistake import DATA_COMMANDS, DEEP, GENERATE, HUGE, Mistake, Prepare, write


def _card(**changes: Any) -> Prepare:
    def change() -> None:
        path = Path("heads/headstart.json")
        card = json.loads(path.read_text())
        for key, value in changes.items():
            at = card
            *parents, last = key.split("__")
            for parent in parents:
                at = at[parent]
            at[last] = value
        path.write_text(json.dumps(card))

    return change


def cards() -> Iterator[Mistake]:
    damages: dict[str, Prepare] = {
        name: write("heads/headstart.json", content)
        for name, content in {"deep": DEEP, "deep mapping": '{"a":' * 100_000, "a list": "[]", "a number": "3", "null": "null", "empty": "",
                              "no UTF-8": b"\xff", "huge integer": f'{{"format": {HUGE}}}', "a text": '"x"', "zeros": b"\0" * 9}.items()
    }  # fmt: skip
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    changes: dict[str, dict[str, Any]] = {
        "nested arguments": {"arguments": deep}, "nested provenance": {"provenance": deep}, "nested contract": {"contract__x": deep},
        "kind of a path": {"kind": "../../etc"}, "kind that is empty": {"kind": ""}, "kind unknown": {"kind": "wizard"}, "kind that is a module": {"kind": "os.path"},
        "kind of a surrogate": {"kind": "\ud800"}, "unknown argument": {"arguments": {"x": 1}}, "no arguments": {"arguments": {}},
        "depth of thousands": {"arguments": {"depth": 5000}}, "depth of millions": {"arguments": {"depth": 50_000_000}}, "depth of text": {"arguments": {"depth": "x"}},
        "file above": {"weights__file": "../x"}, "file that is absolute": {"weights__file": "/dev/zero"}, "file that is empty": {"weights__file": ""},
        "file .": {"weights__file": "."}, "file ..": {"weights__file": ".."}, "file of null": {"weights__file": "a\0b"}, "file of a surrogate": {"weights__file": "\ud800"},
        "file that is missing": {"weights__file": "none.safetensors"}, "file that is no weights": {"weights__file": "config.json"},
        "hash of text": {"weights__sha256": "x"}, "weights that are a list": {"weights": ["file", "sha256"]}, "adapter that is a number": {"weights__adapter": 3},
        "adapter that is missing": {"weights__adapter": "abc"}, "contract of nothing": {"contract": {}}, "contract's adapter": {"contract__adapter": ["x"]},
        "contract's weights of text": {"contract__weights": ["a", "b"]}, "contract's weights of lists": {"contract__weights": [[1], [2]]},
        "contract's weights of NaN": {"contract__weights": [float("nan")] * 64}, "contract's size": {"contract__hidden_size": "x"},
        "provenance's recipe of text": {"provenance": {"recipe": "x"}}, "provenance's data of text": {"provenance": {"recipe": {"data": "x"}}},
        "provenance's template of a number": {"provenance": {"chat_template": 3}}, "provenance's steps of text": {"provenance": {"steps": "many", "tau": "x", "tokens": []}},
        "provenance's vocabulary of text": {"provenance": {"draft_vocabulary": "x"}}, "provenance's versions of a list": {"provenance": {"versions": [1]}},
        "provenance's commit of a mapping": {"provenance": {"commit": {}, "command": {}}}, "backbone of a null character": {"backbone": "a\0b"},
        "backbone that is empty": {"backbone": ""}, "backbone of a surrogate": {"backbone": "\ud800"}, "format of text": {"format": "x"}, "format of a list": {"format": [1]},
        "format of later": {"format": 99},
    }  # fmt: skip
    damages |= {name: _card(**change) for name, change in changes.items()}
    damages["weights empty"] = lambda: next(Path("heads").glob("*.safetensors")).write_bytes(b"")
    damages["weights a folder"] = lambda: (os.remove(file := next(Path("heads").glob("*.safetensors"))), os.mkdir(file))
    damages["card a folder"] = lambda: (os.remove("heads/headstart.json"), os.mkdir("heads/headstart.json"))
    damages["card a pipe"] = lambda: (os.remove("heads/headstart.json"), os.mkfifo("heads/headstart.json"))
    damages["weights a pipe"] = lambda: (os.remove(file := next(Path("heads").glob("*.safetensors"))), os.mkfifo(file))
    damages["config.json a text"] = write("heads/config.json", "hello")
    damages["config.json deep"] = write("heads/config.json", DEEP)
    for name, damage in damages.items():
        for command, argv in {
            "inspect": ["inspect", "heads"], "generate": [*GENERATE, "hi"], "by its card": ["generate", "--heads", "heads", "--max-new-tokens", "4", "hi"],
            "export": ["export", "heads", "--to", "exported"], "init": ["train", "recipe.yaml", "drafter={kind: medusa, init: heads}"],
        }.items():  # fmt: skip
            yield Mistake(f"card, {command}: {name}", argv, prepare=damage)
    for name, content in {"deep": DEEP, "text": "hello", "a list": "[]", "huge": f'{{"vocab_size": {HUGE}}}', "a size of text": '{"model_type": "llama", "vocab_size": "x"}',
                          "empty": "", "no UTF-8": b"\xff", "negative": '{"model_type": "llama", "hidden_size": -1}'}.items():  # fmt: skip
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            yield Mistake(f"backbone's {file}: {name}", [*GENERATE, "hi"], prepare=write(f"backbone/{file}", content))
        yield Mistake(
            f"backbone's config.json, plan: {name}",
            ["plan", "recipe.yaml", "--no-calibration"],
            prepare=write("backbone/config.json", content),
        )


def caches() -> Iterator[Mistake]:
    def manifest(content: str | bytes) -> Prepare:
        return lambda: (os.mkdir("features"), write("features/manifest.json", content)())

    for name, content in {"deep": DEEP, "a list": "[]", "empty": "", "no UTF-8": b"\xff", "huge": f'{{"format": {HUGE}}}', "null": "null", "format only": '{"format": 1}',
                          "shards of text": '{"format": 1, "contents": {}, "shards": ["ab"], "id": "x"}', "contents of a list": '{"format": 1, "contents": [], "shards": [], "id": 1}',
                          "shards of numbers": '{"format": 1, "contents": {}, "shards": [1], "id": "x"}'}.items():  # fmt: skip
        for command in ("train", "cache"):
            yield Mistake(f"features, {command}: {name}", [command, "recipe.yaml", "cache.dir=features"], prepare=manifest(content))
    for name, content in {"deep": DEEP, "a list": "[]\n", "no UTF-8": b"\xff\n", "huge": f'{{"format": {HUGE}}}\n', "null": "null\n", "row of text": '{"format": 2, "dependencies": {}}\n{"row": "x"}\n',
                          "dependencies of a list": '{"format": 2, "dependencies": []}\n{"row": 0, "result": {}, "error": "", "turns": 1, "tokens": 1}\n'}.items():  # fmt: skip
        yield Mistake(f"regenerate's partial file: {name}", DATA_COMMANDS["regenerate"][:2] + ["regenerate.out=new.jsonl", "regenerate.max_new_tokens=4"],
                      prepare=write("new.jsonl.partial", content))  # fmt: skip
    for name, content in {
        "deep": DEEP, "empty": "", "a list": "[]", "no UTF-8": b"\xff", "huge": f'{{"format": {HUGE}}}', "null": "null",
    }.items():  # fmt: skip

        def state(content: str | bytes = content) -> None:
            os.makedirs("out/state/step-00000001")
            Path("out/state/step-00000001/tensors.safetensors").write_bytes(b"")
            write("out/state/step-00000001/state.json", content)()

        yield Mistake(f"saved state: {name}", ["train", "recipe.yaml"], prepare=state)
