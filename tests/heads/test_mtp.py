"""MTP modules against a plain reference, their layers against the models' own, and MTP weights in a backbone's checkpoint.

Shape suffixes: B batch, T positions.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refuses
from families import LAYERS, SIZES, backbone, build, random_drafter, shake, texts
from safetensors.torch import load_file, save_file
from test_contract import CLOSE
from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.weight_files import LAYOUTS
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE
from headstart.heads.methods import build_drafter
from headstart.heads.mtp import Mtp
from headstart.inference.contract import chain, part
from headstart.serving.layouts.mtp import INDEX, NEW_FILE, write_back

GATED = SIZES | {
    "head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("Llama", SIZES | {"max_position_embeddings": 256}),
    "mimo": ("Qwen2", SIZES | {"max_position_embeddings": 256}),
    "qwen3_5": ("Qwen3_5Text", GATED),
}


def made(on: Backbone, **arguments: Any) -> Mtp:
    drafter = random_drafter("mtp", on, **arguments)
    assert isinstance(drafter, Mtp)
    return drafter


@pytest.mark.parametrize("layout", ["mimo", "qwen3_5"])
def test_the_layer_is_the_familys(layout: str) -> None:
    """The weights of the backbone's own last layer give its own output; and what is trained is what drafts."""
    on = Backbone(build(*NATIVE[layout]))
    drafter = made(on, layout=layout)
    layer, L = drafter.mtps[0].layer, on.num_layers
    features = on.read(texts(2, 9), taps=(L - 1, L))
    assert features.taps is not None
    weights = layer.state_dict()
    layer.load_state_dict(on.layers[-1].state_dict(), strict=True)
    blocks = divide(None, (2, drafter.layer_config.num_attention_heads, 9), on.device)
    output, _ = layer.forward_train((features.taps[L - 1],), (), drafter.mtps[0].cached.rotary, blocks)
    torch.testing.assert_close(output, features.taps[L], **CLOSE)
    layer.load_state_dict(weights)
    taught = drafter(features)
    state = drafter.begin(part(features, 3, 5), drafter.reserve(drafter.begin(part(features, 0, 3)), 64))
    for k, logits in enumerate(chain(drafter, state, features.tokens_BT[:, 5:8])):
        torch.testing.assert_close(logits, drafter.readout(taught[k][:, 4], k), **CLOSE)


def test_start_values() -> None:
    on = backbone("llama")
    drafter = build_drafter("mtp", on, {"shared": False, "depth": 2})
    assert isinstance(drafter, Mtp) and len(drafter.mtps) == 2
    last = dict(on.layers[-1].named_parameters())
    for module in drafter.mtps:
        assert all(torch.equal(weight, last[name]) for name, weight in module.layer.named_parameters())
        assert torch.equal(module.eh_proj.weight[:, on.dim :], torch.eye(on.dim))
        assert 0 < module.eh_proj.weight[:, : on.dim].abs().max() <= OTHER_STREAM_SCALE * (2 * on.dim) ** -0.5
        assert torch.equal(module.norm.weight, on.base.norm.weight)
    gated = build_drafter("mtp", on, {"layout": "qwen3_5"})
    assert not any(weight.any() for name, weight in gated.named_parameters() if "q_norm" in name or "enorm" in name)
    for layout, less in (("deepseek", 0), ("qwen3_5", 1)):  # of a family whose norms hold their weights less one
        qwen = Backbone(build(*NATIVE["qwen3_5"]))
        drafter = build_drafter("mtp", qwen, {"layout": layout})
        weights, last = drafter.state_dict(), dict(qwen.layers[-1].named_parameters())
        torch.testing.assert_close(weights["mtp.0.layer.input_layernorm.weight"] + less, last["input_layernorm.weight"] + 1)
        torch.testing.assert_close(weights["mtp.0.norm.weight"] + less, dict(qwen.base.named_parameters())["norm.weight"] + 1)
    biased = build_drafter("mtp", on, {"layout": "mimo"})
    assert not any(weight.any() for name, weight in biased.named_parameters() if name.endswith(".bias"))


# MTP weights in a backbone's checkpoint.


