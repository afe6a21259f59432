"""The backbone: readout and taps equal the model's own, and unsuitable models are refused in one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from errors import refusal, refuses
from families import FAMILIES, LAYERS, SIZES, backbone, build, texts, tiny
from plain.base import Target
from safetensors.torch import load_file, save_file
from shrink import shrunk
from structure import ROOT
from tiny_models import tiny_model
from torch import Tensor
from transformers import Gemma2PreTrainedModel
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from headstart import Backbone, load, load_backbone, load_tokenizer
from headstart.heads.backbone.fingerprint import same_weights
from headstart.heads.backbone.model_config import read_end_tokens
from headstart.heads.layers.start_values import layer_weights
from headstart.support.devices import find_accelerator
from headstart.support.errors import UserError

WIDE = SIZES | {"max_position_embeddings": 256}
NARROW = WIDE | {"head_dim": 8, "sliding_window": 5}
POSTPROCESSED: dict[str, dict[str, Any]] = {
    "Cohere": WIDE | {"logit_scale": 0.3},
    "Cohere2": NARROW | {"logit_scale": 0.3},
    "Gemma2": NARROW | {"final_logit_softcapping": 2.0},
    "RecurrentGemma": NARROW | {"logits_soft_cap": 2.0},
    "Granite": WIDE | {"logits_scaling": 4.0, "residual_multiplier": 0.5},
}
"""Families that scale or cap their logits."""


@pytest.mark.parametrize("name", [*FAMILIES, *POSTPROCESSED])
def test_readout_is_the_models_own(name: str) -> None:
    on = Backbone(build(name, POSTPROCESSED[name]), trees=False) if name in POSTPROCESSED else backbone(name)
    tokens = texts(2, 12)
    read = on.read(tokens)
    logits = on.model(tokens).logits
    torch.testing.assert_close(on.readout(read.hidden_BTD), logits, atol=1e-5, rtol=1e-5)
    if name not in ("llama", "qwen3", "gpt2"):
        assert (on.unembed(read.hidden_BTD) - logits).abs().max() > 0.1, "this family does nothing to its logits: the test holds nothing"
    assert on.readout(read.hidden_BTD[0, 3]).shape == (on.vocab,)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_models_hidden_states(family: str) -> None:
    on, tokens = backbone(family), texts(2, 12)
    states = on.model(tokens, output_hidden_states=True).hidden_states
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in on.layers]
    read = on.read(tokens, taps=(0, 2, LAYERS - 1, LAYERS))
    assert read.taps is not None and set(read.taps) == {0, 2, LAYERS - 1, LAYERS}
    for tap in (0, 2, LAYERS - 1):
        assert torch.equal(read.taps[tap], states[tap])
    assert torch.equal(read.hidden_BTD, states[LAYERS])
    assert not torch.allclose(read.taps[LAYERS], states[LAYERS], atol=1e-2), "the last tap stands before the final norm"
    assert on.read(tokens).taps is None
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in on.layers] == hooks, "hooks are left behind"


def test_the_layers_are_the_language_models_where_an_image_tower_has_as_many() -> None:
    tower = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(vocab_size=61, pad_token_id=0, bos_token_id=None, eos_token_id=None, **WIDE)
    both = transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=60)
    on, tokens = Backbone(transformers.LlavaForConditionalGeneration(both)), texts(1, 9)
    states = on.model(tokens, output_hidden_states=True).hidden_states
    read, reference = on.read(tokens, taps=(0, 2, 5)), Target(on.model).read(tokens[0].tolist(), (0, 2, 5))
    assert read.taps is not None
    for tap in (0, 2, 5):
        torch.testing.assert_close(read.taps[tap], states[tap])
        torch.testing.assert_close(reference.streams[tap], states[tap][0])
    start = layer_weights(on)
    assert start is not None and torch.equal(start[0]["mlp.up_proj.weight"], on.layers[-1].mlp.up_proj.weight)  # type: ignore[union-attr]


def test_a_backbone_is_frozen_and_evaluates() -> None:
    model = tiny("gpt2").train()  # has dropout
    on = Backbone(model)
    assert not any(weight.requires_grad for weight in model.parameters())
    assert torch.equal(on.read(texts(1, 8)).hidden_BTD, on.read(texts(1, 8)).hidden_BTD)
    assert not on.read(texts(1, 8)).hidden_BTD.requires_grad
    assert on.model is model and (on.dim, on.vocab, on.num_layers, on.max_positions) == (32, 61, LAYERS, 96)


def banning(logits: Tensor, token: int = 7) -> Tensor:
    return logits.index_fill(-1, torch.tensor([token]), -torch.inf)


@pytest.mark.parametrize("change", [torch.square, banning, lambda logits: logits + 0.01 * logits.abs().max() * (logits > 0)])
def test_an_unknown_change_of_the_logits_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: banning(out, 5))  # each token by itself
    assert Backbone(model).dependence is None
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = change(out.logits.nan_to_num(neginf=0.0))
        return out

    model.forward = changed
    refuses("changes its logits", Backbone, model)


def test_the_fingerprint_is_of_the_weights_not_of_their_type() -> None:
    prints = [Backbone(tiny("llama").to(dtype)).fingerprint() for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert all(same_weights(a, b) for a in prints for b in prints)
    other = Backbone(tiny("llama", seed=1)).fingerprint()
    assert not any(same_weights(a, other) for a in prints) and not same_weights(prints[0], prints[0][:5])


def refused(path: Path | str, **options: Any) -> str:
    """The error message, which must be one line."""
    return refusal(load_backbone, str(path), **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_load_backbone(saved: Path) -> None:
    on = load_backbone(str(saved), device="cpu")
    assert on.dtype == torch.float32 and torch.equal(on.read(texts(1, 9)).hidden_BTD, backbone("llama").read(texts(1, 9)).hidden_BTD)
    assert load_backbone(str(saved), dtype="bf16", device="cpu").dtype == torch.bfloat16
    assert load_backbone(str(saved), attention="eager", device="cpu").model.config._attn_implementation == "eager"


@pytest.mark.parametrize("model", ["gpt-oss-20b"] + ["gemma-2-9b-it"] * (not Gemma2PreTrainedModel._supports_sdpa))  # 5.20 says it does
def test_models_without_sdpa_compute_attention_eagerly_by_themselves(tmp_path: Path, model: str) -> None:
    shrunk(model).save_pretrained(tmp_path)
    assert load_backbone(str(tmp_path), device="cpu").model.config._attn_implementation == "eager"
    refuses("cannot compute attention with sdpa .*; set attention to auto", load_backbone, str(tmp_path), attention="sdpa", device="cpu")


def test_missing_backbones(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere") and str(tmp_path / "nowhere") in refused(tmp_path / "nowhere")
    assert "no such folder" in refused("nowhere")
    assert "nobody/nothing" in refused("nobody/nothing")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty")
    refuses("tokenizer", load_tokenizer, str(tmp_path / "empty"))


def test_damaged_backbones(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole, config = weights.read_bytes(), (folder / "config.json").read_text()
    for part in (b"", whole[:4], whole[: len(whole) // 2]):
        weights.write_bytes(part)
        assert f"the weights of '{folder}' are cut short, damaged or not all there" in refused(folder)
    weights.write_bytes(whole)
    shapes = "lm_head.weight of .* is .61, 32. in its files, and .99, 32. by its config.json; take the config.json that belongs to"
    (folder / "config.json").write_text(json.dumps(json.loads(config) | {"vocab_size": 99}))
    assert re.search(shapes, refused(folder))
    for text in (
        "{",
        "[]",
        json.dumps(json.loads(config) | {"num_attention_heads": "many"}),
        json.dumps(json.loads(config) | {"hidden_size": 64}),
    ):
        (folder / "config.json").write_text(text)
        assert str(folder) in refused(folder)


def test_end_tokens_are_numbers(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refuses("eos_token_id of the model's GenerationConfig is a token's number, .* got '</s>'", read_end_tokens, str(folder))


def test_missing_tensors_are_not_made_up(folder: Path) -> None:
    """transformers would fill them with random numbers and only warn."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".3." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.3" in refused(folder)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "llama"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, kind: str) -> None:
    """transformers makes one of special tokens alone for some, which reads every text as empty or as unknown."""
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    refuses("no tokenizer in .*: a tokenizer.json is missing there", load_tokenizer, str(tmp_path))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    model.save_pretrained(tmp_path / "t5")
    assert "encoder-decoder" in refused(tmp_path / "t5")
    refuses("encoder-decoder", Backbone, model)


