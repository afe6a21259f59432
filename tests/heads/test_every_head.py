"""Every kind of head in one run: resumed, sharded, from a feature cache, packed and on-policy."""

import json
from pathlib import Path

import pytest
import torch
from every_head import every_head, following
from forked import Forked
from safetensors.torch import load_file
from small_run import make_recipe, read_log, train_once

from headstart.cli.main import main as headstart
from headstart.cli.train import main
from headstart.heads.methods import find_drafter, methods
from headstart.training.recipe.yaml_text import dump_yaml, read_yaml

HEADS = [{"kind": kind, **arguments} for kind, arguments in every_head(2)]
FILES = {kind: find_drafter(kind).file_name for kind in methods()}
STEPS = 4
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Another order of summation changes gradients by an ulp, and AdamW divides the smallest of them by as little."""


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of every kind of head, and its run in ``out``."""
    folder = tmp_path_factory.mktemp("together")
    train = {"steps": STEPS, "batch_size": 4, "micro_batch": 2, "schedule": "constant", "optimizer": "muon", "ema_decay": 0.5}
    path = make_recipe(folder, train=train, data={"eval_rows": 0}, objective={"chunk_size": 50})
    recipe = read_yaml(path)
    del recipe["drafter"]
    path.write_text(dump_yaml({**recipe, "heads": HEADS}))
    return train_once(path)


def losses(out: Path) -> dict[str, list[float]]:
    lines = [line for line in read_log(out) if "loss" in line]
    return {kind: [line["loss"] for line in lines if line["head"] == kind] for kind in FILES}


def require_close(actual: Path, expected: Path) -> None:
    for kind, file in FILES.items():
        assert losses(actual)[kind] == pytest.approx(losses(expected)[kind], rel=1e-4), kind
        one, other = (load_file(out / kind / file) for out in (actual, expected))
        for name, tensor in other.items():
            torch.testing.assert_close(one[name], tensor, **CLOSE, msg=lambda text, name=name, kind=kind: f"{kind} {name}: {text}")


def test_resumed_it_is_the_same_bit_for_bit(together: Path, tmp_path: Path) -> None:
    for steps in (STEPS // 2, STEPS):
        assert main([str(together / "recipe.yaml"), f"save.dir={tmp_path}", f"train.steps={steps}"]) == 0
    for kind, file in FILES.items():
        assert (tmp_path / kind / file).read_bytes() == (together / "out" / kind / file).read_bytes(), kind
    assert losses(tmp_path) == losses(together / "out")


@pytest.mark.slow
def test_two_processes_shard_them(together: Path, tmp_path: Path) -> None:
    """FSDP2: each head is a unit; they end as in one process, in whole checkpoints."""
    said, arguments = tmp_path / "said", [str(together / "recipe.yaml"), f"save.dir={tmp_path}/out", "train.micro_batch=null"]
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert Forked(2, arguments, said, **environment).wait() == 0, said.read_text()[-3000:]
    assert "2 processes on cpu, sharded (FSDP2)" in said.read_text()
    require_close(tmp_path / "out", together / "out")


def test_from_a_feature_cache(together: Path, tmp_path: Path) -> None:
    cached = [str(together / "recipe.yaml"), f"cache.dir={tmp_path}/cache", "cache.dtype=exact"]
    assert headstart(["cache", *cached]) == 0
    assert main([*cached, f"save.dir={tmp_path}/out"]) == 0
    require_close(tmp_path / "out", together / "out")


@pytest.mark.slow
def test_from_packed_rows(together: Path, tmp_path: Path) -> None:
    """In rows that hold several documents, in one micro-batch or in several, every head learns the same."""
    packed = [str(together / "recipe.yaml"), "data.packing=true", "data.max_length=96"]
    assert main([*packed, f"save.dir={tmp_path}/pieces", "train.micro_batch=1"]) == 0
    assert main([*packed, f"save.dir={tmp_path}/whole", "train.micro_batch=null"]) == 0
    require_close(tmp_path / "pieces", tmp_path / "whole")


@pytest.mark.slow
def test_on_their_own_drafts(together: Path, tmp_path: Path) -> None:
    """On-policy, resumed bit for bit, for every kind whose drafts depend on its own drafts."""
    heads = [{"kind": kind, **arguments} for kind, arguments in following(2)]
    given = [str(together / "recipe.yaml"), f"heads={json.dumps(heads)}", "objective.on_policy=0.5", "objective.on_policy_share=0.3"]
    for name, steps in (("parts", 1), ("parts", 2), ("whole", 2)):
        assert main([*given, f"save.dir={tmp_path}/{name}", f"train.steps={steps}"]) == 0
    for kind in (head["kind"] for head in heads):
        assert (tmp_path / "parts" / kind / FILES[kind]).read_bytes() == (tmp_path / "whole" / kind / FILES[kind]).read_bytes(), kind
        assert losses(tmp_path / "whole")[kind][0] > losses(together / "out")[kind][0]
