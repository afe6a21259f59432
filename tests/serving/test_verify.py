"""``headstart verify``: damaged exports are each caught, and the message names the likely cause."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_alone import stand_in
from errors import error_of, output_of, report_of
from families import VOCAB, random_drafter, tiny
from plain.base import Target
from plain.drafts import reference_drafts
from plain.folders import read_heads
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.serving.export import reference
from headstart.serving.layouts.files import read_files
from headstart.serving.verify.drafts import EngineSettings, Transcript, Verdict
from headstart.serving.verify.llamacpp import LLAMACPP
from headstart.serving.verify.verify import Check, verify
from headstart.serving.verify.vllm import VLLM

Damage = Callable[[dict[str, Any], dict[str, Tensor]], object]
PROMPTS = [[5, 9, 33, 12, 7], [1, 2, 3, 4, 50, 60, 7]]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone and heads for it."""
    root = tmp_path_factory.mktemp("house")
    tiny("llama").save_pretrained(root / "backbone")
    backbone = load_backbone(str(root / "backbone"))
    for kind, arguments in {"eagle3": {"draft_vocab_size": 23, "depth": 3}, "eagle": {}, "block": {"depth": 3, "layers": 2},
                            "dspark": {"depth": 3, "layers": 1, "correction_rank": 4, "confidence": True}}.items():  # fmt: skip
        drafter = random_drafter(kind.replace("dspark", "block"), backbone, **arguments)
        if isinstance(drafter, OwnReadoutDrafter):
            drafter.use_vocabulary(torch.arange(VOCAB)[1::2][:23])
        drafter.save_pretrained(root / kind)
    return root


@pytest.fixture(scope="module")
def backbone(house: Path) -> Backbone:
    return load_backbone(str(house / "backbone"))


