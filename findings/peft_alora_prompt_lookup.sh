#!/usr/bin/env bash
# Prompt lookup (transformers 5.23.0) with an activated LoRA (PEFT 0.21.2) writes another greedy text, without a word.
#
# An activated LoRA (aLoRA) begins at its invocation tokens. PEFT (tuners/lora/variants.py) finds them in the prompt once and tells layers how many of the
# LAST positions of a pass to adapt: 3 where a prompt ends in three such tokens. A plain step is one position and adapted whole. A pass
# that verifies looked-up tokens has up to 9 positions, of which the first 6 are read without the adapter, and their keys stay so.
# The same call with a plain LoRA writes the same text, as speculative decoding promises.
#
# Seen on 2026-11-28 with transformers 5.23.0, peft 0.21.2, torch 2.13.0, accelerate 1.15.0, tokenizers 0.23.3, Python 3.11, on a CPU in fp32:
#   greedy texts of six that are the same with prompt_lookup_num_tokens=8: {'lora': 6, 'alora': 0}
#
# Exits 0 as long as that is so, and 1 once the texts agree or the output is another.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SWITCH = [5, 6, 7]
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0))
shared = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
adapted = get_peft_model(model, LoraConfig(**shared), "lora")
adapted.add_adapter("alora", LoraConfig(**shared, alora_invocation_tokens=SWITCH))
with torch.no_grad():
    for weight in adapted.parameters():
        if weight.dim() > 1:
            weight.normal_(std=2 * weight.shape[-1] ** -0.5)
adapted.eval()

equal = {}
for name in ("lora", "alora"):
    adapted.set_adapter(name)
    equal[name] = 0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(8, 97, (1, 7), generator=generator).repeat(1, 4)
        ids = torch.cat([text, torch.tensor([SWITCH])], 1)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
        plain = adapted.generate(**call)
        looked_up = adapted.generate(**call, prompt_lookup_num_tokens=8)
        equal[name] += int(torch.equal(plain, looked_up))
print("greedy texts of six that are the same with prompt_lookup_num_tokens=8:", equal)
sys.exit(equal != {"lora": 6, "alora": 0})
PY
