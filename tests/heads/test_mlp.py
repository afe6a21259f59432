"""MLP speculators are what the paper and IBM's code say, and are saved in the layout of the engines that load them.

Shape suffixes: B batch, T positions, D width, I inner width.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, backbone, random_drafter, read, texts
from safetensors.torch import load_file
from test_contract import CLOSE

from headstart.heads.methods import build_drafter

VARIANTS: list[dict[str, Any]] = [
    {"depth": 3, "inner_dim": 20},
    {"depth": 4, "scale_input": False, "draft_vocab_size": 23},
    {"depth": 3, "inner_dim": 40, "tie_weights": True},
]


@pytest.mark.parametrize("arguments", VARIANTS, ids=lambda arguments: "-".join(arguments))
def test_mlp_is_what_the_paper_says(arguments: dict[str, Any]) -> None:
    """The recurrence, position by position, from the saved tensors."""
    on, n = backbone("llama"), arguments["depth"]
    drafter = random_drafter("mlp", on, **arguments)
    weights, inner = drafter.tensors(), arguments.get("inner_dim", on.dim)
    features = read(on, texts(2, 9), drafter)
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
    taught = drafter(features)
    for t in range(9 - 2 - n):
        state = features.hidden_BTD[:, t]
        if arguments.get("scale_input", True):
            state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6) / 2**0.5
        for k in range(n):
            emb, proj = (0, min(k, 1)) if arguments.get("tie_weights") else (k, k)
            mixed = state_weight * state @ weights[f"speculator.proj.{proj}.weight"].T
            mixed = mixed + emb_weight * weights[f"speculator.emb.{emb}.weight"][features.tokens_BT[:, t + 1 + k]]
            mixed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + 1e-6)
            mixed = mixed * weights[f"speculator.ln.{emb}.weight"] + weights[f"speculator.ln.{emb}.bias"]
            state = mixed * 0.5 * (1 + torch.erf(mixed / 2**0.5))
            torch.testing.assert_close(taught[k][:, t], state, **CLOSE)
            expected_BV = state @ weights[f"speculator.head.{emb}.weight"].T
            torch.testing.assert_close(drafter.readout(taught[k][:, t], k), expected_BV, **CLOSE)


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_is_the_layout_of_the_engines(tmp_path: Path, tied: bool) -> None:
    D = backbone("llama").dim
    random_drafter("mlp", backbone("llama"), depth=3, inner_dim=20, tie_weights=tied).save_pretrained(tmp_path)
    sets = 1 if tied else 3
    expected = {f"speculator.emb.{k}.weight": [VOCAB, 20] for k in range(sets)}
    expected |= {f"speculator.proj.{k}.weight": [20, 20 if k else D] for k in range(2 if tied else 3)}
    expected |= {f"speculator.ln.{k}.{name}": [20] for k in range(sets) for name in ("weight", "bias")}
    expected |= {f"speculator.head.{k}.weight": [VOCAB, 20] for k in range(sets)}
    assert {name: list(x.shape) for name, x in load_file(tmp_path / "model.safetensors").items()} == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("base_model_name_or_path") is not None
    assert config == {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_predict": 3,
        "emb_dim": D,
        "inner_dim": 20,
        "vocab_size": VOCAB,
        "tie_weights": tied,
        "scale_input": True,
        "top_k_tokens_per_head": [5, 4, 3],
        "n_candidates": 5,
    }


def test_it_starts_from_the_backbones_embedding_and_output_layer_where_they_fit() -> None:
    """At another width all is random, of the size that the weight of embeddings is made for."""
    on = backbone("llama")
    fitting, narrow = build_drafter("mlp", on, {"depth": 2}), build_drafter("mlp", on, {"depth": 2, "inner_dim": 20})
    for k in range(2):
        emb, head = (fitting.tensors()[f"speculator.{name}.{k}.weight"] for name in ("emb", "head"))
        torch.testing.assert_close(emb / emb.norm(), on.embed.weight / on.embed.weight.norm())
        assert torch.equal(head, on.unembed.weight)
        randoms = [narrow.tensors()[f"speculator.{name}.{k}.weight"] for name in ("emb", "head", "proj")]
        for weight, width in ((emb, on.dim), *((random, 20) for random in randoms)):
            assert 0.85 < weight.square().mean().sqrt() * width**0.5 < 1.15
