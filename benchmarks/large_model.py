"""Measures the cost of a forward pass on an accelerator, for an 8B Llama-shaped backbone with random weights and EAGLE-3 of depth 6.

    python benchmarks/large_model.py [--json FILE]      # without CUDA: a tiny model instead, as the output states

Prints JSON: milliseconds of an autoregressive step, uncaptured and captured; passes by number of nodes, and a 64-node decoding step with
drafting, as multiples of a captured AR step; and the share of the measured memory bandwidth that captured AR decoding reaches (MBU).
"""

from typing import Any

import torch
from program import options, run
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.inference.bench.bandwidth import memory_bandwidth, weight_bytes
from headstart.inference.bench.tune import TunePlan, tune
from headstart.inference.generate import SpeculativeModel

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
NODES = (1, 8, 16, 32, 64)


def build() -> tuple[Backbone, Drafter]:
    """A random backbone of 8B parameters and EAGLE-3 of depth 6 in bf16 on CUDA; tiny ones in fp32 elsewhere."""
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    with torch.device(device):
        torch.set_default_dtype(dtype)
        backbone = Backbone(LlamaForCausalLM(LlamaConfig(**(LARGE if cuda else TINY), max_position_embeddings=8192)))
        drafter = build_drafter("eagle3", backbone, {"depth": 6, "draft_vocab_size": backbone.vocab // 4})
        torch.set_default_dtype(torch.float32)
    return backbone, drafter


def device_name() -> str:
    """The GPU's name, or that there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu: no CUDA here, so a tiny model; the ratios say nothing of a large one"


def measure(context: int) -> dict[str, Any]:
    backbone, drafter = build()
    cuda, device = torch.cuda.is_available(), backbone.device
    drafter = drafter.to(device, backbone.dtype).eval().requires_grad_(False)
    plan = TunePlan(rows=(1,), contexts=(context,), nodes=NODES, repeats=15)
    uncaptured, captured = (
        tune(SpeculativeModel(backbone, drafter, capture=backend), [], plan).details["by_context"][0]   # type: ignore[arg-type]
        for backend in ("off", "cuda-graph" if cuda else "trace")
    )
    ar = dict(captured["pass_ms"])[1]
    draft = captured["drafting_ms"][0]
    return {
        "device": device_name(),
        "dtype": str(backbone.dtype),
        "context": context,
        "ar_ms": {"uncaptured": dict(uncaptured["pass_ms"])[1], "captured": ar},
        "pass_over_ar": {str(nodes): ms / ar for nodes, ms in captured["pass_ms"]},
        "whole_pass_over_ar": (dict(captured["pass_ms"])[64] + draft["begin"] + sum(draft["depths"])) / ar,
        "drafting_ms": draft,
        "mbu": weight_bytes(backbone) / (ar / 1e3) / memory_bandwidth(device),
    }


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--context", type=int, default=512)
    run(parser, lambda given: measure(given.context))
