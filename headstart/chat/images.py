"""Prompts with images, as a model's processor writes them: of ``headstart generate --image FILE``, and of rows of training data.

Images are local files or data: URLs; nothing is fetched.

Shape suffix: T positions.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedTokenizerBase

from headstart.chat.conversation import Chat, begins_twice
from headstart.chat.messages import ASSISTANT, MARKS, Message, image_parts
from headstart.chat.prompts import Prompter
from headstart.chat.template import ChatSettings, Template, TemplateRefusal
from headstart.support.errors import UserError, cause
from headstart.support.files import require_file, value_hash


def shown(name: str) -> str:
    """Return a name for a line: of a data: URL the beginning."""
    return name[:60] if name.startswith("data:") else name


def read_image(name: str, what: str = "--image") -> tuple[Any, str]:
    """Read an image, as RGB, and hash its file. Raises UserError, which begins with ``what``, for what is missing, remote or no image."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise UserError(f"{what} needs Pillow: pip install 'headstart[images]'") from None
    inline = name.startswith("data:")
    if "://" in name and not inline:
        raise UserError(f"{what} {name}: nothing is fetched; save it, and give the file")
    file = None if inline else require_file(what, name)
    try:
        held = base64.b64decode(name.partition("base64,")[2], validate=True) if file is None else file.read_bytes()
        # Photographs upright, as transformers' processors read them.
        return ImageOps.exif_transpose(Image.open(BytesIO(held))).convert("RGB"), hashlib.sha256(held).hexdigest()
    except Exception as error:  # what Pillow raises depends on the format and on the damage
        why = "Pillow knows no such format" if isinstance(error, UnidentifiedImageError) else cause(error)
        raise UserError(f"{what} {shown(name)} cannot be read as an image ({why}); give a PNG or JPEG file") from None


def inline(name: str, what: str) -> str:
    """Return an image as a data: URL. Raises UserError as `read_image` does."""
    read_image(name, what)
    data = "" if name.startswith("data:") else base64.b64encode(require_file(what, name).read_bytes()).decode()
    return f"data:{mimetypes.guess_type(name)[0] or 'image/png'};base64,{data}" if data else name


@dataclass(frozen=True)
class ImageFile:
    """An image of a row."""

    name: str
    reader: ImageReader = field(repr=False)
    digest: str
    """Hash of the file and of the processor's settings."""
    size: tuple[int, int]
    """Width and height in pixels."""
    tokens: int
    """That stand for its features."""
    place: tuple[int, int] = (0, 0)
    """In a sample, of the first of them and after the last."""


class ImageReader:
    """A model's processor: prompts of text and images to tokens, and images to what the model reads."""

    def __init__(self, processor: Any, token: int) -> None:
        """``token``: stands for a feature of an image. Raises UserError for a processor that names no place of images."""
        self.processor, self.token, self.place = processor, token, str(getattr(processor, "image_token", None) or "")
        if not self.place:
            raise UserError(f"{type(processor).__name__} does not say how a text names an image (image_token); leave images out")
        self._settings = value_hash(processor.image_processor.to_dict())

    def read(self, messages: Sequence[Message], where: str) -> list[tuple[Any, ImageFile]]:
        """Read the images of turns and count their tokens. Raises UserError, which begins with ``where``."""
        found = []
        for name, (image, digest) in [(part["image"], read_image(part["image"], f"{where}: image")) for part in image_parts(messages)]:
            tokens = self.inputs(self.place, [image], where)["input_ids"][0].tolist().count(self.token)
            found.append((image, ImageFile(name, self, value_hash([digest, self._settings]), image.size, tokens)))
        return found

    def inputs(self, text: str, images: Sequence[Any], what: str, special: bool = False) -> dict[str, Tensor]:
        """Return what the processor makes of a prompt. Raises UserError, which begins with ``what``."""
        if (places := text.count(self.place)) != len(images):
            raise UserError(f"{what}: the prompt has {places} places for images ({self.place}), and {len(images)} are given; give as many")
        try:
            return dict(self.processor(images=list(images) or None, text=[text], add_special_tokens=special, return_tensors="pt"))
        except Exception as error:  # processors raise what they like for images that do not fit
            raise UserError(f"{what}: the model's processor does not take {len(images)} images in this text: {cause(error)}") from None

    def beside(self, files: Sequence[ImageFile], ids_T: Tensor) -> dict[str, Tensor]:
        """Return `arguments` of images that are read again. Raises UserError for a file that has changed since its row was read."""
        found = [read_image(file.name, "image") for file in files]
        for file, (_, digest) in zip(files, found, strict=True):
            if file.digest != value_hash([digest, self._settings]):
                raise UserError(f"image {shown(file.name)} has changed since its row was read; restore it, or begin anew")
        return self.arguments([image for image, _ in found], ids_T)

    def arguments(self, images: Sequence[Any], ids_T: Tensor) -> dict[str, Tensor]:
        """Return what the model reads beside a text's tokens: pixels, and which tokens are of images."""
        example, given = self.inputs(self.place * len(images), images, "images"), {}
        ids_1T = example["input_ids"]
        for name, value in example.items():
            kinds = value.shape == ids_1T.shape
            given[name] = torch.isin(ids_T, ids_1T[value != 0].to(ids_T.device))[None].to(value.dtype) if kinds else value.to(ids_T.device)
        return {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}

    def find(self, ids: Sequence[int], files: Sequence[ImageFile], where: str) -> tuple[ImageFile, ...]:
        """Return the images of a text, the first of these, with their places. Raises UserError for tokens of others."""
        places, found = [place for place, token in enumerate(ids) if token == self.token], []
        for file in files:
            if own := places[: file.tokens]:
                found.append(replace(file, place=(own[0], own[-1] + 1)))
            places = places[file.tokens :]
        if places:
            raise UserError(f"{where} has {len(places)} more tokens of images than its images give; give parts {{'type': 'image'}} instead")
        return tuple(found)


