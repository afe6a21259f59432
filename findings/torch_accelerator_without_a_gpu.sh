#!/usr/bin/env bash
# torch.accelerator.current_accelerator() says what torch was built for, not what the machine has: the wheel that PyPI gives on Linux, built for
# CUDA, answers cuda on a machine without a GPU or a driver, though torch.accelerator.is_available() is False and device_count() 0.
#
# So `current_accelerator() or "cpu"`, which is right with a CPU wheel, moves a model to CUDA there and ends in "Found no NVIDIA driver".
# What is meant is current_accelerator(check_available=True), which is not the default.
#
# Seen on 2026-11-30 with torch 2.14.1 (CUDA 13.0), Python 3.11, on a machine without a GPU:
#   current_accelerator(): cuda; with check_available=True: None; is_available(): False; device_count(): 0
#   a tensor moved to current_accelerator() or "cpu": RuntimeError
#
# Fetches 3 GB. Exits 0 as long as that is so, else 1. GPUs are hidden.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1
cd "$folder"
cat > device.py <<'PY'
import sys

import torch

built, there = torch.accelerator.current_accelerator(), torch.accelerator.current_accelerator(check_available=True)
available, count = torch.accelerator.is_available(), torch.accelerator.device_count()
print(f"current_accelerator(): {built}; with check_available=True: {there}; is_available(): {available}; device_count(): {count}")
try:
    moved = torch.zeros(1).to(built or "cpu").device.type
except (RuntimeError, AssertionError) as error:
    moved = type(error).__name__
print(f'a tensor moved to current_accelerator() or "cpu": {moved}')
sys.exit((str(built), there, available, count, moved) != ("cuda", None, False, 0, "RuntimeError"))
PY
CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" device.py
