"""Draft vocabularies: ``d2t`` and ``t2d`` of foreign heads, checked and brought to ascending tokens.

``d2t`` holds offsets, token minus draft token; some files hold the tokens themselves, which is recognised.
Shape suffixes: V backbone vocabulary, DV draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.support.errors import UserError


def vocabulary_shapes(draft_vocab: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a draft vocabulary; there are none for the whole one."""
    return {"d2t": (draft_vocab,), "t2d": (vocab,)} if draft_vocab < vocab else {}


def with_vocabulary(
    tensors: Mapping[str, Tensor], output_layers: Sequence[str], vocab: int, path: str
) -> tuple[dict[str, Tensor], int | None, list[str]]:
    """Return the tensors with consistent ``d2t`` and ``t2d``, the size of the draft vocabulary (None: the whole one), and notes.

    Rows of the output layers follow the tokens if these are not ascending. Raises UserError for maps that contradict each other.
    """
    kept, notes = dict(tensors), list[str]()
    d2t, t2d = kept.pop("d2t", None), kept.pop("t2d", None)
    rows = {len(kept[name]) for name in output_layers if name in kept}
    if len(rows) > 1:
        raise UserError(f"{path}: the output layers have different numbers of rows ({', '.join(map(str, sorted(rows)))})")
    DV = rows.pop() if rows else vocab
    if d2t is None:
        if t2d is not None and (t2d.ndim != 1 or len(t2d) != vocab or int(t2d.sum()) != DV):
            raise UserError(f"{path}: t2d {list(t2d.shape)} marks {int(t2d.sum())} tokens of {DV} in the output layer: fetch it again")
        if DV == vocab:
            return kept, None, notes
        if t2d is None:
            raise UserError(f"{path} drafts {DV} of the backbone's {vocab} tokens and has no d2t, which says which: fetch it with d2t")
        tokens_DV = t2d.nonzero().flatten()
        notes.append("d2t is missing and was made from t2d")
    else:
        tokens_DV = _tokens(d2t, t2d, vocab, DV, path, notes)
    order_DV = tokens_DV.argsort()
    if not torch.equal(order_DV, torch.arange(DV)):
        kept |= {name: kept[name][order_DV] for name in output_layers if name in kept}
        notes.append("draft tokens are in another order than the backbone's: the rows of the output layer follow them")
        tokens_DV = tokens_DV[order_DV]
    if DV == vocab:
        return kept, None, notes
    kept["d2t"] = tokens_DV - torch.arange(DV)
    kept["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens_DV, True)
    return kept, DV, notes


def _tokens(d2t: Tensor, t2d: Tensor | None, vocab: int, DV: int, path: str, notes: list[str]) -> Tensor:
    """Return the backbone token of each draft token (int64 ``[DV]``)."""
    if d2t.ndim != 1 or len(d2t) != DV or d2t.is_floating_point():
        raise UserError(f"{path}: d2t is {str(d2t.dtype).removeprefix('torch.')} {list(d2t.shape)}; expected are {DV} whole numbers")
    if t2d is not None and (t2d.ndim != 1 or len(t2d) != vocab):
        raise UserError(f"{path}: t2d is {list(t2d.shape)}; the backbone's vocabulary has [{vocab}]")
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    values_DV = d2t.long()
    as_offsets, as_tokens = values_DV + torch.arange(DV), values_DV
    if _fits(as_offsets, marked, vocab):
        return as_offsets
    if _fits(as_tokens, marked, vocab):
        notes.append("d2t holds tokens instead of offsets (token minus draft token) and was converted: engines read it as offsets, wrongly")
        return as_tokens
    if marked is not None:
        raise UserError(f"{path}: d2t and t2d disagree, whether d2t holds offsets or tokens: the file is damaged, fetch it again")
    raise UserError(f"{path}: d2t names tokens twice or beyond the vocabulary of {vocab}, as offsets and as tokens: fetch it again")


def _fits(tokens_DV: Tensor, marked: Tensor | None, vocab: int) -> bool:
    """Return whether these are different tokens of the vocabulary, and the marked ones if any are."""
    ascending = tokens_DV.sort().values
    if bool((ascending[:1] < 0).any() or (ascending[-1:] >= vocab).any() or (ascending[1:] == ascending[:-1]).any()):
        return False
    return marked is None or torch.equal(ascending, marked)


def over_whole_vocabulary(tensors: Mapping[str, Tensor], output_layers: str, vocab: int) -> dict[str, Tensor]:
    """Return heads with a draft vocabulary with output layers ``[V, D]`` in place of ``[DV, D]``, and without ``d2t`` and ``t2d``.

    ``output_layers`` is a part of their names. The rows of all other tokens are the mean of the drafted ones, so that their logit is the
    mean of the drafted logits and never the largest: the layers draft what the small ones do.
    """
    if "t2d" not in tensors:
        return dict(tensors)
    tokens_DV = tensors["t2d"].nonzero().flatten()
    found = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    for name, rows_DVD in found.items():
        if output_layers in name:
            found[name] = rows_DVD.float().mean(0).to(rows_DVD.dtype).repeat(vocab, 1)
            found[name][tokens_DV] = rows_DVD
    return found


WHOLE = (
    "output layers are written over the whole vocabulary, since no engine reads truncated ones (vLLM's are broken in 0.32): the rows of "
    "tokens that are not drafted are the mean of the others, so that these tokens are never the likeliest draft"
)
