"""Every key and tensor of a GGUF file is compared with the model that comes of it: put right where it is known, said where it is not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import chat_model, write_gguf
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.backbone.gguf_config import say_unread
from headstart.heads.backbone.gguf_file import GgufFile
from headstart.heads.backbone.gguf_header import GgufHeader, read_header
from headstart.heads.backbone.model_config import empty_model, load_config

SIZES = {"context_length": 4096, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "vocab_size": 32}
HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2}
RMS, NORM = {"attention.layer_norm_rms_epsilon": 1e-6}, {"attention.layer_norm_epsilon": 1e-5}
WIDE = {"attention.key_length": 32, "attention.value_length": 32}
BASE = {"rope.freq_base": 1e6}
USED = {"expert_used_count": 2}


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of Headstart; transformers has some of its own."""
    return [record.getMessage() for record in caplog.records if record.name == "headstart"]


def config_of(folder: Path, architecture: str, stated: dict[str, Any], tensors: tuple[str, ...] = ()) -> Any:
    """Return the configuration of a file whose header says this."""
    file = gguf.GGUFWriter(folder / "small.gguf", architecture)
    for key, value in {**SIZES, **HEADS, **stated}.items():
        add = {bool: file.add_bool, int: file.add_uint32, float: file.add_float32, str: file.add_string, list: file.add_array}
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([f"t{number}" for number in range(32)])
    for tensor in ("token_embd.weight", *tensors):
        file.add_tensor(tensor, np.zeros((32, 64) if tensor.endswith("weight") else 64, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return load_config(str(folder / "small.gguf")).get_text_config()


BARE = {"attention.head_count_kv": None}
"""No key but those that llama.cpp needs: the others have its defaults, all of the head is rotated, by 10,000, and nothing has a window."""


@pytest.mark.parametrize(("architecture", "stated", "expected"), [
    ("starcoder2", NORM | BASE, {"rope_theta": 1e6, "norm_epsilon": 1e-5}),
    ("phi3", RMS | {"attention.sliding_window": 2047}, {"sliding_window": 2047}),
    ("phi3", RMS | {"rope.dimension_count": 12}, {"partial_rotary_factor": 0.75}),
    ("stablelm", NORM | {"rope.dimension_count": 8}, {"partial_rotary_factor": 0.5}),
    ("nemotron", {"attention.layer_norm_epsilon": 2e-5}, {"norm_eps": 2e-5}),
    ("qwen3", RMS | WIDE | BASE, {"head_dim": 32}),
    ("llama", RMS | WIDE | {"rope.dimension_count": 32}, {"head_dim": 32, "attention_bias": False}),
    ("gemma2", RMS | WIDE | {"final_logit_softcapping": 20.0}, {"final_logit_softcapping": 20.0, "query_pre_attn_scalar": 32}),
    ("gemma2", RMS | WIDE | {"block_count": 46, "attention.head_count": 2}, {"query_pre_attn_scalar": 32}),
    ("gemma3", RMS | WIDE | BASE | {"block_count": 62, "attention.head_count": 8}, {"query_pre_attn_scalar": 8}),
    ("qwen2moe", RMS | USED | {"expert_count": 8, "expert_feed_forward_length": 24}, {"moe_intermediate_size": 24, "num_experts": 8}),
    ("gpt2", NORM | {"attention.head_count_kv": 4}, {"max_position_embeddings": 4096}),
    ("mistral", RMS | BASE, {"sliding_window": False}),
    ("mistral", RMS | BASE | {"attention.sliding_window": 0}, {"sliding_window": False}),
    ("gemma2", RMS | WIDE | {"attention.sliding_window": 0}, {"sliding_window": 4096}),
    ("qwen3moe", RMS | WIDE | USED | {"expert_count": 8, "expert_weights_norm": False}, {"norm_topk_prob": False}),
    ("qwen2moe", RMS | USED | {"expert_count": 8, "expert_weights_norm": True, "expert_gating_func": 1}, {"norm_topk_prob": True}),
    ("llama", RMS | {"rope.scaling.factor": 4.0}, {"factor": 4.0}),
    ("qwen2", RMS | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {"original_max_position_embeddings": 4096}),
    ("stablelm", NORM | BARE, {"partial_rotary_factor": 1, "num_key_value_heads": 4}),
    ("nemotron", NORM | BARE, {"partial_rotary_factor": 1, "num_key_value_heads": 4, "head_dim": 16}),
    ("qwen3", RMS | BARE, {"head_dim": 16, "num_key_value_heads": 4}),
    ("gemma4", RMS | WIDE | {"attention.sliding_window": 512, "attention.sliding_window_pattern": [True, False]},
     {"final_logit_softcapping": 30}),
    ("minimax-m2", RMS | BARE | USED | {"expert_gating_func": 2, "rope.dimension_count": 8},
     {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
])  # fmt: skip
def test_what_transformers_leaves_out(
    architecture: str, stated: dict[str, Any], expected: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, architecture, stated)
    found = {name: getattr(config, name, None) or (config.to_dict().get("rope_parameters") or {}).get(name, False) for name in expected}
    assert found == pytest.approx(expected) and not said_by(caplog)


@pytest.mark.parametrize(("architecture", "stated", "lacking"), [
    ("llama", {"attention.head_count": None}, "llama.attention.head_count, llama.attention.layer_norm_rms_epsilon"),
    ("stablelm", {}, "stablelm.attention.layer_norm_epsilon"), ("qwen3moe", RMS, "qwen3moe.expert_used_count"),
    ("minimax-m2", RMS | USED, "minimax-m2.expert_gating_func"),
])  # fmt: skip
def test_a_key_without_a_default_is_one_line(architecture: str, stated: dict[str, Any], lacking: str, tmp_path: Path, caplog: Any) -> None:
    config_of(tmp_path, architecture, stated)
    (line,) = said_by(caplog)
    assert line.startswith(f"small.gguf lacks {lacking}, for which GGUF has no default: ")


LINEAR = WIDE | BASE | {
    "block_count": 4, "full_attention_interval": 4, "attention.recurrent_layers": [True, True, True, False], "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
ONE_HEAD = {"attention.head_count_kv": 1, "feed_forward_length": 256, "tensor_data_layout": "jploski"}
CONVERTED: dict[str, dict[str, Any]] = {
    "bloom": NORM | {"attention.head_count_kv": 4, "feed_forward_length": 256},
    "falcon": NORM | ONE_HEAD,
    "gemma2": RMS | NORM | WIDE | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
    "gemma3": RMS | NORM | WIDE | BASE | {"attention.sliding_window": 512, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "gemma4": RMS | BASE | {
        "block_count": 4, "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
        "attention.value_length_swa": 16, "attention.sliding_window": 512, "attention.sliding_window_pattern": [True, True, True, False],
        "rope.freq_base_swa": 1e4, "rope.dimension_count": 32, "rope.dimension_count_swa": 16, "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 16, "final_logit_softcapping": 30.0,
    },
    "gpt2": NORM | {"attention.head_count_kv": 4, "feed_forward_length": 256},
    "lfm2": RMS | BASE | {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    "llama": RMS | BASE | {"rope.dimension_count": 16},
    "mamba": RMS | {
        "context_length": 2**20, "attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0, "ssm.conv_kernel": 4,
        "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.dt_b_c_rms": False,
    },
    "minimax-m2": RMS | BASE | WIDE | EXPERTS | {"rope.dimension_count": 16, "expert_feed_forward_length": 96, "expert_gating_func": 2},
    "mistral": RMS | BASE | {"rope.dimension_count": 16},
    "nemotron": NORM | BASE | {"rope.dimension_count": 8, "rope.scaling.type": "none"},
    "phi3": RMS | BASE | {"rope.dimension_count": 16, "rope.scaling.original_context_length": 4096, "attention.sliding_window": 2047},
    "qwen2": RMS | BASE,
    "qwen2moe": RMS | BASE | EXPERTS | {"expert_shared_feed_forward_length": 96},
    "qwen3": RMS | BASE | WIDE,
    "qwen35": RMS | LINEAR,
    "qwen35moe": RMS | LINEAR | EXPERTS | {"expert_shared_feed_forward_length": 24},
    "qwen3moe": RMS | BASE | WIDE | EXPERTS,
    "stablelm": NORM | {"rope.dimension_count": 4, "use_parallel_residual": True},
    "starcoder2": NORM | BASE,
}  # fmt: skip
"""Headers with the keys that llama.cpp's converter (conversion/ in llama-cpp-python 0.3.36) writes for the architectures that load."""


@pytest.mark.parametrize("architecture", CONVERTED)
def test_a_converted_model_s_header_has_no_line(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of(tmp_path, architecture, CONVERTED[architecture])
    assert said_by(caplog) == []


def test_every_architecture_that_transformers_reads_has_a_header() -> None:
    """But for encoder-decoders, and two that it names and cannot read (5.23: gpt-oss fails at its lists, deci has no configuration)."""
    stated = {*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer", "t5", "umt5", "deci", "gpt_oss"}
    assert {name.replace("_m", "m").replace("minimaxm", "minimax-m") for name in stated} == {*CONVERTED}


def test_layers_elsewhere_than_transformers_has_them_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_of(tmp_path, "qwen35", RMS | LINEAR | {"attention.recurrent_layers": [True, False, True, False]})
    (line,) = said_by(caplog)
    assert line.startswith("small.gguf states qwen35.attention.recurrent_layers = [True, False, True, False], which is not read: ")


def test_windows_of_some_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stated = RMS | WIDE | BASE | {"block_count": 6, "attention.sliding_window": 512, "rope.freq_base_swa": 2e4}
    for pattern in (6, [True] * 5 + [False]):
        config = config_of(tmp_path, "gemma3", stated | {"attention.sliding_window_pattern": pattern})
        assert [config.rope_parameters[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [1e6, 2e4]
    assert not said_by(caplog)
    for none in (None, 0):
        config = config_of(tmp_path, "gemma3", stated | {"attention.sliding_window": none, "rope.freq_base": None})
        assert config.layer_types == ["full_attention"] * 6 and config.rope_parameters["full_attention"]["rope_theta"] == 1e4
    config_of(tmp_path, "gemma3", stated | {"attention.sliding_window_pattern": 3})
    assert "states gemma3.attention.sliding_window_pattern = 3, which is not read" in caplog.text


@pytest.mark.parametrize(("architecture", "stated", "said"), [
    ("llama", RMS | {"attention.sliding_window": 512, "router": 0.25}, "llama.attention.sliding_window = 512, llama.router = 0.25"),
    ("qwen2", RMS | {"attention.sliding_window": 512}, "qwen2.attention.sliding_window = 512"),
    ("llama", RMS | {"rope.dimension_count": 8, "attention.key_length": 16}, "llama.rope.dimension_count = 8"),
    ("llama", RMS | {"attention.causal": False}, "llama.attention.causal = False"),
    ("qwen2moe", RMS | USED | {"expert_count": 8, "expert_gating_func": 2}, "qwen2moe.expert_gating_func = 2"),
    ("minimax-m2", RMS | USED | {"expert_gating_func": 1}, "minimax-m2.expert_gating_func = 1"),
    ("gpt2", NORM | {"attention.head_count_kv": [2, 2]}, "gpt2.attention.head_count_kv = [2, 2]"),
    ("qwen2", RMS | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024,
                     "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 0.5}, "qwen2.rope.scaling.attn_factor = 0.5"),
])  # fmt: skip
def test_what_nothing_accounts_for_is_one_line(architecture: str, stated: dict[str, Any], said: str, tmp_path: Path, caplog: Any) -> None:
    config = config_of(tmp_path, architecture, stated)
    assert said_by(caplog) == [f"small.gguf states {said}, which is not read: the model may compute otherwise"]
    if "rope.scaling.type" in stated:
        assert config.rope_parameters["beta_fast"] == 16


def test_the_header_says_nothing_that_is_not_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole file, of which all keys and tensors are read, and one loaded before is not spoken of again."""
    file = write_gguf(tmp_path / "plain.gguf", *chat_model(), kind="F32")
    for _ in range(2):
        load_backbone(str(file), dtype="fp32", device="cpu")
    assert [line for line in caplog.messages if "not read" in line] == []


def test_keys_of_the_tokenizer_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unread = {"remove_extra_whitespaces": 1, "escape_whitespaces": 0}
    keys = {f"tokenizer__ggml__{name}": value for name, value in (unread | {"add_sep_token": 0, "eot_token_id": 7}).items()}
    load_config(str(write_gguf(tmp_path / "spaced.gguf", *chat_model(), **keys)))
    stated = ", ".join(f"tokenizer.ggml.{name} = {value}" for name, value in unread.items())
    assert said_by(caplog) == [f"spaced.gguf states {stated}, which is not read: the model may compute otherwise"]


def test_biases_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = chat_model(attention_bias=True, mlp_bias=True)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
    on = load_backbone(str(write_gguf(tmp_path / "biased.gguf", model, tokenizer, "F32")), dtype="fp32", device="cpu")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(on.model(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)
    assert "not read" not in caplog.text


def test_a_tensor_that_nothing_takes_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = chat_model()
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(16, bias=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("gguf_models").NAMES, "self_attn.q_norm", "attn_q_norm")
        file = write_gguf(tmp_path / "normed.gguf", model, tokenizer, "F32")
    load_backbone(str(file), dtype="fp32", device="cpu")
    names = ", ".join(f"blk.{layer}.attn_q_norm.weight" for layer in range(4))
    assert f"normed.gguf holds 4 tensors that transformers does not read ({names}): the model computes without them" in caplog.messages


PARTS = "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_norm ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"


@pytest.mark.parametrize("architecture", ["minimax-m2", "qwen3moe"])
def test_only_what_nothing_takes_of_a_mixture_of_experts_is_named(architecture: str, tmp_path: Path, caplog: Any) -> None:
    """All of MiniMax-M2 is read; a Qwen3 has no bias for its choice of experts."""
    biases = ["blk.0.exp_probs_b.bias", "blk.1.exp_probs_b.bias"]
    layers = [f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in PARTS.split()]
    tensors = ["output.weight", "output_norm.weight", *layers, *biases]
    model = empty_model(config_of(tmp_path, architecture, CONVERTED[architecture], tuple(tensors)), "small.gguf")
    header = read_header(tmp_path / "small.gguf")
    large = GgufHeader(header.metadata, {name: replace(raw, elements=10**6) for name, raw in header.tensors.items()}, header.end)
    say_unread(GgufFile(tmp_path / "small.gguf", header.end, large), model)
    line = f"small.gguf holds 2 tensors that transformers does not read ({', '.join(biases)}): the model computes without them"
    assert said_by(caplog) == ([] if architecture == "minimax-m2" else [line])
