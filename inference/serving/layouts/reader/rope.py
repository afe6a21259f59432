"""Rotary embeddings as configuration files state them: default, linear, llama3 and yarn (2309.00071).

Shape suffixes: T positions, H heads, C head width, R rotated width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.support.errors import UserError

LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0}
"""Fields that yarn may leave out."""
WANTED: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "llama3": ("factor", *LLAMA3), "yarn": ("factor", "original_max_position_embeddings"),
}  # fmt: skip
"""Kind of scaling -> the fields it must state."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the frequencies."""

    theta: float = 10000.0
    kind: str = "default"
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The scaling's own: ``factor``, and for llama3 and yarn those of `WANTED` and `YARN`."""
    share: float = 1.0
    """The share of a head that is rotated."""
    loudness: float = 1.0
    """Yarn's factor on cosines and sines."""

    def __str__(self) -> str:
        scaling = "".join(f", {name} {value:g}" for name, value in self.numbers.items())
        return f"theta {self.theta:g}" + ("" if self.kind == "default" else f", {self.kind}{scaling}")


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read a configuration's rotary embedding, under transformers 5's key or the older ones. Raises UserError for another kind."""
    stated = _stated(config)
    scaling = stated or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in WANTED:
        raise UserError(f"rope of type {kind!r} is not read by the reference engine, which reads {', '.join(WANTED)}; use --engine vllm")
    if lacking := [name for name in WANTED[kind] if name not in scaling]:
        raise UserError(f"rope of type {kind} lacks {lacking[0]} in config.json; copy the backbone's rope_parameters")
    theta = stated.get("rope_theta") or config.get("rope_theta") or 10000.0
    share = stated.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    numbers = {name: float(scaling[name]) for name in WANTED[kind]}
    if kind == "yarn":
        numbers |= {name: float(scaling.get(name, value)) for name, value in YARN.items()}
        return Rope(float(theta), kind, numbers, float(share), _loudness(scaling))
    return Rope(float(theta), kind, numbers, float(share))


def _loudness(scaling: Mapping[str, Any]) -> float:
    """Yarn's attention factor: stated, or from the factor, or as the ratio of DeepSeek's two scales."""
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    scale, everywhere = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(scale) / of(everywhere) if scale and everywhere else of(1.0)


def stated_thetas(config: Mapping[str, Any]) -> list[float]:
    """Return the rotary bases that a configuration states under the old and the new key; engines read either."""
    found = (_stated(config).get("rope_theta"), config.get("rope_theta"))
    return [float(theta) for theta in found if theta is not None]


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("rope_parameters") or {}
    return stated.get("full_attention") or {} if "full_attention" in stated else stated


def rotate(x_THC: Tensor, positions_T: Tensor, rope: Rope) -> Tensor:
    """Rotate the first R entries of each head; entry i is paired with entry i + R / 2."""
    width = int(x_THC.shape[-1] * rope.share)
    angles_TR = positions_T[:, None].float() * _frequencies(width, rope).repeat(2)
    part_THR, rest = x_THC[..., :width], x_THC[..., width:]
    low, high = part_THR.chunk(2, -1)
    turned = part_THR * angles_TR.cos()[:, None] + torch.cat([-high, low], -1) * angles_TR.sin()[:, None]
    return torch.cat([turned * rope.loudness, rest], -1)


def _frequencies(width: int, rope: Rope) -> Tensor:
    """Return ``[width / 2]`` radians per position."""
    plain = 1.0 / rope.theta ** (torch.arange(0, width, 2).float() / width)
    if rope.kind == "default":
        return plain
    scaled = plain / rope.numbers["factor"]
    if rope.kind == "linear":
        return scaled
    if rope.kind == "yarn":
        return _between(plain, scaled, rope, width)
    # llama3: long wavelengths are scaled, short ones not, those between interpolated.
    low, high, length = (rope.numbers[name] for name in LLAMA3)
    turns = length * plain / (2 * math.pi)
    mix = ((turns - low) / (high - low)).clamp(0, 1)
    return mix * plain + (1 - mix) * scaled


def _between(plain: Tensor, scaled: Tensor, rope: Rope, width: int) -> Tensor:
    """Yarn: entries that turn more than ``beta_fast`` times over the original length are not scaled, those below ``beta_slow`` are."""
    numbers = rope.numbers
    first, last = (
        width * math.log(numbers["original_max_position_embeddings"] / (2 * math.pi * numbers[name])) / (2 * math.log(rope.theta))
        for name in ("beta_fast", "beta_slow")
    )
    if numbers["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    mix = ((torch.arange(width // 2).float() - first) / max(last - first, 1e-3)).clamp(0, 1)
    return mix * scaled + (1 - mix) * plain
