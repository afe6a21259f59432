"""Prints the machine and the versions that a measurement belongs to, as JSON.

    python benchmarks/environment.py [--json FILE]
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from program import options, run

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "datasets", "safetensors")


def environment() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if not torch.cuda.is_available():
        return found | {"gpu": None, "note": "no CUDA device: tiny shapes on the CPU, whose figures say nothing of a GPU"}
    properties = torch.cuda.get_device_properties(0)
    return found | {"gpu": properties.name, "gpu_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}


if __name__ == "__main__":
    run(options(__doc__), lambda given: environment())
