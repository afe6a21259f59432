"""What `headstart import` refuses: one line that names what is wrong, and nothing is written; heads that others quantised."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from errors import error_of, output_of, refusal, refuses
from families import VOCAB, random_drafter, tiny
from foreign import DV, D, Tensors, normal, write
from safetensors.torch import load_file, save_file

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.serving.layouts.files import dequantized
from headstart.serving.reading import Wishes, import_heads

Folder = tuple[dict[str, Any], Tensors]


def changed(made: Folder, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Folder:
    """The folder with keys and tensors replaced, or left out where they are None; ``__`` stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return {**made[0], **(config or {})}, {name: tensor for name, tensor in {**made[1], **named}.items() if tensor is not None}


def nested(**stated: Any) -> dict[str, Any]:
    return {"dflash_config": {**DFLASH2()[0]["dflash_config"], **stated}}


EAGLE3, EAGLE1, MEDUSA, HYDRA = foreign.safeailab_eagle3, foreign.safeailab_eagle1, foreign.medusa, lambda: foreign.hydra(False)
DFLASH, DFLASH2, DSPARK, DOMINO = (lambda kind=kind: foreign.block(kind) for kind in ("dflash", "dflash2", "dspark", "domino"))
IDS = "eagle_aux_hidden_state_layer_ids"
CASES: list[tuple[Callable[[], Folder], str]] = [
    (lambda: changed(EAGLE3(), {"architectures": None}, fc__weight=None), "no known layout"),
    (lambda: changed(EAGLE3(), norm__weight=None), "lacks the tensor norm.weight [32] of eagle3 heads"),
    (lambda: changed(EAGLE3(), norm__weight=None, final__weight=normal(D)), "it has final.weight [32], which they do not have"),
    (lambda: changed(EAGLE3(), extra__weight=normal(3, 4)), "has a tensor extra.weight [3, 4], which eagle3 heads of its config"),
    (lambda: changed(EAGLE3(), fc__weight=normal(3 * D, D)), "fc.weight is [96, 32]; with this config.json and backbone it is [32, 96]"),
    (lambda: changed(EAGLE3(), fc__weight=normal(D, 2 * D)), "fc.weight is [32, 64]; with this config.json and backbone it is [32, 96]"),
    (lambda: changed(EAGLE3(), fc__weight=normal(D, 3 * D) * torch.nan), "leaves weight fc.weight of Eagle3 not a number"),
    (lambda: changed(EAGLE3(), {"hidden_size": 64}), "(EAGLE-3) is for a backbone of width 64; BACKBONE has width 32: give the backbone"),
    (lambda: changed(EAGLE3(), t2d=None, config={"vocab_size": 99}), "is for a backbone of vocabulary 99; BACKBONE has vocabulary 61"),
    (lambda: changed(EAGLE3(), {"hidden_act": "gelu"}), "hidden_act 'gelu' in config.json; heads here compute silu alone"),
    (lambda: changed(EAGLE3(), {"num_attention_heads": 5}), "config.json is no configuration of a decoder layer"),
    (lambda: changed(EAGLE3(), {IDS: "2"}), f"{IDS} in config.json is a list of layer numbers; got '2'"),
    (lambda: changed(EAGLE3(), {"eagle_config": [1]}), "eagle_config in config.json is a mapping; got [1]: correct it, or remove it"),
    (lambda: changed(EAGLE3(), {"architectures": [1]}), "architectures in config.json is a list of names; got [1]"),
    (lambda: changed(DFLASH(), {"rope_theta": "x"}), "rope_theta in config.json is a number; got 'x'"),
    (lambda: changed(EAGLE3(), {IDS: [1, 4, 9]}), "reads the layers [1, 4, 9], and the backbone has 6"),
    (lambda: EAGLE3(ids=False), "the default [2, 3, 3] is none for 6 layers"),
    (lambda: changed(EAGLE3(), d2t=None, t2d=None), "drafts 23 of the backbone's 61 tokens and has no d2t"),
    (lambda: changed(EAGLE3(), d2t=torch.zeros(DV, dtype=torch.int64)), "d2t and t2d disagree, whether d2t holds offsets or tokens"),
    (lambda: changed(EAGLE3(), t2d=None, d2t=torch.full((DV,), 50)), "d2t names tokens twice or beyond the vocabulary of 61"),
    (lambda: changed(EAGLE3(), d2t=torch.zeros(DV - 1, dtype=torch.int64)), "d2t is int64 [22]; expected are 23 whole numbers"),
    (lambda: changed(EAGLE3(), embed_tokens__weight=normal(VOCAB, D)), "has embed_tokens.weight [61, 32] of its own, which is not"),
    (lambda: changed(foreign.vllm_peagle(), {"pard_token": 3}), "one mask token in config.json"),
    (lambda: changed(foreign.vllm_peagle(), mask_hidden=normal(3, 4)), "has mask_hidden [3, 4]; expected is mask_hidden [1, 1, 96]"),
    (lambda: changed(foreign.vllm_peagle(), mask_hidden=None), "has no mask_hidden; expected is mask_hidden [1, 1, 96]"),
    (lambda: changed(EAGLE3(), {"logit_scale": 2.0}), "scales logits by 2.0, which eagle3 heads here do not"),
    (lambda: changed(EAGLE1(), fc__bias=None), "lacks the tensor fc.bias [32], and its config.json says bias: true"),
    (lambda: changed(EAGLE1(), norm__weight=normal(D)), "has a norm norm.weight [32] in "),
    (lambda: changed(foreign.speculators_eagle3(), {"speculators_model_type": "xpress"}), "holds heads of speculators' type 'xpress'"),
    (lambda: changed(foreign.speculators_eagle3(), {"transformer_layer_config": {**foreign.LAYER, "hidden_size": 48}}), "org/target"),
    (lambda: changed(MEDUSA(), **{"1__0__linear__bias": None}), "lacks the tensor 1.0.linear.bias [32] of medusa heads"),
    (lambda: changed(MEDUSA(), token_map=torch.arange(9)), "has a truncated vocabulary (token_map [9] in "),
    (lambda: changed(HYDRA(), {"hydra_head_arch": "eagle-attn"}), "hydra_head_arch 'eagle-attn'; hydra heads here are mlp or prefix-mlp"),
    (lambda: changed(HYDRA(), {"grounded_heads": False}), "grounded_heads false"),
    (lambda: changed(foreign.accelerator(False), {"tie_weights": True}), "says tie_weights, but speculator.emb.1.weight differs"),
    (lambda: changed(foreign.accelerator(False), {"n_predict": None}), "config.json does not say n_predict"),
    (lambda: changed(DFLASH(), {"dflash_config": {"target_layer_ids": [1, 8]}}), "reads the taps [2, 9], and the backbone has 6 layers"),
    (lambda: changed(DFLASH(), {"sample_from_anchor": True}), "has sample_from_anchor true"),
    (lambda: changed(DFLASH(), {"draft_vocab_size": 23}), "drafts 23 of the backbone's 61 tokens; block heads here draft all"),
    (lambda: changed(DFLASH(), {"block_size": "8"}), "block_size in config.json is a whole number of at least 1; got '8'"),
    (lambda: changed(DFLASH(), **{"lilicorr__out_head__weight": normal(6, D)}), "holds LiLiCorr heads (lilicorr_enabled), which"),
    (lambda: changed(DFLASH2(), {"sample_from_anchor": True}), "has sample_from_anchor true; block heads here draft from the anchor in"),
    (lambda: changed(DFLASH2(), nested(conv_group_size=8)), "{'conv_group_size': 8} in config.json; block heads here"),
    (lambda: changed(DFLASH2(), nested(output_multiplier=2.0)), "DFlash2 heads with {'output_multiplier': 2.0} in config.json; block"),
    (lambda: changed(DFLASH2(), nested(selector_top_k=None)), "selector_top_k in config.json is a whole number of at least 1; got None"),
    (lambda: changed(DFLASH2(), **{"layers__1__mlp_conv__base_kernel": None}), "lacks the tensor layers.1.mlp_conv.base_kernel [2, 2, 32]"),
    (lambda: changed(DSPARK(), {"markov_head_type": "gated"}), "has a Markov head of type 'gated'"),
    (lambda: changed(DOMINO(), {"dflash_config": {**DOMINO()[0]["dflash_config"], "shift_label": False}}), "'shift_label': False"),
]  # fmt: skip


