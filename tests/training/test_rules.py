"""Recipes by rule: the shipped ones are what recipes/write.py writes, plan, and train on shrunk models; so do those of new-recipe."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import shrink
import torch
from chat_templates import CHATML
from errors import error_of, output_of, refuses
from small_run import losses, make_backbone, rows_of_text

from headstart.cli.main import main
from headstart.heads.methods import find_drafter
from headstart.training.loop import train
from headstart.training.plan.plan import Machine, find_machine
from headstart.training.recipe.recipe import load_recipe, split_drafter, to_dict
from headstart.training.rules import METHODS, ROWS, TEXT, ModelFacts, fit, own_data, propose, read_facts, shared
from headstart.training.setup import prepare

ROOT = Path(__file__).parents[2]
GPU = Machine(True, 1, 80_000_000_000, "accelerator", False)
FEW = (("gpt2", "medusa2"), ("ministral-3-3b-instruct-2512", "eagle3"), ("gemma-2-9b-it", "block"))
"""Shipped recipes that are tried in every run of the tests; the others are slow."""


def _write_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_recipes", ROOT / "recipes" / "write.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


write = _write_module()
ENTRIES: dict[str, Any] = write.entries()
KEPT: dict[str, Any] = write.read_figures()
EVERY = [(name, method) for name, entry in ENTRIES.items() for method in entry["methods"]]


def test_the_promised_models_have_recipes() -> None:
    """They are those whose configurations the tests have."""
    assert set(ENTRIES) == {path.stem for path in shrink.FOLDER.glob("*.json")}
    assert all("eagle3" in entry["methods"] for entry in ENTRIES.values())
    for name in ENTRIES:
        if KEPT["models"][name]["parameters"] > 3.9e9:
            assert "block" in ENTRIES[name]["methods"]
    for name in ("vicuna-7b-v1.5", "vicuna-13b-v1.5", "llama-2-7b-chat-hf", "mistral-7b-instruct-v0.3", "gpt2", "pythia-1b"):
        assert {"medusa", "medusa2"} <= set(ENTRIES[name]["methods"])


def test_the_shipped_recipes_are_what_the_rules_give() -> None:
    for name, method in EVERY:
        path, facts = ROOT / "recipes" / name / f"{method}.yaml", ModelFacts(**KEPT["models"][name])
        assert path.read_text() == write.text_of(name, method, KEPT), f"run: python recipes/write.py {name}"
        recipe = load_recipe(path)
        assert recipe.backbone.path == facts.path and recipe.data.max_length <= facts.context, path
        assert recipe.save.dir == f"out/{name}/{method}" and recipe.train.batch_size % (recipe.train.micro_batch or 1) == 0, path


def test_nothing_else_is_shipped() -> None:
    there = {path.parent.name + "/" + path.stem for path in (ROOT / "recipes").glob("*/*.yaml")}
    others = {name for name in there if name.split("/")[0] in ("accelerate", "shared", "quickstart", "conversations", "smollm2")}
    assert there - others == {f"{name}/{method}" for name, method in EVERY}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in ENTRIES])
def test_the_facts_are_those_of_the_published_configuration(name: str) -> None:
    assert json.loads(json.dumps(write.facts_of(name))) == KEPT["models"][name], f"run: python recipes/write.py --plan {name}"


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(KEPT["plans"]))
def test_what_makes_a_recipe_fit_is_kept(key: str) -> None:
    name, method = key.split("/")
    assert write.plan_of(name, method, ModelFacts(**KEPT["models"][name])) == KEPT["plans"][key]


def small_model(folder: Path, name: str) -> Path:
    """A shrunk model of that configuration, with a tokenizer of bytes."""
    make_backbone(folder / name)
    for file in (folder / name).glob("*.safetensors"):
        file.unlink()
    shrink.shrunk(name, vocab=256).save_pretrained(folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("name", "method"), [pytest.param(*case, id="-".join(case), marks=() if case in FEW else pytest.mark.slow) for case in EVERY]
)
def test_a_shipped_recipe_plans_and_trains_on_its_shrunk_model(name: str, method: str, tmp_path: Path) -> None:
    model, text = small_model(tmp_path, name), rows_of_text(tmp_path)
    drafter = load_recipe(ROOT / "recipes" / name / f"{method}.yaml").drafter
    smaller = {"draft_vocab_size": 40, "correction_rank": 8}
    changes = [f"drafter.{key}={value}" for key, value in smaller.items() if drafter.get(key)]
    changes += ["drafter.path=null", "drafter.layers=2"] if "path" in drafter else []
    recipe = load_recipe(ROOT / "recipes" / name / f"{method}.yaml", [
        f"backbone.path={model}", "backbone.dtype=fp32", f"data={{train: {text}, max_length: 64, eval_rows: 4}}", *changes,
        "features.endpoint=null",
        "train.steps=2", "train.batch_size=2", "train.micro_batch=1", "train.precision=no", "eval.prompts=1", "eval.max_new_tokens=4",
        f"save.dir={tmp_path / 'out'}",
    ])  # fmt: skip
    assert fit(to_dict(recipe), GPU, str(model))[1] > 0
    assert train(prepare(recipe)) == 0
    assert torch.isfinite(torch.tensor(losses(tmp_path / "out"))).all()


OTHERS = [(name, "eagle3") for name in ENTRIES] + [("gpt2", method) for method in METHODS if method != "eagle3"]


@pytest.mark.parametrize(
    ("name", "method"), [pytest.param(*one, marks=() if one == ("gpt2", "medusa") else pytest.mark.slow) for one in OTHERS]
)
def test_new_recipe_gives_one_that_trains(name: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text, out = small_model(tmp_path, name), rows_of_text(tmp_path), tmp_path / "recipe.yaml"
    command = ["new-recipe", str(model), "--method", method, "--data", str(text), "--out", str(out), "--json", str(tmp_path / "x.json")]
    out.write_text("mine")
    assert main(command) == 2 and out.read_text() == "mine"
    refusal = r"error: .* is there already; name another file with --out, or replace it with --overwrite\n"
    assert re.fullmatch(refusal, capsys.readouterr().err)
    said = output_of(capsys, *command, "--overwrite")
    assert f"wrote     {out}" in said and out.read_text() in said and "fits      " in said and "largest   " not in said
    assert json.loads((tmp_path / "x.json").read_text())["peak"] > 0
    short = ["data.eval_rows=4", "train.epochs=null", "train.steps=2", "eval.prompts=1", "eval.max_new_tokens=4"]
    recipe = load_recipe(out, [*short, f"save.dir={tmp_path / 'out'}"])
    assert recipe.train.precision == recipe.backbone.dtype == "auto"
    assert train(prepare(recipe)) == 0


@pytest.mark.parametrize("row", [{"prompt": "Who?"}, {"messages": [{"role": "user", "content": "Who?"}]}])
def test_new_recipe_takes_prompts_alone(row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/start.md says: they are answered next, and only then trained on."""
    model, asked, out = small_model(tmp_path, "qwen2.5-7b-instruct"), tmp_path / "asked.jsonl", tmp_path / "recipe.yaml"
    asked.write_text(f"{json.dumps(row)}\n" * 20)
    (model / "chat_template.jinja").write_text(CHATML)
    said = output_of(capsys, "new-recipe", str(model), "--data", str(asked), "--out", str(out))
    assert "data      none yet" in said and "`headstart regenerate` answers" in said and f"next      headstart regenerate {out}" in said
    assert main(["train", str(out)]) == 2 and "`headstart regenerate` answers" in capsys.readouterr().err


