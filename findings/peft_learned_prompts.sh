#!/usr/bin/env bash
# generate of transformers 5.24.0 loses what PEFT 0.21.2 learned as a prefix, and reads a learned prompt otherwise, both without an error.
#
# transformers 5.24 hands its KV cache to models as "cache"; PEFT's prepare_inputs_for_generation puts the prefix in "past_key_values",
# and asks that name whether the prompt has been read. Of the prefix a FutureWarning says which of both is ignored; of the prompt nothing
# is said. PEFT's own forward is right, and with transformers 5.23.0 so is generate.
#
# Seen on 2026-11-28 with peft 0.21.2, torch 2.13.0, accelerate 1.15.0, tokenizers 0.23.3, Python 3.11, on a CPU in fp32:
#   transformers 5.24.0
#   PrefixTuningConfig: generate writes the text of forward: False, that of the model without the prefix: True
#   PromptTuningConfig: generate writes the text of forward: False, that of the model without the prefix: False
#   transformers 5.23.0
#   PrefixTuningConfig: generate writes the text of forward: True, that of the model without the prefix: False
#   PromptTuningConfig: generate writes the text of forward: True, that of the model without the prefix: False
#
# Exits 0 as long as that is so, and 1 once 5.24.0 writes the text of forward or the output is another.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 tokenizers==0.23.3
cd "$folder"
cat > texts.py <<'PY'
import sys

import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
ids = torch.arange(8, 20)[None]
call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}


def tuned(kind):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
    plain = model.generate(**call)
    wrapped = get_peft_model(model, kind(num_virtual_tokens=5, task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for weight in wrapped.prompt_encoder.parameters():
            weight.normal_()
    return wrapped, plain


@torch.no_grad()
def by_forward(model):
    """Greedy decoding that reads the whole text at every step, by PEFT's own forward."""
    text = ids
    for _ in range(20):
        text = torch.cat([text, model(input_ids=text, attention_mask=torch.ones_like(text)).logits[:, -1:].argmax(-1)], 1)
    return text


print("transformers", transformers.__version__)
found = []
for kind in (PrefixTuningConfig, PromptTuningConfig):
    model, plain = tuned(kind)
    text = model.generate(**call)
    found.append((torch.equal(text, by_forward(model)), torch.equal(text, plain)))
    print(f"{kind.__name__}: generate writes the text of forward: {found[-1][0]}, that of the model without the prefix: {found[-1][1]}")
right, lost = [(True, False), (True, False)], [(False, True), (False, False)]
sys.exit(found != (lost if transformers.__version__ == "5.24.0" else right))
PY
export HF_HUB_OFFLINE=1
"$folder/venv/bin/python" texts.py
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
"$folder/venv/bin/python" texts.py
