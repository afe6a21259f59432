"""Tests use no network and one thread each (several times faster than two on a busy two-core machine)."""

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = f"{tempfile.gettempdir()}/headstart-tests-{os.getuid()}"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("HF_HOME", str(CACHE / "huggingface"))  # what is there stays in use
os.environ.update(
    XDG_CACHE_HOME=FOLDER,  # tests leave the user's cache folder alone
    HF_MODULES_CACHE=f"{FOLDER}/modules-{os.environ.get('PYTEST_XDIST_WORKER', '')}",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_DATASETS_CACHE=f"{FOLDER}/datasets",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    OMP_NUM_THREADS="1",  # for the processes that tests start
    HEADSTART_COMPILE="0",  # but for those of headstart-cpu, no test uses compiled layers
)


import pytest  # noqa: E402
import torch  # noqa: E402  (the libraries read these when imported)
from matrix import mark_slow_cells  # noqa: E402
from recorded import graphs  # noqa: E402, F401  (a fixture)

from headstart.inference.capture import capture  # noqa: E402
from headstart.training.features import server  # noqa: E402
from headstart.training.regenerate import endpoint  # noqa: E402

CALLS = capture.PATIENCE
torch.set_num_threads(1)
capture.PATIENCE = 1 << 40  # a trace costs as much as 30 passes: tests of traces ask for them by name, or for the fixture `tracing`
server.FIRST_WAIT = endpoint.FIRST_WAIT = 0.01  # seconds before a request is sent again
server.GRACE = 0.05


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_cells(items)


@pytest.fixture
def tracing() -> Iterator[None]:
    """Decoding by ``auto`` begins to trace as it does for users."""
    capture.PATIENCE, never = CALLS, capture.PATIENCE
    yield
    capture.PATIENCE = never


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process are on the CPU and start without the state of earlier ones."""
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | io.StringIO], None]:
    """Gives commands a text on standard input."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text) if isinstance(text, str) else text)
