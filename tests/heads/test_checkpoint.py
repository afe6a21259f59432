"""A checkpoint is the directory that serving engines load; missing, damaged or mismatched ones are refused in one line."""

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refusal
from families import DRAFTERS, VOCAB, backbone, left_padded, prompts, random_drafter, say, texts, tiny
from safetensors import safe_open
from safetensors.torch import load_file

import headstart
from headstart import Backbone, Drafter, SpeculativeModel
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.heads.methods import build_drafter

D, FF, HC, KVC, DV = 32, 48, 32, 16, 23
"""Sizes of the tiny Llama: hidden, feed-forward, heads x head width, key heads x head width; and of a draft vocabulary."""
METADATA = "headstart.json"


def tensors_of(file: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(file, "pt") as opened:
        return {name: (opened.get_slice(name).get_shape(), opened.get_slice(name).get_dtype()) for name in opened.keys()}


def saved(kind: str, folder: Path, **arguments: Any) -> Drafter:
    drafter = random_drafter(kind, backbone("llama"), **arguments)
    drafter.save_pretrained(folder, {"recipe": "a recipe"})
    return drafter


def test_a_draft_vocabulary_is_kept_as_offsets_and_marks(tmp_path: Path) -> None:
    drafter = random_drafter("eagle3", backbone("llama"), draft_vocab_size=DV)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DV]
    drafter.use_vocabulary(ids)
    drafter.save_pretrained(tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir() if file.is_file()}) == 1, "who may read the card may read the weights"
    tensors = load_file(tmp_path / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, t2d.dtype, tensors["lm_head.weight"].shape) == (torch.int64, torch.bool, (DV, D))
    assert torch.equal(d2t, ids.sort().values - torch.arange(DV)) and torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(DV))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["draft_vocab_size"], config["vocab_size"]) == (["LlamaForCausalLMEagle3"], DV, VOCAB)


def test_scaled_rotary_is_written_for_old_and_new_readers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    on = Backbone(tiny("llama", rope_parameters=rope | {"original_max_position_embeddings": 64}))
    random_drafter("eagle3", on).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["rope_type"] == "llama3" and config["rope_scaling"]["factor"] == 8.0
    assert config["rope_parameters"] == rope | {"original_max_position_embeddings": 64}


