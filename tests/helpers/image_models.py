"""Tiny random models that read images, and prompts for them as their processors write them.

An image is 32 by 32 pixels, or 32 by 64 where a model takes any size, of which every 16 by 16 become one token.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chat_templates import make_tokenizer
from families import texts
from shrink import WIDTH, published, shrink
from tiny_models import CHANGES, CONFIG_MAPPING, Fields, built, merged, small
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headstart.heads.backbone.backbone import Backbone

IMAGE, START, END, LAST = 60, 59, 58, 55
"""Tokens: of an image's features, before and after them; the last of text."""
TOKENS: Fields = {
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": 57, "audio_token_id": 56,
    "vision_start_token_id": START, "vision_end_token_id": END, "boi_token_index": START, "eoi_token_index": END,
    "boi_token_id": START, "eoi_token_id": END,
}  # fmt: skip
QWEN: Fields = {"depth": 1, "patch_size": 8, "hidden_size": 32, "num_heads": 4, "out_hidden_size": WIDTH}
SIGLIP: Fields = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 1}
POOLED: Fields = {"patch_size": 8, "pooling_kernel_size": 2}
UNTIED: Fields = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}


def of_class(kind: str, vision: Fields) -> Fields:
    """The fields of a class's default configuration made small."""
    return merged(merged(small(CONFIG_MAPPING[kind]().to_dict()), CHANGES.get(kind, {})), {"vision_config": vision})


FAMILIES: dict[str, Any] = {
    "qwen2.5-vl": lambda: of_class("qwen2_5_vl", QWEN | {"fullatt_block_indexes": [0]}),
    "qwen3-vl": lambda: of_class("qwen3_vl", QWEN | {"deepstack_visual_indexes": [0]}),
    "qwen3.5": lambda: merged(shrink(published("qwen3.5-4b")), {"vision_config": QWEN}),
    "gemma3": lambda: merged(shrink(published("gemma-3-4b-it")), {"vision_config": SIGLIP} | UNTIED),
    "gemma4": lambda: merged(shrink(published("gemma-4-31b-it")), {"vision_config": POOLED} | UNTIED),
    "gemma4-e": lambda: merged(shrink(published("gemma-4-e4b-it")), {"vision_config": POOLED} | UNTIED),
    "smolvlm": lambda: merged(of_class("smolvlm", SIGLIP | {"patch_size": 4}), {"scale_factor": 4}),  # 5.20 asks for patch_size tokens
    "idefics3": lambda: of_class("idefics3", SIGLIP),
}


def image_model(family: str) -> PreTrainedModel:
    fields = FAMILIES[family]()
    return built(fields | {name: token for name, token in TOKENS.items() if name in fields}, AutoModelForImageTextToText)


@functools.cache
def image_backbone(family: str) -> Backbone:
    """The session's shared one; tests must not modify it."""
    return Backbone(image_model(family))


@dataclass(frozen=True)
class Picture:
    """An image of random pixels. ``wide``: of twice the width, where a model takes any size."""

    seed: int
    wide: bool = False

    def pixels(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(1000 + self.seed))


def prompt_of(family: str, parts: Sequence[int | Picture], seed: int = 0) -> dict[str, Tensor]:
    """The inputs of a prompt ``[1, T]`` of pictures and so many tokens of text each."""
    pictures = [part for part in parts if isinstance(part, Picture)]
    anysize = family.startswith("qwen")
    tokens: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, Picture):
            tokens += [START, *[IMAGE] * (8 if part.wide and anysize else 4), END]
        else:
            tokens += texts(1, part, seed * 100 + place)[0].clamp(max=LAST).tolist()
    ids = torch.tensor([tokens])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    kinds = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    if not family.startswith(("smolvlm", "idefics3")):
        inputs[kinds] = (ids == IMAGE).long()
    if not pictures:
        return inputs
    if anysize:
        grids = [[1, 4, 8 if picture.wide else 4] for picture in pictures]
        patches = [picture.pixels(grid[1] * grid[2], 3 * 2 * 8 * 8) for picture, grid in zip(pictures, grids, strict=True)]
        return inputs | {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    if family.startswith("gemma4"):
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
        pixels = torch.stack([picture.pixels(16, 3 * 8 * 8) for picture in pictures])
        return inputs | {"pixel_values": pixels, "image_position_ids": places.expand(len(pictures), 16, 2).clone()}
    pixels = torch.stack([picture.pixels(3, 32, 32) for picture in pictures])
    if family == "gemma3":
        return inputs | {"pixel_values": pixels}
    return inputs | {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, len(pictures), 32, 32, dtype=torch.long)}


