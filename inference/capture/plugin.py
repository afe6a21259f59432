"""The interface of a package that makes decoding faster on one kind of device, found by its entry point:

    [project.entry-points."headstart.capture"]
    cpu = "headstart_cpu.plugin:CPU"

Without it everything decodes, with heads as without. `region` marks parts of a function that such a package may compile by themselves.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture.backend import Backend, Function
from headstart.support.errors import UserError

Collect = Callable[[Path, Any], object]
"""Takes the programs of passes that are not compiled, by their files."""
GROUP = "headstart.capture"
logger = logging.getLogger(__name__)
LACKING = "the package headstart-cpu, with which a CPU decodes faster, is not installed; in a clone: pip install ./plugins/headstart-cpu"


class Compiled(Protocol):
    """A function by compiled code."""

    reason: str | None
    """Why it is not compiled, and will not be."""

    @property
    def active(self) -> bool:
        """True while compiled code is used."""

    def __call__(self, held: Any, *inputs: Any) -> tuple[Any] | None:
        """The function's result, alone in a tuple; None if the function itself is to be run."""

    def give_up(self, reason: str) -> None:
        """Run the function itself from now on."""


class Plugin(Protocol):
    """What the package brings."""

    trace: type[Backend]
    """The backend ``trace``."""

    def compiled(self, function: Function, of: Backbone | nn.Module | None, capture: str, collect: Collect | None) -> Compiled | None:
        """``function(held, *inputs)``, compiled; None where it is not. ``of``: the backbone that verifies, or the drafter that drafts.

        ``capture``: auto, or compile, by which what lacks is compiled at once. ``collect``: is given what lacks, to be compiled later.
        """

    def compile_model(self, heads: Any, say: Callable[[str], object], batch: int = 1) -> dict[str, Any]:
        """Compile what decoding with a `SpeculativeModel` runs, once for a machine.

        ``batch``: the most rows that are decoded together. ``say``: is given lines about the progress. Returns ``parts``, how many were
        compiled, ``seconds`` and the ``folder``. Raises UserError where the layers cannot be compiled.
        """

    def compile_lacking(self, heads: Any, batch: int = 1) -> None:
        """The same where compiled code is used by default, with lines on standard error, also about what cannot be compiled."""


@functools.cache
def plugin(device: str = "cpu") -> Plugin | None:
    """The package for this type of device; None if none is installed, or none that fits, with a line in the log."""
    for point in entry_points(group=GROUP, name=device):
        try:
            found: Plugin = point.load()
            return found
        except (ImportError, AttributeError) as error:
            logger.warning("the package %s is not used, which makes decoding slower: %s", point.dist and point.dist.name, error)
    return None


def required() -> Plugin:
    """The package for CPUs. Raises UserError if it is not installed."""
    found = plugin()
    if found is None:
        raise UserError(LACKING)
    return found


def compile_lacking(heads: Any, batch: int = 1) -> None:
    """See `Plugin.compile_lacking`; nothing without a package for the device."""
    found = plugin(heads.backbone.device.type)
    if found is not None:
        found.compile_lacking(heads, batch)


Mark = Callable[[], Callable[[], None]]
_mark: ContextVar[Mark | None] = ContextVar("marking regions", default=None)


@contextmanager
def region() -> Iterator[None]:
    """What is traced in this block is one region."""
    mark = _mark.get()
    leave: Any = None if mark is None else mark()
    yield
    if leave is not None:
        leave()


@contextmanager
def marking(mark: Mark) -> Iterator[None]:
    """Within this context `region` calls ``mark`` at its start, and what that returns at its end."""
    token = _mark.set(mark)
    try:
        yield
    finally:
        _mark.reset(token)
