"""A complete training run in miniature: a random backbone and a byte-level tokenizer on disk, text, and a recipe; runs in this process, in
one of their own, or in several forked from this one; and a file system that fails."""

import builtins
import errno
import faulthandler
import io
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.heads import card
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import MemoryPlan
from headstart.training.recipe.recipe import load_recipe
from headstart.training.recipe.yaml_text import dump_yaml
from headstart.training.run import checkpoint as run_checkpoint
from headstart.training.setup import Run, prepare

ROOT = Path(__file__).parents[2]
WORDS = "the a cat dog sun moon sees likes finds and so it is red blue old new".split()


def make_backbone(folder: Path, layers: int = 2) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=16,
        intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, initializer_range=0.3,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def rows_of_text(folder: Path) -> Path:
    """Write ``folder/text.jsonl``: 40 short texts."""
    rng = random.Random(0)
    lines = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))} for _ in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "text.jsonl"


def make_recipe(folder: Path, layers: int = 2, heads: list[dict[str, Any]] | None = None, **sections: dict[str, Any]) -> Path:
    """Write backbone, data and ``recipe.yaml`` into ``folder``; the run goes to ``folder/out``. ``heads``: in place of one drafter."""
    make_backbone(folder / "backbone", layers)
    text = rows_of_text(folder)
    recipe: dict[str, Any] = {
        "backbone": {"path": str(folder / "backbone")}, "drafter": {"kind": "medusa", "depth": 2},
        "data": {"train": str(text), "eval_rows": 4, "max_length": 64}, "objective": {"chunk_size": 50},
        "train": {"steps": 12, "batch_size": 4, "lr": 3e-3}, "eval": {"prompts": 2, "max_new_tokens": 8},
        "save": {"dir": str(folder / "out")}, "log": {"every": 1}, "seed": 7,
    }  # fmt: skip
    if heads is not None:
        del recipe["drafter"]
        recipe["heads"] = heads
    for name, section in sections.items():
        recipe[name] = {**recipe[name], **section}
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml(recipe))
    return path


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The log without timings and without the recipe, which names the folder."""
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in read_log(folder) if "recipe" not in line]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder) if "loss" in line]


def prepared(recipe: Path, *changes: str) -> Run:
    """The run of a recipe as training would begin it or go on with it; nothing is logged."""
    run = prepare(load_recipe(recipe, changes))
    run.log.close()
    return run


def memory_plan(recipe: Path, *changes: str, accelerator: bool = False) -> MemoryPlan:
    read = load_recipe(recipe, changes)
    return MemoryPlan(read, make_fake_models(read, accelerator), accelerator, False)


def train_once(recipe: Path, *changes: str) -> Path:
    """Train on the CPU, without the state of earlier runs; returns the folder of the recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(True)
        assert main(["train", str(recipe), *changes]) == 0
    return recipe.parent


# Training processes forked from this one: libraries are already imported, so starting several takes no time.

SECONDS, GRACE = 100, 10  # how long a run may take, and how long the others may once one has failed


class Forked:
    """``count`` processes of one group, each running the command with these arguments; their output goes to ``log``."""

    def __init__(self, count: int, arguments: list[str], log: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
        ranked = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} if count > 1 else {}
        self.running: list[int] = []
        self.log = log
        for rank in range(count):
            pid = os.fork()
            if not pid:
                _become(arguments, log, {**shared, **ranked, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {})})
            self.running.append(pid)

    def wait(self, grace: float = GRACE) -> int:
        """The first non-zero exit status (minus the signal); kills those that do not end after a failure or in time."""
        end, worst = time.monotonic() + SECONDS, 0
        while self.running and time.monotonic() < end:
            for pid in list(self.running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.running.remove(pid)
                if ended and status and not worst:
                    worst, end = os.waitstatus_to_exitcode(status), min(end, time.monotonic() + grace)
            time.sleep(0.01)
        if self.running:
            why = f"another one failed with {worst}" if worst else f"it took more than {SECONDS} s"
            self.kill()
            raise AssertionError(f"killed, since {why}:\n{self.log.read_text()[-10_000:]}")
        return worst

    def kill(self) -> bool:
        """Kill all of them with SIGKILL, as a power cut would; True if any was still running."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.running]
        self.running = []
        return -signal.SIGKILL in ends


def _become(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run the command in the forked process; never returns to the test."""
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
        os.environ.update(environment)
        faulthandler.dump_traceback_later(SECONDS - 5, file=sys.stderr)  # where a run hangs is in its log when it is killed
        AcceleratorState._reset_state(True)
        tqdm.set_lock(threading.RLock())  # the inherited one is shared: a process that is killed while it holds it would stop all others
        status = train(arguments)
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# A file system that fails: the n-th operation on files below a folder raises, or ends the process as a kill would.

PATHS = ("replace", "rename", "mkdir", "rmdir", "unlink")
"""Functions of `os` that take a path; `pathlib` and `shutil` call them."""


class Faulty:
    """Counts the operations and calls ``fail`` at number ``at`` (from 1), and at all later ones too if ``for_good``."""

    def __init__(self, folder: Path, at: int, fail: Callable[[], None], for_good: bool) -> None:
        self.folder, self.at, self.fail, self.for_good = str(folder), at, fail, for_good
        self.count = 0
        self.seen: list[str] = []

    def note(self, name: str) -> None:
        self.count += 1
        self.seen.append(name)
        if self.count == self.at or (self.for_good and self.count > self.at):
            self.fail()

    def concerns(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self.folder)

    def of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self.concerns(path):
                self.note(f"{name} {Path(path).name}")
            return real(path, *args, **options)

        return call

    def fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(handle: int) -> None:
            self.note("fsync")
            real(handle)

        return call

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = real(path, mode, *args, **options)
            if self.concerns(path) and set(mode) & set("wax+"):
                self.note(f"open {Path(path).name}")
                write = file.write

                def writing(content: Any) -> Any:
                    self.note(f"write {Path(path).name}")
                    return write(content)

                file.write = writing
            return file

        return call

    def saved(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The safetensors library writes outside of Python; a fault leaves half of the file."""

        def call(tensors: Any, path: Path, *args: Any, **options: Any) -> Any:
            real(tensors, path, *args, **options)
            content = Path(path).read_bytes()
            os.truncate(path, len(content) // 2)
            self.note(f"save_file {Path(path).name}")
            with open(path, "r+b") as file:
                os.write(file.fileno(), content)
            return None

        return call


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def broken_disk() -> None:
    raise OSError(errno.EIO, "Input/output error")


def killed() -> None:
    os._exit(9)


@contextmanager
def faults(folder: Path, at: int, fail: Callable[[], None] = broken_disk, for_good: bool = False) -> Iterator[Faulty]:
    """In the block, the ``at``-th operation below ``folder`` fails (0: none; they are only counted)."""
    faulty = Faulty(folder, at, fail, for_good)
    with pytest.MonkeyPatch.context() as patch:
        for name in PATHS:
            patch.setattr(os, name, faulty.of_path(name, getattr(os, name)))
        patch.setattr(os, "fsync", faulty.fsync(os.fsync))
        opened = faulty.opened(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        for module in (card, run_checkpoint):
            patch.setattr(module, "save_file", faulty.saved(module.save_file))
        yield faulty
