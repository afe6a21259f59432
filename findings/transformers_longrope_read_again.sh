#!/usr/bin/env bash
# transformers 5.23.0: with LongRoPE, `generate` reads a text again when it grows past its original length for Phi-3 alone, not for Llama.
#
# LongRoPE has other rotary frequencies beyond `original_max_position_embeddings`, so keys that were cached before have the wrong ones. Phi-3's
# `prepare_inputs_for_generation` drops the cache there. Other classes take the same `rope_type` and switch the frequencies of new tokens, but
# go on with the keys of the old ones: what they generate is not what the model says of that text without a cache.
#
# Seen on 2026-11-30 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: tiny random models, fp32:
#   Phi3: tokens past the original length are those of a pass without a cache: True
#   Llama: tokens past the original length are those of a pass without a cache: False
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
import transformers

logging.disable(logging.WARNING)
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0,
    "original_max_position_embeddings": 24,
}
SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 96, "original_max_position_embeddings": 24, "rope_parameters": ROPE, "pad_token_id": 0, "eos_token_id": None,
}
found = []
for name in ("Phi3", "Llama"):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES)).eval()
    for weight in model.parameters():
        weight.data.mul_(8.0 if weight.ndim > 1 else 1.0)
    same = []
    for seed in range(8):
        text = torch.randint(1, 256, (1, 16), generator=torch.Generator().manual_seed(seed))
        longer = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=32, do_sample=False)
        with torch.no_grad():
            picked = model(longer, use_cache=False).logits.argmax(-1)
        same.append(bool(torch.equal(longer[:, 26:], picked[:, 25:-1])))
    found.append(all(same))
    print(f"{name}: tokens past the original length are those of a pass without a cache: {found[-1]}")
sys.exit(found != [True, False])
PY