def refused(folder: Path | str, on: Backbone, out: Path) -> str:
    """The one line with which an import is refused, which writes nothing."""
    line = refusal(import_heads, str(folder), on.name, out, lambda: on, Wishes(new_tokens=2))
    assert not out.exists()
    return line.replace(on.name, "BACKBONE")


def test_what_does_not_fit_is_named(on: Backbone, tmp_path: Path) -> None:
    for i, (make, message) in enumerate(CASES):
        folder = write(tmp_path / str(i), *make())
        assert message in refused(folder, on, tmp_path / "out"), i


def test_unos_adapters_are_refused(on: Backbone, tmp_path: Path) -> None:
    (tmp_path / "uno").mkdir()
    (tmp_path / "uno" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(2, 2)}, tmp_path / "uno" / "adapter_model.safetensors")
    message = refused(tmp_path / "uno", on, tmp_path / "out")
    assert "holds a PEFT adapter" in message and "as Uno's heads are" in message and "backbone.adapter" in message


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_damaged_and_hostile_files(on: Backbone, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, tensors = EAGLE3()

    def message(name: str) -> str:
        return refused(tmp_path / name, on, tmp_path / "out")

    (write(tmp_path / "pickle", config, {}, "x.pt") / "x.pt").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    assert "is no file of tensors alone, or damaged" in message("pickle") and not (tmp_path / "exploded").exists()
    write(tmp_path / "object", config, {"fc.weight": [1, 2]}, "x.bin")  # type: ignore[dict-item]
    assert "holds other things than named tensors (fc.weight)" in message("object")
    whole = write(tmp_path / "cut", config, tensors) / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-10])
    assert "is truncated or damaged" in message("cut")
    for shard, fault in (("../cut/model.safetensors", "outside of it"), ("missing.safetensors", "lacks missing.safetensors")):
        folder = write(tmp_path / "index", config, tensors)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
        assert fault in message("index")
    write(tmp_path / "twice", config, tensors, "a.safetensors")
    write(tmp_path / "twice", config, tensors, "b.safetensors")
    assert "has the tensor d2t in a.safetensors and in b.safetensors" in message("twice")
    (write(tmp_path / "json", config, tensors) / "config.json").write_text("{")
    assert "config.json is damaged" in message("json")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in message("empty")
    assert "no heads at '../no/where': no such folder, and not on the hub" in refused("../no/where", on, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/note").touch()
    error = error_of(capsys, "import", tmp_path / "cut", "--backbone", on.name, "--out", tmp_path / "full")
    assert "exists and is not an empty folder; give a new one" in error


def packed(weight: torch.Tensor, bits: int, scales: tuple[int, int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round a weight to values of so many bits, and pack them a value at a time; returns the tensors and what they stand for."""
    rows, width = weight.shape
    blocks = weight.view(scales[0], rows // scales[0], scales[1], width // scales[1])
    scale = blocks.abs().amax((1, 3)) / (2 ** (bits - 1) - 1)
    whole = (blocks / scale[:, None, :, None]).round()
    words = torch.zeros(rows, -(-width * bits // 32), dtype=torch.int64)
    for column in range(width):
        words[:, column * bits // 32] += (whole.view(rows, width)[:, column].long() + 2 ** (bits - 1)) << (column * bits % 32)
    parts = {"_packed": words.to(torch.int32), "_scale": scale, "_shape": torch.tensor([rows, width])}
    return {f"a.weight{end}": part for end, part in parts.items()}, (whole * scale[:, None, :, None]).view(rows, width)


def quantised_by_others(**changed: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}} | changed}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", [(6, 5), (6, 1), (1, 1), (3, 2)])
def test_what_others_pack_is_read(bits: int, scales: tuple[int, int]) -> None:
    tensors, want = packed(torch.randn(6, 20 if scales[1] != 2 else 18), bits, scales)
    found = dequantized(quantised_by_others(), tensors | {"norm.weight": torch.ones(3)})
    assert found.keys() == {"a.weight", "norm.weight"}
    torch.testing.assert_close(found["a.weight"], want)
    no_zero = {"a.weight_zero_point": torch.zeros(6, 1, dtype=torch.int32)}
    assert torch.equal(dequantized(quantised_by_others(), tensors | no_zero)["a.weight"], found["a.weight"])


@pytest.mark.parametrize(("of", "dtype"), [("float-quantized", torch.float8_e4m3fn), ("int-quantized", torch.int8)])
def test_what_others_leave_unpacked_is_read(of: str, dtype: torch.dtype) -> None:
    tensors = {"a.weight": torch.tensor([[-3.0, 4.0]]).to(dtype), "a.weight_scale": torch.tensor([[0.5]])}
    assert dequantized(quantised_by_others(format=of), tensors)["a.weight"].tolist() == [[-1.5, 2.0]]


@pytest.mark.parametrize(("changed", "stated", "message"), [
    ({"a.weight_zero_point": torch.ones(6, 1)}, {}, "zero points or in the order of activations are not read"),
    ({"a.weight_packed": torch.zeros(6, 4, dtype=torch.int32)}, {}, r"weight_packed \[6, 4\] holds no values of 4 or 8 bits"),
    ({"a.weight_scale": torch.ones(6, 3)}, {}, r"\[6, 3\] scales do not divide a weight of \[6, 20\] evenly"),
    ({}, {"quant_method": "gptq", "format": None}, "quantised by gptq; read are compressed-tensors' pack-quantized"),
    ({}, {"format": "nvfp4-pack-quantized"}, "quantised by compressed-tensors nvfp4-pack-quantized; read are"),
    ({}, {"transform_config": {"config_groups": {}}}, "with other weights left out or rotated"),
    ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with other weights left out or rotated"),
])  # fmt: skip
def test_what_is_not_read_of_others_is_one_line(changed: dict[str, torch.Tensor], stated: dict[str, Any], message: str) -> None:
    tensors = packed(torch.randn(6, 20), 4, (6, 1))[0] | changed
    refuses(message, dequantized, quantised_by_others(**stated), tensors)


def test_heads_in_four_bits_are_imported_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    random_drafter("eagle3", load_backbone(str(tmp_path / "backbone"))).save_pretrained(tmp_path / "heads")
    out = tmp_path / "out"
    assert main(["export", "--heads", str(tmp_path / "heads"), "--to", "vllm", "--out", str(out)]) == 0
    tensors, stands_for = load_file(out / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, stands_for[name] = packed(tensors.pop(name), 4, (1, 2))
        tensors |= {key.replace("a.weight", name): part for key, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(json.loads((out / "config.json").read_text()) | quantised_by_others()))
    imported, backbone = tmp_path / "imported", str(tmp_path / "backbone")
    assert main(["import", str(out), "--backbone", backbone, "--out", str(imported), "--max-new-tokens", "4"]) == 0
    assert "quantised weights became the fp32 weights" in (imported / "headstart.json").read_text()
    found = load_file(imported / "model.safetensors")
    printed = output_of(capsys, "verify", str(out), status=1)
    assert "the folder's weights are quantised (pack-quantized), which changes drafts by itself" in printed and "damaged" not in printed
    assert len(stands_for) == 7 and all(torch.allclose(found[name], weight) for name, weight in stands_for.items())
