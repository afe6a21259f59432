"""Loads a backbone with Headstart (a folder, a hub id, a GGUF file) and saves it as a folder that loads in no time.

    python benchmarks/convert.py MODEL FOLDER [--json FILE]

Prints JSON: its class, sizes and dtype, and the seconds that loading and saving took.
"""

import argparse
import time
from typing import Any

from program import options, run

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer


def convert(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    backbone, tokenizer = load_backbone(args.model, dtype="bf16", device="cpu"), load_tokenizer(args.model)
    loaded = time.perf_counter()
    backbone.model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    return {
        "model": args.model,
        "class": type(backbone.model).__name__,
        "layers": backbone.num_layers,
        "width": backbone.dim,
        "vocab": backbone.vocab,
        "chat_template": bool(tokenizer.chat_template),
        "seconds": {"load": loaded - start, "save": time.perf_counter() - loaded},
    }


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("model")
    parser.add_argument("folder")
    run(parser, convert)
