"""The example `accelerate` configurations: accelerate reads them, each documents its command, and the documentation names them."""

import os
import random
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.launch import prepare_multi_gpu_env
from errors import error_of
from small_run import losses, make_recipe

from headstart.cli.train import main
from headstart.support.devices import not_compilable
from headstart.training.run.processes import fsdp_plugin

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PROCESSES = {"one_gpu": (1, 1), "eight_gpus": (8, 1), "fsdp2": (8, 1), "two_machines": (16, 2)}


def test_those_promised_are_there_and_named() -> None:
    assert {path.stem for path in CONFIGS} == set(PROCESSES)
    page = (ROOT / "docs" / "recipe.md").read_text()
    assert [path.name for path in CONFIGS if f"recipes/accelerate/{path.name}" not in page] == []
    assert "recipes/accelerate/" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_it_and_its_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config_from_file(str(path))
    assert (config.num_processes, config.num_machines) == PROCESSES[path.stem] and not config.use_cpu and config.mixed_precision == "no"
    commands = re.findall(r"^#   accelerate launch (.*)$", path.read_text(), re.M)
    assert len(commands) == config.num_machines
    monkeypatch.chdir(ROOT)
    for rank, command in enumerate(commands):
        args, *_ = _validate_launch_command(launch_command_parser().parse_args(shlex.split(command)))
        assert args.training_script == "train_heads.py" and Path(args.training_script_args[0]).exists()
        assert args.use_fsdp == (path.stem == "fsdp2") and args.num_processes == config.num_processes
        assert args.machine_rank == rank


def test_the_sharded_one_asks_for_what_training_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["--config_file", str(ROOT / "recipes" / "accelerate" / "fsdp2.yaml"), "train_heads.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(name, value)
    plugin = fsdp_plugin()
    assert plugin is not None and plugin.fsdp_version == 2 and plugin.reshard_after_forward and plugin.auto_wrap_policy is None


def test_the_slurm_script_starts_one_launcher_per_node_with_what_slurm_gives(tmp_path: Path) -> None:
    """Slurm's commands and the launcher are stand-ins that print what they are given; the second of two nodes is played."""
    script = ROOT / "recipes" / "accelerate" / "slurm.sbatch"
    stand_ins = {
        "srun": '#!/bin/bash\nshift\nSLURM_NODEID=1 exec "$@"\n', "scontrol": "#!/bin/bash\nprintf 'node7\\nnode8\\n'\n",
        "accelerate": '#!/bin/bash\nprintf "%s\\n" "$@"\n',
    }  # fmt: skip
    for name, text in stand_ins.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VENV": str(tmp_path)}
    recipe = "recipes/llama-3.1-8b-instruct/eagle3.yaml"
    command = ["bash", str(script), recipe, "log.name=two words"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[0] == "launch" and words[-3:] == ["train_heads.py", recipe, "log.name=two words"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words[1:]))
    assert (args.num_machines, args.num_processes, args.machine_rank, args.main_process_ip) == (2, 8, 1, "node7")
    assert args.main_process_port == 20041 and not args.use_fsdp
    refused = subprocess.run(["bash", script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and refused.stderr.startswith("error: give a recipe")


# The recipe alone says how a run trains, whatever the environment says: a launcher's configuration, or the state of the process.

CONFIGURATION = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "eager"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
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


@pytest.mark.parametrize(("variable", "name"), [
    ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism config"),
])  # fmt: skip
def test_other_launchers_are_refused_in_one_line(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, name: str
) -> None:
    monkeypatch.setenv(variable, "true")
    assert main([str(recipe), f"save.dir={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and name in said[0] and "FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)" in said[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not_compilable(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_a_compiled_objective_gives_the_same_losses(tmp_path: Path) -> None:
    recipe = str(make_recipe(tmp_path, train={"steps": 4}, eval={"every": 0, "prompts": 1, "max_new_tokens": 4}))
    for on in ("false", "true"):
        assert main([recipe, f"save.dir={tmp_path}/{on}", f"train.compile={on}"]) == 0
    plain, compiled = losses(tmp_path / "false"), losses(tmp_path / "true")
    assert compiled == pytest.approx(plain, rel=1e-4) and len(plain) == 4


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    error = error_of(capsys, "train", make_recipe(tmp_path), f"save.dir={tmp_path}/out", "train.compile=true")
    assert "train.compile=true: torch.compile needs a C++ compiler (no-such-compiler is missing)" in error
    assert error.endswith("or set train.compile=false")
    assert not list((tmp_path / "out").glob("*.safetensors"))
