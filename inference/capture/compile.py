"""Backend ``compile``: `torch.compile` with dynamic shapes and no graph breaks. Compiling takes from seconds to minutes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import sys
from collections.abc import Hashable
from typing import Any

import torch

from headstart.inference.capture.backend import Backend, Call, Capture, Function, sizes_of_one

RECOMPILE_LIMIT = 64
"""Compilations of one capture before it counts as not capturable; torch's default of 8 is meant for a whole program."""


class Compile(Backend):
    """Compiled graphs; torch's guards recompile them where a size was specialised."""

    name = "compile"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
            return f"torch {torch.__version__} cannot compile functions apart from each other (torch.compile's isolate_recompiles)"
        if not torch._dynamo.is_dynamo_supported():
            return f"torch {torch.__version__} does not compile on Python {sys.version_info.major}.{sys.version_info.minor}"
        if device.type == "cpu":
            compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
            return None if shutil.which(compiler) else f"torch.compile needs a C++ compiler ({compiler} is missing); install one or set CXX"
        return None if importlib.util.find_spec("triton") else "torch.compile needs Triton on this device; install triton"

    def variant(self, call: Call) -> Hashable:
        return sizes_of_one(call.shapes)

    def capture(self, function: Function, call: Call) -> Capture:
        limits: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}   # missing from the overloads' types
        return _Compiled(torch.compile(function, dynamic=True, fullgraph=True, **limits))


class _Compiled(Capture):
    def __init__(self, compiled: Function) -> None:
        super().__init__()
        self.compiled = compiled

    def __call__(self, call: Call) -> Any:
        return self.compiled(call.held, *call.inputs)
