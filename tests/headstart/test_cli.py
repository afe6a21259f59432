"""The command ``headstart``: its output, its reports, and one line for every error."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_templates import CHATML, make_chat_model
from errors import error_of, output_of, report_of
from transformers import LlamaConfig, LlamaForCausalLM

import headstart
from headstart import TreeShape, load, load_backbone, load_tokenizer
from headstart.chat.prompts import Prompter, read_prompts
from headstart.cli.generate import add_generate
from headstart.cli.loading import drafting_heads, heads_of
from headstart.cli.main import main
from headstart.heads.methods import build_drafter
from headstart.inference.measure import Settings, continue_text, measure_tau

ROOT = Path(__file__).parents[2]
ROW_KEYS = set(
    "head temperature tau acceptance_per_depth tokens_per_second speedup_vs_ar speedup_vs_transformers identical identical_to_transformers "
    "tokens passes draft_ms verify_ms host_ms nodes width depth mbu capture draft_vocabulary".split()
)


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A folder with a tiny backbone, two untrained heads for it, and prompts."""
    root = tmp_path_factory.mktemp("house")
    backbone = load_backbone(str(make_chat_model(root / "backbone", None, special="", ends=[1], max_position_embeddings=96)))
    for kind in ("eagle3", "medusa"):
        build_drafter(kind, backbone, {"depth": 3}).save_pretrained(root / kind)
    (root / "prompts.jsonl").write_text('{"prompt": "What is two?"}\n{"text": "It is four. And three? Six, I think."}\n')
    return root


@pytest.fixture(autouse=True)
def at_home(house, monkeypatch):
    monkeypatch.chdir(house)


def written(house: Path, settings: Settings, kind: str | None = "eagle3", prompt: str = "What is two?") -> str:
    backbone, tokenizer = load_backbone(str(house / "backbone")), load_tokenizer(str(house / "backbone"))
    prompt_T = Prompter(tokenizer).ask(prompt)
    output = continue_text(load(kind and house / kind, backbone), prompt_T, settings, 7, tokenizer=tokenizer)
    return tokenizer.decode(output.sequences[0, len(prompt_T) :], skip_special_tokens=True)


def test_bench(house, tmp_path, capsys):
    file = tmp_path / "made" / "report.json"
    heads = ["--heads", "eagle3", "--heads", "medusa", "--temperature", "0", "--temperature", "1"]
    sizes = ["--max-new-tokens", "12", "--nodes", "12", "--width", "4", "--seed", "5", "--threads", "1", "--rounds", "1"]
    sampled = ["--sampled-nodes", "9", "--sampled-width", "3"]
    assert main(["bench", *heads, "--prompts", "prompts.jsonl", *sizes, *sampled, "--json", str(file)]) == 0
    report, printed = json.loads(file.read_text()), capsys.readouterr()
    expected = {"prompts": 2, "rounds": 1, "max_new_tokens": 12, "threads": 1, "dtype": "fp32"}
    assert {key: report[key] for key in expected} == expected
    assert report["backbone"] == str(house / "backbone") and set(report["versions"]) == {"headstart", "torch", "transformers", "python"}
    assert [(row["head"], row["temperature"]) for row in report["results"]] == [(h, t) for t in (0.0, 1.0) for h in ("eagle3", "medusa")]
    for row in report["results"]:
        assert set(row) >= ROW_KEYS and row["identical"] is True
        assert row["identical_to_transformers"] is (None if row["temperature"] else True)
        base = {one["name"]: one for one in report["baselines"] if one["temperature"] == row["temperature"]}
        assert row["speedup_vs_ar"] == pytest.approx(row["tokens_per_second"] / base["AR (headstart)"]["tokens_per_second"])
        assert row["speedup_vs_transformers"] == pytest.approx(row["tokens_per_second"] / base["AR (transformers)"]["tokens_per_second"])
        assert (row["nodes"], row["width"], row["depth"]) == ((9, 3, 3) if row["temperature"] else (12, 4, 3))
        assert min(row["draft_ms"], row["verify_ms"], row["host_ms"]) > 0
    backbone, tokenizer = load_backbone("backbone"), load_tokenizer("backbone")
    asked = [prompt.ids_T for prompt in read_prompts("prompts.jsonl", Prompter(tokenizer))]
    measured = measure_tau(load("medusa", backbone), asked, max_new_tokens=12, temperature=1.0, seed=5, tree=TreeShape(9, 3))
    last = report["results"][-1]
    assert {key: last[key] for key in measured} == measured  # computed from the same sums, so equal to the last bit
    assert "x transformers" in printed.out and "medusa" in printed.out
    assert "at temperature 0 also to transformers' generate." in printed.out
    assert "temperature 1: 100%" in printed.err and "100%" not in printed.out
    assert [path.name for path in file.parent.iterdir()] == ["report.json"]


