"""Prompts with images, as a model's processor writes them: ``headstart generate --image FILE``.

Images are local files or data: URLs; nothing is fetched. They stand before the text of a conversation's first question.

Shape suffix: T positions.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from headstart.chat.messages import ASSISTANT, Message
from headstart.chat.prompts import Prompter
from headstart.chat.template import TemplateRefusal
from headstart.support.errors import UserError, cause
from headstart.support.files import require_file


def read_image(name: str) -> Any:
    """Read an image, as RGB. Raises UserError for what is missing, remote or no image."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("--image needs Pillow: pip install 'headstart[images]'") from None
    inline = name.startswith("data:")
    if "://" in name and not inline:
        raise UserError(f"--image {name}: nothing is fetched; save it, and give the file")
    file = None if inline else require_file("--image", name)
    try:
        held = base64.b64decode(name.partition("base64,")[2], validate=True) if file is None else file.read_bytes()
        return Image.open(BytesIO(held)).convert("RGB")
    except Exception as error:  # what Pillow raises depends on the format and on the damage
        why = "Pillow knows no such format" if isinstance(error, UnidentifiedImageError) else cause(error)
        raise UserError(f"--image {name[:60]} cannot be read as an image ({why}); give a PNG or JPEG file") from None


@dataclass(frozen=True)
class ImagePrompter(Prompter):
    """Prompts in which the images stand before the first question; without a template, where the text has places for them."""

    processor: Any = None
    images: tuple[Any, ...] = ()

    def begin(self, text: str) -> Tensor:
        return self._inputs(text, True)["input_ids"][0]

    def converse(self, messages: Sequence[Message], tools: Any = None) -> Tensor:
        return self._inputs(self._rendered(messages, tools), False)["input_ids"][0]

    def answered(self, messages: Sequence[Message], answer_T: Tensor) -> Message:
        return {"role": ASSISTANT, "content": self.tokenizer.decode(answer_T, skip_special_tokens=True)}

    def beside(self, ids_T: Tensor, device: torch.device) -> dict[str, Tensor]:
        ids_1T, given = self._example["input_ids"], {}
        for name, value in self._example.items():
            kinds = value.shape == ids_1T.shape  # which tokens are of images
            given[name] = torch.isin(ids_T, ids_1T[value != 0])[None].to(value.dtype) if kinds else value
        return {name: value.to(device) for name, value in given.items() if name not in ("input_ids", "attention_mask")}

    @cached_property
    def _example(self) -> dict[str, Tensor]:
        """A prompt of the images and no text."""
        nothing = self._rendered([{"role": "user", "content": ""}]) if self.templated else self.processor.image_token * len(self.images)
        return self._inputs(nothing, False)

    def _rendered(self, messages: Sequence[Message], tools: Any = None) -> str:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        parts = [[{"type": "text", "text": message["content"]}] for message in messages]  # some templates take no plain text
        parts[first] = [{"type": "image"}] * len(self.images) + parts[first]
        whole = [message | {"content": part} for message, part in zip(messages, parts, strict=True)]
        try:
            return self.conversations.template.render(whole, tools, ask=True).text
        except TemplateRefusal as refusal:
            raise UserError(f"the chat template refuses the conversation with images: {refusal}; change it, or give --raw") from None

    def _inputs(self, text: str, special: bool) -> dict[str, Tensor]:
        """The processor's. Raises UserError where the text has not a place for each image."""
        place: str | None = getattr(self.processor, "image_token", None)
        if place is not None and (places := text.count(place)) != len(self.images):
            raise UserError(f"the prompt has {places} places for images ({place}), --image gives {len(self.images)}; give as many")
        try:
            given = self.processor(images=list(self.images), text=[text], add_special_tokens=special, return_tensors="pt")
        except Exception as error:  # processors raise what they like for texts without places, or with others
            raise UserError(f"the model's processor does not take {len(self.images)} images in this text: {cause(error)}") from None
        return dict(given)
