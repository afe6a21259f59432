"""Heads trained together on one forward pass of the backbone end in the weights that each would have alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, refusal
from families import backbone, random_drafter
from small_run import Forked, make_recipe, read_log, train_once

from headstart.cli.train import main
from headstart.heads.backbone.backbone import Backbone
from headstart.support.errors import UserError
from headstart.training.data.batches import collate
from headstart.training.features.source import LiveWithCache, require_on_policy
from headstart.training.loop import train
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import StepKey
from headstart.training.objective.objective import on_policy_loss
from headstart.training.recipe.recipe import Objective, load_recipe, to_yaml
from headstart.training.setup import prepare

HEADS: list[dict[str, Any]] = [
    {"kind": "eagle3", "depth": 3, "draft_vocab_size": 40, "taps": [1, 2, 3]},
    {
        "name": "wide", "kind": "medusa", "depth": 2,
        "objective": {"terms": {"ce": 0.5, "tv": 0.5}}, "train": {"lr": 1e-3, "optimizer": "muon", "ema_decay": 0.5, "schedule": "linear"},
    },
    {"name": "other-taps", "kind": "eagle3", "depth": 1, "taps": [0, 4, 5], "train": {"max_grad_norm": 0.1}},
]  # fmt: skip
FILES = {"eagle3": "model.safetensors", "wide": "medusa_lm_head.safetensors", "other-taps": "model.safetensors"}
STEPS = 8


def make(folder: Path) -> Path:
    train = {"steps": STEPS, "batch_size": 4, "micro_batch": 2}
    return make_recipe(folder, 6, HEADS, train=train, eval={"every": 4, "prompts": 1})


def weights(out: Path) -> dict[str, bytes]:
    return {name: (out / name / file).read_bytes() for name, file in FILES.items()}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and its run in ``out``."""
    return train_once(make(tmp_path_factory.mktemp("together")))


def test_each_is_what_it_would_be_alone_bit_for_bit(together: Path, tmp_path: Path) -> None:
    recipes = load_recipe(together / "recipe.yaml").per_drafter()
    assert list(recipes) == list(FILES) and recipes["wide"].train.lr == 1e-3 and recipes["wide"].train.steps == STEPS
    logs = read_log(together / "out")
    for name, recipe in recipes.items():
        (tmp_path / "alone.yaml").write_text(to_yaml(recipe))
        assert main([f"{tmp_path}/alone.yaml", f"save.dir={tmp_path}/{name}"]) == 0
        assert (tmp_path / name / FILES[name]).read_bytes() == weights(together / "out")[name]
        lines = [line for line in read_log(tmp_path / name) if "recipe" not in line]
        alone = [{key: x for key, x in line.items() if key != "tokens_per_second"} for line in lines]
        own = [{key: x for key, x in line.items() if key not in ("tokens_per_second", "head")} for line in logs if line.get("head") == name]
        assert own == alone and [line["step"] for line in own if "tau" in line] == [4, 8]


def test_the_backbone_reads_a_batch_once(tmp_path: Path) -> None:
    run, passes = prepare(load_recipe(make(tmp_path), ["train.steps=2", "data.eval_rows=0"])), []
    run.backbone.layers[0].register_forward_hook(lambda *of: passes.append(of))
    assert train(run) == 0 and len(passes) == 2 * 4  # steps, samples
    run.log.close()


def test_an_override_reaches_its_drafter(together: Path) -> None:
    recipe = load_recipe(together / "recipe.yaml", ["heads.wide.depth=5", "heads.wide.train.lr=0.5", "train.max_grad_norm=9"])
    wide, other = recipe.per_drafter()["wide"], recipe.per_drafter()["other-taps"]
    assert (wide.drafter, wide.train.lr, wide.train.max_grad_norm) == ({"kind": "medusa", "depth": 5}, 0.5, 9)
    assert other.train.max_grad_norm == 0.1
    assert wide.objective.terms == {"ce": 0.5, "tv": 0.5} and wide.save.dir.endswith("out/wide")
    assert list(load_recipe(together / "recipe.yaml", ["heads=[{kind: medusa}]"]).per_drafter()) == ["medusa"]


@pytest.mark.parametrize(("override", "message"), [
    ("drafter={kind: medusa}", "heads stand in place of drafter, not beside it; leave one out"),
    ("heads=[{kind: medusa}, {kind: medusa}]", "heads[1] is named 'medusa' like another"),
    ("heads=[medusa]", "heads[0] is a mapping with kind"),
    ("heads=[{depth: 3}]", "heads[0].name is text; got None"),
    ("heads=[{kind: medusa, name: ../x}]", "'../x' cannot name a folder in save.dir"),
    ("heads=[{kind: medusa, name: state}]", "'state' cannot name a folder in save.dir"),
    ("heads={x: {depth: 3}}", "missing key heads.x.kind"),
    ("heads.wide.layer=3", "unknown key heads.wide.layer; did you mean heads.wide.layers?"),
    ("heads.wide.depth=0", "heads.wide.depth is a whole number of at least 1 and at most 128; got 0"),
    ("heads=[]", "missing key drafter.kind"),
    ("heads.wide.train={steps: 3}", "heads.wide.train.steps is the same for all heads, which share the backbone's forward pass; set"),
    ("heads.wide.train={lrr: 3}", "heads.wide: unknown key train.lrr; did you mean train.lr?"),
    ("heads.wide.train={lr: 0}", "heads.wide: train.lr is a number above 0 or 'auto'; got 0"),
    ("heads.wide.objective=kl", "heads.wide.objective is a section with keys of its own; got 'kl'"),
])  # fmt: skip
def test_what_is_wrong_is_named(together: Path, override: str, message: str) -> None:
    assert message in refusal(load_recipe, together / "recipe.yaml", [override])


