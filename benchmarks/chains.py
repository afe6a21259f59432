"""What chains bring models whose states do not branch along a tree: random models of published widths and few layers, fp32.

    python benchmarks/chains.py                 # some ten minutes on one idle core, 8 GB
    python benchmarks/chains.py --tokens 256 --models LFM2 Mamba2

Their weights are small beside the embeddings, so that a text repeats itself and n-grams are accepted. Prints JSON: for each model and
temperature seconds with and without drafts and of transformers' `generate` (greedy), passes, tau, and whether the texts are the same; and
milliseconds of passes of one and of four tokens, with chunks of Mamba-2 as in the configuration and as decoding sets them.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.chain_cache import as_steps, mixers_of
from headstart.inference.engine.proposer import made
from headstart.inference.generate import SpeculativeModel

SILENT = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SMALL = 0.05
"""By how much weights other than the embeddings are reduced."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Granite-4-H-micro, 3 layers": ("GraniteMoeHybrid", {
        "hidden_size": 2048, "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 32,
        "num_key_value_heads": 8, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 64, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "num_local_experts": 0, "position_embedding_type": None,
    }),
    "Falcon-H1-0.5B, 2 layers": ("FalconH1", {
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    }),
    "Nemotron-H-8B, 4 layers": ("NemotronH", {
        "hidden_size": 4096, "intermediate_size": 21504, "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128,
    }),
    "Bamba-9B, 2 layers": ("Bamba", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "attn_layer_indices": [1],
    }),
    "Zamba2-1.2B, 3 layers": ("Zamba2", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 32,
        "n_mamba_heads": 64, "mamba_d_state": 64, "mamba_ngroups": 1, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
    }),
    "Mamba2-130M, 4 layers": ("Mamba2", {
        "hidden_size": 768, "num_hidden_layers": 4, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1,
    }),
    "RWKV-4-169M, 4 layers": ("Rwkv", {
        "hidden_size": 768, "attention_hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4,
    }),
    "Llama-4-Scout, 2 layers, 2 experts": ("Llama4Text", {
        "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 2, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 2, "num_experts_per_tok": 1,
    }),
    "BLOOM-560M, 4 layers": ("Bloom", {"hidden_size": 1024, "n_head": 16, "n_layer": 4}),
    "MPT-7B, 2 layers": ("Mpt", {"d_model": 4096, "n_heads": 32, "n_layers": 2, "expansion_ratio": 4}),
    "GPT-Neo-125M, 4 layers": ("GPTNeo", {
        "hidden_size": 768, "num_heads": 12, "num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 256,
    }),
    "LFM2-350M, 4 layers": ("Lfm2", {
        "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    }),
}  # fmt: skip
"""Title -> transformers' configuration class, and widths as published."""


def build(name: str, widths: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=4096, tie_word_embeddings=True, **widths, **SILENT)
    model = AutoModelForCausalLM.from_config(config).eval()
    for key, weight in model.named_parameters():
        weight.data.mul_(SMALL if weight.ndim > 1 and "embed" not in key else 1.0)
    model.generation_config = GenerationConfig(**SILENT)
    return model


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def decode(heads: SpeculativeModel, tokens: int) -> Iterator[dict[str, Any]]:
    model = heads.backbone.model
    ids = torch.randint(1, 4000, (1, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 4)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": tokens}
    for temperature in (0.0, 0.2, 1.0):
        how: dict[str, Any] = {"do_sample": True, "temperature": temperature, "seed": 1} if temperature else {"do_sample": False}
        ours = given | how | {"custom_generate": heads.generate, "return_dict_in_generate": True}
        drafted, with_drafts = timed(lambda ours=ours: model.generate(**ours))
        plain, without = timed(lambda ours=ours: model.generate(**ours, speculate=False))
        line = {"temperature": temperature, "same": torch.equal(drafted.sequences, plain.sequences), "tau": drafted.tau,
                "passes": len(drafted.steps), "of": len(plain.steps), "seconds": with_drafts, "seconds_without": without}  # fmt: skip
        if not temperature:
            own, line["seconds_transformers"] = timed(lambda: model.generate(**given, do_sample=False))
            line["same_as_transformers"] = torch.equal(own, drafted.sequences)
        yield line


@torch.no_grad()
def passes(backbone: Backbone, rounds: int = 5) -> dict[str, float]:
    """The best of some passes, in milliseconds."""
    mixers, best = mixers_of(backbone.model), dict[str, float]()
    cache = DynamicCache(config=backbone.config)
    backbone.read(torch.ones(1, 40, dtype=torch.int64), cache, torch.arange(40)[None])
    for name, count, short in (("one", 1, True), ("four", 4, True), ("four, whole chunks", 4, False)):
        for at in range(40, 40 + rounds):
            with as_steps(mixers, count) if short else nullcontext():
                place_1T = torch.arange(at, at + count)[None]
                seconds = timed(lambda place_1T=place_1T: backbone.read(torch.ones_like(place_1T), cache, place_1T))[1]
            best[name] = min(best.get(name, 1e9), 1000 * seconds)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--models", nargs="+", default=[""], metavar="NAME", help="those whose titles begin so (default: all)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for title, (name, widths) in MODELS.items():
        if not title.startswith(tuple(args.models)):
            continue
        heads = SpeculativeModel(Backbone(build(name, widths)), proposers=made(["suffix", "recycling"]), capture="off")
        report = {"texts": list(decode(heads, args.tokens)), "milliseconds": passes(heads.backbone)}
        print(json.dumps({title: report}), flush=True)


if __name__ == "__main__":
    main()
