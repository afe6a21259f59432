"""On a CPU the backbone reads each sample once: later epochs, and runs that are resumed, find its features on disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from forked import Forked
from safetensors.torch import load_file
from small_run import make_recipe, read_log
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaModel

from headstart.cli.train import main
from headstart.training.features.cached import FeaturesBetweenEpochs, keep_between_epochs
from headstart.training.features.source import LiveFeatures
from headstart.training.recipe.recipe import load_recipe

pytestmark = pytest.mark.usefixtures("on_the_cpu")
EPOCHS = ["train.steps=null", "train.epochs=3"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    drafter = {"kind": "eagle3", "depth": 2, "draft_vocab_size": 40}
    return str(make_recipe(tmp_path, drafter=drafter, data={"eval_rows": 0}, save={"every": 4}))


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """The rows of each forward pass of the backbone."""
    rows = list[int]()

    def count(module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(module, LlamaModel):
            rows.append(len(output[0]))

    handle = register_module_forward_hook(count, with_kwargs=True)
    yield rows
    handle.remove()


def test_the_backbone_reads_each_sample_once(recipe: str, tmp_path: Path, passes: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    read, losses = {}, {}
    for name, extra in {"kept": [], "live": ["cache.between_epochs=false"]}.items():
        passes.clear()
        assert main([recipe, *EPOCHS, f"save.dir={tmp_path / name}", *extra]) == 0
        read[name], losses[name] = sum(passes), [line["loss"] for line in read_log(tmp_path / name) if "loss" in line]
        assert ("of the first epoch are kept for the next ones" in capsys.readouterr().err) == (name != "live")
        assert not list((tmp_path / name).rglob("features"))
    assert len(losses["live"]) == 30 and read["kept"] == read["live"] - 2 * 40
    assert losses["kept"] == pytest.approx(losses["live"], rel=1e-4)


def test_a_resumed_run_reads_what_was_kept(recipe: str, tmp_path: Path, passes: list[int]) -> None:
    """Ended by a signal in the second epoch, which is at step 11 of 30."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([recipe, *EPOCHS, f"save.dir={whole}", "drafter.kind=tests.helpers.dying"]) == 0
    stop = {"HEADSTART_TEST_SIGNAL": str(int(signal.SIGTERM)), "HEADSTART_TEST_FORWARD": "15"}
    command = [recipe, *EPOCHS, f"save.dir={parts}", "drafter.kind=tests.helpers.dying"]
    assert Forked(1, command, tmp_path / "said", **stop).wait() == 128 + signal.SIGTERM
    kept = list((parts / "state" / "features").rglob("*.safetensors"))
    assert len(kept) == 40
    kept[3].write_bytes(kept[3].read_bytes()[:-9])  # damaged: read anew
    passes.clear()
    assert main(command) == 0
    assert sum(passes) < 10 and not (parts / "state" / "features").exists()  # the start values' and evaluation's
    ours, others = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    (parts / "state" / "features" / "of a run that was killed at its end").mkdir(parents=True)
    assert main(command) == 0 and not (parts / "state" / "features").exists()


def test_features_that_do_not_fit_on_the_disk_are_computed_again(recipe: str) -> None:
    source = LiveFeatures(families.backbone("llama"), (1,))
    feed = SimpleNamespace(steps=20, rows=40, samples=[SimpleNamespace(tokens=range(10**13))])
    found, line = keep_between_epochs(load_recipe(recipe), source, [], feed, 1)  # type: ignore[arg-type]
    assert isinstance(found, FeaturesBetweenEpochs) and not found.store
    assert line is not None and line.startswith("computed in each epoch: to keep them takes ")
    assert keep_between_epochs(load_recipe(recipe), source, [], feed, 2) == (source, None)  # type: ignore[arg-type]
