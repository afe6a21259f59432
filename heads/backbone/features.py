"""Features: the backbone's hidden states over consecutive tokens, the input of drafters; and the images that it reads among tokens.

In training a drafter may draft from some of the positions alone, its `Anchors`.

Shape suffixes: B batch, T positions, D width, R anchors of a row, K depth, M anchors, X axes of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config, loading
from headstart.support.errors import UserError
from headstart.support.hub import resolve
from headstart.support.pytree import list_tensors, map_tensors

if TYPE_CHECKING:
    from headstart.chat.images import ImageReader


@dataclass(frozen=True)
class Features:
    """The backbone's hidden states over consecutive tokens, computed live or read from a feature cache."""

    tokens_BT: Tensor
    hidden_BTD: Tensor
    """The final hidden state, after the final norm."""
    taps: dict[int, Tensor] | None = None
    """Tap number -> [B, T, D]: the residual stream after that many layers (0: the embedding), before the final norm."""
    loss_mask_BT: Tensor | None = None
    """True where token ``x_j`` is a label, that is, has a loss."""
    document_BT: Tensor | None = None
    """Document index of each position; -1 marks right padding. None: one document per row, no padding."""
    norm_BT: Tensor | None = None
    """Log-sum-exp of the backbone's logits over its whole vocabulary, where the next token is a label; None: not computed yet."""
    choice_BT: Tensor | None = None
    """Most likely next token there."""

    def gather(self, index_BT: Tensor, valid_BT: Tensor) -> Features:
        """Select the positions ``index_BT`` of each row; those where ``valid_BT`` is False become padding."""
        taps = None if self.taps is None else {number: pick(tap, index_BT) for number, tap in self.taps.items()}
        document = torch.where(valid_BT, 0, -1)
        return Features(self.tokens_BT.gather(1, index_BT), pick(self.hidden_BTD, index_BT), taps, document_BT=document)

    def concatenated(self, taps: tuple[int, ...], index_BT: Tensor | None = None) -> Tensor:
        """Concatenate these taps along the width: ``[B, T, len(taps) D]``, at the positions ``index_BT`` of each row only if given."""
        assert self.taps is not None
        taps_BTX = torch.cat([self.taps[tap] for tap in taps], -1)
        return taps_BTX if index_BT is None else pick(taps_BTX, index_BT)

    def rows(self, rows_B: Tensor) -> Features:
        """Select the rows ``rows_B`` (int64) of the batch, in that order."""
        return map_tensors(lambda tensor: tensor[rows_B], self)

    def padded(self, positions: int) -> Features:
        """Right-pad the rows to at least ``positions`` positions."""
        missing = positions - self.tokens_BT.shape[1]
        if missing <= 0:
            return self
        taps = None if self.taps is None else {number: F.pad(tap, (0, 0, 0, missing)) for number, tap in self.taps.items()}
        document_BT = torch.zeros_like(self.tokens_BT) if self.document_BT is None else self.document_BT
        tokens_BT, hidden_BTD = F.pad(self.tokens_BT, (0, missing)), F.pad(self.hidden_BTD, (0, 0, 0, missing))
        return Features(tokens_BT, hidden_BTD, taps, document_BT=F.pad(document_BT, (0, missing), value=-1))

    def split(self, last: int) -> tuple[Features, Features]:
        """Each row's positions before its last ``last``, and the last ones, both right-padded; there are more than ``last`` positions."""
        (B, T), device = self.tokens_BT.shape, self.tokens_BT.device
        lengths_B1, place_BT = self.lengths_B[:, None], torch.arange(T - last, device=device).expand(B, -1)
        before_B1 = (lengths_B1 - last).clamp(min=0)
        place_BN = before_B1 + torch.arange(last, device=device)
        return self.gather(place_BT, place_BT < before_B1), self.gather(place_BN, place_BN < lengths_B1)

    @property
    def lengths_B(self) -> Tensor:
        """Length of each row without padding."""
        if self.document_BT is None:
            return self.tokens_BT.new_full((self.tokens_BT.shape[0],), self.tokens_BT.shape[1])
        return (self.document_BT >= 0).sum(1)

    @property
    def last_B1D(self) -> Tensor:
        """The final hidden state of each row's last token."""
        return pick(self.hidden_BTD, (self.lengths_B - 1).clamp(min=0)[:, None])

    def newer(self, value_B1D: Tensor, before_B1D: Tensor | None) -> Tensor:
        """``value_B1D``, which follows from these features; for rows that have no tokens here ``before_B1D``, if there is one."""
        return value_B1D if before_B1D is None else torch.where(self.lengths_B[:, None, None] > 0, value_B1D, before_B1D)