def test_a_repositorys_code_runs_only_when_told(folder: Path) -> None:
    code = {"model_type": "homemade", "auto_map": {"AutoConfig": "payload.C", "AutoModelForCausalLM": "payload.M"}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | code))
    (folder / "payload.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    assert "trust_remote_code" in refused(folder)
    assert not (folder / "ran").exists()


def test_a_model_of_two_widths_is_refused() -> None:
    settings = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(UserError, match="OPTForCausalLM has embeddings of width 16 and layers of width 32"):
        Backbone(build("OPT", settings | {"do_layer_norm_before": False}))


def test_a_model_that_is_its_own_base_decodes() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    token_ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = MllamaTextConfig(**sizes, **token_ids, cross_attention_layers=[], initializer_range=0.2)
    model, ids = transformers.MllamaForCausalLM(config).eval(), texts(1, 9, seed=3)
    with load(None, model, proposers="suffix") as heads:
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(model.generate(**asked, custom_generate=heads.generate), model.generate(**asked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_for_all_tokens_of_a_pass_is_named(dtype: torch.dtype) -> None:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 3
        return (x / scale).round() * scale

    model = tiny("llama").to(dtype)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    refuses("computes other hidden states where more tokens follow in a pass.* one dynamic scale", Backbone, model)


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 1.05), (torch.float32, 1.0005)])
def test_attention_without_a_mask_may_round_otherwise(dtype: torch.dtype, share: float) -> None:
    """SmolLM2 in bf16 drafted chains on processors where the rounding of another kernel grew to 5.3 % over its 30 layers."""
    model = tiny("llama").to(dtype)
    for layer in model.model.layers:

        def apart(_: Any, inputs: Any, given: Any, outputs: Any) -> Any:
            return (outputs[0] * (share if given["attention_mask"] is None else 1), *outputs[1:])

        layer.self_attn.register_forward_hook(apart, with_kwargs=True)
    assert Backbone(model).no_trees is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_are_not_followed_are_named_in_16_bits_too(dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, inputs, given: (inputs, given | {"attention_mask": None}), with_kwargs=True)
    refuses("LlamaForCausalLM does not follow a 4-D attention mask", Backbone, model)


def test_states_of_layers_that_are_not_one_for_each_token_are_refused() -> None:
    """XLNet's have time before rows."""
    on = Backbone(tiny_model("xlnet"), trees=False)
    assert on.read(texts(1, 9)).hidden_BTD.shape == (1, 9, on.dim)
    refuses(r"XLNetLayer gives states \[9, 1, 32\] for \[1, 9, 32\], so heads cannot read layers", on.read, texts(1, 9), taps=(1,))


def test_torch_for_cuda_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's torch on Linux: it names an accelerator unless it is asked whether one is there."""
    built_for = lambda check_available=False: None if check_available else torch.device("cuda")  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for)
    assert find_accelerator() is None and load_backbone("embedded").device == torch.device("cpu")
    sources = [path for folder in ("heads", "inference", "training", "headstart") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in sources if "current_accelerator" in path.read_text()] == ["devices.py"]
