# ruff: noqa: E501
"""Mistakes in recipes, overrides and the places where runs are saved."""

import os
from collections.abc import Iterator
from pathlib import Path

from house import RECIPE
from mistake import GENERATE, HUGE, Mistake


def recipe_files() -> Iterator[Mistake]:
    texts = {
        "list as key": "? [a, b]\n: 1\n", "mapping as key": "? {a: b}\n: 1\n", "number as key": "1: 2\n", "null as key": "~: 2\n",
        "int of text": "seed: !!int abc\n", "float of text": "seed: !!float abc\n", "bool of text": "seed: !!bool maybe\n",
        "date that is none": "seed: !!timestamp 2024-13-45\n", "date": "seed: !!timestamp 2024-01-02\n", "binary": "seed: !!binary $$$\n",
        "set": "seed: !!set {a, b}\n", "omap": "seed: !!omap [a, b]\n", "pairs": "seed: !!pairs [a: 1]\n", "null of text": "seed: !!null abc\n",
        "python tag": "seed: !!python/object/apply:os.system [ls]\n", "unknown tag": "seed: !new 1\n",
        "huge integer": f"seed: {HUGE}\n", "huge hexadecimal": f"seed: 0x{HUGE}\n", "huge octal": f"seed: 0o{'7' * 5000}\n",
        "huge float": f"seed: {HUGE}.5\n", "nested lists": f"seed: {'[' * 3000}{']' * 3000}\n", "unclosed lists": f"seed: {'[' * 3000}\n",
        "nested mappings": "seed: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n",
        "nested blocks": "".join(" " * i + "a:\n" for i in range(1000)), "nested sequence": "seed:\n  " + "- " * 3000 + "1\n",
        "alias of itself": "seed: &a [*a]\n", "mapping of itself": "drafter: &a {kind: medusa, x: *a}\n",
        "billion laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
        "unknown alias": "seed: *b\n", "two documents": "seed: 1\n---\nseed: 2\n", "tab": "\tseed: 1\n", "control character": "seed: \x01\n",
        "directive": "%YAML 9.9\n---\nseed: 1\n", "bad directive": "%YAML x\n---\nseed: 1\n", "merge key": "<<: {seed: 1}\n",
        "merge of a number": "<<: 1\n",
        "surrogate escape": 'save: {dir: "\\ud800"}\n', "null character": 'save: {dir: "a\\0b"}\n', "infinity": "train: {lr: .inf}\n",
        "not a number": "train: {lr: .nan}\n", "a list": "- 1\n- 2\n", "a text": "hello\n", "empty": "", "only a comment": "# a\n",
        "a section that is a list": "train: [1]\n", "heads that is a number": "heads: 3\n", "heads of lists": "heads: [[1]]\n",
        "heads of a key that is a number": "heads: {1: {kind: medusa}}\n", "drafter with a number as key": "drafter: {kind: medusa, 1: 2}\n",
        "drafter with a list as key": "drafter: {kind: medusa, [1]: 2}\n", "terms with a number as key": "objective: {terms: {1: 1}}\n",
        "a kind that is a list": "drafter: {kind: [a]}\n", "a long key": f"{'k' * 100_000}: 1\n", "a long value": f"seed: {'k' * 1_000_000}\n",
        "two equal keys": "seed: 1\nseed: 2\n", "sexagesimal": "seed: 1:30\n", "underscore": "seed: 1_000\n",
    }  # fmt: skip
    for name, text in texts.items():
        others = [line for line in RECIPE.splitlines(True) if text and line.partition(":")[0] != text.partition(":")[0]]
        yield Mistake(f"recipe: {name}", ["train", "bad.yaml"], {"bad.yaml": "".join([*others, text])})
    for name, content in {
        "no UTF-8": b"seed: \xff\xfe\n",
        "UTF-16": RECIPE.encode("utf-16"),
        "zeros": b"\0" * 100,
        "gzip": b"\x1f\x8b\x08\0",
    }.items():
        yield Mistake(f"recipe: {name}", ["train", "bad.yaml"], {"bad.yaml": content})
    yield Mistake("recipe: a large file", ["train", "bad.yaml"], {"bad.yaml": RECIPE + "# comment\n" * 5_000_000})
    yield Mistake("recipe: a folder", ["train", "backbone"])
    yield Mistake("recipe: a pipe", ["train", "pipe.yaml"], prepare=lambda: os.mkfifo("pipe.yaml"))
    yield Mistake("recipe: a device", ["train", "/dev/zero"])
    yield Mistake("recipe: endless", ["train", "/dev/urandom"])
    yield Mistake("recipe: a terminal", ["train", "/dev/tty"])
    yield Mistake("recipe: no permission", ["train", "/proc/1/mem"])
    yield Mistake("recipe: below a file", ["train", "rows.jsonl/x.yaml"])
    yield Mistake("recipe: a loop of links", ["train", "loop.yaml"], prepare=lambda: os.symlink("loop.yaml", "loop.yaml"))
    yield Mistake("recipe: a link to nothing", ["train", "gone.yaml"], prepare=lambda: os.symlink("nowhere", "gone.yaml"))
    yield Mistake("recipe: a long name", ["train", "x" * 5000 + ".yaml"])
    yield Mistake("recipe: a null character in its name", ["train", "a\0b.yaml"])
    yield Mistake("recipe: a surrogate in its name", ["train", "a\udcff.yaml"])
    yield Mistake("recipe: no name", ["train", ""])


