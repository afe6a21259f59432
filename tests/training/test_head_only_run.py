"""Training from a feature cache loads the backbone's embedding, final norm and output layer alone, and learns the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import losses, make_recipe, read_log

from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.training import loop, setup
from headstart.training.features import source as opening
from headstart.training.features.cached import SUPPLEMENT
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import MemoryPlan
from headstart.training.recipe.recipe import load_recipe
from headstart.training.setup import prepare

pytestmark = pytest.mark.usefixtures("on_the_cpu")
HEAD = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
LAYER = "model.layers.5."
DRAFTERS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "depth": 2},
    "eagle3": {"kind": "eagle3", "depth": 2},
    "block": {"kind": "block", "depth": 3, "layers": 1, "anchor_share": 0.5},
}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a recipe and a cache, and the overrides that train from it."""
    folder = tmp_path_factory.mktemp("cached")
    recipe = make_recipe(folder, 6, drafter=DRAFTERS["eagle3"])
    options = [f"cache.dir={folder / 'cache'}", "drafter.taps=[1,3,5]"]
    assert main(["cache", str(recipe), *options]) == 0
    return folder, options


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_losses_are_those_beside_the_whole_backbone(
    kind: str, cached: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, start values included; and of the checkpoint only what is needed is read."""
    folder, options = cached
    drafter = DRAFTERS[kind] | ({} if kind == "medusa" else {"taps": [1, 3, 5]})
    command = [str(folder / "recipe.yaml"), *options[:1], f"drafter={json.dumps(drafter)}"]
    run = prepare(load_recipe(command[0], [*command[1:], f"save.dir={tmp_path}/head"]))
    assert isinstance(run.backbone, HeadOnlyBackbone) and run.backbone.files is not None and loop.train(run) == 0
    names = run.backbone.files.read_names
    layer = [name for name in names if name not in HEAD]
    assert sorted(set(names)) == sorted({*HEAD, *layer}) and (bool(layer) == (kind != "medusa"))
    assert all(name.startswith(LAYER) for name in layer) and len(layer) == len(set(layer)) <= 9  # what a fresh head starts as
    monkeypatch.setattr(opening, "opens_head_only", lambda recipe: False)
    monkeypatch.setattr(setup, "opens_head_only", lambda recipe: False)
    assert train([*command, f"save.dir={tmp_path}/whole"]) == 0
    assert losses(tmp_path / "head") == losses(tmp_path / "whole") and len(losses(tmp_path / "head")) == 12
    ours, theirs = (next((tmp_path / name).glob("*.safetensors")) for name in ("head", "whole"))
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys() and all(torch.equal(one[name], weight) for name, weight in other.items())


def test_a_run_that_goes_on_reads_three_tensors_and_needs_no_others(cached: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The checkpoint's layers may be gone."""
    folder, options = cached
    shutil.copytree(folder, tmp_path / "copy")
    recipe = tmp_path / "copy" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(folder), str(tmp_path / "copy")))
    options = [f"cache.dir={tmp_path / 'copy' / 'cache'}", *options[1:]]
    assert train([str(recipe), *options, "train.steps=3"]) == 0
    file = tmp_path / "copy" / "backbone" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name in HEAD}, file, {"format": "pt"})
    run = prepare(load_recipe(recipe, [*options, "train.steps=3"]))
    run.log.close()
    assert isinstance(run.backbone, HeadOnlyBackbone) and run.backbone.files is not None and run.done == 3
    assert sorted(run.backbone.files.read_names) == HEAD
    assert sum(weight.numel() for weight in run.backbone.weights) == (2 * 256 + 1) * 16
    assert train([str(recipe), *options, f"save.dir={tmp_path}/fresh"]) == 0  # starts at random then


def test_held_out_rows_are_evaluated_on_their_features(cached: tuple[Path, list[str]], tmp_path: Path, capsys: Any) -> None:
    folder, options = cached
    command = [str(folder / "recipe.yaml"), *options, "train.steps=4"]
    assert train([*command, f"save.dir={tmp_path}/out"]) == 0
    [line] = [line for line in read_log(tmp_path / "out") if "teacher_forced_tau" in line]
    shares = line["teacher_forced_acceptance_per_depth"]
    assert line["teacher_forced_tau"] == pytest.approx(1 + sum(shares)) and 1 >= shares[0] >= shares[1] >= 0
    assert "as a teacher-forced chain on held-out features (not decoded" in capsys.readouterr().err
    provenance = json.loads((tmp_path / "out" / "headstart.json").read_text())["provenance"]
    assert provenance["teacher_forced"]["teacher_forced_tau"] == line["teacher_forced_tau"] and provenance["tau"] is None
    shutil.copytree(folder / "cache", tmp_path / "old")
    (tmp_path / "old" / SUPPLEMENT).unlink()
    assert train([*command, f"cache.dir={tmp_path}/old", f"save.dir={tmp_path}/unevaluated"]) == 2
    assert f"lacks {SUPPLEMENT}; run headstart cache with this recipe to write it" in capsys.readouterr().err


def test_the_plan_counts_no_layers(cached: tuple[Path, list[str]]) -> None:
    folder, options = cached
    found = []
    for changes in (options, []):
        recipe = load_recipe(folder / "recipe.yaml", changes)
        found.append(MemoryPlan(recipe, make_fake_models(recipe, False), False, False).persistent()["backbone weights"])
    assert found[0] == 4 * (2 * 256 + 1) * 16 < found[1] / 2


def test_an_adapter_needs_the_whole_backbone(cached: tuple[Path, list[str]]) -> None:
    folder, options = cached
    recipe = load_recipe(folder / "recipe.yaml", options)
    assert opening.opens_head_only(recipe)
    for change in ("backbone.adapter=somewhere", "drafter={kind: draft_model, layers: 2, depth: 2}", "cache.dir=null"):
        assert not opening.opens_head_only(load_recipe(folder / "recipe.yaml", [*options[:1], change]))
    assert not issubclass(Backbone, HeadOnlyBackbone)
