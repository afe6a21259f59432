"""``headstart verify``: damaged exports are each caught, and the message names the likely cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, random_drafter, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.inference.serving.verification.verdict import Verdict
from headstart.inference.serving.verification.verification import Check, verify

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


def post_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["norm_output"] = True


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
    ("eagle3", post_norm, "norm_output is true", "the heads fit false"),
    ("eagle3", gone, "lm_head.weight", "original heads"),
]


@pytest.mark.parametrize("kind,damage,cause,detail", DAMAGES, ids=[f"{kind}-{i}-{one[1].__name__}" for i, one in enumerate(DAMAGES) for kind in one[:1]])
def test_damage_is_named(
    house: Path, backbone: Backbone, tmp_path: Path, kind: str, damage: Damage, cause: str, detail: str
) -> None:
    verdict = verdict_of(copied(house / kind, tmp_path / "export", damage), backbone, house / kind)
    text = "\n".join(verdict.lines())
    assert not verdict.equal and text.startswith("DIFFERENT")
    assert verdict.cause is not None and cause in verdict.cause, text
    assert detail in text, text
