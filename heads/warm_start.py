"""Start a new drafter from a trained one (``drafter.init``), strict about what is taken over.

All tensors must have equal names and shapes, but for the output layers of another draft vocabulary, whose rows are taken over by backbone
token. Heads whose weights are shared by all depths may therefore start from heads of another depth. Parts of DFlash2 may be new
(`Block.added`), which change no draft before they are trained.

Training moves the rows of the output layers mostly alike, so that a row as it was before training would win everywhere: SmolLM2's heads
with 980 such rows among 8,192 got 5 % of first drafts right. Rows of new tokens are moved by the affine map that fits the others best.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.heads.block import Block
from headstart.heads.checkpoint import check_contract, read_drafter, read_metadata
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.support.errors import UserError, naming

VOCABULARY = ("d2t", "t2d")
"""Tensors of the draft vocabulary, which the new drafter has already."""


@dataclass(frozen=True)
class WarmStart:
    """A trained drafter to start from."""

    path: str
    drafter: Drafter
    weights: dict[str, str]
    """File names and hashes of its weights, as in its metadata."""
    same_backbone: bool
    """False: it was trained on a backbone, or adapter, with other weights."""

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what the new checkpoint records about its origin."""
        return {"path": self.path, "weights": self.weights, "same_backbone": self.same_backbone}

    def require_fits(self, drafter: Drafter) -> None:
        """Raise UserError, naming the first difference, unless ``drafter`` can start from these heads."""
        if self.drafter.taps != drafter.taps:
            taps = list(self.drafter.taps)
            raise UserError(f"drafter.init={self.path} reads the taps {taps}, this drafter {list(drafter.taps)}: set drafter.taps={taps}")
        for key in drafter.fixed_arguments:
            given, here = (json.dumps(heads.arguments[key]) for heads in (self.drafter, drafter))
            if given != here:
                found = f"drafter.init={self.path} computes with drafter.{key} {given}, this drafter {here}"
                raise UserError(f"{found}: set drafter.{key}={given}")
        theirs, ours, by_token = _state(self.drafter), _state(drafter), _output_names(drafter)
        for name in [*theirs, *(name for name in ours if name not in theirs and not _added(drafter, name))]:
            shapes = [state[name].shape if name in state else None for state in (theirs, ours)]
            if name in by_token:
                shapes = [None if shape is None else shape[1:] for shape in shapes]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"drafter.init={self.path}: tensor {name} is {_shape(theirs, name)} there and {_shape(ours, name)} here"
                    f"{self._arguments(drafter)}; give the drafter the same arguments, or leave drafter.init out"
                )

    def apply(self, drafter: Drafter) -> str:
        """Copy the weights to ``drafter``, whose draft vocabulary is set, and return a summary of what was taken over.

        Rows of the output layers for tokens that were not in the trained draft vocabulary are moved as the others were (`move_alike`).
        """
        theirs, ours = _state(self.drafter), _state(drafter)
        rows_V = torch.full((drafter.backbone.vocab,), -1)
        trained_DV = _tokens(self.drafter)
        rows_V[trained_DV] = torch.arange(len(trained_DV))
        rows_DV = rows_V[_tokens(drafter)]
        output_names, new = _output_names(drafter), [name for name in ours if name not in theirs]
        for name, tensor in ours.items():
            if name in new:
                continue
            source = theirs[name].to(tensor.device)
            if name in output_names:
                known_DV = rows_DV >= 0
                if not known_DV.all() and tensor.ndim == 2:
                    tensor[~known_DV] = move_alike(tensor[~known_DV], drafter.backbone.unembed.weight[trained_DV].to(source), source)
                tensor[known_DV] = source[rows_DV[known_DV]]
            else:
                tensor.copy_(source)
        parts = Counter(part for name in new for part in name.split(".") if part in Block.added)  # of equal ones how many
        listed = " and ".join(f"{count} of {part}" for part, count in parts.items())
        summary = f"{self.path}: {len(ours) - len(new)} tensors" + (f", new are {listed}" if new else "")
        if output_names and not torch.equal(trained_DV, _tokens(drafter)):
            kept, size = int((rows_DV >= 0).sum()), len(rows_DV)
            summary += f", {kept:,} of {size:,} draft tokens among them and {size - kept:,} new"
        summary += "" if new else self._arguments(drafter)
        return summary + ("" if self.same_backbone else "; trained on a backbone with other weights")

    def _arguments(self, drafter: Drafter) -> str:
        """Describe the arguments that differ."""
        ours, theirs = drafter.arguments, self.drafter.arguments
        differing = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
        listed = " and ".join(f"drafter.{key} is {theirs.get(key)} there and {ours.get(key)} here" for key in differing)
        return f", where {listed}" if listed else ""


@torch.no_grad()
def move_alike(start_ND: Tensor, start_KD: Tensor, trained_KD: Tensor) -> Tensor:
    """Return the rows ``start_ND`` after the affine map that brings ``start_KD`` closest to ``trained_KD``, and changes them least."""
    ones_ND, ones_KD = (torch.cat([rows, torch.ones_like(rows[:, :1])], 1).double().cpu() for rows in (start_ND, start_KD))
    inverse_XX = torch.linalg.pinv(ones_KD.T @ ones_KD, hermitian=True)
    change_XD = inverse_XX @ (ones_KD.T @ (trained_KD - start_KD).double().cpu())
    return start_ND + (ones_ND @ change_XD).to(start_ND)


def read_warm_start(path: str, kind: str, backbone: Backbone) -> WarmStart:
    """Read the heads at ``path`` (a folder or hub id) to start a drafter of ``kind`` on ``backbone``.

    Raises UserError if files are missing or damaged, for another kind, and for a backbone of another shape. Another backbone of the same
    shape, such as a fine-tune, is allowed.
    """
    with naming("drafter.init"):
        folder, card = read_metadata(path)
        require_kind(path, card, kind)
        check_contract(path, card, backbone, allow_finetuned=True)
        drafter = read_drafter(path, folder, card, backbone)
    same = backbone.match(card["contract"]) != "other" and card["contract"].get("adapter") == backbone.adapter_digest
    return WarmStart(path, drafter.to(backbone.device), card["weights"], same)


def require_kind(path: str, card: dict[str, Any], kind: str) -> None:
    """Raise UserError unless the checkpoint holds heads of this kind."""
    if (found := card["kind"]) != kind:
        raise UserError(f"{path} holds {found} heads, this recipe trains {kind}; set drafter.kind={found}, or give other heads")


def _state(drafter: Drafter) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in drafter.state_dict().items() if name not in VOCABULARY}


def _tokens(drafter: Drafter) -> Tensor:
    """Return the backbone tokens of the draft vocabulary (int64 ``[DV]``), on the CPU."""
    return torch.arange(drafter.backbone.vocab) if drafter.vocabulary is None else drafter.vocabulary.cpu()


def _output_names(drafter: Drafter) -> set[str]:
    """Return the names of the tensors with one row per draft token."""
    if not isinstance(drafter, OwnReadoutDrafter):
        return set()
    layers = drafter.output_layers()
    names = [name for name, module in drafter.named_modules(remove_duplicate=False) if any(module is layer for layer in layers)]
    return {f"{name}.{part}" for name in names for part in ("weight", "bias")}


def _added(drafter: Drafter, name: str) -> bool:
    """Return whether a weight may start without a trained one."""
    return isinstance(drafter, Block) and any(part in name.split(".") for part in Block.added)


def _shape(state: dict[str, Tensor], name: str) -> str:
    return str(list(state[name].shape)) if name in state else "missing"
