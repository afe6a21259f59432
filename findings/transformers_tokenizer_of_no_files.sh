#!/usr/bin/env bash
# transformers 5.23.0: from a folder with a config.json and no tokenizer at all, AutoTokenizer makes one for Qwen and Gemma that reads nothing.
#
# For Llama's configuration it raises an error. For Qwen2's it returns a tokenizer of one special token that turns every text into no tokens at
# all, and for Gemma 2's one of five special tokens that turns every text into an unknown one: whoever saves a model alone and trains or
# generates from its folder gets empty prompts, or a text about nothing, and no error.
#
# Seen on 2026-11-30 with transformers 5.23.0, tokenizers 0.23, Python 3.11:
#   llama: an error (ValueError)
#   qwen2: 1 tokens known, 'The sky is blue.' becomes [], unknown tokens alone: False
#   gemma2: 5 tokens known, 'The sky is blue.' becomes [3], unknown tokens alone: True
#
# Exits 0 as long as that is so, and 1 once it changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import logging
import sys

from transformers import AutoConfig, AutoTokenizer

logging.disable(logging.WARNING)
TEXT = "The sky is blue."
found = []
for kind in ("llama", "qwen2", "gemma2"):
    AutoConfig.for_model(kind).save_pretrained(kind)
    try:
        tokenizer = AutoTokenizer.from_pretrained(kind)
    except Exception as error:
        print(f"{kind}: an error ({type(error).__name__})")
        found.append("error")
        continue
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    unknown = bool(ids) and {*ids} == {tokenizer.unk_token_id}
    print(f"{kind}: {len(tokenizer)} tokens known, {TEXT!r} becomes {ids}, unknown tokens alone: {unknown}")
    found.append("nothing" if not ids else "unknown" if unknown else "text")
sys.exit(found != ["error", "nothing", "unknown"])
PY
