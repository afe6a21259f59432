#!/usr/bin/env bash
# transformers 5.23.0: Nemotron-H and Zamba2 compute a token otherwise in a pass of several tokens than in a pass of its own.
#
# Their Mamba-2 layers raise the time step to config.time_step_min (0.001) in passes of several tokens, and leave it as it is in passes of
# one token, by which `generate` decodes. Where a head's time step is smaller, the same token after the same cache has other hidden states,
# by far more than rounding. Whoever verifies several tokens at once gets another text. Bamba's layers have no such bound, and are equal.
#
# Seen on 2026-11-28 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: tiny random models, fp32, bias of the time step -9:
#   NemotronH: one token at a time and four at once differ by more than a thousandth: True
#   Zamba2: one token at a time and four at once differ by more than a thousandth: True
#   Bamba: one token at a time and four at once differ by more than a thousandth: False
#
# Exits 0 as long as that is so, and 1 once it changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import copy
import logging
import sys

import torch
import transformers

logging.disable(logging.WARNING)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
MODELS = {
    "NemotronH": {"layers_block_type": ["mamba", "attention"], "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
                  "n_groups": 1, "chunk_size": 16},
    "Zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "mamba_headdim": 8,
               "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 1, "attention_hidden_size": 64, "attention_head_dim": 16},
    "Bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
              "mamba_n_groups": 1, "mamba_expand": 2},
}
tokens, place, found = torch.arange(1, 21)[None], torch.arange(20)[None], []
for name, changes in MODELS.items():
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **changes)).eval()
    for key, weight in model.named_parameters():
        weight.data.fill_(-9.0) if key.endswith("dt_bias") else weight.data.mul_(25.0 if weight.ndim > 1 else 1.0)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(tokens[:, :16], position_ids=place[:, :16], past_key_values=cache, use_cache=True)
        other = copy.deepcopy(cache)
        four = model.model(tokens[:, 16:], position_ids=place[:, 16:], past_key_values=cache, use_cache=True).last_hidden_state
        singly = [
            model.model(tokens[:, i : i + 1], position_ids=place[:, i : i + 1], past_key_values=other, use_cache=True).last_hidden_state
            for i in range(16, 20)
        ]
    found.append(bool((torch.cat(singly, 1) - four).abs().max() > 1e-3))
    print(f"{name}: one token at a time and four at once differ by more than a thousandth: {found[-1]}")
sys.exit(found != [True, True, False])
PY
