"""The embedded backbone and its data match the documentation, and heads can be trained on them."""

import ast
import gzip
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refuses
from families import tiny
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import headstart
from headstart import Backbone, SpeculativeModel, TreeShape, load_backbone, load_tokenizer
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.heads.methods import build_drafter
from headstart.support.errors import UserError
from headstart.support.files import file_hash
from headstart.support.hub import HEADS, resolve, resolve_heads
from headstart.support.terminal import show

FOLDER = Path(resolve("embedded"))
PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("embedded")


def rows(name: str) -> list[str]:
    data = (FOLDER.parent / name).read_bytes()
    lines = (gzip.decompress(data) if name.endswith(".gz") else data).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_it_is_small_and_says_how_good_it_is(backbone: Backbone) -> None:
    facts = json.loads((FOLDER / "training.json").read_text())
    assert (FOLDER / "model.safetensors").stat().st_size <= 50_000_000
    assert 20_000_000 <= backbone.model.num_parameters() <= 25_000_000 and 12 <= backbone.num_layers <= 14
    assert facts["bits_per_byte"] <= 0.8 and f"{facts['bits_per_byte']:.2f} bits per byte" in PAGE
    assert backbone.name == "embedded"


def test_any_text_round_trips() -> None:
    tokenizer = load_tokenizer("embedded")
    for text in ("def f(x):\n\treturn x  # größer 漢字\r\n", "\x00 \U0001f600"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_it_predicts_python_better_than_noise(backbone: Backbone) -> None:
    """Recomputed on the shipped held-out prompts; a shuffle of the same tokens is far less likely."""
    tokenizer, nats = load_tokenizer("embedded"), {"python": 0.0, "shuffled": 0.0}
    texts = rows("prompts.jsonl")[:20]
    torch.manual_seed(0)
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        for name, tokens in (("python", ids), ("shuffled", ids[torch.randperm(len(ids))])):
            logits = backbone.readout(backbone.read(tokens[None, :-1]).hidden_BTD)[0]
            nats[name] += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    size = sum(len(text.encode()) for text in texts)
    assert nats["python"] / size / 0.6931 < 2.0, "openings of 64 tokens, without the context a file gives"
    assert nats["shuffled"] > 1.5 * nats["python"]


def test_prompts_are_enough_and_not_trained_on() -> None:
    prompts, train = rows("prompts.jsonl"), rows("train.jsonl.gz")
    assert len(prompts) >= 40 and len(set(prompts)) == len(prompts) and len(train) >= 1000
    joined = "\n".join(train)
    assert not [prompt for prompt in prompts if prompt in joined]


@pytest.mark.parametrize("name", ["embedded", "embedded-mlp"])
def test_heads_ship_with_it_and_accept_most_drafts(backbone: Backbone, name: str) -> None:
    heads = headstart.load(name, backbone)
    assert (FOLDER.parents[1] / HEADS[name] / "model.safetensors").stat().st_size <= 8_000_000
    row = load_tokenizer("embedded")(rows("prompts.jsonl")[0], return_tensors="pt")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True}
    out = backbone.model.generate(**row, custom_generate=heads.generate, tree=TreeShape(12, 4), **options)
    plain = backbone.model.generate(**row, **options)
    assert torch.equal(out.sequences, plain.sequences) and out.tau > 2


def test_other_names_of_shipped_heads_are_refused(backbone: Backbone) -> None:
    refuses("no heads 'embedded-medusa' ship .*; embedded, embedded-mlp, smollm2 do", headstart.load, "embedded-medusa", backbone)
    assert resolve_heads("embedded-lab/eagle3") is None, "a hub id"


# The heads that ship for SmolLM2-135M-Instruct, without the model: whole, small, found by name, and drafting on a model of that shape.

ROOT = Path(__file__).parents[2]
MOST_BYTES = 30e6


