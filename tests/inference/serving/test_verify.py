"""``headstart verify``: damaged exports are each caught, and the message names the likely cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, random_drafter, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.methods import build_drafter
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.inference.serving.layouts.files import read_files
from headstart.inference.serving.layouts.reader.base import Target
from headstart.inference.serving.verify import verify as verification
from headstart.inference.serving.verify.decode import read_heads, reference_drafts
from headstart.inference.serving.verify.drafts import EngineSettings, Transcript, Verdict
from headstart.inference.serving.verify.verify import Check, verify

Damage = Callable[[dict[str, Any], dict[str, Tensor]], None]
PROMPTS = [[5, 9, 33, 12, 7], [1, 2, 3, 4, 50, 60, 7]]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone and heads for it."""
    root = tmp_path_factory.mktemp("house")
    tiny("llama").save_pretrained(root / "backbone")
    backbone = load_backbone(str(root / "backbone"))
    for kind, arguments in {"eagle3": {"draft_vocab_size": 23, "depth": 3}, "eagle": {}, "block": {"depth": 3, "layers": 2}}.items():
        drafter = random_drafter(kind, backbone, **arguments)
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


def drop_d2t(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"]


def zero_d2t(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"].zero_()


def ids_for_offsets(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


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


def turn_square(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"].T


def reorder_fc(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].split(32, 1)[::-1], 1)


def other_rope(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 500000.0


def half_a_rope(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_theta"] = 500000.0


def drop_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.hidden_norm.weight"]


def spoil(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"][3] = torch.nan


def pre_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["norm_output"] = False


def gone(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)


NORMS = swap("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
LATER_NORMS = swap("midlayer.post_attention_layernorm.weight", "norm.weight")
DAMAGES: list[tuple[str, Damage, str, str]] = [
    ("eagle3", shift_ids, "shifted layer ids", "the folder reads the backbone after layers [0, 2, 4], the heads fit [1, 3, 5]"),
    ("eagle3", shift_one_key, "layer ids disagree", "vLLM reads the former, SGLang the latter"),
    ("block", shift_block_ids, "shifted layer ids", "the heads fit"),
    ("eagle3", drop_d2t, "d2t is missing", "only 23 of 61 tokens are drafted"),
    ("eagle3", zero_d2t, "d2t is all zero", "t2d is"),
    ("eagle3", ids_for_offsets, "d2t holds token ids (cumulative)", "engines read offsets"),
    ("eagle3", other_tokens, "d2t", "another vocabulary"),
    ("eagle3", other_vocabulary, "another vocabulary", "config.json states 50 tokens, the backbone has 61"),
    ("eagle3", NORMS, "swapped norms", "input_layernorm"),
    ("eagle3", LATER_NORMS, "swapped norms", "norm.weight"),
    ("eagle3", turn_fc, "tensor fc.weight is [96, 32]", "transposed"),
    ("eagle", turn_fc, "tensor fc.weight is [64, 32]", "transposed"),
    ("eagle3", turn_square, "transposed", "o_proj"),
    ("eagle3", reorder_fc, "fc.weight takes its parts in the order", "[2, 1, 0]"),
    ("eagle3", other_rope, "rope of another base", "theta 10000"),
    ("block", other_rope, "rope of another base", "theta 10000"),
    ("eagle3", half_a_rope, "rope", "states two bases, 10000 and 500000"),
    ("eagle3", drop_norm, "tensor layers.0.hidden_norm.weight is missing", "half-written"),
    ("eagle3", spoil, "tensor norm.weight holds NaN", "half-written"),
    ("eagle3", pre_norm, "norm_output is false", "the heads fit true"),
    ("eagle3", gone, "lm_head.weight", "original heads"),
]


@pytest.mark.matrix(cells=8)
@pytest.mark.parametrize("kind,damage,cause,detail", DAMAGES, ids=[f"{kind}-{damage.__name__}" for kind, damage, _, _ in DAMAGES])
def test_damage_is_named(house: Path, backbone: Backbone, tmp_path: Path, kind: str, damage: Damage, cause: str, detail: str) -> None:
    verdict = verdict_of(copied(house / kind, tmp_path / "export", damage), backbone, house / kind)
    text = "\n".join(verdict.lines())
    assert not verdict.equal and text.startswith("DIFFERENT")
    assert verdict.cause is not None and cause in verdict.cause, text
    assert detail in text, text


def test_an_export_in_bfloat16_is_compared_with_heads_rounded_alike(house: Path, backbone: Backbone, tmp_path: Path) -> None:
    def rounded(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.is_floating_point()}

    verdict = verdict_of(copied(house / "eagle3", tmp_path / "export", rounded), backbone, house / "eagle3")
    assert verdict.equal, list(verdict.lines())


@pytest.mark.parametrize("file,left", [("model.safetensors", 2000), ("model.safetensors", 4), ("config.json", 200), ("config.json", 0)])
def test_half_written_files_are_named(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, left: int) -> None:
    folder = copied(house / "eagle3", tmp_path / "export")
    (folder / file).write_bytes((folder / file).read_bytes()[:left])
    assert main(["verify", str(folder), "--heads", str(house / "eagle3"), "--backbone", str(house / "backbone")]) == 1
    out = capsys.readouterr().out
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
    report = tmp_path / "verdict.json"
    command = ["verify", str(house / "eagle3"), "--max-new-tokens", "6", "--prompt-tokens", "6"]
    assert main([*command, "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("EQUAL") and "tau" in out and "mean acceptance length" in out and "6 equal texts" in out
    assert "measured on 6 prompts of its own (--prompts for others), at temperature 0, up to " in out
    stored = json.loads(report.read_text())
    assert stored["equal"] and stored["cause"] is None and stored["comparison"]["equal_drafts"] == stored["comparison"]["drafts"] > 10
    assert stored["logits_distance"] < 1e-4 and stored["comparison"]["figures"]["reference"]["tau"] >= 1

    changed = tmp_path / "changed"
    shutil.copytree(house / "eagle3", changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["norm.weight"] *= 2
    save_file(tensors, changed / "model.safetensors")
    assert main(["verify", str(changed)]) == 1
    assert "changed or cut short since it was saved" in capsys.readouterr().out


def test_user_errors_exit_with_2(house: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = copied(house / "eagle3", tmp_path / "export")
    config = json.loads((plain / "config.json").read_text())
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text('{"architectures": ["Strange"]}')
    save_file({"x": torch.ones(2)}, odd / "model.safetensors")
    yarn = copied(house / "eagle", tmp_path / "yarn", lambda config, tensors: config.update(rope_parameters={"rope_type": "yarn"}))
    tiny("llama", seed=5).save_pretrained(tmp_path / "other")
    on = ["--backbone", str(house / "backbone")]
    for arguments, fault in [
        ([str(tmp_path / "nowhere"), *on], "no heads at"),
        ([str(plain)], "does not say what its backbone is; give --backbone"),
        ([str(odd), *on], "holds no heads that the reference engine reads; it reads medusa"),
        ([str(yarn), *on], "rope of type yarn lacks factor in config.json"),
        ([str(plain), "--heads", str(house / "eagle3"), "--backbone", str(tmp_path / "other")], "with other weights"),
        ([str(plain), *on, "--max-new-tokens", "250"], "leaves no room for prompts"),
        ([str(plain), *on, "--engine", "sglang"], "invalid choice: 'sglang'"),
    ]:
        try:
            status = main(["verify", *arguments])
        except SystemExit as left:
            status = int(str(left.code))
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert status == 2 and fault in error, error
    assert config == json.loads((plain / "config.json").read_text())


def test_an_engine_that_reads_other_layers_is_found_out(house: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
        on = load_backbone(backbone)
        reading = read_heads(read_files(folder), on)
        return reference_drafts(replace(reading, taps=tuple(tap + 1 for tap in reading.taps)), Target(on.model), prompts, settings)

    monkeypatch.setattr(verification, "find_engine", lambda name: engine)
    verdict = verify(Check(house / "eagle3", backbone, None, "vllm", PROMPTS, new_tokens=6))
    assert not verdict.equal
    assert any("the difference is the engine's own" in note for note in verdict.notes)
    assert any("the engine drafts as if: shifted layer ids" in note for note in verdict.notes)


@pytest.mark.slow
def test_without_the_original_heads_the_backbones_text_decides(house: Path, backbone: Backbone, tmp_path: Path) -> None:
    """Heads trained on what the backbone writes: a wrong reading of their files drafts less of it."""
    torch.manual_seed(0)
    drafter = build_drafter("eagle3", backbone, {"depth": 3})
    tokens_BT = backbone.model.generate(torch.tensor(PROMPTS[:1] + [[8, 3, 2, 6, 1]]), max_new_tokens=24, do_sample=False)
    features, optimizer = backbone.read(tokens_BT, taps=drafter.taps), torch.optim.Adam(drafter.parameters(), 0.01)
    for _ in range(40):
        losses = []
        for k, hidden in enumerate(drafter.forward_dense(features)):
            logits = drafter.readout(hidden, k).flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, tokens_BT[:, 2 + k :].flatten()))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    drafter.save_pretrained(tmp_path / "trained")
    right = copied(tmp_path / "trained", tmp_path / "right")
    wrong = copied(tmp_path / "trained", tmp_path / "wrong", shift_ids)
    verdicts = [verify(Check(folder, backbone, None, "reference", tokens_BT[:, :5].tolist(), 20, 3)) for folder in (right, wrong)]
    assert verdicts[0].equal and next(verdicts[0].lines()).startswith("NO MISTAKE FOUND"), list(verdicts[0].lines())
    assert not verdicts[1].equal and verdicts[1].cause is not None and "shifted layer ids" in verdicts[1].cause
    assert "of the drafts are right instead of" in verdicts[1].cause
