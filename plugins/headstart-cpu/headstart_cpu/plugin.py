"""What this package brings to headstart: traces, compiled layers and drafts, and the products that they are made of."""

from headstart_cpu.compile_model import compile_lacking, compile_model
from headstart_cpu.passes import compiled_pass
from headstart_cpu.trace import Trace


class _CPU:
    """See `headstart.inference.capture.plugin.Plugin`."""

    trace = Trace
    compiled = staticmethod(compiled_pass)
    compile_lacking = staticmethod(compile_lacking)
    compile_model = staticmethod(compile_model)


CPU = _CPU()
