"""What a drafter is: one module that is trained on known text and then proposals unknown text.

Alignment, stated once and used everywhere. The backbone has read ``x_0 .. x_t``; its own output layer gives the root
``x_{t+1}``. Depth ``k`` (from 0) drafts ``x_{t+2+k}`` from the features up to ``t``, the root, and the ``k`` tokens
drafted in between.

Shape suffixes: B batch, T positions, D width, V vocabulary, N tree nodes, K depth.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headstart.support.errors import UserError

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone

NOT_METHODS = {
    "base", "backbone", "causal", "checkpoint", "errors", "frequencies", "hooks", "kv", "layers", "quantization", "recurrent", "start",
    "store",
}  # fmt: skip
"""Files of this folder that are not drafters."""


@dataclass(frozen=True)
class Features:
    """What the backbone knows of a run of consecutive tokens; read live or from disk, a drafter cannot tell."""

    tokens_BT: Tensor
    hidden_BTD: Tensor
    """The final hidden state, after the final norm."""
    taps: dict[int, Tensor] | None = None
    """Tap number -> [B, T, D]: the residual stream after that many layers (0 is the embedding), before the final norm."""
    loss_mask_BT: Tensor | None = None
    """True where ``x_j`` is a token to learn to draft."""
    document_BT: Tensor | None = None
    """Which document a position belongs to; -1 is padding, at the right end of a row. None: one document, no padding."""

    def gather(self, index_BT: Tensor, valid_BT: Tensor) -> Features:
        """The positions ``index_BT`` of each row; where ``valid_BT`` is False the position is padding."""

        def pick(x_BTD: Tensor) -> Tensor:
            return x_BTD.gather(1, index_BT[..., None].expand(-1, -1, x_BTD.shape[-1]))

        taps = None if self.taps is None else {number: pick(tap) for number, tap in self.taps.items()}
        document = torch.where(valid_BT, 0, -1)
        return Features(self.tokens_BT.gather(1, index_BT), pick(self.hidden_BTD), taps, document_BT=document)

    def rows(self, rows_B: Tensor) -> Features:
        """Those rows of the batch (int64), in that order."""
        return map_tensors(lambda tensor: tensor[rows_B], self)

    @property
    def lengths_B(self) -> Tensor:
        """How many positions of each row are not padding."""
        if self.document_BT is None:
            return self.tokens_BT.new_full((self.tokens_BT.shape[0],), self.tokens_BT.shape[1])
        return (self.document_BT >= 0).sum(1)


def join_features(parts: list[Features]) -> Features:
    """Runs of consecutive tokens one behind the other, rows right-padded as each of the parts is."""
    if len(parts) == 1:
        return parts[0]
    taps = None if parts[0].taps is None else {tap: torch.cat([part.taps[tap] for part in parts if part.taps], 1) for tap in parts[0].taps}
    tokens_BT = torch.cat([part.tokens_BT for part in parts], 1)
    there_BT = torch.cat([_there(part) for part in parts], 1)
    whole = Features(tokens_BT, torch.cat([part.hidden_BTD for part in parts], 1), taps)
    order_BT = (~there_BT).to(torch.int8).argsort(dim=1, stable=True)[:, : int(there_BT.sum(1).max())]
    return whole.gather(order_BT, there_BT.gather(1, order_BT))


def _there(features: Features) -> Tensor:
    """True where a position is no padding, ``[B, T]``."""
    return torch.ones_like(features.tokens_BT, dtype=torch.bool) if features.document_BT is None else features.document_BT >= 0


class Drafter(nn.Module, ABC):
    """Subclass it, give the members below, put it in ``heads/<kind>.py``: that is a new method.

    Constructor: ``(backbone, *, depth=..., ...)``; ``self.arguments`` holds the keyword arguments, to build it again.
    ``self.backbone[0]`` is the backbone: in a list, so that it is no submodule, since it is frozen and not the drafter's to save.
    """

    depth: int
    """K: how many tokens beyond the root are drafted."""
    taps: tuple[int, ...] = ()
    """The backbone layers whose residual stream this drafter reads."""
    vocabulary: Tensor | None
    """int64 [DV]: the backbone's token for each token of the draft vocabulary, ascending; None: the whole vocabulary."""
    arguments: dict[str, Any]
    captures: bool = False
    """Whether `begin` and `step` are functions of tensors alone: no host reads, no branching on values; then they may be captured
    once and replayed. The state is then a tensor, or a (nested) dataclass or tuple of tensors."""
    file_name: str = "model.safetensors"
    """The name serving engines expect for the weights."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = [backbone]
        self.register_buffer("vocabulary", None, persistent=False)  # a buffer, so that it follows the drafter to its device

    def forward(self, features: Features) -> list[Tensor]:
        """Training: K tensors, the k-th ``[B, max(T-2-k, 0), D]``; its position t drafts ``x_{t+2+k}`` from the true tokens.

        Raises UserError for a drafter that is not trained, such as a draft model.
        """
        raise UserError(f"{type(self).__name__} drafts without training; train one of {', '.join(methods())}")

    def recompute(self) -> None:
        """Training: from now on keep little of the forward for the gradients, and compute it again there. Raises UserError if it cannot."""
        raise UserError(f"train.gradient_checkpointing is not for {type(self).__name__}, which computes nothing again; set it to false")

    @abstractmethod
    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        """Hidden states ``[..., D]`` of one depth -> logits ``[..., DV]`` over the draft vocabulary.

        ``parent_tokens [...]`` are the tokens the hidden states were stepped with, for heads that correct by them.
        """

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        """Decoding: look back at the first ``sink`` and the last ``window`` positions alone and keep no more than those (None: all),
        and with ``offload`` keep them in host memory between drafts; of texts prefill_at from now on. Raises UserError if it cannot.
        """
        raise UserError(f"{type(self).__name__} keeps nothing of earlier positions to be limited; leave out draft windows and offloading")

    def reserve(self, state: Any, length: int) -> Any:
        """Decoding: the state with room for ``length`` positions a row, drafted nodes included; called before `begin` goes on from it."""
        return state

    def select(self, state: Any, rows_B: Tensor) -> Any:
        """Decoding: the state of those rows of the batch (int64), in that order; a row may be left out or come twice."""
        return map_tensors(lambda tensor: tensor[rows_B], state)

    def join(self, state: Any, other: Any) -> Any:
        """Decoding: the rows of both states, the other's behind. Both have taken in all there is to their texts."""
        theirs = iter(list_tensors(other))
        return map_tensors(lambda mine: torch.cat([mine, next(theirs)]), state)

    def prepare_draft(self, state: Any, cache: Any, nodes: int) -> Any:
        """Decoding, before each drafting: the state with room for ``nodes`` drafted nodes behind each row.

        ``cache`` is the backbone's own (inference/cache.py), for a drafter that drafts on it.
        """
        return self.reserve(state, cache.longest + nodes)

    @abstractmethod
    def begin(self, features: Features, state: Any = None) -> Any:
        """Decoding: take in the features of newly accepted tokens (rows right-padded, document -1); the state to draft from."""

    @abstractmethod
    def step(self, state: Any, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Any]:
        """Decoding: hidden states ``[B, N, D]`` of N nodes of one depth, and the state that knows them.

        ``tokens_BN`` are the nodes' tokens (depth 0: the roots), ``parents_BN`` their parents' places among the nodes of the
        depth before. A drafter that does not look at the tokens may return ``[B, 1, D]``.
        """

    def use_vocabulary(self, tokens: Tensor) -> None:
        """Draft these backbone tokens (int64 ``[DV]``) and no others; called before training if there is a draft vocabulary."""
        raise UserError(f"{type(self).__name__} drafts the backbone's whole vocabulary; leave the draft vocabulary out")

    def config(self) -> dict[str, Any]:
        """The ``config.json`` that serving engines read beside the weights. Raises UserError for a drafter that is not saved."""
        raise UserError(f"{type(self).__name__} drafts without training: there is nothing of it to save")

    def tensors(self) -> dict[str, Tensor]:
        """The weights under the names that serving engines expect."""
        return self.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`; strict."""
        self.load_state_dict(dict(tensors), strict=True)

    def save_pretrained(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the checkpoint; ``extra`` is kept as its provenance. `headstart.load` reads it, and so do serving engines."""
        from headstart.heads.checkpoint import save_drafter

        save_drafter(self, Path(folder), dict(extra or {}))

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> None:
        """Save to a hub repository of that id, made if need be."""
        from headstart.heads.checkpoint import push_drafter

        push_drafter(self, repo_id, private)


def map_tensors(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """The same nest of tensors, tuples, lists, dicts and dataclasses, each tensor changed; what is no tensor stays."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, tuple | list):
        return type(nest)(map_tensors(change, one) for one in nest)
    if isinstance(nest, dict):
        return {key: map_tensors(change, one) for key, one in nest.items()}
    if is_dataclass(nest) and not isinstance(nest, type):
        return replace(nest, **{field.name: map_tensors(change, getattr(nest, field.name)) for field in fields(nest)})
    return nest


def list_tensors(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in the order of `map_tensors`."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, nest)   # type: ignore[func-returns-value]
    return found


def methods() -> list[str]:
    """The kinds of drafter that ship: the file names of this folder."""
    import headstart.heads as here

    return sorted(module.name for module in pkgutil.iter_modules(here.__path__) if module.name not in NOT_METHODS)


def find_drafter(kind: str) -> type[Drafter]:
    """``medusa`` is the drafter in heads/medusa.py; a dotted name is a module of the user's own."""
    known = methods()
    if "." not in kind and kind not in known:
        near = difflib.get_close_matches(kind, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown drafter {kind!r}; {hint}known: {', '.join(known)}, or the dotted name of a module of your own")
    name = kind if "." in kind else f"headstart.heads.{kind}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UserError(f"no module {name!r} for the drafter; known: {', '.join(known)}, or a dotted name that can be imported") from None
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Drafter) and c.__module__ == name]
    if len(found) != 1:
        raise UserError(f"{name} must define exactly one Drafter; found {len(found)}")
    return found[0]


def build_drafter(kind: str, backbone: Backbone, arguments: Mapping[str, Any]) -> Drafter:
    """A fresh drafter of that kind for that backbone.

    Raises UserError for an unknown kind, an unknown argument, or a value the drafter refuses.
    """
    cls = find_drafter(kind)
    known = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "backbone")]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"unknown argument drafter.{name} for {kind}{hint} (it takes {', '.join(known)})")
    return cls(backbone, **arguments)


def require_count(name: str, value: Any, least: int = 1, of: str = "drafter") -> None:
    """Raise UserError unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{of}.{name} is a whole number of at least {least}; got {value!r}")
