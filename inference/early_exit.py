"""The backbone's first layers as a drafter, without weights or cache of its own (Draft & Verify, 2309.08168; LayerSkip, 2404.16710).

The first E layers draft with the backbone's final norm and output layer. Keys and values of accepted tokens are in the backbone's cache;
those of drafted nodes are stored after each row's end, where the verifying pass overwrites them. Backbones that were not trained for
early exit predict poorly before their last layers.

Shape suffixes: B batch, N tree nodes, D width, V vocabulary.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter, DrafterConfig, require_count
from headstart.heads.layers.cached_model import Rows, read_level
from headstart.heads.layers.ragged_cache import TreeCache
from headstart.heads.layers.rows import pad_rows
from headstart.support.errors import UserError

DEPTH = 4
"""Tokens drafted beyond the root unless a depth is given."""


class EarlyExit(Drafter):
    """``layers``: E, the number of backbone layers that draft. Raises UserError if the backbone does not allow exit after E layers."""

    reads_hidden = False
    own_readout = False
    uses_backbone_cache = True
    capturable = True

    def __init__(self, backbone: Backbone, *, layers: int, depth: int | None = None) -> None:
        """``depth``: the number of tokens drafted; None: `DEPTH`, and in adaptive trees up to twice as many."""
        if depth is not None:
            require_count("depth", depth, of="early exit")
        super().__init__(backbone, DrafterConfig(depth=depth or DEPTH, draft_depth=depth))
        require_count("layers", layers, of="early exit")
        if layers > backbone.num_layers:
            raise UserError(f"early exit.layers is from 1 to {backbone.num_layers}, the layers that {backbone.name} has; got {layers}")
        if backbone.recurrent is not None:
            raise UserError(f"{backbone.name} has recurrent layers, whose states drafted nodes can't share; draft without early exit")
        self.first = first_layers(backbone, layers)
        self.view: TreeCache | None = None

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.backbone.readout(hidden)

    # Between drafts the state holds only lengths: the keys are in the backbone's cache, which the decoding loop maintains.

    def reserve(self, state: Rows, length: int) -> Rows:
        return Rows(((), ()), state.lengths_B)

    def select(self, state: Rows, rows_B: Tensor) -> Rows:
        return self.reserve(state, 0).select(rows_B)

    def join(self, state: Rows, other: Rows) -> Rows:
        return self.reserve(state, 0).join(self.reserve(other, 0))

    def begin(self, features: Features, state: Rows | None = None) -> Rows:
        return Rows(((), ()), features.lengths_B if state is None else state.lengths_B + features.lengths_B)

    def prepare_draft(self, state: Rows, cache: Any, nodes: int) -> Rows:
        if self.view is None or self.view.groups != cache.groups:
            self.view = TreeCache(cache.groups)
        stores = cache.stores(nodes)
        return Rows(stores, pad_rows(cache.lengths_B, stores[0][0].shape[1]))

    def step(self, state: Rows, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Rows]:
        assert self.view is not None and state.stores[0], "prepare_draft the backbone's cache first"
        return read_level(self.first, self.view, state, tokens_BN, parents_BN, depth)


def first_layers(backbone: Backbone, count: int) -> Backbone:
    """A backbone of the first ``count`` layers that shares all weights; the model object itself is unchanged.

    Raises UserError if its output is not that of the first layers of the whole model.
    """
    path = next(name for name, module in backbone.base.named_modules() if module is backbone.layers)
    first = copy.copy(backbone)
    first.layers, first.num_layers = nn.ModuleList(list(backbone.layers)[:count]), count
    first.base = _with(backbone.base, path, first.layers) if path else first.layers
    tokens_BT = torch.arange(4, device=backbone.device)[None] % backbone.vocab
    whole, ran = backbone.read(tokens_BT, taps=(count,)).taps, []
    handles = [layer.register_forward_hook(lambda layer, *_: ran.append(layer)) for layer in backbone.layers]
    try:
        cut = first.read(tokens_BT, taps=(count,)).taps
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
        cut = None
    finally:
        for handle in handles:
            handle.remove()
    if whole is None or cut is None or len(ran) != count or not torch.allclose(cut[count], whole[count], atol=1e-3, rtol=1e-2):
        name = type(backbone.model).__name__
        raise UserError(f"{name} does not run with its first {count} layers alone, so it can't draft by early exit; use another proposer")
    return first


def _with(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """A copy of the module that shares everything but the submodule at the dotted path."""
    name, _, rest = path.partition(".")
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    changed._modules[name] = _with(changed._modules[name], rest, part) if rest else part  # type: ignore[arg-type]
    return changed
