"""EAGLE and EAGLE-3: their start values, properties of their weights, noise, and the files that engines load.

Shape suffixes: B batch, T positions, D width.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import backbone, random_drafter, read, texts, tiny
from shrink import model_of, published, shrink
from test_contract import CLOSE
from transformers import AutoConfig, LlamaConfig

from headstart import Backbone, Features
from headstart.heads.eagle import BIAS, Eagle
from headstart.heads.eagle3 import Eagle3, _taps
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE
from headstart.heads.layers.start_values import probe, size_of
from headstart.heads.methods import build_drafter
from headstart.support.errors import UserError
from headstart.support.pytree import list_tensors, map_tensors


def fresh(on: Backbone, **arguments: Any) -> Eagle3:
    drafter = build_drafter("eagle3", on, arguments)
    assert isinstance(drafter, Eagle3)
    return drafter


@pytest.mark.parametrize(
    "layers,taps", [(32, (2, 16, 29)), (36, (2, 18, 33)), (12, (2, 6, 9)), (6, (1, 3, 5)), (4, (1, 2, 3)), (2, (1,)), (1, (1,))]
)
def test_default_taps(layers: int, taps: tuple[int, ...]) -> None:
    """``(2, L//2, L-3)``, as in every engine; other taps only where that does not give three layers."""
    assert _taps(None, layers) == taps


def test_the_layer_starts_as_the_backbones_last() -> None:
    """Weights that read the state are copied from that layer; a layer of another shape or width keeps its random initialisation."""
    on = backbone("llama")
    drafter, last, D = fresh(on), on.layers[-1], on.dim
    layer = drafter.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        reads = getattr(layer.self_attn, name).weight
        assert torch.equal(reads[:, D:], getattr(last.self_attn, name).weight) and 0 < reads[:, :D].abs().max() < OTHER_STREAM_SCALE
    features = probe(on, (on.num_layers,))
    assert features.taps is not None
    shrink = size_of(features.hidden_BTD) / size_of(features.taps[on.num_layers])
    torch.testing.assert_close(layer.self_attn.o_proj.weight, last.self_attn.o_proj.weight * shrink)
    torch.testing.assert_close(layer.mlp.down_proj.weight, last.mlp.down_proj.weight * shrink)
    assert size_of(drafter.states(probe(on, drafter.taps))) == pytest.approx(size_of(features.hidden_BTD), rel=0.5)
    assert torch.equal(layer.hidden_norm.weight, last.input_layernorm.weight) and torch.equal(drafter.norm.weight, on.base.norm.weight)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(D))
    for other in (fresh(on, intermediate_size=40), fresh(backbone("gpt2")), fresh(backbone("gemma3"))):
        assert torch.equal(other.midlayer.hidden_norm.weight, torch.ones(D)) and torch.equal(other.norm.weight, torch.ones(D))
    qwen = backbone("qwen3")  # it normalises queries and keys, which a head does not
    layer, last = fresh(qwen).midlayer, qwen.layers[-1]
    assert torch.equal(layer.self_attn.v_proj.weight[:, D:], last.self_attn.v_proj.weight)
    assert layer.self_attn.q_proj.weight.abs().max() < 1 < last.self_attn.q_proj.weight.abs().max()


def test_the_fused_state_is_fitted_to_the_next_final_hidden_state() -> None:
    on = backbone("llama")
    drafter, random_start, padded = fresh(on), fresh(on), fresh(on)
    rows = [read(on, texts(1, 50, i), drafter) for i in range(250)]
    line = drafter.fit_start(iter(rows))
    assert drafter.start_positions == 12_000 and "on 12,000 positions" in line
    features = read(on, texts(8, 50, 1000), drafter)
    missed = [(one.states(features)[:, 1:-1] - features.hidden_BTD[:, 2:]).square().mean() for one in (drafter, random_start)]
    assert missed[0] < features.hidden_BTD[:, 2:].square().mean() < missed[1]
    weight = drafter.fc.weight.clone()
    assert drafter.fit_start(iter([])) == "" and torch.equal(weight, drafter.fc.weight), "without texts it stays as it is"
    batch = [join_rows([one.padded(60) for one in rows[i : i + 25]]) for i in range(0, 250, 25)]
    assert "on 12,000 positions" in padded.fit_start(iter(batch)), "padding does not count"
    torch.testing.assert_close(padded.fc.weight, weight, rtol=1e-3, atol=1e-4)


