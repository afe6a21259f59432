"""What this package brings to headstart: traces, compiled layers and drafts, and the products that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture.plugin import Collect, Function
from headstart_cpu.passes import compiled_pass
from headstart_cpu.trace import Trace

if TYPE_CHECKING:
    from headstart.inference.generate import SpeculativeModel
    from headstart_cpu.compiled_pass import CompiledPass


class _CPU:
    """See `headstart.inference.capture.plugin.Plugin`."""

    trace = Trace

    def compiled(self, function: Function, of: Backbone | nn.Module | None, capture: str, collect: Collect | None) -> CompiledPass | None:
        return compiled_pass(function, of, capture, collect)

    def compile_model(self, heads: SpeculativeModel, say: Callable[[str], object], batch: int = 1) -> dict[str, Any]:
        from headstart_cpu.compile_model import compile_model  # here and below, since few calls need it

        return compile_model(heads, say, batch)

    def compile_lacking(self, heads: SpeculativeModel, batch: int = 1) -> None:
        from headstart_cpu.compile_model import compile_lacking

        compile_lacking(heads, batch)


CPU = _CPU()
