"""How a drafter is found by its name, which of its arguments are refused, and what Medusa and MLP heads start as."""

import json
from pathlib import Path
from typing import Any

import torch
from errors import refuses
from families import DRAFTERS, LAYERS, VOCAB, backbone, random_drafter, read, texts
from safetensors.torch import load_file
from test_contract import CLOSE

from headstart.heads.hydra import Hydra
from headstart.heads.methods import build_drafter, find_drafter
from headstart.inference.contract import chain, part

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"taps": []}, "taps"),
    ("eagle3", {"taps": [1, LAYERS + 1]}, "taps"),
    ("eagle3", {"taps": [-1]}, "taps"),
    ("eagle3", {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
    ("eagle3", {"layers": 3}, "layers"),
    ("eagle3", {"sliding_window": 4}, "drafter.sliding_window is at least drafter.depth=5, the length of a draft; got 4"),
    ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "drafter.fc_norm and drafter.norm_before_fc both norm the taps"),
    ("eagle", {"draft_vocab_size": 9}, "drafter.depth, drafter.draft_depth, drafter.intermediate_size, drafter.feature_noise"),
    ("eagle3", {"layer": {"num_attention_heads": 5}}, r"^drafter\.layer=.* is no shape of a decoder layer of width 32: .*multiple"),
    ("medusa", {"dept": 3}, "did you mean drafter.depth"),
    ("medusa", {"draft_depth": 0}, "drafter.draft_depth"),
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
        refuses(named, build_drafter, kind, backbone("llama"), arguments)


def test_every_drafter_is_found_by_its_file() -> None:
    assert {"eagle3", "medusa"} <= set(DRAFTERS)
    for kind in DRAFTERS:
        assert find_drafter(kind).__module__ == f"headstart.heads.{kind}"
        assert find_drafter(f"headstart.heads.{kind}") is find_drafter(kind)


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


# Hydra heads are what the paper and its code say, start as the backbone's output layer, and depend on every token drafted so far.

PLAIN: dict[str, Any] = {"prefix_attention": False, "layers": 1, "depth": 3}


def test_untrained_medusa_and_hydra_repeat_the_backbone() -> None:
    """Exactly without a prefix layer; with one up to the size of the hidden state, which its norm makes the same at all positions."""
    on = backbone("llama")
    features = on.read(texts(1, 9))
    for kind, arguments, exact in (("medusa", {}, True), ("hydra", PLAIN, True), ("hydra", {}, False)):
        drafter = build_drafter(kind, on, arguments)
        for k, hidden_BTD in enumerate(drafter(features)):
            expected_BTD = features.hidden_BTD[:, : hidden_BTD.shape[1]]
            ratio = hidden_BTD.norm(dim=-1, keepdim=True) / expected_BTD.norm(dim=-1, keepdim=True)
            assert (ratio == 1).all() if exact else (0.7 < ratio).all() and (ratio < 1.4).all()
            torch.testing.assert_close(drafter.readout(hidden_BTD / ratio, k), on.readout(expected_BTD), **CLOSE)


def test_the_folder_has_the_names_of_the_papers_code(tmp_path: Path) -> None:
    D = backbone("llama").dim
    for prefix, arch in ((False, "mlp"), (True, "prefix-mlp")):
        folder = tmp_path / arch
        random_drafter("hydra", backbone("llama"), depth=2, layers=2, prefix_attention=prefix).save_pretrained(folder)
        shapes = {name: list(x.shape) for name, x in load_file(folder / "hydra_lm_head.safetensors").items()}
        layer = [name for name in shapes if name.startswith("prefix_embeding_layer.")]
        assert len(layer) == (10 if prefix else 0) and all(name.split(".")[1] in ("layers", "norm") for name in layer)
        blocks, out = ([1, 3], "1.") if prefix else ([0, 1], "")
        expected = {f"hydra_lm_head.{k}.{out}weight": [VOCAB, D] for k in range(2)}
        expected |= {f"hydra_lm_head.{k}.{out}bias": [VOCAB] for k in range(2)}
        for k in range(2):
            for block, width in zip(blocks, ((k + 2) * D, D), strict=True):
                expected |= {f"hydra_mlp.{k}.{block}.linear.weight": [D, width], f"hydra_mlp.{k}.{block}.linear.bias": [D]}
            first = f"hydra_mlp.{k}.{blocks[0]}.res_connection"
            expected |= {f"{first}.weight": [D, (k + 2) * D], f"{first}.bias": [D]}
        assert {name: shape for name, shape in shapes.items() if name not in layer} == expected
        config = json.loads((folder / "config.json").read_text())
        assert (config["hydra_num_heads"], config["hydra_num_layers"], config["hydra_head_arch"]) == (2, 2, arch)
        assert config["grounded_heads"] is True and config["hidden_state_offset"] == 0


def test_the_scale_of_embeddings_is_part_of_the_saved_weights() -> None:
    """Heads read scaled embeddings, the saved ones plain embeddings; going there and back rounds nothing."""
    on = backbone("llama")
    drafter, again = random_drafter("hydra", on), random_drafter("hydra", on, seed=2)
    assert drafter.embedding_scale == 2.0  # entries of the embedding are about 0.4
    again.load_tensors(drafter.tensors())
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in drafter.state_dict().items())
    stored = drafter.tensors()["hydra_mlp.1.1.linear.weight"]
    held = drafter.get_parameter("mlps.1.0.linear.weight")
    assert torch.equal(stored[:, : on.dim], held[:, : on.dim]) and torch.equal(stored[:, on.dim :], 2 * held[:, on.dim :])


def test_a_window_bounds_the_prefix_layer_alone() -> None:
    """Positions outside the window have no effect; without a prefix layer there is nothing to bound."""
    on = backbone("llama")
    drafter, tokens = random_drafter("hydra", on), texts(1, 4, seed=5)
    features = read(on, texts(1, 30), drafter)
    drafter.limit(6, sink=2)
    whole = chain(drafter, drafter.begin(features), tokens)
    state = None
    for start, end in ((0, 13), (13, 14), (14, 30)):
        state = drafter.begin(part(features, start, end), drafter.reserve(state, 64) if state is not None else None)
    spoiled = read(on, features.tokens_BT, drafter)
    spoiled.hidden_BTD[:, 2:24] = 5.0
    for other in (chain(drafter, state, tokens), chain(drafter, drafter.begin(spoiled), tokens)):
        for one, two in zip(whole, other, strict=True):
            torch.testing.assert_close(one, two, **CLOSE)
    drafter.limit(None)
    assert not torch.allclose(chain(drafter, drafter.begin(features), tokens)[0], whole[0])
    refuses("Hydra has no KV cache of its own", random_drafter("hydra", on, **PLAIN).limit, 8)


def test_hydra_plus_plus_is_the_default() -> None:
    drafter = build_drafter("hydra", backbone("llama"), {})
    assert isinstance(drafter, Hydra) and drafter.prefix is not None and drafter.config.layers == 4