def overrides() -> Iterator[Mistake]:
    values = (
        "drafter.kind=../../etc", "drafter.kind=..", "drafter.kind=.", "drafter.kind=.medusa", "drafter.kind=medusa.", "drafter.kind=a..b",
        "drafter.kind=os.path", "drafter.kind=../medusa", "drafter.kind=a b.c", "drafter.kind=''", "drafter.kind=3", "drafter.kind=a/b.c",
        "drafter.kind='a\\0.b'", 'drafter.kind="\\ud800.a"', "drafter.kind=antigravity.x", "drafter.kind=json.decoder",
        "drafter.depth=5000", "drafter.depth=100000000", "drafter.depth=99999999999999999999", "drafter.depth=0", "drafter.depth=1e9",
        "drafter.depth=95", "drafter.depth=true", "seed=-1", "seed=4294967296", "seed=18446744073709551616", "seed=9223372036854775808",
        "seed=1e3", f"seed={HUGE}", "train.lr=1e30", "train.lr=1e308", "train.lr=1e-300", f"train.lr={HUGE}", "train.lr=1e999",
        "train.weight_decay=1e308", "train.max_grad_norm=1e-308", "train.batch_size=100000000000", "train.micro_batch=1000000000",
        "train.steps=99999999999999999999", "train.epochs=1e308", "train.epochs=1e-308", "train.warmup_ratio=1e-320", "train.betas=[0.9]",
        "data.max_length=99999999999999999999", "data.max_length=5", "data.eval_rows=99999999999", "data.limit=99999999999999999999",
        "eval.nodes=100000000", "eval.width=100000000", "eval.max_new_tokens=99999999999999999999", "eval.prompts=99999999999999999999",
        "eval.temperature=1e308", "eval.temperature=1e-320", "objective.chunk_size=99999999999999999999",
        "objective.top_k=99999999999999999999", "objective.terms={topk_kl: 1}", "objective.terms={kl: 1e308}", "objective.lk_eta=1e308",
        "objective.terms.kl=-1", "objective.on_policy=1", "objective.on_policy=1e308", "objective.on_policy_share=1e-320",
        "save.every=99999999999999999999", "save.keep=99999999999999999999", "log.every=99999999999999999999", "cache.shard_mb=99999999999999999999",
        "data.chat_template='{% for %}'", "data.chat_template='{{ 1/0 }}'", "data.chat_template='{{ messages[99].x.y }}'",
        "data.chat_template='{% for i in range(10**10) %}x{% endfor %}'", "data.chat_template=''", "data.chat_template='{{ undefined_function() }}'",
        "data.chat_template='{{ messages.__class__.__mro__ }}'",
        "backbone.path=''", "backbone.path=/dev/zero", "backbone.path=rows.jsonl", "backbone.path='a\\0b'", 'backbone.path="\\ud800"',
        "backbone.path=../../..", "backbone.adapter=rows.jsonl", "backbone.adapter=/dev/zero", "drafter.init=rows.jsonl", "drafter.init=/proc",
        "data.train=''", "data.train=.", "data.train=/dev/zero", "data.train=pipe.jsonl", "data.train=/dev/tty", "data.train=backbone",
        "data.train=/proc/self/mem", "data.train='a\\0b.jsonl'", 'data.train="\\ud800.jsonl"', "data.train=quickstart:../../../etc/passwd",
        "data.train=~nobody_here/x.jsonl", f"data.train={'x' * 5000}.jsonl", "data.train=rows.jsonl/x.jsonl", "data.eval=/dev/zero.jsonl",
        "data.eval=pipe.jsonl", "data.column=nothing", "data.split='a\\0b'", "data.train=no/such", "data.format=text",
        "a=1", "=1", "a", ".=1", "..a=1", "data=1", "data.train.x=1", "drafter=medusa", "train=null", "save=null", "heads=1", "heads.a=1",
        "heads.a.kind=medusa", "train.lr=[", "train.lr={", "train.lr='", "train.lr=*a", "train.lr=&a", "train.lr=!!int x",
        f"train.lr={'[' * 3000}", f"{'a.' * 5000}b=1", "train.lr=", "\0=1", "train.lr=\0", "train.lr=\udcff", "train.steps=1\nseed: 3",
        "train.lr=? [a]", "drafter.lora={rank: 1}", "backbone.lora={rank: 100000}", "drafter.draft_vocab_size=99999999",
        "drafter.draft_vocab_size=1", "drafter.num_layers=100000", "drafter.res_layers=1000000",
        "backbone.dtype=fp16", "train.precision=fp16", "log.name=null", "train.batch_size=3",
    )  # fmt: skip
    for value in values:
        yield Mistake(f"override: {value[:60]}", ["train", "recipe.yaml", value], prepare=lambda: os.mkfifo("pipe.jsonl"))


