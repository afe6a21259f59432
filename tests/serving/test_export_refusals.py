"""What `headstart export` refuses: each in one line, and nothing is written."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refuses
from exported import DV, KINDS, D, refused
from families import random_drafter, tiny
from safetensors.torch import load_file, save_file
from tables import with_tables
from torch import Tensor

from headstart.cli.serving import add_export
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.methods import build_drafter
from headstart.serving.engines import ENGINES, TABLE
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import new_folder, write_folder
from headstart.serving.layouts.layout import METHODS, method_of
from headstart.serving.reading import layouts_of
from headstart.support.errors import UserError
from headstart.support.files import file_hash


@pytest.mark.parametrize("name,to,parts", [
    ("eagle3", "vlm", ("unknown format 'vlm'", "'vllm'", "transformers, llama.cpp, openvino, dflash", "eagle4, medusa", "speculators")),
    ("medusa", "vllm", ("up to version 0.32 only", "TGI reads them", "--to medusa")),
    ("medusa", "sglang", ("SGLang does not read Medusa", "TGI")),
    ("mlp", "vllm", ("0.9.2", "TGI")),
    ("mlp-small", "tgi", ("tie_weights only", "--to mlp-speculator")),
    ("hydra", "vllm", ("no other engine reads them today", "headstart.load")),
    ("hydra", "medusa", ("holds Hydra heads", "no engine reads these")),
    ("eagle", "trtllm", ("1.2.1", "EAGLE-3 only", "vLLM and SGLang read them")),
    ("domino", "vllm", ("Domino's correction", "SGLang reads them")),
    ("dspark", "dflash-hf", ("is of DFlash", "dflash, speculators")),
    ("eagle3", "transformers", ("does not read EAGLE-3",)),
    ("absent", "vllm", ("no heads at", "not on the hub")),
    ("backbone", "vllm", ("has no headstart.json",)),
])  # fmt: skip
def test_refusals(home: Path, tmp_path: Path, name: str, to: str, parts: tuple[str, ...]) -> None:
    message = refused(home, name, to, tmp_path / "out")
    assert all(part in message for part in parts), message


def test_folders_and_backbones_that_do_not_fit(home: Path, tmp_path: Path) -> None:
    random_drafter("tests.helpers.block_head", load_backbone(str(home / "backbone"))).save_pretrained(tmp_path / "own")
    assert "code of your own; engines read eagle3," in refused(tmp_path, "own", "vllm", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "not an empty folder" in refused(home, "eagle3", "vllm", tmp_path / "full")
    refuses("is a file; give a new folder", export, Request(str(home / "eagle3"), "vllm", tmp_path / "full" / "file" / "out"))
    assert "no backbone at 'nobody/nothing'" in refused(home, "eagle3", "vllm", tmp_path / "out", backbone="nobody/nothing")
    tiny("llama", num_hidden_layers=2).save_pretrained(tmp_path / "other")
    message = refused(home, "eagle3", "vllm", tmp_path / "out", backbone=str(tmp_path / "other"))
    assert "(num_hidden_layers 6)" in message and "(num_hidden_layers 2)" in message


def damaged(home: Path, folder: Path, name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    """Write heads with other tensors and another configuration, and return why they are refused."""
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    card = json.loads((home / name / "headstart.json").read_text())
    card["weights"]["sha256"] = file_hash(folder / "model.safetensors")
    (folder / "headstart.json").write_text(json.dumps(card))
    (folder / "config.json").write_text(json.dumps(config))
    return refused(folder.parent, folder.name, "vllm", folder.parent / "out")


def test_damaged_heads(home: Path, tmp_path: Path) -> None:
    name = "eagle3-small"
    tensors, config = load_file(home / name / "model.safetensors"), json.loads((home / name / "config.json").read_text())
    fc, shifted = tensors["fc.weight"], {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}}
    cases = [
        ({"fc.weight": fc * torch.nan}, {}, "leaves weight fc.weight of Eagle3 not a number"),
        ({"fc.weight": fc.T}, {}, "size mismatch for fc.weight"),
        ({"norm.weight": None}, {}, 'Missing key(s) in state_dict: "norm.weight"'),
        ({"norm.bias": torch.zeros(D)}, {}, 'Unexpected key(s) in state_dict: "norm.bias"'),
        ({"d2t": tensors["d2t"] + torch.arange(DV)}, {}, "d2t and t2d disagree"),
        ({}, {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2 in config.json, and 3 layers are read"),
        ({}, shifted, "layer ids disagree"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 3, 9], "eagle_config": {}}, "and the backbone has 6"),
    ]
    for i, (changes, stated, part) in enumerate(cases):
        changed = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
        assert part in damaged(home, tmp_path / str(i), name, changed, config | stated), part


def test_heads_that_an_engine_would_compute_otherwise(home: Path, tmp_path: Path) -> None:
    drafter = build_drafter("eagle", load_backbone(str(home / "backbone")), {})
    drafter.save_pretrained(tmp_path / "heads")
    tensors = load_file(tmp_path / "heads" / "model.safetensors") | {"fc.bias": torch.ones(D)}
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert "drops the bias of fc" in damaged(tmp_path, tmp_path / "biased", "heads", tensors, config)
    tiny("gemma3").save_pretrained(tmp_path / "gemma3")  # its embedding is scaled, which engines leave out where heads embed
    for kind, read in (("eagle3", True), ("eagle", False), ("block", False)):
        random_drafter(kind, load_backbone(str(tmp_path / "gemma3"))).save_pretrained(tmp_path / kind)
        if read:
            export(Request(str(tmp_path / kind), "vllm", tmp_path / f"{kind}-out"))
        else:
            assert "without its factor" in refused(tmp_path, kind, "vllm", tmp_path / "out")


def test_the_table_of_engines_is_that_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    assert with_tables(page) == page, "run python tests/helpers/tables.py docs/serving.md"


def test_every_method_has_an_answer_from_every_engine() -> None:
    assert {(engine, method) for engine in ("vllm", "sglang", "trtllm") for method in METHODS} <= TABLE.keys()
    assert {method_of(kind, arguments) for kind, arguments in KINDS.values()} == METHODS.keys()
    assert {engine for engine, _ in TABLE} == ENGINES.keys()
    readable = {method for (_, method), entry in TABLE.items() if hasattr(entry, "how")}
    assert readable == {method for method in METHODS if layouts_of(method)}
    assert all({*one.methods} <= METHODS.keys() and {*one.engines} <= ENGINES.keys() for one in layouts_of())
    page, parser = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8"), argparse.ArgumentParser()
    add_export(parser)
    said = " ".join(parser.format_help().split()).replace("- ", "-")
    for name in (*(one.name for one in layouts_of()), *ENGINES):
        assert name in said and (name in ENGINES or f"| `{name}` |" in page)
    held = {(engine, method) for one in layouts_of() for engine in one.engines for method in one.methods}
    assert {key for key, entry in TABLE.items() if hasattr(entry, "how") and entry.until is None} <= held


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    with new_folder(folder) as temporary:
        write_folder(temporary, {"a": 1}, tensors, "w.safetensors", "w.pt")


def test_a_layout_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    shared = torch.ones(4, 4)
    tensors = {"x": shared, "y": shared, "z": shared[1:2]}
    write(tmp_path / "out", tensors)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "w.safetensors", "w.pt"}
    refuses("tensor x holds NaN", write, tmp_path / "nan", {"x": shared / 0 * 0})
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cannot write .*full \(.*No space left.*nothing is written"):
        patch.setattr("headstart.serving.layouts.files.save_file", full)
        write(tmp_path / "full", tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
