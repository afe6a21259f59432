"""From which acceptance on heads pay on this machine, by size of the model: random models of published sizes, all layers.

    python benchmarks/gain.py                              # about seven minutes on two idle cores
    python benchmarks/gain.py --models llama-3.2-1b-instruct --heads eagle3             # 11 GB

Prints JSON: for each model and kind of head what `headstart plan` finds by untrained heads: milliseconds of a step without drafts, of
drafting and of verifying chains by their depth, the acceptance from which on they pay, and what 40, 60 and 80 % bring.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.methods import build_drafter
from headstart.training.plan.duration import gain_of

CONFIGURATIONS = Path(__file__).parents[1] / "tests" / "helpers" / "configurations"
MODELS = ("smollm2-135m-instruct", "smollm2-360m-instruct", "qwen3-0.6b")
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"depth": 8, "draft_vocab_size": 8192},
    "eagle3, 32,000 tokens": {"depth": 8, "draft_vocab_size": 32000},
    "medusa": {"depth": 4},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help=f"of {CONFIGURATIONS.name}/")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS, metavar="KIND")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.models:
        config = AutoConfig.for_model(**json.loads((CONFIGURATIONS / f"{name}.json").read_text()))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype]).eval()
        model.generation_config = GenerationConfig(pad_token_id=0)
        on = Backbone(model)
        for kind in args.heads:
            drafter = build_drafter(kind.partition(",")[0], on, HEADS[kind])
            sizes = {"width": on.dim, "layers": len(on.layers), "vocabulary": on.vocab, "dtype": args.dtype, "threads": args.threads}
            print(json.dumps({"model": name, **sizes, "heads": kind, **gain_of(drafter)}), flush=True)


if __name__ == "__main__":
    main()
