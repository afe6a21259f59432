#!/usr/bin/env bash
# transformers 5.23.0 splits text as GPT-2 does for a GGUF file whose tokenizer.ggml.pre is "smollm", without a word.
#
# SmolLM and SmolLM2 set every digit apart before anything else, and llama.cpp does so too for this name. The table of names,
# transformers.integrations.gguf.gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS, has no "smollm" (nor starcoder, refact, command-r,
# falcon, deepseek-llm, deepseek-coder, viking ...), and set_split_regex keeps GPT-2's rule for a name that it lacks.
#
# Seen on 2026-11-28 with transformers 5.23.0, torch 2.13.0, tokenizers 0.23.3, gguf 0.19.0, Python 3.11:
#   the tokenizer that the file was made from: ['a', ':', 'ĊĊ', '1', '2']
#   the tokenizer that transformers makes:     ['a', ':', 'Ċ', 'Ċ', '12']
#
# Exits 0 as long as that is so, and 1 once the two agree or the output is another.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import sys

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
merges = [("Ċ", "Ċ"), ("1", "2")]
tokens = [*letters, "ĊĊ", "12", "<|endoftext|>"]
own = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
own.pre_tokenizer = pre_tokenizers.Sequence(split)

file = gguf.GGUFWriter("small.gguf", "llama")
sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8, "vocab_size": len(tokens)}
for key, value in {**sizes, "attention.head_count": 2, "attention.head_count_kv": 2}.items():
    file.add_uint32(f"llama.{key}", value)
file.add_layer_norm_rms_eps(1e-5)
file.add_tokenizer_model("gpt2")
file.add_tokenizer_pre("smollm")
file.add_token_list(tokens)
file.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
file.add_token_merges([" ".join(pair) for pair in merges])
file.add_bos_token_id(len(tokens) - 1)
file.add_eos_token_id(len(tokens) - 1)
file.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()

text = "a:\n\n12"
read = AutoTokenizer.from_pretrained(".", gguf_file="small.gguf")
right, got = own.encode(text).tokens, read.tokenize(text)
print("the tokenizer that the file was made from:", right)
print("the tokenizer that transformers makes:    ", got)
sys.exit(not (right == ["a", ":", "ĊĊ", "1", "2"] and got == ["a", ":", "Ċ", "Ċ", "12"]))
PY