def test_new_recipe_of_several_chat_templates_without_a_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, asked = small_model(tmp_path, "qwen2.5-7b-instruct"), tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "Who?", "completion": "I."}\n' * 20)
    named = [{"name": name, "template": CHATML} for name in ("rag", "tool_use")]
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": named}))
    error = error_of(capsys, "new-recipe", model, "--data", asked, "--out", tmp_path / "recipe.yaml")
    assert "the chat templates rag, tool_use have no default; set data.chat_template to the text of one" in error


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere/at-all"], "no backbone at 'nowhere/at-all': no such folder"),
    ([""], "MODEL is a folder with config.json, a hub id, or 'embedded'; got empty text"),
    (["embedded", "--method", "eagle4"], "--method eagle4 is unknown; methods are eagle3, peagle, block, medusa"),
    (["embedded", "--gpus", "1"], "--gpus 1: this machine has no accelerator to read the memory of; give it with --memory GB"),
    (["embedded", "--method", "medusa", "--gpus", "1", "--memory", "1"], "nothing fits 1 x 1.0 GB, not even one row at a time"),
    (["embedded", "--data", " "], "--data is one of ultrachat, sharegpt"),
    (["embedded", "--data", "nowhere.jsonl"], "data file nowhere.jsonl: there is no such file"),
    (["embedded", "--out", "recipe.txt"], "--out recipe.txt is to end in .yaml"),
])  # fmt: skip
def test_new_recipe_names_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, "new-recipe", *arguments)
    assert not list(tmp_path.rglob("*.yaml"))


FACTS = ModelFacts("some/Chat-8B", 8_000_000_000, 32, 4096, 128_256, 131_072, True, True, False)


def test_values_of_models_unlike_those_of_the_shipped_recipes() -> None:
    def values(method: str = "eagle3", **changes: Any) -> dict[str, Any]:
        return propose(dataclasses.replace(FACTS, **changes), method, GPU).tree

    assert "packing" not in values(chat=False, packable=False)["data"]
    assert values(context=100)["train"]["batch_size"] == 256  # a power of two
    assert values("block", layers=4, width=64)["drafter"]["layers"] == 2
    assert "tie_weights" not in values("mlp", vocab=32_000)["drafter"]


