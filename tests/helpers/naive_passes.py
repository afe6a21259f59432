"""The training passes of EAGLE's heads in plain torch, one position at a time, from the tensors that a checkpoint holds.

Shape suffixes: T positions, D width, H heads, C head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig


@dataclass(frozen=True)
class NaiveLayer:
    """A decoder layer by its weights (Llama's names), and what it reads of a pair: attention's input and the residual."""

    config: LlamaConfig
    weights: Mapping[str, Tensor]
    reads: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def normed(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def heads(self, x_D: Tensor, name: str, position: int | None = None) -> Tensor:
        x_HC = (self.weights[f"self_attn.{name}_proj.weight"] @ x_D).view(-1, self.config.head_dim)
        if (bias := self.weights.get(f"self_attn.{name}_proj.bias")) is not None:
            x_HC = x_HC + bias.view(x_HC.shape)
        if f"self_attn.{name}_norm.weight" in self.weights:  # of queries and keys, by head
            x_HC = torch.stack([self.normed(x_C, f"self_attn.{name}_norm") for x_C in x_HC])
        return x_HC if position is None else self.turned(x_HC, position)

    def turned(self, x_HC: Tensor, position: int) -> Tensor:
        C = self.config.head_dim
        angle = position * self.config.rope_parameters["rope_theta"] ** (-torch.arange(0, C, 2).float() / C)
        a, b = x_HC[:, : C // 2], x_HC[:, C // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def attended(self, query_HC: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        group, mixed = len(query_HC) // len(keys[0]), []
        for h, query_C in enumerate(query_HC):
            scores = torch.stack([query_C @ key[h // group] / len(query_C) ** 0.5 for key in keys])
            mixed.append(sum(w * value[h // group] for w, value in zip(scores.softmax(0), values, strict=True)))
        return self.weights["self_attn.o_proj.weight"] @ torch.cat(mixed)

    def output(self, state_D: Tensor, attended_D: Tensor) -> Tensor:
        state_D = state_D + attended_D
        x_D = self.normed(state_D, "post_attention_layernorm")
        gate, up, down = (self.weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return state_D + down @ (torch.nn.functional.silu(gate @ x_D) * (up @ x_D))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean() + eps) ** -0.5 * weight


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def passes(
    layers: list[NaiveLayer],
    embedded: list[Tensor],
    states: list[Tensor],
    depth: int,
    window: int | None = None,
    next_state: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[Tensor]:
    """Outputs ``[T-2-k, D]`` of every pass: position t of pass k sees the first pass up to t and the others at t, as its window reaches."""
    T, outputs = len(states), []
    keys: list[list[list[Tensor]]] = [[] for _ in layers]  # by layer, pass, position
    values: list[list[list[Tensor]]] = [[] for _ in layers]
    for k in range(depth):
        pairs = [(embedded[t + 1 + k], states[t]) for t in range(T - 2 - k)]
        for i, layer in enumerate(layers):
            read = [layer.reads(*pair) for pair in pairs]
            keys[i].append([layer.heads(x, "k", t + k) for t, (x, _) in enumerate(read)])
            values[i].append([layer.heads(x, "v") for x, _ in read])
            new = []
            for t, (x, residual) in enumerate(read):
                seen = [(0, j) for j in range(t + 1) if window is None or t + k - j < window]
                seen += [(j, t) for j in range(1, k + 1) if window is None or k - j < window]
                mixed = layer.attended(layer.heads(x, "q", t + k), *([store[i][a][b] for a, b in seen] for store in (keys, values)))
                new.append(layer.output(residual, mixed))
            pairs = [(embedded[t + 1 + k], state) for t, state in enumerate(new)]
        outputs.append(torch.stack(new))
        states = [next_state(state) for state in new]
    return outputs
