"""Temporary changes to a model during a forward pass: collect or nudge layer outputs, and recompute layers in the backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headstart.heads.backbone.recompute import contexts


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """Collect the residual stream after each of the ``taps`` layers (0: the embedding) while the model runs in this thread."""
    kept: dict[int, Tensor] = {}
    thread = threading.get_ident()

    def after(tap: int) -> Callable[[nn.Module, tuple, Any], None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if threading.get_ident() == thread:
                kept[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == thread:
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
def nudged(layers: nn.ModuleList, seed: int = 0) -> Iterator[None]:
    """Move every value that a layer returns by a unit in the last place, up, down or not at all, while the model runs in this thread.

    What that changes is what rounding otherwise in every layer may change.
    """
    drawn: dict[torch.device, torch.Generator] = {}
    thread = threading.get_ident()

    def move(module: nn.Module, args: tuple, output: Any) -> Any:
        if threading.get_ident() != thread:
            return output
        hidden = output[0] if isinstance(output, tuple) else output
        generator = drawn.setdefault(hidden.device, torch.Generator(hidden.device).manual_seed(seed))
        signs = torch.randint(-1, 2, hidden.shape, generator=generator, device=hidden.device)
        moved = hidden + hidden.abs() * torch.finfo(hidden.dtype).eps * signs
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    handles = [layer.register_forward_hook(move) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recomputed(layers: nn.ModuleList, mode: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Keep only the layers' inputs for the backward, which computes their activations again, in the context ``mode()``.

    transformers' own gradient checkpointing needs the model in training mode, whose dropout a backbone must not have.
    """
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=partial(contexts, mode))
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own
