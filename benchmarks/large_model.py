"""Measures the cost of a forward pass on an accelerator, for an 8B Llama-shaped backbone with random weights and EAGLE-3 of depth 6.

    python benchmarks/large_model.py [--backbone PATH] [--json FILE]      # PATH: that model. Without CUDA and PATH: a tiny model

Prints JSON: milliseconds of an autoregressive step, uncaptured and captured; passes by number of nodes as multiples of a captured AR
step; the parts of real decoding steps, AR and with drafts, and the ratio of the whole steps; and the share of the measured memory
bandwidth that captured AR decoding reaches (MBU). With ``--profile``, the kernels of steps with 1, 8 and 64 nodes instead.
"""

import statistics
from typing import Any

import torch
from program import options, run
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.inference.bench.results import memory_bandwidth, weight_bytes
from headstart.inference.capture.capture import BackendName
from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.tree import CandidateTree, TreeShape
from headstart.inference.generate import GenerateOutput, SpeculativeModel

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
NODES = (1, 8, 64)
DEPTH, WIDTH = 6, 8
WARM_UP, LONGEST_WARM_UP, REPEATS = 40, 240, 15


def build(path: str | None) -> tuple[Backbone, Drafter]:
    """The backbone, or a random one of 8B parameters, and EAGLE-3 of depth 6, in bf16 on CUDA; elsewhere a tiny one, and fp32."""
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    loaded = None if path is None else load_backbone(path, dtype="bf16" if cuda else "fp32", device=device)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        sizes = LARGE if cuda else TINY
        backbone = loaded or Backbone(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=8192)).eval().requires_grad_(False))
        drafter = build_drafter("eagle3", backbone, {"depth": DEPTH, "draft_vocab_size": backbone.vocab // 4})
        torch.set_default_dtype(torch.float32)
    return backbone, drafter


def device_name() -> str:
    """The GPU's name, or that there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu: no CUDA here, so no large model; the ratios say nothing of one on a GPU"


def decode(model: SpeculativeModel, context: int, new_tokens: int, tree: TreeShape | None) -> GenerateOutput:
    """Decode greedily after a random prompt: autoregressively, or with trees of that shape."""
    backbone = model.backbone
    ids = torch.randint(backbone.vocab, (1, context), device=backbone.device)
    options: dict[str, Any] = {"speculate": False} if tree is None else {"tree": tree}
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return backbone.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), custom_generate=model.generate, timed=True, return_dict_in_generate=True,
        **lengths, **options,
    )  # fmt: skip


def step_ms(model: SpeculativeModel, context: int, tree: TreeShape | None) -> dict[str, float]:
    """Milliseconds of the parts of a decoding step; the first call captures."""
    for _ in range(2):
        out = decode(model, context, 48, tree)
    assert out.seconds is not None and out.passes
    return {part: 1e3 * seconds / out.passes for part, seconds in out.seconds.items()}


def models(path: str | None) -> tuple[Backbone, Drafter]:
    backbone, drafter = build(path)
    return backbone, drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


@torch.no_grad()
def pass_ms(model: SpeculativeModel, context: int) -> dict[int, float]:
    """Median milliseconds of a pass by nodes, the transfer of the picks to the host included, once it is no longer being captured."""
    reader, found = model.engine(True).reader, {}
    ids = torch.randint(model.backbone.vocab, (1, context), device=model.backbone.device)
    _, cache = reader.prompts(ids, torch.full((1,), context, device=ids.device))
    for nodes in NODES:
        tree = CandidateTree([list(range(nodes))], [[max(0, (node - 1) // 2) for node in range(nodes)]])
        times: list[float] = []
        for passes in range(LONGEST_WARM_UP + REPEATS):
            with Stopwatch(ids.device) as watch:
                reader.tree(cache, tree)[1].argmax(-1).tolist()
            if passes >= WARM_UP and (watch.valid or times):
                times.append(watch.seconds)
            if len(times) == REPEATS:
                break
        found[nodes] = 1e3 * statistics.median(times)
    return found


def measure(path: str | None, context: int) -> dict[str, Any]:
    backbone, drafter = models(path)
    backend: BackendName = "cuda-graph" if torch.cuda.is_available() else "trace"
    uncaptured, captured = (pass_ms(SpeculativeModel(backbone, drafter, capture=name), context) for name in ("off", backend))
    ar = captured[1]
    model = SpeculativeModel(backbone, drafter, capture=backend)
    steps = {"ar": step_ms(model, context, None)}
    steps |= {str(nodes): step_ms(model, context, TreeShape(nodes, WIDTH, DEPTH)) for nodes in NODES[1:]}
    whole = {name: sum(parts.values()) for name, parts in steps.items()}
    return {
        "device": device_name(),
        "backbone": path,
        "dtype": str(backbone.dtype),
        "context": context,
        "ar_ms": {"uncaptured": uncaptured[1], "captured": ar},
        "pass_over_ar": {str(nodes): ms / ar for nodes, ms in captured.items()},
        "step_ms": steps,
        "step_over_ar": {name: ms / whole["ar"] for name, ms in whole.items()},
        "mbu": weight_bytes(backbone) / (ar / 1e3) / memory_bandwidth(backbone.device),
    }


def kernels(path: str | None, context: int) -> dict[str, Any]:
    """The kernels that take longest in some decoding steps, by nodes: milliseconds a step and calls a step."""
    backbone, drafter = models(path)
    model, found = SpeculativeModel(backbone, drafter, capture="off"), {}
    for nodes in (1, 8, 64):
        tree = None if nodes == 1 else TreeShape(nodes, WIDTH, DEPTH)
        decode(model, context, 4, tree)
        with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as watch:
            passes = decode(model, context, 9, tree).passes or 1
        events = [(one.self_device_time_total or one.self_cpu_time_total, one.count, one.key) for one in watch.key_averages()]
        found[str(nodes)] = [
            {"kernel": name[:100], "ms": round(microseconds / 1e3 / passes, 3), "calls": round(calls / passes, 1)}
            for microseconds, calls, name in sorted(events, reverse=True)[:16]
        ]
    return found


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", metavar="PATH", help="measure this model instead")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step instead")
    run(parser, lambda given: (kernels if given.profile else measure)(given.backbone, given.context))
