#!/usr/bin/env bash
# PEFT 0.21.2's Lily adapters are no function of a token's own prefix: each layer weighs its up-projections once, by the mean of the router
# over all tokens of all rows of the pass. Nothing warns of it, and the model stays causal to look at.
#
# So a row's logits depend on the rows that it is batched with, a token's on those that come after it, and generate writes another text
# with a KV cache than by reading the whole text at each step. With LoRA on the same layers all three agree.
#
# Seen on 2026-11-30 with peft 0.21.2, transformers 5.23.0, torch 2.13.0, accelerate 1.15.0, Python 3.11, on a CPU in fp32:
#   LilyConfig: largest difference of logits beside another row 0.2 or more: True, with other later tokens 0.2 or more: True
#   LilyConfig: generate writes the same text with and without a KV cache: False
#   LoraConfig: largest difference of logits beside another row 0.2 or more: False, with other later tokens 0.2 or more: False
#   LoraConfig: generate writes the same text with and without a KV cache: True
#
# Exits 0 as long as that is so, else 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0
cd "$folder"
cat > rows.py <<'PY'
import sys

import torch
from peft import LilyConfig, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97}
ids = torch.arange(8, 20)[None]
other = torch.arange(60, 72)[None]
targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
kinds = {
    "LilyConfig": LilyConfig(r=8, num_B=2, target_modules=targets, init_weights=False, scaling=4.0),
    "LoraConfig": LoraConfig(r=8, lora_alpha=32, target_modules=targets, init_lora_weights=False),
}
found = {}
for name, config in kinds.items():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "lily" in part or "lora" in part:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
        alone = model(input_ids=ids).logits[0]
        beside = model(input_ids=torch.cat([ids, other])).logits[0]
        followed = model(input_ids=torch.cat([ids, other], 1)).logits[0, : ids.shape[1]]
        texts = [model.generate(input_ids=ids, max_new_tokens=24, do_sample=False, use_cache=cached) for cached in (True, False)]
    far = [bool((one - alone).abs().max() >= 0.2) for one in (beside, followed)]
    found[name] = (*far, torch.equal(*texts))
    print(f"{name}: largest difference of logits beside another row 0.2 or more: {far[0]}, with other later tokens 0.2 or more: {far[1]}")
    print(f"{name}: generate writes the same text with and without a KV cache: {found[name][2]}")
sys.exit(found != {"LilyConfig": (True, True, False), "LoraConfig": (False, False, True)})
PY
export HF_HUB_OFFLINE=1
"$folder/venv/bin/python" rows.py