def batch_of(prompts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Prompts as one batch, padded on the left, as processors write it."""
    length, batch = max(one["input_ids"].shape[1] for one in prompts), dict[str, Tensor]()
    for name in dict.fromkeys(name for one in prompts for name in one):
        values = [one[name] for one in prompts if name in one]
        if name in prompts[0] and prompts[0][name].shape == prompts[0]["input_ids"].shape:
            values = [pad(value, (length - value.shape[1], 0)) for value in values]
        if name.startswith("pixel") and any("pixel_attention_mask" in one for one in prompts):  # Idefics-3 pads the number of images
            most, none = max(value.shape[1] for value in values), torch.zeros_like(values[0][:, :0])
            values = [pad(one.get(name, none), (0, 0) * (none.ndim - 2) + (0, most - one.get(name, none).shape[1])) for one in prompts]
        batch[name] = torch.cat(values)
    return batch


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{{ '<boi>' if part['type'] == 'image' else part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of messages in parts alone, as Idefics-3's."""


def make_image_model(folder: Path, family: str = "gemma3") -> ProcessorMixin:
    """Write a random model of 384 positions with its tokenizer, and Gemma-3 with its processor, which is returned."""
    tokenizer = make_tokenizer(TEMPLATE, special="<|im_start|> <|im_end|> <image> <boi> <eoi> <video>")
    named = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    named |= dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<video>")
    tokenizer._set_model_specific_special_tokens(named)
    processor = processor_of(family, tokenizer)
    names = {IMAGE: "<image>", START: "<boi>", END: "<eoi>"}
    ids = {name: tokenizer.convert_tokens_to_ids(names.get(token, "<video>")) for name, token in TOKENS.items()}
    fields = FAMILIES[family]()
    fields |= {name: token for name, token in ids.items() if name in fields}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 384, "pad_token_id": 0}
    model = built(merged(fields, {"text_config": text}), AutoModelForImageTextToText)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family == "gemma3":
        processor.save_pretrained(folder)
    return processor


