"""Run gated delta rule layers (2412.06464) over a candidate tree: each node updates its parent's state with its own token.

Such a layer keeps two tensors per row, whose size does not depend on the sequence length: the state, one matrix per head, and the
window, the last inputs of a short convolution. With S the state before the root and g the sum of the log decays on a node's path,

    u_i = beta_i (v_i - e^g_i S' k_i - sum_j e^(g_i - g_j) (k_i . k_j) u_j)      over the ancestors j of i: a triangular system
    o_i = e^g_i S' q_i + sum_j e^(g_i - g_j) (q_i . k_j) u_j                     over the ancestors and i itself
    S_i = e^g_i S + sum_j e^(g_i - g_j) k_j u_j'                                 over the ancestors and i itself

so a tree takes a few matrix products, no state per node is stored, and the state after an accepted path is one sum.
For a chain this is the chunked form in which these layers run a prefill.

The model's own code runs: during a tree forward pass each layer's forward function gets a namespace in which the names of the
convolution and of the rule refer to the functions here.

Shape suffixes: L recurrent layers, B batch, H heads, N and M tree nodes, K key width, V value width, C channels, W window,
J inputs of a convolution (W + 1).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from headstart.heads.backbone.hooks import replaced_forward
from headstart.support.errors import UserError

KIND = "linear_attention"
"""transformers' name for such a layer in ``layer_types``."""
CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""The functions that such a layer's forward calls."""


def rule_dtype(x: Tensor) -> torch.dtype:
    """The dtype of states and of the rule: at least fp32, and fp64 on a CPU.

    The sums of a plain step and of a tree, and of one token after another and of several at once, add up the same terms in other orders.
    In fp64, rounded to the model's dtype where a layer's output is, they are nearly always equal in every bit.
    """
    return torch.float64 if x.device.type == "cpu" else torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True)
class States:
    """State and window of all recurrent layers for each row."""

    state_LBHKV: Tensor
    window_LBCW: Tensor

    @staticmethod
    def of(cache: Any, numbers: Sequence[int]) -> States:
        """Collect the states of the layers ``numbers`` from a `transformers` cache."""
        layers = [cache.layers[number] for number in numbers]
        windows = [layer.conv_states[0][..., 1:] for layer in layers]  # the next token does not use the oldest input
        states = torch.stack([layer.recurrent_states[0] for layer in layers])
        return States(states.to(rule_dtype(states)), torch.stack(windows))

    def behind(self, added: Added, node_B: Tensor) -> States:
        """Return the states after each row's sequence is extended to ``node_B`` of its tree."""
        rows_B = torch.arange(node_B.shape[0], device=node_B.device)
        L, _, H, _ = added.decay_LBHN.shape
        C = added.input_LBCN.shape[2]
        sum_LBH1 = added.decay_LBHN.gather(3, node_B[None, :, None, None].expand(L, -1, H, 1))
        path_BN = added.seen_BNM[rows_B, node_B]
        share_LBHN = (sum_LBH1 - added.decay_LBHN).masked_fill(~path_BN[None, :, None], -torch.inf).exp()
        gain_LBHKV = (added.key_LBHNK * share_LBHN[..., None]).transpose(-1, -2) @ added.update_LBHNV
        place_BW = added.places_BNJ[rows_B, node_B, 1:]
        inputs_LBCM = torch.cat([self.window_LBCW, added.input_LBCN], -1)
        window_LBCW = inputs_LBCM.gather(3, place_BW[None, :, None].expand(L, -1, C, -1))
        return States(sum_LBH1[..., None].exp() * self.state_LBHKV + gain_LBHKV, window_LBCW)

    def overwrite(self, other: States) -> None:
        """Copy another's values in place; the tensors keep their addresses."""
        self.state_LBHKV.copy_(other.state_LBHKV)
        self.window_LBCW.copy_(other.window_LBCW)


@dataclass(frozen=True)
class Added:
    """Contributions of a tree's nodes to the states, for all layers."""

    key_LBHNK: Tensor
    update_LBHNV: Tensor
    decay_LBHN: Tensor
    """Log decays summed along each node's path."""
    input_LBCN: Tensor
    seen_BNM: Tensor
    """True where node m is an ancestor of node n or n itself."""
    places_BNJ: Tensor
    """Indices of each node's convolution inputs in the window followed by the nodes, oldest first."""


