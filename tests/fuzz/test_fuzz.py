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
from ruamel.yaml import YAML
from strategies import LEAVES, TEXTS, VALUES, changed, damaged, documents, profile
from trial import Outcome, try_command

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
    """Run a command and hold it to the promise."""
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
    """The house with a feature cache."""
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
