"""Runs with on-policy training: independent of how a step is split, resumable, and effective; impossible settings are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import backbone, random_drafter
from forked import Forked
from small_run import make_recipe, read_log

from headstart.cli.train import main
from headstart.heads.backbone.backbone import Backbone
from headstart.support.errors import UserError
from headstart.training.data.batches import collate
from headstart.training.features.source import LiveWithCache, require_on_policy
from headstart.training.loop import train
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import StepKey
from headstart.training.objective.objective import on_policy_loss
from headstart.training.recipe.recipe import Objective, load_recipe
from headstart.training.setup import prepare

KEY = StepKey(seed=3, step=5)
DRAFTER = {"kind": "eagle3", "depth": 3}
WANTED = {"on_policy": 0.5, "on_policy_share": 0.3}


def losses(out: Path) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in read_log(out) if "loss" in line]


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
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
@pytest.mark.usefixtures("on_the_cpu")
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


@pytest.mark.usefixtures("on_the_cpu")
def test_a_head_learns_as_it_would_alone(tmp_path: Path) -> None:
    heads = "heads=[{kind: eagle3, depth: 3, objective: {on_policy: 0.5, on_policy_share: 0.3}}, {name: other, kind: eagle3, depth: 2, objective: {on_policy: 1}}, {kind: medusa, depth: 2}]"  # noqa: E501
    recipe = str(make_recipe(tmp_path, train={"steps": 3}, eval={"prompts": 1}))
    assert main([recipe, "drafter={}", heads, f"save.dir={tmp_path}/together"]) == 0
    assert main([recipe, "drafter={kind: eagle3, depth: 2}", "objective.on_policy=1", f"save.dir={tmp_path}/other"]) == 0
    assert main([recipe, "drafter={kind: medusa, depth: 2}", "cache.between_epochs=false", f"save.dir={tmp_path}/medusa"]) == 0
    for name, file in (("other", "model.safetensors"), ("medusa", "medusa_lm_head.safetensors")):
        assert (tmp_path / "together" / name / file).read_bytes() == (tmp_path / name / file).read_bytes()


# Refusals.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.on_policy=-1"], "objective.on_policy is a number of at least 0; got -1"),
        (["objective.on_policy=.nan"], "objective.on_policy is a number of at least 0; got nan"),
        (["objective.on_policy_share=0"], "objective.on_policy_share is a number above 0 and at most 1; got 0"),
        (["objective.on_policy_share=1.5"], "objective.on_policy_share is a number above 0 and at most 1; got 1.5"),
        (["objective.on_policy_temperature=-1"], "objective.on_policy_temperature is a number of at least 0 and at most 100; got -1"),
        (["objective.on_policy=1", "cache.dir=x"], "objective.on_policy needs the backbone, which does not run with cache.dir='x'"),
        (["drafter={}", "heads=[{kind: eagle3, objective: {on_policy: 1}}]", "cache.dir=x"], "heads.eagle3: objective.on_policy needs the"),
    ],
)
def test_recipes_that_cannot_be(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(make_recipe(tmp_path), overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"kind": "medusa"}, "objective.on_policy=0.5: what medusa drafts does not depend on its own proposals, so it learns nothing"),
        ({"kind": "eagle3", "depth": 1}, "=0.5 needs a drafter that goes on from its proposals; eagle3 has drafter.depth=1: raise it"),
    ],
)
def test_drafters_that_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: dict[str, Any], message: str) -> None:
    path = make_recipe(tmp_path, objective=WANTED)
    assert main([str(path), f"drafter={drafter}".replace("'", "")]) == 2
    output = capsys.readouterr().err
    assert message in output and "Traceback" not in output and not (tmp_path / "out").exists()


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
