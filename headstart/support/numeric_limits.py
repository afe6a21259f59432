"""The largest values that make sense: a larger one is a slip, and would end in no answer, no memory or an overflow.

Recipes, command-line arguments and the Python interface are held to the same limits, and docs/errors.md lists them. What a backbone and
a machine can take may be less: `require_memory` in inference/engine/request.py, and the backbone's context.
"""

from __future__ import annotations

import os

MAX_SEED = (1 << 32) - 1
"""Seeds of recipes and of the command line, as in numpy; of the Python interface 63 bits."""
MAX_DEPTH = 128
"""Tokens drafted beyond the root; published heads draft up to 16."""
MAX_LAYERS = 256
"""Layers of a head."""
MAX_SIZE = 1 << 18
"""Width of a part of a layer."""
MAX_NODES = 4096
"""Nodes of a candidate tree. A tree's mask and logits grow with it; the best trees have less than 100."""
MAX_WIDTH = 1024
"""Nodes expanded per draft level."""
MAX_BATCH = 4096
"""Sequences decoded together."""
MAX_STEP_SEQUENCES = 1 << 20
"""Sequences of a training step."""
MAX_MEMORY_GB = 1_000_000
"""Memory of a device that a plan is made for."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Of a temperature other than 0: outside, scores overflow in half precision or all tokens are alike."""
TEMPERATURES = f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
THREADS_PER_PROCESSOR = 4
"""More threads than this for each processor only take each other's time."""


def max_threads() -> int:
    """The largest number of threads on this machine."""
    return THREADS_PER_PROCESSOR * (os.cpu_count() or 1)


def is_temperature(value: float) -> bool:
    """Return True for 0 (greedy) and for a temperature in the range."""
    return value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE
