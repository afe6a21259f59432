#!/usr/bin/env bash
# transformers 5.23.0: BambaModel counts positions from 0 again in every pass after a cache, unless position_ids are given.
#
# Other models take the length of the cache where `position_ids` is None. `generate` always gives them, so it does not show there; whoever
# calls the model with a cache, as the usage of its siblings suggests, gets rotary positions that begin anew.
#
# Seen on 2026-11-28 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: tiny random models, fp32:
#   Bamba: without position_ids the tokens after a cache differ from those of one pass: True, with them: False
#   FalconH1: without position_ids the tokens after a cache differ from those of one pass: False, with them: False
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
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "pad_token_id": 0,
}
tokens, found = torch.arange(1, 21)[None], []
for name, changes in {"Bamba": {"attn_layer_indices": [1]}, "FalconH1": {"mamba_d_ssm": 64}}.items():
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **changes)).eval()
    for weight in model.parameters():
        weight.data.mul_(8.0 if weight.ndim > 1 else 1.0)
    differ = []
    with torch.no_grad():
        whole = model.model(tokens).last_hidden_state[:, 16:]
        for given in (False, True):
            cache = transformers.DynamicCache(config=model.config)
            for part in (slice(0, 16), slice(16, 20)):
                place = {"position_ids": torch.arange(20)[None, part]} if given else {}
                out = model.model(tokens[:, part], past_key_values=cache, use_cache=True, **place).last_hidden_state
            differ.append(bool((out - whole).abs().max() > 1e-3))
    found.append(differ)
    print(f"{name}: without position_ids the tokens after a cache differ from those of one pass: {differ[0]}, with them: {differ[1]}")
sys.exit(found != [[True, False], [False, False]])
PY
