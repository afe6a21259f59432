"""Images of a prompt, as the model's own forward pass takes them.

transformers' ``generate`` computes positions, and features of images where a model lets it (``mm_encoder_outputs``), before it calls heads.

Shape suffixes: B batch, T positions, X axes of positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config, loading
from headstart.support.errors import UserError
from headstart.support.hub import resolve

if TYPE_CHECKING:
    from headstart.chat.images import ImageReader

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
