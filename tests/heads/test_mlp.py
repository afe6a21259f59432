"""MLP speculators are what the paper and IBM's code say, and are saved in the layout of the engines that load them.

Shape suffixes: B batch, T positions, D width, I inner width.
"""

from __future__ import annotations

import torch
from families import backbone

from headstart.heads.methods import build_drafter


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