def test_medusa_is_the_directory_of_three_engines(tmp_path: Path) -> None:
    saved("medusa", tmp_path, depth=3, layers=2)
    expected = {f"{k}.{layer}.linear.weight": [D, D] for k in range(3) for layer in range(2)}
    expected |= {f"{k}.{layer}.linear.bias": [D] for k in range(3) for layer in range(2)} | {f"{k}.2.weight": [VOCAB, D] for k in range(3)}
    assert tensors_of(tmp_path / "medusa_lm_head.safetensors") == {name: (shape, "F32") for name, shape in expected.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert {k: v for k, v in config.items() if k != "base_model_name_or_path"} == {
        "medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_fc_bias": True, "hidden_size": D, "vocab_size": VOCAB,
    }  # fmt: skip
    assert "base_model_name_or_path" in config and "architectures" not in config


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_folder_holds_what_engines_read_and_no_traces(tmp_path: Path, kind: str) -> None:
    drafter = saved(kind, tmp_path / "a" / "b")
    drafter.save_pretrained(folder := tmp_path / "a" / "b", {"recipe": "another"})  # overwrites the first
    assert {p.name for p in folder.iterdir()} - {*drafter.engine_files()} == {"config.json", METADATA, drafter.file_name, "custom_generate"}
    card = read_metadata(folder)[1]
    assert card["kind"] == kind and card["provenance"] == {"recipe": "another"} and card["arguments"] == drafter.arguments
    assert card["contract"]["taps"] == list(drafter.taps)


def refused(folder: Path | str, on: Backbone | None = None, **options: Any) -> str:
    """The error message, which must be one line."""
    return refusal(load_drafter, folder, on or backbone("llama"), **options)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    drafter = saved(kind, tmp_path / "heads")
    weights = tmp_path / "heads" / drafter.file_name
    whole = weights.read_bytes()
    changed = bytearray(whole)
    changed[-5] ^= 1
    for content in (whole[: len(whole) // 2], whole[:6], b"", bytes(changed), whole + b"\0", pickle.dumps({"a": 1})):
        weights.write_bytes(content)
        assert drafter.file_name in refused(tmp_path / "heads") and "truncated or changed" in refused(tmp_path / "heads")
    weights.unlink()
    assert f"lacks its weights {drafter.file_name}" in refused(tmp_path / "heads")
    weights.write_bytes(whole)
    load_drafter(tmp_path / "heads", backbone("llama"))
    (tmp_path / "heads" / METADATA).unlink()
    assert METADATA in refused(tmp_path / "heads")
    assert "no such folder" in refused(tmp_path / "nowhere") and "no such folder" in refused("nobody/nothing")


def test_tensors_of_another_drafter(tmp_path: Path) -> None:
    """Intact files, but not of the drafter the metadata names."""
    saved("eagle3", tmp_path / "heads")
    card = json.loads((tmp_path / "heads" / METADATA).read_text())
    for arguments in ({"depth": 5, "draft_vocab_size": 20}, {"depth": 5, "taps": [1, 2]}, {"depth": 5, "intermediate_size": 20}):
        (tmp_path / "heads" / METADATA).write_text(json.dumps(card | {"arguments": arguments}))
        assert "does not hold the tensors of eagle3" in refused(tmp_path / "heads")


def test_a_drafter_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir()
    shutil.copy(
        Path(sys.modules[type(build_drafter("medusa", backbone("llama"), {})).__module__].__file__ or ""), tmp_path / "ours" / "mine.py"
    )
    monkeypatch.syspath_prepend(tmp_path)
    drafter = build_drafter("ours.mine", backbone("llama"), {"depth": 2})
    drafter.save_pretrained(tmp_path / "heads")
    assert type(load_drafter(tmp_path / "heads", backbone("llama"))) is type(drafter)


@pytest.mark.matrix(cells=2)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_another_backbone(tmp_path: Path, kind: str) -> None:
    saved(kind, tmp_path / "heads")
    twin = Backbone(tiny("llama", seed=8))
    for on, named in (
        (backbone("qwen3"), "model_type"),
        (Backbone(tiny("llama", hidden_size=16)), "hidden_size"),
        (Backbone(tiny("llama", num_hidden_layers=5)), "num_hidden_layers 6"),
        (Backbone(tiny("llama", vocab_size=62)), "vocab_size"),
        (twin, "weights"),
    ):
        assert named in refused(tmp_path / "heads", on) and "this backbone is" in refused(tmp_path / "heads", on)
        assert on is twin or named in refused(tmp_path / "heads", on, allow_finetuned=True)
    assert "allow_finetuned=True" in refused(tmp_path / "heads", twin)
    of = headstart.load(tmp_path / "heads", backbone=twin.model, allow_finetuned=True)
    rows = left_padded(prompts())
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        plain = say(SpeculativeModel(twin), rows, max_new_tokens=15, **options)
        assert torch.equal(say(SpeculativeModel(twin, of.drafter), rows, max_new_tokens=15, **options), plain)


def test_load_gives_heads_in_the_backbones_type(tmp_path: Path) -> None:
    saved("eagle3", tmp_path / "heads", draft_vocab_size=DV)
    of = headstart.load(tmp_path / "heads", backbone=tiny("llama").to(torch.bfloat16))
    assert of.drafter is not None and {p.dtype for p in of.drafter.parameters()} == {torch.bfloat16}
    assert say(of, {"input_ids": texts(1, 6)}, max_new_tokens=8).shape == (1, 14)
    assert headstart.load(None, backbone=of.backbone).drafter is None
