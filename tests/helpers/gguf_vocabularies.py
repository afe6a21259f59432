"""Small vocabularies in GGUF files, under the rules of released ones, and texts that those split in different ways.

The pairs are learned over the whole of the texts, across words, so that a rule shows wherever it splits. tests/oracles/llama_ids.py has
llama.cpp read the same files.
"""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TEXTS = [
    "Hello, how are you today?", "What is the capital of France? It's Paris, isn't it.",
    "I'M SURE THEY'LL COME; we've said so, you'd see.", "Buy these:\n\n1. Bread\n\n2. Milk\n\n3. Tea\n\nNo more.",
    "Steps:\n1) Mix\n2) Bake\n10) Eat", "* one\n* two\n  * three\n", "- [ ] a\n- [x] b",
    "| name | n |\n|------|--:|\n| Ann  |  10 |\n| Bob  | 200 |", "a\tb\t12\n\t3\t4",
    "def f(x):\n    return x[0] + 12  # ok\n\n\nclass A:\n\tpass", "for (int i = 0; i < 10; i++) {\n  s += \"a\" + i;\n}",
    "SELECT a, b FROM t WHERE n >= 100;", "<div class=\"a\">Hi&nbsp;you</div>\n", "{\"a\": [1, 2.5, -3e10], \"b\": null}",
    "x = 10\n\ny = 20 and z = 3", "https://example.org/a_b?c=1&d=22#e", "name@example.org", "1984", " 1984", "12345678",
    "3.14159, 2,718,281", "10 + 20 = 30; 5*5=25", "$12.50 (or 10%)", "2026-11-28T10:20:30Z", "v1.2.3-rc4", "1st 2nd 3rd",
    "½ cup, x² and ⅷ", "١٢٣ ٤٥٦", "", " ", "  ", "   a", "a   ", "a  b   c    d", "\n", "\n\n", "\n\n\n1", " \n  \n", "\r\n\r\nab\r\n",
    "\t\t", "        x", "a\u00a0b\u3000c\u200bd", "naïve café, coöperate", "Grüße aus Köln", "un été à Noël", "Привет, мир! Это 10.",
    "Καλημέρα κόσμε", "שלום עולם 12", "你好，世界。今天是2026年。", "こんにちは、世界。カタカナ", "안녕하세요 세계", "हिन्दी शब्द 12",
    "ภาษาไทย 12",
    "🙂👍🏽 ok 👨\u200d👩\u200d👧", "e\u0301te\u0301", "wait... what?!", "\"quoted\" 'words' (and more) [here]", "--- *** ___ ### ```py",
    "a/b\\c|d~e^f=g+h", "…and—so on– “yes” ‘no’", "CamelCaseWord snake_case helloWorld helloWorld fooBar fooBar it's it's it's",
    "हिन्दी हिन्दी हिन्दी किताब किताब",
    "<|im_start|>user\nDone:\n\n1. Bread<|im_end|>\n<|im_start|>assistant\n", "<s>[INST] Hi [/INST] Yes</s> x<s> y",
    "<|user|>\nHi 12<|end|>\n<|assistant|>\n", "<｜begin▁of▁sentence｜>Hi<｜User｜>12", "  <s>  two</s>\n", "Bread, Milk Bread",
]  # fmt: skip
CONTROL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>", "<|assistant|>", "<｜begin▁of▁sentence｜>", "<｜User｜>"]
PLAIN = [text for text in TEXTS if "<|" not in text and "<s>" not in text and "<｜" not in text]
WHOLE = ["ĠBread", "Milk", "Hello", "ĠMilk"]
"""Tokens that no pairs make."""
Kind = gguf.TokenType


def learned(texts: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Return the most frequent pairs, one after the other, of texts in symbols."""
    pairs: list[tuple[str, str]] = []
    for _ in range(count):
        seen = Counter(pair for text in texts for pair in zip(text, text[1:], strict=False))
        best = max(seen, key=lambda pair: (seen[pair], pair))
        pairs.append(best)
        texts = [_joined(text, best) for text in texts]
    return pairs


def _joined(text: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in text:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


def alphabet() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones are themselves, the others follow from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + place) for place, byte in enumerate(others)}


@lru_cache
def of_bytes() -> dict[str, Any]:
    """A vocabulary of pairs of bytes, as keys of a GGUF file."""
    letters = alphabet()
    pairs = learned([[letters[byte] for byte in text.encode()] for text in PLAIN], 300)
    normal = [*letters.values(), *("".join(pair) for pair in pairs), *WHOLE]
    tokens = [*dict.fromkeys(normal), "<s>", "</s>", *CONTROL, "    "]
    kinds = [Kind.NORMAL] * (len(tokens) - len(CONTROL) - 3) + [Kind.CONTROL] * (len(CONTROL) + 2) + [Kind.USER_DEFINED]
    ends = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")}
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": [" ".join(pair) for pair in pairs], **ends}


@lru_cache
def of_pieces() -> dict[str, Any]:
    lines = [line for text in PLAIN for line in text.split("\n") if line and max(line) < "\u0180"]  # others are read as bytes
    texts = [list("\u2581" + line.replace(" ", "\u2581")) for line in lines]
    pieces = ["".join(pair) for pair in learned(texts, 300)] + sorted({letter for text in texts for letter in text})
    byte = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte, *dict.fromkeys(pieces), *CONTROL[2:5], "<|endoftext|>", "\n\n", "     "]
    kinds = [Kind.UNKNOWN] + [Kind.CONTROL] * 2 + [Kind.BYTE] * 256 + [Kind.NORMAL] * len(dict.fromkeys(pieces))
    kinds += [Kind.CONTROL] * 4 + [Kind.USER_DEFINED] * 2
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}


def write_vocabulary(path: Path, keys: dict[str, Any], architecture: str = "llama", name: str = "small") -> Path:
    """Write a file with these keys of a tokenizer and hardly any weights."""
    file = gguf.GGUFWriter(path, architecture)
    file.add_name(name)
    for key, value in keys.items():
        place = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            file.add_array(place, value)
        else:
            (file.add_bool if isinstance(value, bool) else file.add_uint32 if isinstance(value, int) else file.add_string)(place, value)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8, "vocab_size": len(keys["tokens"])}
    for key, size in {**sizes, "attention.head_count": 2, "attention.head_count_kv": 2}.items():
        file.add_uint32(f"{architecture}.{key}", size)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tensor("token_embd.weight", np.zeros((len(keys["tokens"]), 8), np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