def places() -> Iterator[Mistake]:
    def readonly() -> None:
        Path("shut").mkdir(mode=0o500)

    for place in ("rows.jsonl", "rows.jsonl/below", "/proc/x", "/dev/null", "/dev/null/x", "''", "'a\\0b'", '"\\ud800"', "x" * 300, "x/" * 3000,
                  "/sys/x", "shut/below", "loop", "gone/x"):  # fmt: skip
        prepare = {"shut/below": readonly, "loop": lambda: os.symlink("loop", "loop")}.get(place)
        yield Mistake(f"save.dir={place[:40]}", ["train", "recipe.yaml", f"save.dir={place}"], prepare=prepare)
        yield Mistake(f"cache.dir={place[:40]}", ["cache", "recipe.yaml", f"cache.dir={place}"], prepare=prepare)
        out = (
            f"regenerate.out={place.strip(chr(39) + chr(34))}.jsonl"
            if "\\" not in place
            else f"regenerate.out={place[:-1]}.jsonl{place[-1]}"
        )
        yield Mistake(out[:60], ["regenerate", "recipe.yaml", out, "regenerate.max_new_tokens=4"], prepare=prepare)
        for flag in (
            ["inspect", "heads", "--json"],
            [*GENERATE, "hi", "--json"],
            ["schema", "--out"],
            ["plan", "recipe.yaml", "--no-calibration", "--json"],
        ):
            value = place.strip("'\"").replace("\\0", "\0").replace("\\ud800", "\ud800")
            yield Mistake(f"{flag[0]} {flag[-1]} {place[:40]}", [*flag, value], prepare=prepare)