def stack_rows(parts: Sequence[Features]) -> Features:
    """The rows of several batches as one, right-padded to the longest."""
    lengths = [part.tokens_BT.shape[1] for part in parts]
    if len(parts) == 1:
        return parts[0]
    place_1T = torch.arange(max(lengths), device=parts[0].tokens_BT.device)[None]
    padded = []
    for part, length in zip(parts, lengths, strict=True):
        shape = len(part.tokens_BT), -1
        padded.append(part.gather(place_1T.clamp(max=length - 1).expand(shape), (place_1T < length).expand(shape)))
    columns = zip(*map(list_tensors, padded), strict=True)
    stacked: Features = map_tensors(lambda _: torch.cat(next(columns)), padded[0])
    return stacked


def pick(x_BTD: Tensor, index_BN: Tensor) -> Tensor:
    """Select the positions ``index_BN`` of each row: ``[B, N, D]``."""
    return x_BTD.gather(1, index_BN[..., None].expand(-1, -1, x_BTD.shape[-1]))


def of_parents(roots_B1D: Tensor, nodes_BND: Tensor | None, parents_BN: Tensor) -> Tensor:
    """What the parents of drafted nodes have: the nodes one depth above, or at depth 0 (None) the roots."""
    return roots_B1D.expand(-1, parents_BN.shape[1], -1) if nodes_BND is None else pick(nodes_BND, parents_BN)


def join_features(parts: list[Features]) -> Features:
    """Concatenate the features of consecutive tokens, which may be right-padded; the result is right-padded too."""
    if len(parts) == 1:
        return parts[0]
    taps = None if parts[0].taps is None else {tap: torch.cat([part.taps[tap] for part in parts if part.taps], 1) for tap in parts[0].taps}
    tokens_BT = torch.cat([part.tokens_BT for part in parts], 1)
    valid = [torch.ones_like(part.tokens_BT, dtype=torch.bool) if part.document_BT is None else part.document_BT >= 0 for part in parts]
    valid_BT = torch.cat(valid, 1)  # False at padding
    whole = Features(tokens_BT, torch.cat([part.hidden_BTD for part in parts], 1), taps)
    order_BT = (~valid_BT).to(torch.int8).argsort(dim=1, stable=True)[:, : int(valid_BT.sum(1).max())]
    return whole.gather(order_BT, valid_BT.gather(1, order_BT))


@dataclass(frozen=True)
class Anchors:
    """One draft per anchor: row m drafts ``x_{t+2}, x_{t+3}, ...`` from ``t = position_M[m]`` of row ``row_M[m]``."""

    row_M: Tensor
    position_M: Tensor

    def ascending(self) -> Anchors:
        """Return the anchors sorted by row and position."""
        order_M = self.position_M.argsort(stable=True)
        order_M = order_M[self.row_M[order_M].argsort(stable=True)]
        return Anchors(self.row_M[order_M], self.position_M[order_M])


def at_all_positions(tokens_BT: Tensor) -> Anchors:
    """Anchors at all positions, in row-major order."""
    B, T = tokens_BT.shape
    device = tokens_BT.device
    return Anchors(torch.arange(B, device=device).repeat_interleave(T), torch.arange(T, device=device).repeat(B))