def test_a_backbone_larger_than_half_a_gpu_is_sharded_over_several() -> None:
    several = dataclasses.replace(GPU, processes=8)
    large = dataclasses.replace(FACTS, parameters=70_000_000_000)
    assert propose(large, "eagle3", several).tree["backbone"]["shard"] is True
    assert "shard" not in propose(FACTS, "eagle3", several).tree["backbone"]
    assert propose(FACTS, "eagle3", several).tree["train"]["micro_batch"] == 2  # of a share of two rows
    cpu = propose(FACTS, "eagle3", find_machine(None, None)).tree
    assert "dtype" not in cpu["backbone"] and "precision" not in cpu["train"]


def test_a_backbone_that_does_not_fit_all_gpus_together_runs_on_servers() -> None:
    huge = dataclasses.replace(FACTS, parameters=355_000_000_000)
    proposal = propose(huge, "eagle3", dataclasses.replace(GPU, processes=4))
    assert proposal.tree["features"] == {"endpoint": "http://localhost:8000"} and "shard" not in proposal.tree["backbone"]
    assert "features" not in propose(huge, "medusa2", dataclasses.replace(GPU, processes=4)).tree  # trains the layers: nothing fits
    assert "features" not in propose(huge, "eagle3", dataclasses.replace(GPU, processes=16)).tree


@pytest.mark.slow
def test_less_memory_takes_fewer_rows_then_recomputes_and_says_so(tmp_path: Path) -> None:
    make_backbone(tmp_path / "model")
    facts = read_facts(str(tmp_path / "model"))
    proposal = propose(facts, "eagle3", GPU, str(rows_of_text(tmp_path)))
    changes, peak, _ = fit(proposal.tree, GPU, facts.path)
    assert changes == {} and proposal.fitted(GPU, facts.path)[0] == proposal
    rows = proposal.own["train"]["micro_batch"]
    tight = proposal.fitted(dataclasses.replace(GPU, memory=round((peak - 3_000_000) / 0.95)), facts.path)[0].own["train"]
    assert tight["micro_batch"] < rows or tight.get("gradient_checkpointing")
    refuses("nothing fits 1 x .* the largest part is", proposal.fitted, dataclasses.replace(GPU, memory=100_000_000), facts.path)


def test_the_parts_are_methods_and_data_sections() -> None:
    assert all(shared(method)["drafter"]["kind"] and shared(method)["train"]["lr"] for method in METHODS)
    assert all(shared(preset).keys() == {"data"} and own_data(preset) == {} for preset in (*ROWS, TEXT))
    assert own_data("someone/dataset") == {"train": "someone/dataset"}


@pytest.mark.parametrize(("rows", "held"), [(1000, None), (60, 6), (4, 1)])
def test_few_rows_of_the_users_own_are_not_all_held_out(rows: int, held: int | None, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n' * rows)
    assert own_data(str(tmp_path / "mine.jsonl")).get("eval_rows") == held


def test_on_a_cpu_steps_are_short() -> None:
    cpu = find_machine(None, None)
    assert not cpu.accelerator

    def drafter(method: str = "eagle3", machine: Any = cpu, **changes: Any) -> dict[str, Any]:
        return dict(propose(dataclasses.replace(FACTS, **changes), method, machine).tree["drafter"])

    values = drafter(vocab=49_152)
    assert (values["depth"], values["draft_vocab_size"]) == (4, 8192)
    for method in METHODS:  # each of a vocabulary from which some would choose
        options, arguments = split_drafter(drafter(method, vocab=200_000))
        assert set(arguments) <= set(find_drafter(options.kind).Config.model_fields), method
    small = drafter(vocab=10_000)
    assert small["depth"] == 4 and "draft_vocab_size" not in small
    assert drafter("medusa", vocab=49_152)["depth"] == 4 and "draft_vocab_size" not in drafter("medusa", vocab=49_152)
    assert drafter(machine=GPU, vocab=49_152)["depth"] == 7
    mine, of_gpu = (propose(FACTS, "eagle3", machine, "someone/rows").tree for machine in (cpu, GPU))
    assert (mine["train"]["lr"], mine["train"]["batch_size"], mine["train"]["epochs"]) == ("auto", 4, 4)
    assert (of_gpu["train"]["lr"], of_gpu["train"]["batch_size"], of_gpu["train"]["epochs"]) == (1e-4, 16, 2)
    assert mine["regenerate"] == of_gpu["regenerate"] | {"max_new_tokens": 256, "unfinished": "keep"}
    small = propose(dataclasses.replace(FACTS, parameters=500_000_000), "eagle3", cpu, "someone/rows").tree
    assert small["regenerate"] == mine["regenerate"] | {"batch_size": 32}
    assert propose(FACTS, "medusa", cpu, "someone/rows").tree["train"]["batch_size"] == 4