def save_with_mtp(folder: Path, model: PreTrainedModel, layout: str, shards: str = "50GB", modules: int = 1) -> dict[str, Tensor]:
    """Save a model in bf16 with random MTP weights of that layout; returns these by their names in the checkpoint."""
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shards)
    shapes = made(Backbone(model), layout=layout, shared=modules == 1, depth=max(modules, 2)).tensors()
    weights = {name: torch.randn(tensor.shape).to(torch.bfloat16) for name, tensor in shapes.items()}
    path = folder / "model.safetensors"
    if path.is_file():
        save_file(load_file(path) | weights, path, metadata={"format": "pt"})
    else:
        save_file(weights, folder / "extra.safetensors", metadata={"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(weights, "extra.safetensors")
        (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text()) | {LAYOUTS[layout].count_key: modules}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
@pytest.mark.parametrize("layout", NATIVE)
def test_native_weights_are_read_trained_and_written_back(layout: str, shards: str, tmp_path: Path) -> None:
    name, settings = NATIVE[layout]
    weights = save_with_mtp(tmp_path / "model", build(name, settings), layout, shards)
    on = load_backbone(str(tmp_path / "model"), dtype="fp32")
    drafter = build_drafter("mtp", on, {"native": True})
    assert isinstance(drafter, Mtp) and drafter.config.layout == drafter.layout.name == layout
    assert drafter.tensors().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name].float()) for name, tensor in drafter.tensors().items())

    write_back(drafter, tmp_path / "same")
    assert {path.name for path in (tmp_path / "same").iterdir()} == {path.name for path in (tmp_path / "model").iterdir()}
    before, after = all_tensors(tmp_path / "model"), all_tensors(tmp_path / "same")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(before[name].dtype == after[name].dtype for name in before)

    with torch.no_grad():
        shake(drafter)
    write_back(drafter, tmp_path / "trained")
    trained = all_tensors(tmp_path / "trained")
    assert all(torch.equal(trained[name], before[name]) != (name in weights) for name in before)
    again = build_drafter("mtp", load_backbone(str(tmp_path / "trained"), dtype="fp32"), {"native": True})
    assert all(map(torch.equal, again.parameters(), [weight.bfloat16().float() for weight in drafter.parameters()]))


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
def test_modules_are_added_to_a_backbone_without_any(shards: str, tmp_path: Path) -> None:
    build(*NATIVE["deepseek"]).to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size=shards)
    on = load_backbone(str(tmp_path / "model"), dtype="fp32")
    drafter = made(on, shared=False, depth=2)
    write_back(drafter, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    written, stitched = all_tensors(tmp_path / "out"), load_backbone(str(tmp_path / "out"), dtype="fp32")
    assert torch.equal(written[f"model.layers.{LAYERS + 1}.eh_proj.weight"], drafter.mtps[1].eh_proj.weight.bfloat16())
    assert all(torch.equal(tensor, written[name]) for name, tensor in all_tensors(tmp_path / "model").items())
    assert stitched.contract() == on.contract()
    if (index := tmp_path / "out" / INDEX).is_file():
        listed = json.loads(index.read_text())
        assert listed["weight_map"][f"model.layers.{LAYERS}.enorm.weight"] == NEW_FILE and listed["weight_map"].keys() == written.keys()
        assert listed["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    again = build_drafter("mtp", stitched, {"native": True, "shared": False, "depth": 2})
    assert all(map(torch.equal, again.parameters(), [weight.bfloat16().float() for weight in drafter.parameters()]))


def test_what_is_not_there_is_named_in_a_line(tmp_path: Path) -> None:
    def refused(on: Backbone, message: str, **arguments: Any) -> None:
        refuses(message, build_drafter, "mtp", on, arguments)

    def loaded(name: str, change: dict[str, Tensor | None], layout: str = "deepseek", modules: int = 1) -> Backbone:
        folder = tmp_path / name
        save_with_mtp(folder, build(*NATIVE[layout]), layout, modules=modules)
        weights = load_file(folder / "model.safetensors") | change
        kept = {key: tensor for key, tensor in weights.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return load_backbone(str(folder), dtype="fp32")

    refused(backbone("llama"), "checkpoint of the backbone '' is no path: it is empty; give the path of a file or folder", native=True)
    refused(load_backbone("embedded"), r"no MTP weights in .*mtp\.fc\.weight.*set drafter\.native=false", native=True)
    prefix = f"model.layers.{LAYERS}."
    experts = loaded("experts", {prefix + "mlp.gate_proj.weight": None, prefix + "mlp.experts.0.gate_proj.weight": torch.ones(2, 2)})
    refused(experts, "deepseek layout.*mlp.gate_proj.weight is missing; mixtures of experts", native=True)
    latent = loaded("latent", {prefix + "self_attn.kv_a_layernorm.weight": torch.ones(2)})
    refused(latent, "kv_a_layernorm.weight is there; mixtures of experts and latent attention", native=True)
    wide = loaded("wide", {prefix + "eh_proj.weight": torch.ones(3, 4)})
    refused(wide, r"eh_proj.weight in .* is \[3, 4\]; a deepseek module of this backbone has \[32, 64\]", native=True)
    several = loaded("several", {}, modules=2)
    refused(several, "3 MTP modules wanted of .* holds 2 .*: set drafter.depth=2", native=True, shared=False)
    assert len(build_drafter("mtp", several, {"native": True, "shared": False, "depth": 2}).tensors()) == 2 * 13
    refused(several, "layout qwen3_5 holds one module; set drafter.shared=true", layout="qwen3_5", shared=False)
    refused(several, "drafter.layout", layout="deepsek")
    refused(several, "drafter.shared", shared=1)
    (tmp_path / "several" / "note").write_text("kept")
    refuses("several exists and is not an empty folder; give a new one", write_back, made(several), tmp_path / "several")
