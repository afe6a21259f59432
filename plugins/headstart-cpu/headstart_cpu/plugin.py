"""What this package brings to headstart: traces, compiled layers and drafts, and the products that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headstart_cpu.passes import compiled_pass
from headstart_cpu.trace import Trace

if TYPE_CHECKING:
    from headstart.inference.generate import SpeculativeModel


class _CPU:
    """See `headstart.inference.capture.plugin.Plugin`."""

    trace = Trace
    compiled = staticmethod(compiled_pass)

    def compile_model(self, heads: SpeculativeModel, say: Callable[[str], object], batch: int = 1) -> dict[str, Any]:
        from headstart_cpu.compile_model import compile_model  # here and below, since few calls need it

        return compile_model(heads, say, batch)

    def compile_lacking(self, heads: SpeculativeModel, batch: int = 1) -> None:
        from headstart_cpu.compile_model import compile_lacking

        compile_lacking(heads, batch)


CPU = _CPU()
