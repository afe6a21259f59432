#!/usr/bin/env bash
# transformers 5.23.0: output_hidden_states is not always one [batch, tokens, width] for each layer and one more for the embedding.
#
# Heads that read layers (EAGLE-3, DFlash) and probes of models index this list by layer. Gemma 3n's entries have its four residual streams in
# front, so that indexing rows of a batch takes streams. Mllama leaves out what its layers of cross-attention would give when no image is
# given, so that the list is shorter and later entries are of other layers than their number says. Neither says so.
#
# Seen on 2026-11-30 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: tiny random models of four layers, two rows of five
# tokens, width 32:
#   Gemma3nForCausalLM: 5 entries, all of shape (4, 2, 5, 32)
#   MllamaForCausalLM: 4 entries, all of shape (2, 5, 32)
#   LlamaForCausalLM: 5 entries, all of shape (2, 5, 32)
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
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

logging.disable(logging.WARNING)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GEMMA = {
    "head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "laurel_rank": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4,
}
MODELS = (
    transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**SIZES, **GEMMA)),
    transformers.MllamaForCausalLM(MllamaTextConfig(**SIZES, bos_token_id=1, eos_token_id=2, cross_attention_layers=[1])),
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
)
found = []
for model in MODELS:
    with torch.no_grad():
        states = model.eval()(torch.arange(1, 6)[None].repeat(2, 1), output_hidden_states=True).hidden_states
    (shape,) = {tuple(state.shape) for state in states}
    found.append((len(states), shape))
    print(f"{type(model).__name__}: {len(states)} entries, all of shape {shape}")
sys.exit(found != [(5, (4, 2, 5, 32)), (4, (2, 5, 32)), (5, (2, 5, 32))])
PY
