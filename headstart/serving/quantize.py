"""Heads of 4 bits: stored in bf16 as ever, with 16 different numbers for every 32 inputs of an output.

headstart-cpu keeps such layers as codes, in three eighths of the memory, and other engines load the heads as any. Inputs are rounded one
after the other, and those that follow make up for the error, by how the heads' inputs on some prompts go together (GPTQ, 2210.17323).

Shape suffixes: O outputs, I inputs, G inputs of a group.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.serving.layouts.files import require_new
from headstart.serving.reading import Wishes, measure, prompts_for
from headstart.support.errors import UserError
from headstart.support.files import atomic
from headstart.support.terminal import watched

GROUP, MOST = 32, 15
"""Inputs that share a scale and an offset, and the largest code."""
NARROWER = tuple(1 - 0.025 * step for step in range(13))
"""Shares of a group's range that are tried: of a narrower one the steps are smaller."""
DAMPING = 0.01


def quantize(path: str, out: Path, load: Callable[[], Backbone], wishes: Wishes) -> dict[str, Any]:
    """Write the heads at ``path`` with layers of 4 bits to ``out``, a new folder, and return a report: what they drafted before and after.

    ``load`` loads their backbone. Raises UserError, and writes nothing, for another backbone, or for heads without layers whose inputs are
    a multiple of 32.
    """
    require_new(out)
    card, backbone = read_metadata(path)[1], load()
    drafter = load_drafter(path, backbone).to(torch.bfloat16).to(backbone.dtype)
    layers = _layers(drafter)
    if not layers:
        raise UserError(
            f"{path}: none of its layers has inputs that are a multiple of {GROUP}, which share a scale; leave the heads as they are"
        )
    prompts, measured_on = prompts_for(backbone, wishes)
    with _moments(layers) as moments:
        before = measure(drafter, prompts, wishes.new_tokens)
    for name, layer in watched(layers.items(), "rounding", "layer"):
        if name in moments:
            layer.weight.data.copy_(rounded(layer.weight.detach().float(), moments[name]))
    after = measure(drafter, prompts, wishes.new_tokens)
    report = {"layers": sorted(moments), "measured_on": measured_on, "before": before, "after": after}
    extra = {**card["provenance"], "quantized": report}
    if tokenizer := card["contract"].get("tokenizer"):
        extra["tokenizer"] = tokenizer
    with atomic(out, folder=True) as folder:
        drafter.to(torch.bfloat16).save_pretrained(folder, extra)
    return report


def _layers(drafter: Drafter) -> dict[str, nn.Linear]:
    """The heads' own linear layers, by their names, that can be rounded."""
    shared = {weight.data_ptr() for weight in drafter.backbone.model.parameters()}
    found = {name: layer for name, layer in drafter.named_modules() if isinstance(layer, nn.Linear)}
    return {name: one for name, one in found.items() if one.in_features % GROUP == 0 and one.weight.data_ptr() not in shared}


@contextmanager
def _moments(layers: Mapping[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """Within this context the products ``[I, I]`` of the inputs that each layer gets are added up, in fp32."""
    names, found = {layer: name for name, layer in layers.items()}, dict[str, Tensor]()

    def add(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(layer, nn.Linear) and (name := names.get(layer)) is not None:
            x_XI = args[0].detach().reshape(-1, layer.in_features).float()
            found[name] = found.get(name, 0) + x_XI.T @ x_XI

    handle = register_module_forward_pre_hook(add)
    try:
        yield found
    finally:
        handle.remove()


def rounded(weight_OI: Tensor, moments_II: Tensor) -> Tensor:
    """Return the weight, in fp32, with numbers of 4 bits: scale * code + offset of each group, rounded to bf16."""
    moments_II = moments_II.double()
    mean = moments_II.diagonal().mean().clamp(min=1e-30)
    moments_II.diagonal().add_(DAMPING * mean)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(moments_II))
    follow_II, sizes_I = torch.linalg.cholesky(inverse_II, upper=True).float(), moments_II.diagonal().float()
    left_OI, found_OI = weight_OI.clone(), torch.empty_like(weight_OI)
    for first in range(0, weight_OI.shape[1], GROUP):
        end = first + GROUP
        scale_O1, offset_O1 = _grid(left_OI[:, first:end], sizes_I[first:end])
        errors_OG = torch.empty_like(left_OI[:, first:end])
        for i in range(first, end):
            found_OI[:, i : i + 1] = _on_grid(left_OI[:, i : i + 1], scale_O1, offset_O1)
            error_O1 = (left_OI[:, i : i + 1] - found_OI[:, i : i + 1]) / follow_II[i, i]
            left_OI[:, i:end] -= error_O1 * follow_II[i, i:end]
            errors_OG[:, i - first : i - first + 1] = error_O1
        left_OI[:, end:] -= errors_OG @ follow_II[first:end, end:]
    return found_OI


def _grid(weight_OG: Tensor, sizes_G: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and offset ``[O, 1]`` of a group that change the outputs least; both are numbers of fp16, as in GGUF's Q4_1."""
    low_O1, high_O1 = weight_OG.amin(1, keepdim=True), weight_OG.amax(1, keepdim=True)
    best: list[Tensor] = []
    for share in NARROWER:
        half_O1 = (high_O1 - low_O1) / 2 * share
        scale_O1, offset_O1 = (2 * half_O1 / MOST).half().float(), ((low_O1 + high_O1) / 2 - half_O1).half().float()
        error_O1 = ((_on_grid(weight_OG, scale_O1, offset_O1) - weight_OG).square() * sizes_G).sum(1, keepdim=True)
        new = [error_O1, scale_O1, offset_O1]
        best = new if not best else [torch.where(error_O1 < best[0], one, other) for one, other in zip(new, best, strict=True)]
    return best[1], best[2]


def _on_grid(weight: Tensor, scale_O1: Tensor, offset_O1: Tensor) -> Tensor:
    codes = ((weight - offset_O1) / scale_O1.clamp(min=1e-12)).round().clamp(0, MOST)
    return (codes * scale_O1 + offset_O1).bfloat16().float()
