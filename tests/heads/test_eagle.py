"""EAGLE against a plain reference, its start values, its noise and its files.

Shape suffixes: B batch, T positions, D width.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import backbone, random_drafter, read, texts
from transformers import AutoConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.eagle import BIAS, Eagle
from headstart.heads.methods import build_drafter
from headstart.support.errors import UserError

CLOSE = {"atol": 3e-5, "rtol": 1e-4}


def made(on: Backbone, depth: int = 1, **arguments: Any) -> Eagle:
    drafter = random_drafter("eagle", on, depth=depth, **arguments)
    assert isinstance(drafter, Eagle)
    return drafter


def test_the_layer_starts_as_the_backbones_last() -> None:
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
    drafter = made(on)
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