def test_another_set_of_drafters_is_refused_on_resume(together: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "train", together / "recipe.yaml", "heads=[{kind: medusa}]", "train.steps=9")
    assert "was trained by another recipe: heads.eagle3.depth (was 3, now None)" in error


# Runs with on-policy training: independent of how a step is split, resumable, and effective; impossible settings are refused.

KEY = StepKey(seed=3, step=5)
DRAFTER = {"kind": "eagle3", "depth": 3}
WANTED = {"on_policy": 0.5, "on_policy_share": 0.3}


def losses(out: Path) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in read_log(out) if "loss" in line]


@pytest.mark.slow
def test_a_step_does_not_depend_on_its_split(tmp_path: Path) -> None:
    recipe = str(make_recipe(tmp_path, objective=WANTED, drafter=DRAFTER, train={"steps": 4, "batch_size": 5}, eval={"prompts": 1}))
    assert main([recipe, f"save.dir={tmp_path}/whole"]) == 0
    pieces = ["train.micro_batch=1", "objective.chunk_size=7", "train.gradient_checkpointing=true"]
    assert main([recipe, f"save.dir={tmp_path}/pieces", *pieces]) == 0
    for name, environment in (("two", {}), ("sharded", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})):
        output = tmp_path / f"{name}.txt"
        assert Forked(2, [recipe, f"save.dir={tmp_path}/{name}"], output, **environment).wait() == 0, output.read_text()[-3000:]
    whole = losses(tmp_path / "whole")
    for name in ("pieces", "two", "sharded"):
        assert [x for line in losses(tmp_path / name) for x in line] == pytest.approx([x for line in whole for x in line], rel=1e-4)
    assert main([recipe, f"save.dir={tmp_path}/without", "objective.on_policy=0"]) == 0
    assert losses(tmp_path / "without")[0][0] < whole[0][0]


@pytest.mark.slow
def test_on_policy_training_improves_its_own_drafts(tmp_path: Path) -> None:
    """On-policy training brings the drafter's own drafts nearer to the backbone's distribution than training on the data alone."""
    distances = {}
    for weight in (0.0, 2.0):
        settings = {"on_policy": weight, "on_policy_share": 0.3}
        path = make_recipe(tmp_path, objective=settings, drafter=DRAFTER, train={"steps": 80, "schedule": "constant"}, eval={"prompts": 1})
        run = prepare(load_recipe(path, [f"save.dir={tmp_path}/{weight}"]))
        assert train(run) == 0
        run.log.close()
        source, objective = LiveWithCache(run.backbone, run.drafter.taps), Objective(on_policy=1.0, on_policy_share=1.0)
        rows = [[i] for i in range(len(run.feed.samples))]
        with torch.no_grad():
            features = source.read(collate(run.feed.samples, rows))
            distances[weight] = on_policy_loss(FusedLoss(objective, run.drafter), features, KEY).item()
    assert distances[2.0] < 0.98 * distances[0.0]


def test_a_head_learns_as_it_would_alone(tmp_path: Path) -> None:
    heads = "heads=[{kind: eagle3, depth: 3, objective: {on_policy: 0.5, on_policy_share: 0.3}}, {name: other, kind: eagle3, depth: 2, objective: {on_policy: 1}}, {kind: medusa, depth: 2}]"  # noqa: E501
    recipe = str(make_recipe(tmp_path, train={"steps": 3}, eval={"prompts": 1}))
    assert main([recipe, "drafter={}", heads, f"save.dir={tmp_path}/together"]) == 0
    assert main([recipe, "drafter={kind: eagle3, depth: 2}", "objective.on_policy=1", f"save.dir={tmp_path}/other"]) == 0
    assert main([recipe, "drafter={kind: medusa, depth: 2}", "cache.between_epochs=false", f"save.dir={tmp_path}/medusa"]) == 0
    for name, file in (("other", "model.safetensors"), ("medusa", "medusa_lm_head.safetensors")):
        assert (tmp_path / "together" / name / file).read_bytes() == (tmp_path / name / file).read_bytes()


def test_backbones_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(make_recipe(tmp_path, objective=WANTED, drafter=DRAFTER))
    on = Backbone(backbone("llama").model)
    drafter = random_drafter("eagle3", on)
    changes: list[tuple[str, Any, str]] = [("recurrent", object(), "has recurrent layers"), ("rope_limit", 32, "change after 32 positions")]
    for name, value, message in changes:
        with monkeypatch.context() as patch, pytest.raises(UserError, match=message) as caught:
            patch.setattr(on, name, value)
            require_on_policy(recipe, on, {"": drafter})
        assert str(caught.value).startswith("objective.on_policy=0.5: ")
