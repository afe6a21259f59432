"""What is done to a model's code while it runs, and undone after it: some layers tapped, shared keys left as they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

GROUPED = "TRANSFORMERS_SDPA_FORCE_GQA"
"""transformers' own switch: its SDPA attention hands grouped queries on to torch."""


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Keeps the residual stream after each of ``taps`` layers while the model runs, and nothing else."""
    kept: dict[int, Tensor] = {}

    def after(tap: int) -> Callable[[nn.Module, tuple, Any], None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            kept[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        kept[0] = args[0] if args else kwargs["hidden_states"]

    handles = [
        layers[tap - 1].register_forward_hook(after(tap)) if tap else layers[0].register_forward_pre_hook(before, with_kwargs=True)
        for tap in taps
    ]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def grouped(on: bool) -> Iterator[None]:
    """Lets transformers' SDPA attention keep the keys that heads share as they are, where it would repeat them because of the mask.

    A CPU takes them so, a tree of four nodes a tenth faster; elsewhere that may lead to a slow kernel.
    """
    before = os.environ.get(GROUPED)
    if on and before is None:
        os.environ[GROUPED] = "1"
    try:
        yield
    finally:
        if on and before is None:
            del os.environ[GROUPED]