def join_rows(rows: list[Features]) -> Features:
    columns = zip(*map(list_tensors, rows), strict=True)
    return map_tensors(lambda _: torch.cat(next(columns)), rows[0])


def test_draft_vocabulary_follows_the_device() -> None:
    drafter = random_drafter("eagle3", backbone("llama"), draft_vocab_size=23)
    moved = copy.deepcopy(drafter).to("meta")
    assert moved.vocabulary is not None and moved.vocabulary.device == moved.lm_head.weight.device


def test_rotation_is_the_same_in_bf16() -> None:
    """Trained in fp32, run in bf16: angles come from unrounded frequencies."""
    drafter, cpu = random_drafter("eagle3", backbone("llama")), torch.device("cpu")
    other = copy.deepcopy(drafter).to(torch.bfloat16)
    for one, two in zip(drafter.cached.rotary(3, 100, cpu), other.cached.rotary(3, 100, cpu), strict=True):
        assert torch.equal(one, two.float())


def test_two_layers_start_as_the_backbones_last_two() -> None:
    on = backbone("llama")
    drafter, features = fresh(on, layers=2), probe(on, (on.num_layers,))
    assert features.taps is not None
    shrink = size_of(features.hidden_BTD) / size_of(features.taps[on.num_layers])
    for layer, start in zip((drafter.midlayer, drafter.layers["1"]), on.layers[-2:], strict=True):
        assert torch.equal(layer.mlp.gate_proj.weight, start.mlp.gate_proj.weight)
        torch.testing.assert_close(layer.mlp.down_proj.weight, start.mlp.down_proj.weight * shrink)
        assert torch.equal(layer.self_attn.v_proj.weight[:, -on.dim :], start.self_attn.v_proj.weight)
    assert torch.equal(drafter.norm.weight, on.base.norm.weight)


def test_the_second_layers_norm_has_both_engines_names(tmp_path: Path) -> None:
    on = backbone("llama")
    drafter = random_drafter("eagle3", on, layers=2, fc_norm=True, norm_output=True, sliding_window=7)
    tensors = drafter.tensors()
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert {"fc_norm.0.weight", "fc_norm.2.weight", "layers.1.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"} < tensors.keys()
    drafter.load_tensors(tensors)
    with pytest.raises(UserError, match=r"layers\.1\.hidden_norm\.weight and layers\.1\.input_layernorm\.weight differ"):
        drafter.load_tensors(tensors | {"layers.1.hidden_norm.weight": torch.zeros(on.dim)})
    drafter.save_pretrained(tmp_path)
    stored = AutoConfig.from_pretrained(tmp_path).to_dict()
    wanted = {"num_hidden_layers": 2, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2, "fc_norm": True, "norm_output": True}
    assert {name: stored[name] for name in wanted} == wanted and "norm_before_fc" not in stored
    other = random_drafter("eagle3", on, norm_before_fc=True)
    assert other.tensors()["input_norm.weight"].shape == (3 * on.dim,) and other.engine_config()["eagle_config"]["norm_before_fc"]
    assert not {"layer_types", "fc_norm", "norm_output"} & fresh(on, norm_output=False).engine_config().keys()


@torch.no_grad()
def test_the_state_fed_back_keeps_its_size() -> None:
    """Before the final norm it grows with each depth, until late depths give what the first gave."""

    def growth(**arguments: Any) -> float:
        drafter = random_drafter("eagle3", backbone("llama"), depth=8, **arguments)
        drafter.midlayer.mlp.down_proj.weight *= 20
        outputs = drafter.forward_dense(read(drafter.backbone, texts(1, 24), drafter))
        sizes = [drafter.next_state(output_BTD).square().mean().sqrt() for output_BTD in outputs]
        return float(sizes[-1] / sizes[0])

    assert growth() < 1.5 < 3 < growth(norm_output=False)
    assert fresh(backbone("llama")).engine_config()["norm_output"]