def anchors_by_row(at: Anchors, rows: int) -> tuple[Tensor, Tensor]:
    """Return each anchor's index among those of its row, ``[M]``, and the anchors of each row, ``[B, R]``; -2 where a row has fewer."""
    order_M = at.row_M.argsort(stable=True)
    row_M, rank_M = at.row_M[order_M], torch.empty_like(order_M)
    rank_M[order_M] = torch.arange(len(row_M), device=row_M.device) - torch.searchsorted(row_M, row_M)
    average = -(-len(row_M) // rows)  # memory planning knows no values, only shapes
    most = int(rank_M.max().item()) + 1 if len(row_M) else 1
    anchor_BR = rank_M.new_full((rows, max(most, average)), -2)
    anchor_BR[at.row_M, rank_M] = at.position_M
    return rank_M, anchor_BR


def gather_anchors(dense: list[Tensor], at: Anchors) -> list[Tensor]:
    """Select the anchors' rows from dense results: ``[B, max(T-2-k, 0), D]`` per depth -> ``[M, D]``.

    A depth without a result at an anchor takes another position's, which the objective ignores: shapes stay fixed and every depth
    stays in the autograd graph.
    """
    taken = []
    for hidden_BTD in dense:
        if not hidden_BTD.shape[1]:
            hidden_BTD = torch.nn.functional.pad(hidden_BTD, (0, 0, 0, 1))
        taken.append(hidden_BTD[at.row_M, at.position_M.clamp(max=hidden_BTD.shape[1] - 1)])
    return taken


def dense_from_anchors(forward: Callable[[Anchors], list[Tensor]], tokens_BT: Tensor) -> list[Tensor]:
    """Compute dense results ``[B, max(T-2-k, 0), D]`` with a drafter that only drafts from anchors."""
    B, T = tokens_BT.shape
    at_all = forward(at_all_positions(tokens_BT))
    return [hidden_MD.unflatten(0, (B, T))[:, : max(T - 2 - k, 0)] for k, hidden_MD in enumerate(at_all)]


# Images of a prompt, as the model's own forward pass takes them. transformers' ``generate`` computes positions, and features of images
# where a model lets it (``mm_encoder_outputs``), before it calls heads.

ENCODED, KINDS = "mm_encoder_outputs", "token_type_ids"
"""The argument with features by modality, and the end of the names of those that say which tokens are text."""
PLACEHOLDERS = tuple(f"{what}_token_{how}" for what in ("image", "video", "audio") for how in ("id", "index"))


@dataclass(frozen=True, eq=False)
class Images:
    """What a prompt ``[1, T]`` without padding has beside its tokens."""

    arguments: Mapping[str, Any]
    """Of the model's forward: features or pixels, and kinds of tokens ``[1, T]``."""
    positions_XT: Tensor
    """``[1, T]``, or ``[X, 1, T]`` where the model has several axes."""

    @property
    def offset(self) -> int:
        """The position of the first token after the prompt, less its number."""
        return int(self.positions_XT.reshape(-1)[-1]) + 1 - self.positions_XT.shape[-1]

    def of_text(self, length: int) -> dict[str, Any]:
        """The arguments for ``length`` tokens, the prompt and what was written after it."""
        more = max(length - self.positions_XT.shape[-1], 0)
        after = self.positions_XT[..., -1:] + torch.arange(1, more + 1, device=self.positions_XT.device)
        positions = torch.cat([self.positions_XT, after], -1)[..., :length]
        given: dict[str, Any] = {**self.arguments, "position_ids": positions}
        for name, value in self.arguments.items():
            if name.endswith(KINDS):
                given[name] = torch.cat([value, value.new_zeros(1, more)], 1)[:, :length]
        return given


def with_positions(model: PreTrainedModel, ids_1T: Tensor, arguments: Mapping[str, Any]) -> Images:
    """Return a text's images with the positions that ``generate`` gives it."""
    return Images(arguments, model._prepare_position_ids_for_generation(ids_1T, {**arguments, "attention_mask": torch.ones_like(ids_1T)}))


def placeholders(config: Any) -> dict[str, int]:
    """Return modality -> the token that stands for a feature of it in a prompt, as a model's configuration names it."""
    stated = {name.partition("_")[0]: getattr(config, name, None) for name in reversed(PLACEHOLDERS)}
    return {what: token for what, token in stated.items() if isinstance(token, int)}


def size_of(output: Any) -> int:
    """Return how many numbers the features of an encoder's output are; 0: not known."""
    features = output.get("pooler_output") if isinstance(output, Mapping) else None
    return 0 if features is None else sum(tensor.numel() for tensor in features)


def split_rows(output: Any, counts: Sequence[int]) -> list[Any]:
    """Return an encoder's output for each row, of so many features, in the containers that the model has them in; None: none."""

    def cut(features: Tensor | Sequence[Tensor], row: int) -> Any:
        first = sum(counts[:row])
        own_D = torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in features])[first : first + counts[row]]
        return own_D[None] if isinstance(features, Tensor) else [own_D]

    def of_row(row: int) -> Any:
        layers = output.get("deepstack_features")
        deep = {} if layers is None else {"deepstack_features": [cut(layer, row) for layer in layers]}
        return type(output)(pooler_output=cut(output["pooler_output"], row), **deep)

    return [of_row(row) if count else None for row, count in enumerate(counts)]


def load_processor(path: str, *, trust_remote_code: bool = False) -> ProcessorMixin:
    """Load what turns texts and images into a model's inputs. Raises UserError if there is none, or if a package is missing for it."""
    try:
        with loading("processor", path):
            found = AutoProcessor.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    except UserError as error:
        lacking = [package for package in ("PIL", "torchvision") if find_spec(package) is None]
        more = f"; without {' and '.join(lacking)} some do not load: pip install 'headstart[images]'" if lacking else ""
        raise UserError(f"{error}{more}") from None
    if not isinstance(found, ProcessorMixin) or "image_processor" not in found.get_attributes():
        raise UserError(f"{path} has no settings for images (preprocessor_config.json); give a model that reads them, or leave images out")
    return found


def image_reader(path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> ImageReader:
    """Load what reads images for a model; its tokenizer gets the processor's chat template. Raises UserError if there is none."""
    token = placeholders(load_config(path, trust_remote_code=trust_remote_code)).get("image")
    if token is None or find_gguf(path) is not None:
        raise UserError(f"{path} reads no images; leave them out, or give a model that does")
    from headstart.chat.images import ImageReader  # here, since few need it

    processor = load_processor(path, trust_remote_code=trust_remote_code)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template  # the tokenizer's own may know no images
    return ImageReader(processor, token)