@dataclass(frozen=True)
class Nodes:
    """One layer's projections of the nodes."""

    query_BHNK: Tensor
    key_BHNK: Tensor
    value_BHNV: Tensor
    decay_BHN: Tensor
    """Log of the factor that decays the state."""
    beta_BHN: Tensor


def delta_rule(nodes: Nodes, state_BHKV: Tensor, seen_BNM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each node's output o and update u, both ``[B, H, N, V]``, and its log decay summed along the path, ``[B, H, N]``.

    Parents must precede their children. The caller scales the queries.
    """
    sum_BHN = (seen_BNM[:, None].to(nodes.decay_BHN.dtype) @ nodes.decay_BHN[..., None])[..., 0]
    between_BHNM = (sum_BHN[..., None] - sum_BHN[..., None, :]).masked_fill(~seen_BNM[:, None], -torch.inf).exp()
    left_BHN1, beta_BHN1 = sum_BHN.exp()[..., None], nodes.beta_BHN[..., None]
    keys_BHKM = nodes.key_BHNK.transpose(-1, -2)
    system_BHNM = beta_BHN1 * between_BHNM * (nodes.key_BHNK @ keys_BHKM)
    new_BHNV = beta_BHN1 * (nodes.value_BHNV - left_BHN1 * (nodes.key_BHNK @ state_BHKV))
    update_BHNV = torch.linalg.solve_triangular(system_BHNM, new_BHNV, upper=False, unitriangular=True)
    out_BHNV = left_BHN1 * (nodes.query_BHNK @ state_BHKV) + (between_BHNM * (nodes.query_BHNK @ keys_BHKM)) @ update_BHNV
    return out_BHNV, update_BHNV, sum_BHN


def convolution_places(seen_BNM: Tensor, depths_BN: Tensor, width: int) -> Tensor:
    """Return the indices ``[B, N, width]`` of each node's last ``width`` inputs, oldest first.

    They index the ``width - 1`` inputs before the root followed by the nodes.
    """
    depth_BNJ = depths_BN[..., None] - torch.arange(width - 1, -1, -1, device=depths_BN.device)
    there_BNJM = seen_BNM[:, :, None] & (depths_BN[:, None, None] == depth_BNJ[..., None])
    node_BNJ = there_BNJM.to(torch.uint8).argmax(-1)
    return torch.where(depth_BNJ >= 0, node_BNJ, depth_BNJ) + (width - 1)


class Branch:
    """One tree's forward pass through the recurrent layers. ``states`` None: the root is the first token."""

    def __init__(self, states: States | None, seen_BNM: Tensor, depths_BN: Tensor) -> None:
        self.states, self.seen_BNM, self.depths_BN = states, seen_BNM, depths_BN
        self.places_BNJ: Tensor | None = None
        self.inputs: list[Tensor] = []
        self.rest: list[tuple[Tensor, Tensor, Tensor]] = []

    def convolve(self, layer: int, input_BCN: Tensor, weight_CJ: Tensor, bias_C: Tensor | None) -> Tensor:
        """Convolve along each node's path, ``[B, C, N]``, accumulating in at least fp32 as a convolution kernel does."""
        B, C, N = input_BCN.shape
        J = weight_CJ.shape[1]
        if self.places_BNJ is None:
            self.places_BNJ = convolution_places(self.seen_BNM, self.depths_BN, J)
        window_BCW = input_BCN.new_zeros(B, C, J - 1) if self.states is None else self.states.window_LBCW[layer]
        self.inputs.append(input_BCN)
        index_BCX = self.places_BNJ.flatten(1)[:, None].expand(-1, C, -1)
        path_BCNJ = torch.cat([window_BCW, input_BCN], -1).gather(2, index_BCX).unflatten(-1, (N, J))
        wide = torch.promote_types(weight_CJ.dtype, torch.float32)
        out_BCN = (path_BCNJ.to(wide) * weight_CJ[:, None].to(wide)).sum(-1)
        return (out_BCN if bias_C is None else out_BCN + bias_C[:, None]).to(weight_CJ.dtype)

    def apply(self, layer: int, nodes: Nodes) -> Tensor:
        """Apply a layer's delta rule; returns the nodes' outputs ``[B, H, N, V]``."""
        B, H, _, K = nodes.key_BHNK.shape
        empty = nodes.key_BHNK.new_zeros(B, H, K, nodes.value_BHNV.shape[-1]) if self.states is None else self.states.state_LBHKV[layer]
        out_BHNV, *added = delta_rule(nodes, empty.to(nodes.key_BHNK.dtype), self.seen_BNM)
        self.rest.append((nodes.key_BHNK, added[0], added[1]))
        return out_BHNV

    def added(self) -> Added:
        """Return the nodes' contributions after the tree has passed all layers."""
        assert self.places_BNJ is not None
        keys, updates, decays = (torch.stack(parts) for parts in zip(*self.rest, strict=True))
        return Added(keys, updates, decays, torch.stack(self.inputs), self.seen_BNM, self.places_BNJ)


class Layer:
    """One recurrent module of the model, and its forward with the convolution and rule of the current branch."""

    def __init__(self, module: nn.Module, place: int) -> None:
        self.module, self.place = module, place
        self.branch: Branch | None = None
        own = inspect.unwrap(type(module).forward)
        names = own.__globals__ | {CONVOLUTION: self.convolve, RULE: self.rule}
        self.own = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        self.own.__kwdefaults__ = own.__kwdefaults__

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a pickle, has functions of its own."""
        return Layer, (self.module, self.place)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Run the module's forward without cache and mask; the branch has the previous states and the tree's structure."""
        return self.own(self.module, hidden_states)

    def convolve(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """Replacement of the convolution: inputs ``[B, C, N]``, weights ``[C, J]``."""
        assert self.branch is not None
        out_BCN = self.branch.convolve(self.place, hidden_states, weight, bias)
        return (out_BCN if activation is None else ACT2FN[activation](out_BCN)).to(hidden_states.dtype)

    def rule(self, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Replacement of the rule: tensors ``[B, N, H, ...]``; several value heads may share a key head."""
        assert self.branch is not None
        groups = value.shape[2] // key.shape[2]
        query, key = (x.repeat_interleave(groups, 2) if groups > 1 else x for x in (query, key))
        wide = rule_dtype(query)
        q, k, v, decay, b = (x.transpose(1, 2).to(wide) for x in (query, key, value, g, beta))
        if options["use_qk_l2norm_in_kernel"]:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        out_BHNV = self.branch.apply(self.place, Nodes(q * q.shape[-1] ** -0.5, k, v, decay, b))
        return out_BHNV.transpose(1, 2).to(query.dtype).contiguous(), None


class Recurrent:
    """The recurrent layers of a model; ``numbers`` are their indices among all its layers."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        self.numbers = tuple(modules)
        self.layers = [Layer(module, place) for place, module in enumerate(modules.values())]
        self.reading = False

    @contextmanager
    def along(self, branch: Branch) -> Iterator[None]:
        """Run the model's forward pass over a tree's nodes inside this context."""
        with ExitStack() as changed:
            self.reading = True
            changed.callback(self._leave)
            for layer in self.layers:
                layer.branch = branch
                changed.enter_context(replaced_forward(layer.module, layer.forward))
            yield

    def _leave(self) -> None:
        self.reading = False
        for layer in self.layers:
            layer.branch = None


def find_recurrent(name: str, layers: nn.ModuleList, kinds: Sequence[str]) -> Recurrent | None:
    """Find the recurrent layers by the kind of each layer; None if there are none. ``name`` is for errors.

    Raises UserError if a layer does not follow the gated delta rule, or if the other layers are of an unsupported kind.
    """
    found: dict[int, nn.Module] = {}
    for number, kind in enumerate(kinds):
        if kind == KIND:
            modules = [module for module in layers[number].modules() if {CONVOLUTION, RULE} <= _called(module)]
            if len(modules) != 1:
                raise UserError(
                    f"{name} has layers of kind {KIND!r} ({type(layers[number]).__name__}) that do not follow the gated delta rule "
                    "of transformers' Qwen3-Next, Qwen3.5 and OLMo-Hybrid, the only recurrence whose states along a tree are computed here"
                )
            found[number] = modules[0]
    beside = sorted(set(kinds) - {KIND})
    if found and beside != ["full_attention"]:
        others = ", ".join(beside) or "no others"
        raise UserError(f"{name} has layers of kind {KIND!r} beside {others}; supported: {KIND} beside full_attention")
    if len({weight.device for module in found.values() for weight in module.parameters()}) > 1:
        raise UserError(f"{name} has recurrent layers on several devices; put them on one")
    return Recurrent(found) if found else None


def _called(module: nn.Module) -> set[str]:
    """Names that a module's forward refers to."""
    own = inspect.unwrap(type(module).forward)
    return set(own.__code__.co_names) if isinstance(own, FunctionType) else set()
