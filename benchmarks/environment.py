"""Prints the machine and the versions that a measurement belongs to, as JSON.

python benchmarks/environment.py [--note TEXT] [--json FILE]
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from program import options, run

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "datasets", "safetensors", "gguf")


def environment(note: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"measured": note, "python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
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
    parser = options(__doc__)
    parser.add_argument("--note", metavar="TEXT", help="what is measured, written down beside")
    run(parser, lambda given: environment(given.note))