@pytest.mark.parametrize("kind", ["eagle3", "block", "eagle"])
def test_a_width_that_is_no_multiple_of_the_attention_heads(kind: str) -> None:
    """As GLM-4.5's: the heads' layer has as many attention heads as fit, since engines read a Llama's configuration."""
    on = Backbone(tiny("qwen3", num_attention_heads=6, num_key_value_heads=2, head_dim=8))
    config = random_drafter(kind, on).engine_config()
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    LlamaConfig.from_dict(config)
    stated = shrink(published("glm-4.7-flash")) | {"num_attention_heads": 5, "num_key_value_heads": 5}  # and states no width of a head
    lite = random_drafter(kind, Backbone(model_of({key: stated[key] for key in stated.keys() - {"head_dim"}}))).engine_config()
    assert (lite["num_attention_heads"], lite["num_key_value_heads"], lite["head_dim"]) == (4, 1, 8)


def test_the_first_eagles_layer_starts_as_the_backbones_last() -> None:
    """The input norm, which this head does not have, is in the projections: on a normed state they give what the backbone's give."""
    on = backbone("llama")
    drafter, last, D = build_drafter("eagle", on, {}), on.layers[-1], on.dim
    assert isinstance(drafter, Eagle)
    layer = drafter.cached.layers[0].layer
    x = torch.randn(3, D)
    x = x / (x.square().mean(-1, keepdim=True) + drafter.layer_config.rms_norm_eps).sqrt()
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = last.self_attn.get_submodule(name)(last.input_layernorm(x))
        torch.testing.assert_close(layer.self_attn.get_submodule(name)(x), expected, **CLOSE)
    assert torch.equal(layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    features = read(on, texts(2, 9), drafter)  # what the layer adds fits the stream before the final norm, so it adds nothing at first
    start = drafter.streams(on.embed(features.tokens_BT[:, 1:-1]), features.hidden_BTD[:, :-2])[0]
    torch.testing.assert_close(drafter.eval()(features)[0], start, **CLOSE)
    state = torch.randn(2, 4, D)
    torch.testing.assert_close(drafter.streams(torch.zeros_like(state), state)[0], state, atol=0.2, rtol=0)
    other = build_drafter("eagle", backbone("gpt2"), {}).tensors()  # of another shape
    assert other["layers.0.self_attn.q_proj.weight"].abs().max() <= D**-0.5


def test_noise_is_for_training_alone_and_follows_the_seed() -> None:
    on = backbone("llama")
    drafter = random_drafter("eagle", on, feature_noise=0.3)
    assert isinstance(drafter, Eagle)
    features, outputs = read(on, texts(2, 9), drafter), []
    plain = drafter.train_states(features)
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(drafter.train().train_states(features))
    difference = outputs[0] - plain
    assert torch.equal(plain, features.hidden_BTD) and 0.29 < difference.abs().max() <= 0.3 and difference.mean().abs() < 0.05
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    quiet = random_drafter("eagle", on, feature_noise=0).train()
    assert torch.equal(quiet(features)[0], quiet.eval()(features)[0])


def test_the_files_are_what_engines_load(tmp_path: Path) -> None:
    """vLLM refuses an input norm of the layer and a final norm, and drops a bias; SGLang starts a missing bias at random."""
    on = backbone("llama")
    drafter = random_drafter("eagle", on, depth=1)
    drafter.save_pretrained(tmp_path)
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = {f"layers.0.{name}.weight" for name in [*layer, "post_attention_layernorm"]} | {"fc.weight", BIAS}
    assert drafter.tensors().keys() == names and not drafter.tensors()[BIAS].any()
    assert drafter.tensors()["fc.weight"].shape == (on.dim, 2 * on.dim)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["architectures"] == ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"] and stored["num_hidden_layers"] == 1
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == on.dim
    drafter.load_tensors({name: tensor for name, tensor in drafter.tensors().items() if name != BIAS})
    with pytest.raises(UserError, match=r"fc\.bias is not zero"):
        drafter.load_tensors(drafter.tensors() | {BIAS: torch.ones(on.dim)})
    with_bias = random_drafter("eagle", on, bias=True)
    with_bias.load_tensors(drafter.tensors() | {BIAS: torch.ones(on.dim)})
    assert torch.equal(with_bias.tensors()[BIAS], torch.ones(on.dim)) and with_bias.engine_config()["bias"]