def model() -> LlamaForCausalLM:
    """A model of SmolLM2-135M's shape with weights by chance."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    theta = {"rope_type": "default", "rope_theta": 100000.0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=49152, num_hidden_layers=30, tie_word_embeddings=True, rope_parameters=theta, **sizes)
    ).eval()


def test_they_are_whole_and_small() -> None:
    folder, card = read_metadata("smollm2")
    assert folder.resolve() == ROOT / "recipes" / "smollm2" / "heads"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < MOST_BYTES
    weights = folder / card["weights"]["file"]
    assert file_hash(weights) == card["weights"]["sha256"]
    assert {tensor.dtype for tensor in load_file(weights).values() if tensor.is_floating_point()} == {torch.bfloat16}


def test_no_prompt_is_both_trained_on_and_measured() -> None:
    trained, measured = (
        [json.loads(line) for line in (ROOT / "recipes" / "smollm2" / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("train", "measure")
    )
    assert {*Counter(row["task"] for row in trained).values()} == {14} and {*Counter(row["task"] for row in measured).values()} == {6}
    long = [{part for row in rows for part in row["messages"][0]["content"].split("\n") if len(part) > 120} for rows in (trained, measured)]
    asked = {row["messages"][0]["content"] for row in (*trained, *measured)}
    assert len(asked) == len(trained) + len(measured) and len(long[0]) > 28 and not long[0] & long[1], "no text either"


def test_prompts_are_written_about_answers(tmp_path: Path) -> None:
    folder, answers = ROOT / "recipes" / "smollm2", tmp_path / "answers.jsonl"
    answers.write_bytes(gzip.decompress((folder / "answers.jsonl.gz").read_bytes()))
    command = [sys.executable, str(folder / "prompts.py"), "--count", "70", "--answers"]
    done = subprocess.run([*command, str(answers)], capture_output=True, text=True, check=True)
    asked = [(row["task"], row["messages"][0]["content"]) for row in map(json.loads, done.stdout.splitlines())]
    assert len({*asked}) == 70 and {*Counter(task for task, _ in asked).values()} == {10}
    written = "".join(turn["content"] for line in answers.read_text().split("\n") if line for turn in json.loads(line)["messages"][1:])
    assert all(text.split("\n\n", 1)[1] in written for task, text in asked if task == "summary")
    refused = subprocess.run([*command, str(folder / "measure.jsonl")], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "") and "no answer has a paragraph of 35 to 170 words" in refused.stderr


def test_what_they_say_of_themselves() -> None:
    folder, card = read_metadata("smollm2")
    assert card["backbone"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and card["contract"]["precision"] == "bfloat16 gguf Q4_1"
    said = (folder / "README.md").read_text()
    assert "license: apache-2.0" in said and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in said and "gguf Q4_1" in said
    assert card["provenance"]["acceptance"]["levels"], "adaptive trees begin with what training measured"


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert read_metadata("smollm2")[0].resolve() == ROOT / "recipes" / "smollm2" / "heads"
    Path("smollm2/headstart.json").write_text("{}")
    refuses("smollm2/headstart.json is damaged", read_metadata, "smollm2")


def test_another_model_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"smollm2 was trained on HuggingFaceTB/SmolLM2-135M-Instruct \(hidden_size 576\)"):
        load_drafter("smollm2", Backbone(tiny("llama")))


@pytest.mark.slow
def test_they_draft_on_a_model_of_that_shape() -> None:
    on = model()
    refuses("of that shape with other weights", headstart.load, "smollm2", on)
    heads = headstart.load("smollm2", on, allow_finetuned=True, capture="off")
    ids = torch.arange(100, 120)[None]
    alone = on.generate(ids, max_new_tokens=8, do_sample=False)
    tree = headstart.TreeShape(8, 2, 3)
    assert torch.equal(alone, on.generate(ids, custom_generate=heads.generate, max_new_tokens=8, do_sample=False, tree=tree))


# docs/quickstart.ipynb: its cells run, in short, and show the text and the tree; its stored outputs are those of a whole run.

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"
SHORTER = {"steps=60": "steps=3", "limit=300": "limit=12", "prompts=2": "prompts=1", ": 80": ": 12", ": 40": ": 8"}


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def run(source: str, scope: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line, which a notebook would show."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), scope) if isinstance(last, ast.Expr) else None


def drawn(tree: Any) -> str:
    show([tree], out := io.StringIO())
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    shown = []
    for cell in cells("code"):
        source = "".join(cell["source"])
        for long, short in SHORTER.items():
            source = source.replace(long, short)
        value = run(source, scope)
        shown += [] if value is None or value == 0 else [value]
    out = capsys.readouterr().out
    assert "greedy, the same: True" in out and "sampled, the same: True" in out
    text, tree, sampled = shown
    assert text._repr_html_().count("<span") == 2 + scope["out"].passes and "→" in drawn(tree) and str(sampled)


def test_its_outputs_are_stored() -> None:
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    stored = json.dumps(outputs)
    assert "text/html" in stored and stored.count("text/html") == 3 and "the same: True" in stored
    assert "tau " in stored and "the same: False" not in stored and "/tmp/" not in stored and "/home/" not in stored


def test_show_puts_each_pass_in_brackets() -> None:
    backbone, tokenizer = headstart.load_backbone("embedded"), headstart.load_tokenizer("embedded")
    torch.manual_seed(0)
    heads = SpeculativeModel(backbone, build_drafter("medusa", backbone, {"depth": 2}), capture="off")
    inputs = tokenizer(["import os", "def read(path):\n    return"], return_tensors="pt", padding=True, padding_side="left")
    arguments = {"custom_generate": heads.generate, "tree": headstart.TreeShape(6, 3), "max_new_tokens": 9, "do_sample": False}
    out = backbone.model.generate(**inputs, return_dict_in_generate=True, **arguments)
    for row, prompt in enumerate(("import os", "def read(path):\n    return")):
        shown = headstart.show(out, tokenizer, row)
        assert shown.prompt.endswith(prompt) and len(shown.passes) == len(shown.trees) + 1
        assert "".join(token for tokens in shown.passes for token in tokens) == tokenizer.decode(out.sequences[row, -9:])
        assert str(shown).count("[") >= len(shown.passes) and "pass 1:" in shown._repr_html_()
        lines = drawn(shown.tree(1))
        assert lines.count("\n") == len(shown.trees[0].tokens) + 1 and lines.count("✓") == len(shown.passes[1]) - 1 and "→" in lines
        refuses("there is no pass 99", shown.tree, 99)
    refuses("there is no row 2; the output has 2", headstart.show, out, tokenizer, 2)
    refuses("return_dict_in_generate", headstart.show, backbone.model.generate(**inputs, **arguments), tokenizer)
