"""Every command of the README, of docs/ and of ``--help`` runs: on the embedded backbone (with a chat template) and on a few short rows.

What cannot run here is listed with the reason in `NOT_RUN` and is parsed all the same.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from headstart.cli.main import COMMANDS, _parser, main
from headstart.heads.backbone.backbone import load_backbone, resolve
from headstart.heads.methods import build_drafter
from headstart.training.recipe.recipe import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
NOT_RUN = {
    "regenerate.endpoint=": "asks a server; tests/test_endpoint.py runs one",
    "--bench report.json": "uploads; tests/test_push.py",
    "--engine vllm": "needs vLLM; make test-engines",
    "headstart import": "downloads; tests/test_import.py imports every layout",
    "someone/": "downloads; tests/test_verify_exports.py",
    "--quantize": "of heads of another shape; tests/test_quantized.py",
}
"""Part of a command -> why it is only parsed."""
MODELS = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct")
FAST = ("headstart generate --heads out/mine \"Why is the sky blue?\"", "headstart compare before.json report.json")
SHORT = [
    "backbone.dtype=fp32", "drafter.draft_vocab_size=256", "drafter.depth=2", "data.limit=8", "data.eval=null", "data.eval_rows=2",
    "data.max_length=64", "train.steps=2", "train.epochs=null", "train.batch_size=2", "train.micro_batch=null", "train.precision=no",
    "eval.every=0", "eval.prompts=1", "eval.max_new_tokens=4", "eval.prompt_tokens=8", "regenerate.max_new_tokens=4", "save.every=0",
]  # fmt: skip
PLACEHOLDERS = re.compile(r"\b[A-Z]{3,}\b(?!\.)|\||\[|\.\.\.")


def blocks(page: Path) -> list[str]:
    """The blocks of commands of a page."""
    return [text for language, text in FENCED.findall(page.read_text()) if language in ("", "bash")]


def commands() -> list[str]:
    """The lines that begin with ``headstart``, once each; lines with placeholders (RECIPE, DIR|HUB_ID) are not commands."""
    texts = [text for page in PAGES for text in blocks(page)] + [command.example for command in COMMANDS]
    found = [re.sub(r"^examples?: ", "", line.strip()).partition(" # ")[0].strip() for text in texts for line in text.splitlines()]
    return [line for line in dict.fromkeys(found) if line.startswith("headstart ") and not PLACEHOLDERS.search(re.sub(r'".*?"', "", line))]


ALL = commands()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: a chat backbone, heads on it, an export, reports and files of rows."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(resolve("embedded"), folder / "backbone")
    tokenizer = AutoTokenizer.from_pretrained(folder / "backbone")
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.save_pretrained(folder / "backbone")
    torch.manual_seed(0)
    backbone = load_backbone(str(folder / "backbone"))
    for name in ("out/mine", "out/eagle3", "out/first", "out/quickstart/eagle3", "out/other", "out/draft_model"):
        build_drafter("eagle3", backbone, {"depth": 2, "draft_vocab_size": 256}).save_pretrained(folder / name)
    for name in ("out/medusa",):
        build_drafter("medusa", backbone, {"depth": 2}).save_pretrained(folder / name)
    text = [{"text": "def read(path):\n    return open(path).read()\n" * 3}] * 12
    rows = {
        "my_chats.jsonl": text, "answers.jsonl": text, "mine.jsonl": text, "my_prompts.jsonl": text[:1], "prompts.jsonl": text[:1],
        "articles.jsonl": text[:1], "spec_bench/question.jsonl": [{"question_id": 1, "category": "qa", "turns": ["Why?"]}],
        "HumanEval.jsonl": [{"task_id": "HumanEval/0", "prompt": "def f(x):"}],
        "gsm8k/test.jsonl": [{"question": "1+1?", "answer": "#### 2"}],
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("question.txt", "long_text.txt"):
        (folder / name).write_text("def read(path):\n")
    return folder


def log_of(folder: Path) -> None:
    """Give a folder of heads the log of a run."""
    recipe = {"backbone": {"path": "x"}, "drafter": {"kind": "eagle3"}, "save": {"dir": str(folder)}}
    step = {"step": 1, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "accuracy": [0.5], "tokens": 9, "tokens_per_second": 3.0}
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ({"recipe": recipe, "steps": 1}, step)))


def shorter(line: str, home: Path) -> list[str]:
    """The words of a command, on the small backbone and few rows."""
    for model in MODELS:
        line = line.replace(model, str(home / "backbone"))
    words = shlex.split(line)[1:]
    given = [word for word in words if not word.startswith("-")]
    if len(given) > 1 and given[1].endswith(".yaml"):
        at = words.index(given[1]) + 1
        data = [] if any(word.startswith("data.train=") for word in words) else [f"data.train={home / 'my_chats.jsonl'}"]
        save = [] if any(word.startswith("save.dir=") for word in words) else ["save.dir=out/new"]
        kept = [word for word in words if not word.startswith("train.steps=")]
        return [*kept[:at], f"backbone.path={home / 'backbone'}", *data, *save, *SHORT, *kept[at:]]
    if words[0] in ("generate", "chat", "bench"):
        words += ["--max-new-tokens", "6"]
    if words[0] == "tune":
        words = words[: words.index("--contexts")] if "--contexts" in words else words
        words += ["--max-nodes", "4", "--contexts", "32", "--max-new-tokens", "6"]
    return words


def clear(words: list[str], folder: Path) -> None:
    """Remove what the command writes, so that it is new."""
    targets = [word.removeprefix("save.dir=") for word in words if word.startswith("save.dir=")]
    targets += [words[words.index("--out") + 1]] if "--out" in words else []
    for target in targets:
        path = folder / target
        if path.is_dir():
            shutil.rmtree(path)


def test_there_are_many_and_the_pages_of_use_have_some() -> None:
    assert len(ALL) > 40 and set(FAST) <= set(ALL)
    assert all(any(part in line for line in ALL) for part in NOT_RUN), "an entry of NOT_RUN is out of date"


@pytest.mark.parametrize("line", ALL)
def test_it_parses(line: str) -> None:
    words = shlex.split(line.partition(" < ")[0])[1:]
    assert _parser().parse_args(words).command.name == words[0]


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("line", [pytest.param(line, marks=() if line in FAST else pytest.mark.slow) for line in ALL])
def test_it_runs(
    line: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = next((reason for part, reason in NOT_RUN.items() if part in line), None)
    if reason is not None:
        pytest.skip(f"parsed only: {reason}")
    place = tmp_path / "place"
    shutil.copytree(home, place, ignore=shutil.ignore_patterns("backbone"))
    (place / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "recipe.md", place / "docs")
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.stdin", io.StringIO("Why is the sky blue?\n"))
    words = shorter(line, home)
    clear(words, place)
    if words[0] == "compare":
        for name in ("mine", "other", "eagle3", "medusa"):
            log_of(place / "out" / name)
        report(place)
    if words[0] in ("verify", "push"):
        assert main(["export", "--heads", "out/eagle3", "--to", "vllm", "--out", "out/served"]) == 0
    if words[0] == "schema":
        (place / "recipes").mkdir()
    status = main(words)
    assert status == 0, capsys.readouterr().err


def report(folder: Path) -> None:
    """Three small reports of bench."""
    arguments = ["--prompts", "prompts.jsonl", "--limit", "1", "--max-new-tokens", "4", "--capture", "off", "--json", "report.json"]
    assert main(["bench", "--heads", "out/mine", *arguments]) == 0
    for name in ("before.json", "after.json"):
        shutil.copy(folder / "report.json", folder / name)


LAUNCHED = [
    line.strip() for page in PAGES for text in blocks(page) for line in text.splitlines() if "train_heads.py recipes/" in line
]


@pytest.mark.parametrize("line", dict.fromkeys(LAUNCHED))
def test_launched_commands_name_recipes_that_load(line: str) -> None:
    _, _, arguments = line.partition(" # ")[0].partition("train_heads.py ")
    recipe, *overrides = shlex.split(arguments)
    load_recipe(ROOT / recipe, overrides)
    configuration = re.search(r"--config_file (\S+)", line)
    assert configuration is None or (ROOT / configuration.group(1)).exists()