def copied(source: Path, folder: Path, damage: Damage | None = None) -> Path:
    """An export of the checkpoint, which is the folder without what Headstart alone reads, damaged."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("headstart.json"))
    if damage is not None:
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        damage(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def verdict_of(folder: Path, backbone: Backbone, heads: Path | None) -> Verdict:
    return verify(Check(folder, backbone, None if heads is None else str(heads), "reference", PROMPTS, new_tokens=6))


def shift_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in config["eagle_aux_hidden_state_layer_ids"]]


def shift_one_key(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]


def shift_block_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for ids in (config["target_layer_ids"], config["dflash_config"]["target_layer_ids"], config["eagle_aux_hidden_state_layer_ids"]):
        ids[:] = [tap + 1 for tap in ids]


def other_tokens(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.full_like(tensors["d2t"], 20)
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
    tensors["t2d"][20:43] = True


def other_vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["vocab_size"] = 50
    tensors["t2d"] = tensors["t2d"][:50]


def swap(one: str, other: str) -> Damage:
    def damage(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return damage


def turn_fc(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].T


def other_rope(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 500000.0


def gone(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)


NORMS = swap("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
DAMAGES: list[tuple[str, Damage, str]] = [
    ("eagle3", shift_ids, "taps is"),
    ("eagle3", shift_one_key, "layer ids disagree"),
    ("block", shift_block_ids, "taps is"),
    ("eagle3", lambda _, tensors: tensors.pop("d2t"), "d2t is missing"),
    ("eagle3", lambda _, tensors: tensors["d2t"].zero_(), "d2t and t2d disagree"),
    ("eagle3", lambda _, to: to["d2t"].add_(torch.arange(23)), "d2t holds tokens instead of offsets"),
    ("eagle3", other_tokens, "tensor d2t is not as in the original heads"),
    ("eagle3", other_vocabulary, "vocabulary 50; "),
    ("eagle3", NORMS, "tensor midlayer.input_layernorm.weight is not as in"),
    ("eagle3", swap("midlayer.post_attention_layernorm.weight", "norm.weight"), "norm.weight is not as in"),
    ("eagle3", turn_fc, "tensor fc.weight is [96, 32]"),
    ("eagle", turn_fc, "tensor fc.weight is [64, 32]"),
    ("eagle3", lambda _, tensors: tensors["midlayer.self_attn.o_proj.weight"].t_(), "o_proj.weight is not as in the original heads"),
    ("eagle3", lambda _, of: of["fc.weight"].copy_(of["fc.weight"].roll(32, 1)), "tensor fc.weight is not as in the original heads"),
    ("eagle3", other_rope, "config: layer is"),
    ("block", other_rope, "config: layer is"),
    ("eagle3", lambda config, _: config.update(rope_theta=500000.0), "states two bases, 10000 and 500000"),
    ("eagle3", lambda _, of: of.pop("midlayer.hidden_norm.weight"), "lacks the tensor midlayer.hidden_norm.weight"),
    ("eagle3", lambda _, tensors: tensors["norm.weight"][3].fill_(torch.nan), "leaves weight norm.weight of Eagle3 not a number"),
    ("eagle3", lambda config, _: config.update(norm_output=False), "config: norm_output is False, of the original heads True"),
    ("dspark", lambda _, of: of["confidence_head.proj.bias"].add_(1), "tensor confidence_head.proj.bias is not as in the original"),
    ("dspark", lambda config, _: config.update(enable_confidence_head=False), "config: "),
    ("eagle3", gone, "tensor lm_head.weight is not as in the original heads"),
]
"""Kind, damage, and what `headstart verify` says of it."""


@pytest.mark.matrix(cells=8)
@pytest.mark.parametrize("kind,damage,cause", DAMAGES, ids=[f"{kind}-{cause[:20]}" for kind, _, cause in DAMAGES])
def test_damage_is_named(house: Path, backbone: Backbone, tmp_path: Path, kind: str, damage: Damage, cause: str) -> None:
    folder = copied(house / kind, tmp_path / "export", damage)
    verdict = verdict_of(folder, backbone, house / kind)
    text = "\n".join(verdict.lines())
    assert not verdict.equal and text.startswith("DIFFERENT")
    assert verdict.cause is not None and cause in verdict.cause, text


@pytest.mark.parametrize("damage", [shift_ids, other_rope, NORMS, gone])
def test_stored_drafts_are_enough(house: Path, backbone: Backbone, tmp_path: Path, damage: Damage) -> None:
    """Without the heads: the export carries what they drafted."""
    stored = tuple(reference(load_drafter(house / "eagle3", backbone)))
    for folder, equal in (
        (copied(house / "eagle3", tmp_path / "right"), True),
        (copied(house / "eagle3", tmp_path / "wrong", damage), False),
    ):
        verdict = verify(Check(folder, backbone, None, "reference", [], 6, stored=stored))
        assert verdict.equal is equal and verdict.reference is not None and (verdict.reference.distance > 1e-3) is not equal


def test_an_export_in_bfloat16_is_compared_with_heads_rounded_alike(house: Path, backbone: Backbone, tmp_path: Path) -> None:
    def rounded(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.is_floating_point()}

    verdict = verdict_of(copied(house / "eagle3", tmp_path / "export", rounded), backbone, house / "eagle3")
    assert verdict.equal, list(verdict.lines())


@pytest.mark.parametrize("file,left", [("model.safetensors", 2000), ("model.safetensors", 4), ("config.json", 200), ("config.json", 0)])
def test_half_written_files_are_named(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, left: int) -> None:
    folder = copied(house / "eagle3", tmp_path / "export")
    (folder / file).write_bytes((folder / file).read_bytes()[:left])
    out = output_of(capsys, "verify", str(folder), "--heads", str(house / "eagle3"), "--backbone", str(house / "backbone"), status=1)
    fault = "damaged" if file == "config.json" else "cut short"
    assert out.startswith("DIFFERENT") and f"{file} is {fault}" in out and "half-written" in out


def test_missing_files_are_named(house: Path, backbone: Backbone, tmp_path: Path) -> None:
    for number, (break_it, cause) in enumerate({
        lambda folder: (folder / "model.safetensors").unlink(): "no weights (*.safetensors, *.bin, *.pt): half-written",
        lambda folder: (folder / "config.json").unlink(): "has no config.json: half-written",
        lambda folder: (folder / ".model.safetensors.12ab.tmp").touch(): "was interrupted (half-written)",
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-2.safetensors"}}'):
            "lists model-2.safetensors, which is not in the folder (half-written)",
    }.items()):  # fmt: skip
        folder = copied(house / "eagle3", tmp_path / str(number))
        break_it(folder)
        verdict = verdict_of(folder, backbone, house / "eagle3")
        assert not verdict.equal and verdict.cause is not None and cause in verdict.cause


def test_a_checkpoint_is_verified_by_itself(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, out = report_of(tmp_path, "verify", house / "eagle3"), capsys.readouterr().out
    assert out.startswith("EQUAL") and "9 of 9 drafts are those of the trained heads" in out
    assert stored["equal"] and stored["cause"] is None and stored["reference"]["equal"] == stored["reference"]["drafts"] == 9
    assert stored["reference"]["distance"] < 1e-4 and stored["comparison"] is None

    changed = tmp_path / "changed"
    shutil.copytree(house / "eagle3", changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["norm.weight"] *= 2
    save_file(tensors, changed / "model.safetensors")
    assert "is truncated or changed (its hash is not the one in headstart.json)" in output_of(capsys, "verify", str(changed), status=1)


def test_user_errors_exit_with_2(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = copied(house / "eagle3", tmp_path / "export")
    config = json.loads((plain / "config.json").read_text())
    odd, rows = tmp_path / "odd", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one"}\n')
    odd.mkdir()
    (odd / "config.json").write_text('{"architectures": ["Strange"]}')
    save_file({"x": torch.ones(2)}, odd / "model.safetensors")
    tiny("llama", seed=5).save_pretrained(tmp_path / "other")
    monkeypatch.setenv(VLLM.variable, sys.executable)
    monkeypatch.setenv(LLAMACPP.variable, str(tmp_path / "none"))
    unloadable = copied(house / "backbone", tmp_path / "backbone")
    (unloadable / "model.safetensors").write_bytes(b"")
    on = ["--backbone", str(house / "backbone")]
    for arguments, fault in [
        ([str(tmp_path / "nowhere"), *on], "no heads at"),
        ([str(plain)], "does not say what its backbone is; give --backbone"),
        ([str(odd), *on], "has no known layout (tensors x, ...); known: Medusa"),
        ([str(plain), "--heads", str(house / "eagle3"), "--backbone", str(tmp_path / "other")], "with other weights"),
        ([str(plain), *on, "--engine", "vllm", "--max-new-tokens", "250"], "leaves no room for prompts"),
        ([str(plain), *on, "--prompts", str(rows)], "--prompts are for an engine"),
        ([str(plain), "--backbone", str(unloadable), "--engine", "llama.cpp"], "is no file; name the Python"),  # before it is loaded
        ([str(plain), *on, "--engine", "sglang"], "invalid choice: 'sglang'"),
    ]:
        assert fault in error_of(capsys, "verify", *arguments)
    assert config == json.loads((plain / "config.json").read_text())


def test_an_engine_that_reads_other_layers_is_found_out(house: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
        on = load_backbone(backbone)
        reading = read_heads(read_files(folder), on)
        return reference_drafts(replace(reading, taps=tuple(tap + 1 for tap in reading.taps)), Target(on.model), prompts, settings)

    stand_in(monkeypatch, engine)
    verdict = verify(Check(house / "eagle3", backbone, None, "vllm", PROMPTS, new_tokens=6))
    assert not verdict.equal
    assert any("the difference is the engine's own" in note for note in verdict.notes)


def test_without_heads_and_stored_drafts_only_files_are_checked(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(house / "eagle3", tmp_path / "export")
    out = output_of(capsys, "verify", str(folder), "--backbone", str(house / "backbone"))
    assert out.startswith("NO FAULT FOUND") and "the export stored no drafts to compare with: give the original heads with --heads" in out
