"""Compares heads whose exported weights are stored in 8 bits with the heads as they were trained: sizes and acceptance.

    python benchmarks/quantized_heads.py --heads out/eagle3 --prompts recipes/quickstart/prompts.jsonl

Prints JSON: for the heads as trained and for ``headstart export --quantize int8`` and ``fp8`` of them, the bytes of the weights file, those
of the weights that are quantised, and the acceptance of the weights that the exported values stand for, in greedy chains.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from program import decoding_options, run
from safetensors.torch import load_file

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.inference.serving.export import Request, export
from headstart.inference.serving.layouts.quantize import QUANTIZED, dequantized


def measure(args: argparse.Namespace) -> dict[str, Any]:
    name = str(read_metadata(args.heads)[1]["backbone"])
    backbone, tokenizer = load_backbone(name, dtype="fp32"), load_tokenizer(name)
    prompts = [prompt.ids_T for prompt in read_prompts(args.prompts, Prompter(tokenizer, None, args.prompt_tokens), args.limit)]
    drafter = load_drafter(args.heads, backbone)
    settings = Settings(args.max_new_tokens, tree=TreeShape(nodes=args.depth + 1, width=1, depth=args.depth))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for how in (None, "int8", "fp8"):
            out = Path(folder) / str(how)
            export(Request(args.heads, "eagle3", out, dtype=args.dtype, quantize=how))
            tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
            drafter.load_tensors({key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in (
                tensors if how is None else dequantized(config, tensors)).items()})  # fmt: skip
            heads, tally = SpeculativeModel(backbone, drafter), Tally()
            for prompt_T in prompts:
                tally.add(continue_text(heads, prompt_T, settings, 0))
            inside = [t for key, t in tensors.items() if QUANTIZED.fullmatch(key.removesuffix("_packed").removesuffix("_scale"))]
            rows.append({
                "weights": how or args.dtype, "file_bytes": (out / "model.safetensors").stat().st_size,
                "layer_bytes": sum(tensor.nbytes for tensor in inside), "tau": tally.tau,
                "acceptance_per_depth": tally.acceptance_per_depth, **tally.engine_counts(),
            })  # fmt: skip
    return {"heads": args.heads, "prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "rows": rows}


if __name__ == "__main__":
    parser = decoding_options(__doc__, max_new_tokens=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    run(parser, measure)