def test_bench_with_everything(house, tmp_path, capsys):
    (tmp_path / "set.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["What is two?", "And three?"]}\n' * 2)
    json_file, html = tmp_path / "report.json", tmp_path / "made" / "report.html"
    files = ["--prompts", "prompts.jsonl", str(tmp_path / "set.jsonl")]
    more = "--prompt-lookup --assistant backbone --batch-size 1 2 --per-task 1 --max-new-tokens 6 --rounds 1".split()
    assert main(["bench", "--heads", "medusa", *files, *more, "--json", str(json_file), "--html", str(html)]) == 0
    report, (printed, said) = json.loads(json_file.read_text()), capsys.readouterr()
    assert all(f"{what}: 100%" in said for what in ("warm-up", "judging the texts", "comparing logits"))
    assert report["tasks"] == {"prompts": 1, "qa": 1} and report["prompts_files"] == files[1:]
    ar = ["AR (transformers)", "AR (headstart)"]
    names = [*ar, "prompt lookup", "assistant backbone", *ar]
    assert [row["name"] for row in report["baselines"]] == names and all(name in printed for name in names)
    assert [row["batch"] for row in report["results"]] == [1, 2] and all(row["identical"] for row in report["results"])
    assert report["results"][0]["tokens"] == 18  # two prompts and a second turn
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_generate_streams_what_heads_write(house, tmp_path, capsys):
    report = report_of(tmp_path, "generate", "--heads", "eagle3", "What is two?", "--max-new-tokens", "16")
    printed = capsys.readouterr()
    text = written(house, Settings(16))
    assert printed.out == text + "\n" and report["text"] == text
    assert printed.err.startswith(f"mean acceptance length (tau) {report['tau']:.2f}") and f"{report['tokens']} tokens" in printed.err
    assert output_of(capsys, "generate", "--heads", "eagle3", "What is two?", "--max-new-tokens", "16", "--echo") == f"What is two?{text}\n"


@pytest.mark.parametrize(
    ("more", "named"),
    [("", ["suffix"]), ("--propose none", []), ("--propose recycling", ["recycling"]), ("--nodes 9", []), ("--no-draft", [])],
)
def test_heads_draft_with_n_grams_of_the_text_unless_told_otherwise(house: Path, more: str, named: list[str]) -> None:
    """In adaptive trees, which leave out what does not pay."""
    add_generate(parser := argparse.ArgumentParser())
    args = parser.parse_args(["--heads", "medusa", "What is two?", *more.split()])
    backbone, tokenizer = load_backbone("backbone"), load_tokenizer("backbone")
    heads = heads_of(drafting_heads(args, backbone), backbone, tokenizer, args)
    assert [proposer.name for proposer in heads.proposers] == named and (heads.drafter is None) == ("--no-draft" in more)


def test_sampling_is_governed_by_the_seed_and_nothing_else(house, tmp_path, capsys):
    arguments = ["generate", "What is two?", "--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--max-new-tokens", "16"]
    outputs = []
    systems = ("--heads eagle3", "--heads medusa --nodes 7", "--backbone backbone")
    for more in systems:
        outputs.append(output_of(capsys, *arguments, *more.split(), "--seed", "7"))
    assert outputs == [written(house, Settings(16, 0.9, 50, 0.9)) + "\n"] * 3
    drawn, printed = report_of(tmp_path, *arguments, "--heads", "medusa")["seed"], capsys.readouterr()
    assert f"seed {drawn}" in printed.err
    assert output_of(capsys, *arguments, "--heads", "medusa", "--seed", str(drawn)) == printed.out


def test_prompt_from_a_file_and_from_a_pipe(house, tmp_path, stdin, capsys):
    (tmp_path / "prompt.txt").write_text("What is\ntwo?\n")
    expected = written(house, Settings(20), prompt="What is\ntwo?") + "\n"
    assert output_of(capsys, "generate", "--heads", "medusa", "--file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "20") == expected
    stdin("What is\ntwo?\n")
    assert output_of(capsys, "generate", "--heads", "medusa", "--max-new-tokens", "20") == expected


def test_stop_strings(house, capsys):
    text = written(house, Settings(40))
    (stop, *_) = re.findall("[a-z]{3}", text)
    assert main(["generate", "--heads", "eagle3", "What is two?", "--max-new-tokens", "40", "--stop", "§§", "--stop", stop]) == 0
    out = capsys.readouterr().out.removesuffix("\n")
    assert stop in out and text.startswith(out) and len(out) < len(text) and out.index(stop) + len(stop) > len(out) - 12


def test_the_recipes_chat_template_serves_a_tokenizer_that_has_none(house, tmp_path):
    backbone = load_backbone(str(house / "backbone"))
    template = "Q: {{ messages[0]['content'] }} A:"
    extra = {"recipe": {"data": {"chat_template": template}}}
    build_drafter("eagle3", backbone, {"depth": 3}).save_pretrained(tmp_path / "heads", extra)
    command = ["generate", "What is two?", "--heads", tmp_path / "heads", "--max-new-tokens", "4"]
    counts = [report_of(tmp_path, *command, *style)["prompt_tokens"] for style in ([], ["--raw"])]
    tokenizer = load_tokenizer(str(house / "backbone"))
    prompt_length = len(tokenizer("Q: What is two? A:", add_special_tokens=False)["input_ids"])
    assert tokenizer.chat_template is None and counts == [prompt_length, len(tokenizer("What is two?")["input_ids"])]


def test_chat_template_unless_raw(house, tmp_path, capsys):
    shutil.copytree(house / "backbone", tmp_path / "chatty")
    tokenizer = load_tokenizer(str(tmp_path / "chatty"))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "chatty")
    command = ["generate", "--backbone", tmp_path / "chatty", "What is two?", "--max-new-tokens", "4"]
    counts = [report_of(tmp_path, *command, *style)["prompt_tokens"] for style in ([], ["--chat"], ["--raw"])]
    assert counts[0] == counts[1] > counts[2] == len(tokenizer("What is two?")["input_ids"])


def broken(house: Path, folder: Path) -> str:
    """Heads with a truncated weight file."""
    shutil.copytree(house / "medusa", folder)
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    return str(folder)


BENCH = ["bench", "--prompts", "prompts.jsonl"]
MISTAKES = {
    "no command": ([], "arguments are required"),
    "unknown command": (["brench"], "brench"),
    "unknown option": (["generate", "--hats", "x", "hi"], "--hats"),
    "no heads to measure": (BENCH, "--heads"),
    "negative temperature": (["generate", "--temperature", "-1", "hi"], "a temperature is 0 \\(greedy\\), or from 0.01 to 100; got '-1'"),
    "temperature of nan": ([*BENCH, "--heads", "medusa", "--temperature", "nan"], "a temperature is 0"),
    "top-p of 0": (["generate", "--top-p", "0", "hi"], "a number above 0 to 1"),
    "half a token": (["generate", "--max-new-tokens", "0.5", "hi"], "a whole number of at least 1"),
    "no model": (["generate", "hi"], "give --heads DIR, or --backbone"),
    "no such heads": (["generate", "--heads", "./gone", "hi"], "no heads at './gone'"),
    "a model for heads": (["generate", "--heads", "backbone/config.json", "hi"], "that is a file; give a folder or a hub id"),
    "heads that are none": (["generate", "--heads", "backbone", "hi"], "has no headstart.json"),
    "no such backbone": (["generate", "--backbone", "./gone", "hi"], "no tokenizer at './gone'"),
    "truncated heads": ([*BENCH, "--heads", "BROKEN"], "truncated"),
    "prompt twice": (["generate", "--heads", "medusa", "hi", "--file", "prompts.jsonl"], "give one"),
    "prompt file gone": (["generate", "--heads", "medusa", "--file", "gone.txt"], "--file gone.txt: there is no such file"),
    "empty prompt": (["generate", "--heads", "medusa", ""], "the prompt is empty"),
    "no template": (["generate", "--heads", "medusa", "--chat", "hi"], "no chat template"),
    "chat and raw": (["generate", "--heads", "medusa", "--chat", "--raw", "hi"], "not allowed with"),
    "over the context": (["generate", "--heads", "medusa", "hi", "--max-new-tokens", "95"], "3 tokens, which with max_new_tokens 95"),
    "a batch of none": ([*BENCH, "--heads", "medusa", "--batch-size", "0"], "a whole number of at least 1"),
    "assisted in batches": ([*BENCH, "--heads", "medusa", "--prompt-lookup", "--batch-size", "2", "4"], "one sequence at a time"),
    "a page in a folder": ([*BENCH, "--heads", "medusa", "--html", "."], "--html . is a folder"),
    "none of a task": ([*BENCH, "--heads", "medusa", "--per-task", "0"], "a whole number of at least 1"),
    "nothing fits": ([*BENCH, "--heads", "medusa", "--skip-long", "--max-new-tokens", "95"], "the shortest prompt has"),
    "bench over the context": ([*BENCH, "--heads", "medusa", "--max-new-tokens", "95"], "context of 96"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(name, house, tmp_path, capsys):
    argv, message = MISTAKES[name]
    argv = [broken(house, tmp_path / "broken") if word == "BROKEN" else word for word in argv]
    out = tmp_path / "made" / "x.json"
    error = error_of(capsys, *argv, *(["--json", out] if argv else []))
    assert message in error or re.search(message, error), error
    assert not out.parent.exists()


def test_heads_on_another_backbone(house, tmp_path, capsys):
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained("backbone")).save_pretrained(tmp_path / "other")
    load_tokenizer("backbone").save_pretrained(tmp_path / "other")
    command = ["generate", "--heads", "medusa", "--backbone", str(tmp_path / "other"), "hi", "--max-new-tokens", "4"]
    assert "was trained on" in error_of(capsys, *command)
    assert main([*command, "--allow-finetuned"]) == 0


def test_heads_whose_backbone_is_elsewhere(house, tmp_path, capsys):
    card = json.loads((shutil.copytree(house / "medusa", tmp_path / "moved") / "headstart.json").read_text())
    (tmp_path / "moved" / "headstart.json").write_text(json.dumps(card | {"backbone": "out/gone"}))
    for command in (["generate", "hi"], BENCH):
        assert "if it is elsewhere say so with --backbone" in error_of(capsys, *command, "--heads", tmp_path / "moved")


def test_a_tokenizer_of_more_tokens_than_the_model_embeds(house, tmp_path, capsys):
    shutil.copytree(house / "backbone", tmp_path / "more")
    tokenizer = load_tokenizer("backbone")
    tokenizer.add_tokens([f"<new{i}>" for i in range(2000)])
    tokenizer.save_pretrained(tmp_path / "more")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "<new1999> Hi <new1999>"}\n')
    commands = ["generate", "Hi <new1999>"], ["bench", "--prompts", rows, "--no-compile", "--propose", "suffix"]
    errors = [error_of(capsys, *command, "--backbone", tmp_path / "more", "--max-new-tokens", "9") for command in commands]
    made = {"backbone": {"path": str(tmp_path / "more")}, "drafter": {"kind": "mlp"}, "data": {"train": str(rows), "format": "text"}}
    (tmp_path / "run.yaml").write_text(json.dumps(made | {"save": {"dir": "x"}, "regenerate": {"max_new_tokens": 9}}))
    errors += [error_of(capsys, "regenerate", tmp_path / "run.yaml", f"regenerate.out={tmp_path / 'out.jsonl'}")]
    assert all("a prompt has token" in error and "leave its text out, or resize the embedding" in error for error in errors)


def test_the_report_must_be_writable_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for file in (tmp_path, tmp_path / "file" / "x.json"):
        assert error_of(capsys, *BENCH, "--heads", "medusa", "--json", file).startswith(f"error: --json {file}")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_loads_no_library():
    done = python("-X", "importtime", "-m", "headstart.cli", "--help")
    assert done.returncode == 0 and "bench" in done.stdout and "generate" in done.stdout
    assert not {"torch", "transformers"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert python("-m", "headstart.cli", "--version").stdout == f"headstart {headstart.__version__}\n"


def test_a_closed_pipe_is_quiet():
    code = (
        "import sys; from headstart.cli import main, preparing\n"
        "def broken(given):\n    print('unwritten', end=''); raise BrokenPipeError\n"
        "preparing.schema = broken; sys.exit(main.main(['schema']))"
    )
    assert ((done := python("-c", code)).returncode, done.stderr) == (141, "")
