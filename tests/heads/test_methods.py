"""How a drafter is found by its name, which of its arguments are refused, and what Medusa and MLP heads start as."""

from typing import Any

import pytest
import torch
from families import DRAFTERS, LAYERS, VOCAB, backbone, texts
from test_contract import CLOSE

from headstart.heads.methods import build_drafter, find_drafter
from headstart.support.errors import UserError

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"taps": []}, "taps"),
    ("eagle3", {"taps": [1, LAYERS + 1]}, "taps"),
    ("eagle3", {"taps": [-1]}, "taps"),
    ("eagle3", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
    ("eagle3", {"layers": 3}, "layers"),
    ("eagle3", {"sliding_window": 4}, "drafter.sliding_window is at least drafter.depth=5, the length of a draft; got 4"),
    ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "drafter.fc_norm and drafter.norm_before_fc both norm the taps"),
    ("eagle", {"feature_noise": -0.1}, "feature_noise"),
    ("eagle", {"draft_vocab_size": 9}, "drafter.depth, drafter.draft_depth, drafter.intermediate_size, drafter.feature_noise"),
    ("medusa", {"layers": 0}, "drafter.layers is a whole number of at least 1 and at most 256; got 0"),
    ("medusa", {"dept": 3}, "did you mean drafter.depth"),
    (
        "medusa",
        {"taps": [1]},
        "drafter.depth, drafter.draft_depth, drafter.draft_vocab_size, drafter.freeze_readout, drafter.shortlist, drafter.layers",
    ),
    ("hydra", {"depth": 2, "draft_depth": 3}, "Hydra cannot draft deeper than the 2 tokens"),
    ("mlp", {"tie_weights": True, "depth": 1}, "drafter.tie_weights shares weights between depths, .* of at least 2; got 1"),
    ("block", {"depth": 7, "sliding_window": 6}, "drafter.sliding_window is at least 7, the length of a block"),
    ("block", {"draft_vocab_size": 20}, "draft_vocab_size"),
    ("peagle", {"mask_token": 61}, "drafter.mask_token is a token of the vocabulary, from 0 to 60; got 61"),
    ("peagle", {"depth": 1}, "drafter.depth"),
    ("medussa", {}, "did you mean 'medusa'"),
    ("no.such.module", {}, "no.such.module"),
    ("json.decoder", {}, "exactly one Drafter"),
]


def test_wrong_arguments_are_refused_in_a_line() -> None:
    for kind, arguments, named in WRONG:
        with pytest.raises(UserError, match=named) as caught:
            build_drafter(kind, backbone("llama"), arguments)
        assert "\n" not in str(caught.value), named


def test_every_drafter_is_found_by_its_file() -> None:
    assert {"eagle3", "medusa"} <= set(DRAFTERS)
    for kind in DRAFTERS:
        assert find_drafter(kind).__module__ == f"headstart.heads.{kind}"
        assert find_drafter(f"headstart.heads.{kind}") is find_drafter(kind)


def test_an_untrained_medusa_repeats_the_backbone() -> None:
    on = backbone("llama")
    drafter = build_drafter("medusa", on, {})
    features = on.read(texts(1, 9))
    for k, hidden in enumerate(drafter(features)):
        torch.testing.assert_close(drafter.readout(hidden, k), on.readout(features.hidden_BTD[:, : hidden.shape[1]]), **CLOSE)


def test_mlp_starts_from_the_backbones_embedding_and_output_layer_where_they_fit() -> None:
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
