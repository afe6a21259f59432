#!/usr/bin/env bash
# transformers 5.23.0: RWKV-4 writes other texts for the rows of a batch than for each row alone.
#
# Where a layer has a state and reads one token, it takes the token before from the state, [rows, width], and mixes it with the token,
# [rows, 1, width]. Broadcast, that is [rows, rows, width]: every row goes on as if it had read as many tokens as there are rows. One row is
# right, and so is a batch that is read whole, without a state. From the second token on `generate` gives each row of a batch of equally
# long prompts, without any padding, another text, with no error and no warning.
#
# Seen on 2026-11-30 with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU: a tiny random model, fp32, two rows, greedy:
#   each row alone writes what a pass over its whole text gives: True
#   the rows of a batch write what they write alone: False
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
from transformers import GenerationConfig, RwkvConfig, RwkvForCausalLM

logging.disable(logging.WARNING)
torch.manual_seed(0)
model = RwkvForCausalLM(RwkvConfig(vocab_size=500, hidden_size=64, attention_hidden_size=64, intermediate_size=128, num_hidden_layers=4)).eval()
model.generation_config = GenerationConfig(pad_token_id=0)
for weight in model.parameters():
    weight.data += 0.05 * torch.randn_like(weight)
rows = torch.randint(1, 500, (2, 9))


def written(prompts):
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, do_sample=False)


alone, whole = [written(row[None]) for row in rows], rows
with torch.no_grad():
    for _ in range(16):
        whole = torch.cat([whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
right, together = torch.equal(torch.cat(alone), whole), torch.equal(written(rows), whole)
print(f"each row alone writes what a pass over its whole text gives: {right}")
print(f"the rows of a batch write what they write alone: {together}")
sys.exit((right, together) != (True, False))
PY