def as_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose text is a list of parts, since some templates take no plain text."""
    return [
        message | {"content": [{"type": "text", "text": text}]} if isinstance(text := message["content"], str) else message
        for message in messages
    ]


def for_server(messages: Sequence[Message], where: str) -> list[Message]:
    """Return messages, without marks, with their images as OpenAI's API takes them. Raises UserError, which begins with ``where``."""
    sent = copy.deepcopy([{key: value for key, value in message.items() if key not in MARKS} for message in messages])
    for part in image_parts(sent):
        part |= {"type": "image_url", "image_url": {"url": inline(part.pop("image"), f"{where}: image")}}
    return sent


class PartsTemplate(Template):
    def plain(self, messages: Sequence[Message], tools: Any = None) -> list[Message]:
        return as_parts(super().plain(messages, tools))


class ImageChat(Chat):
    """The chat template where turns have images, which the processor reads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ChatSettings, reader: ImageReader) -> None:
        super().__init__(tokenizer, settings)
        self.template, self.reader, self.where = PartsTemplate(tokenizer, settings), reader, ""
        self.images: list[tuple[Any, ImageFile]] = []

    def of(self, messages: Sequence[Message], where: str) -> ImageChat:
        """Return the same for a conversation whose images are read. Raises UserError, which begins with ``where``."""
        chat = copy.copy(self)
        chat.ending, chat.where, chat.images = self.ending, where, self.reader.read(messages, where)
        return chat

    def find(self, tokens: Sequence[int]) -> tuple[ImageFile, ...]:
        return self.reader.find(tokens, [file for _, file in self.images], self.where)

    def applied(self, messages: Sequence[Message], tools: Any, **how: bool) -> Any:
        return self.asked([(super().applied(messages, tools, tokenize=False), len(image_parts(messages)))])[0]

    def asked(self, prompts: Sequence[tuple[str, int]]) -> list[list[int]]:
        images = [image for image, _ in self.images]
        return [self.reader.inputs(text, images[:count], self.where)["input_ids"][0].tolist() for text, count in prompts]


def make_chat(tokenizer: PreTrainedTokenizerBase, settings: ChatSettings, reader: ImageReader | None) -> Chat:
    """Return the chat template, with images if there is what reads them."""
    return Chat(tokenizer, settings) if reader is None else ImageChat(tokenizer, settings, reader)


@dataclass(frozen=True)
class ImagePrompter(Prompter):
    """Prompts in which the images stand before the first question; without a template, where the text has places for them.

    ``with_images``: prompts of rows with images of their own, instead.
    """

    images: tuple[Any, ...] = ()
    reader: ImageReader = field(kw_only=True)
    of_rows: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, init=False)
    """The images of rows, by the tensors of their prompts: those with other images may have the same tokens."""

    def begin(self, text: str) -> Tensor:
        ids_T = self._ids(text, True)
        return ids_T[begins_twice(self.tokenizer, ids_T[:2].tolist()) :]

    def converse(self, messages: Sequence[Message], tools: Any = None) -> Tensor:
        try:
            if self.with_images:
                return self._of_row(messages, tools)
            first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
            whole = as_parts(messages)
            whole[first] = whole[first] | {"content": [{"type": "image"}] * len(self.images) + whole[first]["content"]}
            return self._ids(self.conversations.template.render(whole, tools, ask=True).text, False)
        except TemplateRefusal as refusal:
            otherwise = "leave it out" if self.with_images else "give --raw"
            raise UserError(f"the chat template refuses the conversation with images: {refusal}; change it, or {otherwise}") from None

    def answered(self, messages: Sequence[Message], answer_T: Tensor) -> Message:
        return {"role": ASSISTANT, "content": self.tokenizer.decode(answer_T, skip_special_tokens=True)}

    def beside(self, ids_T: Tensor, device: torch.device) -> dict[str, Tensor]:
        images = self.of_rows.get(ids_T, ()) if self.with_images else self.images
        return self.reader.arguments(images, ids_T.to(device)) if images else {}

    def _of_row(self, messages: Sequence[Message], tools: Any) -> Tensor:
        chat = ImageChat(self.tokenizer, self.settings, self.reader).of(messages, "the prompt")
        chat.find(ids := chat.prompt(messages, tools))
        self.of_rows[ids_T := torch.tensor(ids)] = [image for image, _ in chat.images]
        return ids_T

    def _ids(self, text: str, special: bool) -> Tensor:
        return self.reader.inputs(text, self.images, "--image", special)["input_ids"][0]
