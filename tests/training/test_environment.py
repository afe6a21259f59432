"""The recipe alone says how a run trains, whatever the environment says: a launcher's configuration, or the state of the process."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from small_run import make_recipe, read_log

from headstart.cli.train import main
from headstart.support.devices import not_compilable

CONFIGURATION = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "eager"}


@pytest.fixture
def recipe(tmp_path: Path, on_the_cpu: None) -> Path:
    return make_recipe(tmp_path, train={"steps": 3}, eval={"every": 0})


@contextmanager
def other_state() -> Iterator[None]:
    """Another default dtype, autocast, deterministic mode and other random states, as a program may have before it trains."""
    torch.manual_seed(99)
    random.seed(99)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def weights(recipe: Path, folder: Path, change: Callable[[], Any] = lambda: None) -> bytes:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    change()
    assert main([str(recipe), f"save.dir={folder}"]) == 0
    return next(folder.glob("*.safetensors")).read_bytes()


def test_a_configuration_of_accelerate_changes_nothing(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights(recipe, tmp_path / "one")
    assert weights(recipe, tmp_path / "two", lambda: [monkeypatch.setenv(*one) for one in CONFIGURATION.items()]) == plain


def test_the_state_of_the_process_changes_nothing(recipe: Path, tmp_path: Path) -> None:
    plain = weights(recipe, tmp_path / "one")
    with other_state():
        assert weights(recipe, tmp_path / "two") == plain
        assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism config"),
    ],
)
def test_other_launchers_are_refused_in_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, name: str
) -> None:
    monkeypatch.setenv(variable, "true")
    assert main([str(recipe), f"save.dir={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and name in said[0] and "FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)" in said[0]
    assert not (tmp_path / "out").exists()


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def losses(recipe: Path, out: Path, *changes: str) -> list[float]:
    assert main([str(recipe), f"save.dir={out}", *changes]) == 0
    return [line["loss"] for line in read_log(out) if "loss" in line]


@pytest.mark.slow
@pytest.mark.skipif(not_compilable(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_a_compiled_objective_gives_the_same_losses(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, train={"steps": 4}, eval={"every": 0, "prompts": 1, "max_new_tokens": 4})
    plain, compiled = (losses(recipe, tmp_path / str(on), f"train.compile={on}") for on in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4) and len(plain) == 4


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main([str(make_recipe(tmp_path)), f"save.dir={tmp_path}/out", "train.compile=true"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "train.compile=true: torch.compile needs a C++ compiler (no-such-compiler is missing)" in error
    assert error.endswith("or set train.compile=false")
    assert not list((tmp_path / "out").glob("*.safetensors"))
