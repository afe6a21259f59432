# ruff: noqa: E501
"""Whatever a user or a damaged file gives, a command ends in a result or in one line with status 2, and the files it was given stay as they were.

`make fuzz` tries more inputs. A failure found there belongs into mistakes.py, by name.
"""

import json
import shutil
from pathlib import Path

import pytest
from house import RECIPE, TALK, inside, make_house
from hypothesis import given
from hypothesis import strategies as st
from mistake import Mistake, write
from mistakes import mistakes
from ruamel.yaml import YAML
from strategies import EXAMPLES, LEAVES, TEXTS, VALUES, changed, damaged, documents, profile
from trial import Outcome, judge, snapshot, try_command

BASE = YAML(typ="safe").load(RECIPE)
ROWS = [
    {"messages": TALK},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b c d"}]},
    {"text": "a b c d e f"},
]
PROMPTS = [
    *ROWS,
    {"prompt": "a"},
    {"turns": ["a", "b"], "category": "qa"},
    {"task_id": "HumanEval/0", "prompt": "a"},
    {"question": "a", "answer": "####"},
]
SHORT = ["--backbone", "backbone", "--max-new-tokens", "3"]
INPUTS = ("backbone", "heads", "rows.jsonl", "text.jsonl", "prompts.jsonl", "recipe.yaml", "bad")
SECONDS = 60
"""Far more than any input takes, so that a busy machine fails no test."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_house(tmp_path_factory.mktemp("house"))


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.relative_to(folder).parts[0].startswith(INPUTS)]
    return {str(file): file.read_bytes() for file in files}


def hold(folder: Path, argv: list[str], stdin: bytes | None = b"") -> Outcome:
    before = contents(folder)
    outcome = try_command(argv, stdin, SECONDS)
    assert not outcome.fault, f"{argv[:12]}: {outcome.fault}"
    after = contents(folder)
    assert {name: after.get(name) for name in before} == before, "a file that was there is changed"
    return outcome


@given(data=st.data())
@profile(25)
def test_recipes(house: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["tree", "bytes", "text"]))
    if kind == "tree":
        content = json.dumps(data.draw(changed(BASE))).encode()  # YAML reads JSON
    else:
        content = data.draw(damaged(RECIPE.encode()) if kind == "bytes" else st.text().map(lambda text: text.encode("utf-8", "replace")))
    with inside(house) as folder:
        (folder / "bad.yaml").write_bytes(content)
        hold(folder, ["train", "bad.yaml"])


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["seed", "drafter.kind", "drafter.depth", "drafter.layers", "data.train", "data.max_length", "data.format", "data.eval_rows",
                             "data.column", "train.lr", "train.batch_size", "train.betas", "train.epochs", "eval.nodes", "eval.temperature", "objective.terms",
                             "objective.chunk_size", "save.keep", "save.dir", "log.every", "extends", "heads", "cache.dir"]) | TEXTS,
            st.one_of(VALUES.map(lambda value: json.dumps(value)), TEXTS),
        ),
        min_size=1, max_size=2,
    )
)  # fmt: skip
@profile(25)
def test_overrides(house: Path, changes: list[tuple[str, str]]) -> None:
    with inside(house) as folder:
        given = [f"{key}={value}" for key, value in changes]
        hold(folder, ["train", "recipe.yaml", *(word for word in given if not word.startswith("-")), "save.resume=true"])


def _files_of_rows(rows: list[dict[str, object]]) -> st.SearchStrategy[bytes]:
    row = st.sampled_from(rows).flatmap(documents)
    return st.lists(row, min_size=1, max_size=3).map(lambda lines: b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("command", ["train", "regenerate"])
@given(content=_files_of_rows(ROWS))
@profile(15)
def test_rows(house: Path, command: str, content: bytes) -> None:
    with inside(house) as folder:
        (folder / "bad.jsonl").write_bytes(content)
        more = ["regenerate.out=new.jsonl", "regenerate.max_new_tokens=3"] if command == "regenerate" else ["data.eval_rows=0"]
        hold(folder, [command, "recipe.yaml", "data.train=bad.jsonl", *more])


@given(content=_files_of_rows(PROMPTS), raw=st.booleans())
@profile(20)
def test_prompts(house: Path, content: bytes, raw: bool) -> None:
    with inside(house) as folder:
        (folder / "bad.jsonl").write_bytes(content)
        style = ["--raw"] if raw else []
        hold(folder, ["bench", "--heads", "heads", *SHORT, "--prompts", "bad.jsonl", "--skip-long", *style])


@given(lines=st.lists(st.one_of(st.binary(max_size=30), TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")))), system=TEXTS)
@profile(15)
def test_chat(house: Path, lines: list[bytes], system: str) -> None:
    with inside(house) as folder:
        hold(folder, ["chat", "--heads", "heads", *SHORT, f"--system={system}"], stdin=b"\n".join(lines))


@pytest.mark.parametrize("command", ["inspect", "generate", "export"])
@given(data=st.data())
@profile(15)
def test_cards(house: Path, command: str, data: st.DataObject) -> None:
    argv = {
        "inspect": ["inspect", "heads"],
        "generate": ["generate", "--heads", "heads", *SHORT, "hi"],
        "export": ["export", "heads", "--to", "vllm", "--out", "new"],
    }
    with inside(house) as folder:
        card = folder / "heads" / "headstart.json"
        card.write_bytes(data.draw(documents(json.loads(card.read_text()))))
        hold(folder, argv[command])


@pytest.fixture(scope="module")
def cached(house: Path) -> Path:
    with inside(house) as folder:
        assert try_command(["cache", "recipe.yaml", "cache.dir=features"]).status == 0
        shutil.copytree(folder / "features", house / "features")
    return house


@pytest.mark.parametrize("command", ["train", "cache"])
@given(data=st.data())
@profile(15)
def test_manifests_of_features(cached: Path, command: str, data: st.DataObject) -> None:
    with inside(cached) as folder:
        manifest = folder / "features" / "manifest.json"
        manifest.write_bytes(data.draw(documents(json.loads(manifest.read_text()))))
        hold(folder, [command, "recipe.yaml", "cache.dir=features"])


FLAGS = ("--temperature", "--seed", "--width", "--nodes", "--depth", "--threads", "--top-k", "--top-p", "--max-new-tokens", "--draft-window", "--num-sink-tokens",
         "--early-exit", "--stop", "--json", "--file", "--propose", "--dtype", "--capture", "--heads", "--backbone", "--adapter", "--draft-model", "--wizard")  # fmt: skip


@given(words=st.lists(st.tuples(st.sampled_from(FLAGS), LEAVES.map(str)), max_size=3), prompt=TEXTS)
@profile(25)
def test_command_lines(house: Path, words: list[tuple[str, str]], prompt: str) -> None:
    with inside(house) as folder:
        flags = [f"{flag}={value}" for flag, value in words]
        hold(folder, ["generate", "--heads", "heads", *SHORT, *flags, "--", prompt], stdin=b"a question")


# A selection of the mistakes of mistakes.py, in this process: each ends in a result, or in one line with status 2, and changes no file.

ISSUE = ("recipe: list as key", "recipe: int of text", "recipe: nested mappings", "override: drafter.kind=../../etc", "override: drafter.depth=5000",
         "override: data.train=pipe.jsonl", "save.dir=/proc/x", "override: seed=-1", "data, train: surrogate in content", "data, bench: deep",
         "data, regenerate: images in content", "generate, standard input: closed", "chat, then: no UTF-8", "generate --temperature '1e308'",
         "generate --threads '100000'", "card, inspect: nested arguments", "generate --json /proc/x",
         "recipe: a long name", "override: train.batch_size=100000000000", "card, inspect: file of null", "saved state: deep", "plan --memory 1e308")  # fmt: skip
"""Of every kind one, and what was mended last."""


def hold_mistake(house: Path, mistake: Mistake) -> None:
    with inside(house) as folder:
        for name, content in mistake.files.items():
            write(name, content)()
        if mistake.prepare is not None:
            mistake.prepare()
        before = snapshot(folder)
        outcome = try_command(mistake.argv, mistake.stdin, SECONDS)
        assert not outcome.fault, f"{mistake.name}: {outcome.fault}"
        after = snapshot(folder)
        if outcome.status == 2:
            assert {name: after.get(name) for name in before} == before, mistake.name


@pytest.mark.parametrize("name", ISSUE)
def test_one_of_every_kind(house: Path, name: str) -> None:
    hold_mistake(house, next(mistake for mistake in mistakes() if mistake.name == name))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_sixth(house: Path, part: int) -> None:
    """`make fuzz` holds all 1,322."""
    for mistake in mistakes()[:: 1 if EXAMPLES else 6][part::6]:
        hold_mistake(house, mistake)


def test_the_judge_finds_what_breaks_the_promise() -> None:
    assert judge(0, "") == judge(2, "note\nerror: a\n") == ""
    for status, err in (
        (70, "error: a"), (2, ""), (2, "error: a\nerror: b"), (2, "error: a\nmore"), (2, "Traceback\nerror: a"), (None, ""),
    ):  # fmt: skip
        assert judge(status, err), (status, err)