def without_videos(kind: Any) -> Any:
    """A class of processors without their videos, which torchvision reads."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *arguments: None})


def processor_of(family: str, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    if family.startswith("qwen"):
        tokenizer.chat_template = TEMPLATE.replace("'<boi>'", "'<boi><image><eoi>'")
        images = Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64})
        kind = transformers.Qwen2_5_VLProcessor if family == "qwen2.5-vl" else transformers.Qwen3VLProcessor
        return without_videos(kind)(images, tokenizer, None)
    if family.startswith("gemma4"):
        tokenizer.chat_template, tokenizer.pad_token = TEMPLATE.replace("<boi>", "<image>"), "</s>"
        pytest.importorskip("transformers.models.gemma4.processing_gemma4", exc_type=ImportError)  # with 5.20 it needs torchvision
        images = Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)
        return without_videos(transformers.Gemma4Processor)(None, images, tokenizer, None)
    if family == "gemma3":
        return transformers.Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), tokenizer, image_seq_length=4)
    tokenizer.chat_template = TEMPLATE.replace("<boi>", "<image>")
    side = {"longest_edge": 32}
    return transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False), tokenizer, image_seq_len=4
    )


# A model of each of transformers' image-text classes, and prompts with one image or two. What a class takes is guessed from its arguments:
# an image of random pixels in each of the usual forms, until one is read.

TILES: Fields = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
TOWERS: dict[str, Fields] = {
    "aria": {"projector_patch_to_query_dict": {4: 4}},
    "exaone4_5": {"vision_config": {"num_key_value_heads": 4}},
    "gemma3": {"mm_tokens_per_image": 4, "vision_config": {"image_size": 32}},
    "gemma4": {"vision_config": {"pooling_kernel_size": 2}},
    "lighton_ocr": {"vision_config": {"head_dim": 8}},
    "llava_next": TILES,
    "llava_next_video": TILES,
    "llava_onevision": TILES,
    "mistral3": {"vision_config": {"head_dim": 8}},
    "mistral_large4": {"vision_config": {"head_dim": 8}},
    "paligemma": {"projection_dim": 32, "vision_config": {"projection_dim": 32}},
    "shieldgemma2": {"mm_tokens_per_image": 4, "vision_config": {"image_size": 32}},
    "vipllava": {"vision_feature_layers": [-1]},
}
"""Model type -> fields of what reads images that its class needs otherwise."""


def image_text_model(kind: str) -> PreTrainedModel:
    """A model of the type ``kind`` whose tokens of images are in its vocabulary."""
    fields = merged(merged(small(CONFIG_MAPPING[kind]().to_dict()), CHANGES.get(kind, {})), TOWERS.get(kind, {}))
    return built(with_tokens(fields), AutoModelForImageTextToText)


def with_tokens(fields: Fields) -> Fields:
    known = {name: token for name, token in TOKENS.items() if fields.get(name) is not None}
    return fields | known | {name: with_tokens(value) for name, value in fields.items() if isinstance(value, dict)}


def forms(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """An image in every form that the arguments of the model's forward allow, the pixels in [0, 1]."""
    names, vision = inspect.signature(model.forward).parameters, getattr(model.config, "vision_config", None)

    def stated(*fields: str, otherwise: int) -> int:
        found = (getattr(vision, field, None) for field in fields)
        return next((value for value in found if isinstance(value, int) and value), otherwise)

    patch, channels = stated("patch_size", otherwise=8), stated("in_channels", "in_chans", "num_channels", otherwise=3)
    if "image_grid_thw" in names:
        merge = stated("spatial_merge_size", "merge_size", otherwise=2)
        grid = torch.tensor([[1, merge, merge]])
        for frames in dict.fromkeys((stated("temporal_patch_size", otherwise=1), 2)):
            yield {"pixel_values": torch.rand(merge**2, channels * frames * patch**2), "image_grid_thw": grid}
        yield {"pixel_values": torch.rand(merge**2, channels, patch, patch), "image_grid_thw": grid}
    elif "image_position_ids" in names:
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)[None]
        yield {"pixel_values": torch.rand(1, 16, channels * patch**2), "image_position_ids": places}
    elif "spatial_shapes" in names:
        shape, mask = torch.tensor([[4, 4]]), torch.ones(1, 16, dtype=torch.long)
        yield {"pixel_values": torch.rand(1, 16, channels * patch**2), "spatial_shapes": shape, "pixel_attention_mask": mask}
    else:
        for side in dict.fromkeys((stated("image_size", otherwise=16), 4 * patch)):
            sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in names else {}
            masks = {"pixel_attention_mask": torch.ones(1, 1, side, side, dtype=torch.long)} if "pixel_attention_mask" in names else {}
            for tiles, more in (((1,), masks), ((), {}), ((), sizes), ((3,), sizes)):
                if more or not tiles:
                    yield {"pixel_values": torch.rand(1, *tiles, channels, side, side), **more}


def image_prompts(model: PreTrainedModel, how: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Two prompts ``[1, T]`` of equal length, an image in each, that ``generate`` reads. Raises the first error if no form is read."""
    names = {*inspect.signature(model.forward).parameters, *inspect.signature(model.prepare_inputs_for_generation).parameters}
    get, first = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None), None
    if get is None:
        raise ValueError("no get_image_features")
    torch.manual_seed(1)
    for form in forms(model):
        try:
            with torch.no_grad():
                output = get(**form)
            found = output.get("pooler_output") if isinstance(output, dict) else output
            count = sum(one.numel() // one.shape[-1] for one in found)
            asked = []
            for seed in range(2):
                before, after = (texts(1, length, 10 * seed + length)[0].clamp(max=LAST) for length in (3, 4))
                ids = torch.cat([before, torch.tensor([START, *[IMAGE] * count, END]), after])[None]
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | form
                inputs |= {name: (ids == IMAGE).long() for name in ("mm_token_type_ids", "token_type_ids") if name in names}
                asked.append(inputs | {"pixel_values": torch.rand_like(form["pixel_values"])})
                model.generate(**asked[-1], **how)
            return asked
        except Exception as error:  # whatever a class raises for another form than its own
            first = first or error
    assert first is not None
    raise first
