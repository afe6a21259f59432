"""A tiny random model of each of transformers' image-text classes with the part that reads images, and prompts with one image or two.

What a class takes is guessed from its arguments: an image of random pixels in each of the usual forms, until one is read.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from families import texts
from image_models import END, IMAGE, LAST, START, TOKENS
from tiny_models import CHANGES, CONFIG_MAPPING, Fields, built, merged, small
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

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
