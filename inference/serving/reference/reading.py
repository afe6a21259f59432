"""What a folder says its heads are, in one form for all formats, and the interface of the methods that draft with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from headstart.inference.serving.reference.files import Files
from headstart.inference.serving.reference.layer import LayerShape
from headstart.inference.serving.reference.target import Target, Text
from headstart.support.errors import UserError

NextToken = Callable[[int], Tensor]
"""The logits ``[V]`` of the token that follows the one given; called with the root, then with each token drafted."""
VOCABULARY = ("d2t", "t2d")


@dataclass(frozen=True)
class Reading:
    """Heads as read from a folder. Tensors are in fp32 under one name, whatever the format calls them."""

    method: str
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    """The shape that each tensor should have, by the configuration."""
    taps: tuple[int, ...] = ()
    """The layers read, as the residual stream after so many layers; empty: the final hidden state."""
    layer: LayerShape | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the method alone has, such as ``norm_output``."""
    optional: frozenset[str] = frozenset()
    """Names among ``shapes`` that may be absent."""
    remarks: tuple[str, ...] = ()
    """Contradictions found while reading, in words: some engine reads other heads than these."""
    notes: tuple[str, ...] = ()
    """What some engine does not have, in words."""

    @property
    def faults(self) -> list[str]:
        """Name the tensors that are missing, unexpected or misshapen."""
        missing = sorted(set(self.shapes) - set(self.tensors) - self.optional)
        extra = sorted(set(self.tensors) - set(self.shapes))
        skipped = "half-written, or left out by the exporter; engines keep random values there"
        faults = [f"tensor {name} is missing: {skipped}" for name in missing]
        faults += [f"tensor {name} is not expected" for name in extra]
        for name in sorted(set(self.shapes) & set(self.tensors)):
            found, wanted = tuple(self.tensors[name].shape), self.shapes[name]
            if found != wanted:
                turned = ": it is transposed" if found == wanted[::-1] else ""
                faults.append(f"tensor {name} is {list(found)}, by the configuration it is {list(wanted)}{turned}")
        return faults

    @property
    def vocabulary(self) -> Tensor | None:
        """The backbone's token of each drafted one, int64 ``[DV]``, from ``d2t`` as offsets; None: the whole vocabulary."""
        offsets = self.tensors.get("d2t")
        return None if offsets is None else offsets.long() + torch.arange(len(offsets))

    def widened(self, logits_DV: Tensor, vocab: int) -> Tensor:
        """Return logits over the backbone's vocabulary, -inf for tokens that are not drafted.

        Without d2t, draft token i is token i, which is what engines take it for; offsets that lead outside the vocabulary are cut off.
        """
        tokens = self.vocabulary
        tokens = torch.arange(len(logits_DV)) if tokens is None else tokens.clamp(0, vocab - 1)
        whole_V = logits_DV.new_full((max(vocab, len(logits_DV)),), -torch.inf)
        return whole_V.scatter_reduce(0, tokens[: len(logits_DV)], logits_DV[: len(tokens)], "amax")[:vocab]


class Drafting(ABC):
    """Drafting after any prefix of one text. A method is one subclass, in a module of its own."""

    method: ClassVar[str]

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        self.reading, self.target, self.text, self.tensors = reading, target, text, reading.tensors

    @classmethod
    @abstractmethod
    def recognises(cls, files: Files) -> bool:
        """Return whether a folder holds heads of this method."""

    @classmethod
    @abstractmethod
    def read(cls, files: Files, target: Target) -> Reading:
        """Read the folder as the engines do. Raises UserError for what is not read here, DamagedError for damaged files."""

    @abstractmethod
    def after(self, position: int) -> NextToken:
        """Return the draft after the first ``position`` tokens, the last of which is the root: the backbone has read those before it."""

    @property
    def max_depth(self) -> int | None:
        """The most tokens that can be drafted; None: any number."""
        return None

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The embeddings of tokens: the heads' own where they have some, otherwise the backbone's."""
        own = self.tensors.get("embed_tokens.weight")
        return self.target.embed(tokens_T) if own is None else own[tokens_T]

    def shared_logits(self, hidden: Tensor) -> Tensor:
        """Logits by the heads' own output layer where they have one, otherwise by the backbone's."""
        own = self.tensors.get("lm_head.weight")
        return self.target.logits(hidden) if own is None else torch.nn.functional.linear(hidden, own)


def load(files: Files, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the tensors ``{new name: name in the file}``, in fp32 but for integers and booleans."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in files.read(names).items()}


def vocabulary_shapes(draft_vocab: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a draft vocabulary."""
    return {"d2t": (draft_vocab,), "t2d": (vocab,)} if draft_vocab < vocab else {}


def whole_number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a count of the configuration. Raises UserError if it is absent or none."""
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json states {name} as {value!r}, which is a whole number of at least 1; export the heads again")
    return value
