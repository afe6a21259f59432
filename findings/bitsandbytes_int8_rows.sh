#!/usr/bin/env bash
# bitsandbytes 0.50.2's LLM.int8: which columns leave int8 is decided over all rows of a call, so a row's result depends on the others.
#
# A column that holds a value of llm_int8_threshold (6.0) or more in any row is multiplied in 16 bits for every row. The same token in the
# same place, beside other tokens, has another result. With a threshold of 0 no column leaves, and rows are independent.
#
# Seen on 2026-11-28 with bitsandbytes 0.50.2, torch 2.13.0, Python 3.11, on a CPU:
#   threshold 6.0: a row differs beside values of 6 and more from beside copies of itself: True
#   threshold 0.0: a row differs beside values of 6 and more from beside copies of itself: False
#
# (The layer is in evaluation mode, as transformers has it.)
#
# Exits 0 as long as that is so, and 1 once it changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy packaging
"$folder/venv/bin/pip" install --quiet --no-deps bitsandbytes==0.50.2
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import logging
import sys

import torch
from bitsandbytes.nn import Linear8bitLt

logging.disable(logging.WARNING)
found = []
for threshold in (6.0, 0.0):
    torch.manual_seed(0)
    layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=threshold).to("cpu").eval()
    row, others = torch.randn(1, 64), 10 * torch.randn(7, 64)
    beside, alone = layer(torch.cat([row, others]))[0], layer(row.expand(8, -1))[0]
    found.append(not torch.equal(beside, alone))
    print(f"threshold {threshold}: a row differs beside values of 6 and more from beside copies of itself: {found[-1]}")
sys.exit(found != [True, False])
PY
