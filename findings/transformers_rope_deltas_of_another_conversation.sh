#!/usr/bin/env bash
# transformers 5.23.0: a conversation about an image that goes on from its cache gets the positions of whatever the model read last.
#
# Qwen2-VL and its kin (Qwen2.5-VL, Qwen3-VL, Qwen3.5 ...) count fewer positions than tokens for an image. The difference, `rope_deltas`, is
# kept on the model by `generate` and not in the cache. With two conversations at a time, each with a cache of its own, the second turn of the
# first one is read at the positions of the other: another text, without a word.
#
# Seen on 2026-11-29 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: a tiny random Qwen2.5-VL, fp32, greedy:
#   second turn, alone: as the whole conversation read at once: True
#   second turn, after a text of another conversation: as the whole conversation read at once: False
#
# Exits 0 as long as that is so, and 1 once it changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import logging
import sys

import torch
from transformers import DynamicCache, GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

logging.disable(logging.WARNING)
IMAGE = 60
text = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}
vision = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8, "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}
torch.manual_seed(0)
config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62)
model = Qwen2_5_VLForConditionalGeneration(config).eval()
for weight in model.parameters():
    weight.data.mul_(8.0 if weight.ndim > 1 else 1.0)
model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=None, eos_token_id=None)
HOW = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [60, 61, 62]}


def inputs(ids, image):
    """What a processor writes for a prompt: the image has 4 by 8 patches, which are 8 tokens and 4 positions."""
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    pixels = torch.rand(32, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(1))
    return given | ({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]])} if image else {})


first = torch.tensor([[3, 4, *[IMAGE] * 8, 5, 6]])
found = []
for between in (False, True):
    cache = DynamicCache(config=model.config)
    said = model.generate(**inputs(first, True), past_key_values=cache, **HOW)
    second = torch.cat([said, torch.tensor([[7, 8, 9]])], 1)
    if between:
        other = torch.arange(10, 20)[None]
        model.generate(input_ids=other, attention_mask=torch.ones_like(other), past_key_values=DynamicCache(config=model.config), **HOW)
    goes_on = model.generate(**inputs(second, False), past_key_values=cache, **HOW)
    found.append(torch.equal(goes_on, model.generate(**inputs(second, True), **HOW)))
    after = "after a text of another conversation" if between else "alone"
    print(f"second turn, {after}: as the whole conversation read at once: {found[-1]}")
sys.exit(found != [True, False])
PY
