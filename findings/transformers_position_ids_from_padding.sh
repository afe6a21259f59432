#!/usr/bin/env bash
# transformers 5.23.0: some decoders do not count positions from 0. position_ids=arange(T), which is what other models take where none are
# given, makes Kosmos-2.5's text model another model, and is passed over in silence by TrOCR's decoder.
#
# Kosmos-2.5 counts from pad_token_id + 1 where no position_ids are given, as `generate` leaves it, and gives padding tokens none. TrOCR's
# forward function takes position_ids among its keyword arguments and never reads them. GPT-2 and OPT for comparison: OPT also begins at an
# offset, but adds it to position_ids too.
#
# Seen on 2026-11-29 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: tiny random models, fp32:
#   GPT2: arange as none given: True, arange reversed changes the result: True
#   OPT: arange as none given: True, arange reversed changes the result: True
#   Kosmos2_5Text: arange as none given: False, arange reversed changes the result: True
#   TrOCR: arange as none given: True, arange reversed changes the result: False
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
from transformers.models.kosmos2_5.configuration_kosmos2_5 import Kosmos2_5TextConfig
from transformers.models.kosmos2_5.modeling_kosmos2_5 import Kosmos2_5TextForCausalLM

logging.disable(logging.WARNING)
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
KOSMOS = {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4}
TROCR = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
MODELS = {
    "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT),
    "OPT": (transformers.OPTForCausalLM, transformers.OPTConfig, OPT),
    "Kosmos2_5Text": (Kosmos2_5TextForCausalLM, Kosmos2_5TextConfig, KOSMOS),
    "TrOCR": (transformers.TrOCRForCausalLM, transformers.TrOCRConfig, TROCR),
}
tokens, found = torch.arange(5, 17)[None], []
place = torch.arange(12)[None]
for name, (kind, config, sizes) in MODELS.items():
    torch.manual_seed(0)
    model = kind(config(vocab_size=64, pad_token_id=1, **sizes)).eval()
    for weight in model.parameters():
        weight.data.mul_(8.0 if weight.ndim > 1 else 1.0)
    with torch.no_grad():
        none, given, turned = (model(tokens, **more).logits for more in ({}, {"position_ids": place}, {"position_ids": place.flip(1)}))
    found.append((torch.allclose(none, given, atol=1e-4), not torch.allclose(given, turned, atol=1e-4)))
    print(f"{name}: arange as none given: {found[-1][0]}, arange reversed changes the result: {found[-1][1]}")
sys.exit(found != [(True, True), (True, True), (False, True), (True, False)])
PY
