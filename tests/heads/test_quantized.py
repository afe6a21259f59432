"""8-bit backbones: the output equals the quantized model's own, and its measurements are kept separately."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from families import DRAFTERS, left_padded, prompts, random_drafter, say, tiny

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.inference.generate import SpeculativeModel
from headstart.support.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    tiny("llama", hidden_size=64, intermediate_size=128).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Backbone:
    return load_backbone(str(folder), dtype="int8")


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("capture", ["off", "trace"])
def test_the_text_is_the_quantized_models_own(quantized: Backbone, kind: str, capture: str) -> None:
    rows, of = left_padded(prompts()), SpeculativeModel(quantized, random_drafter(kind, quantized), capture=capture)  # type: ignore[arg-type]
    for sample in (False, True):
        options = {"max_new_tokens": 20, "do_sample": sample, "seed": 3}
        assert torch.equal(say(of, rows, **options), say(of, rows, speculate=False, **options))
    row = {name: tensor[:1] for name, tensor in rows.items()}
    want = quantized.model.generate(**row, max_new_tokens=20, do_sample=False)
    assert torch.equal(say(of, row, max_new_tokens=20, do_sample=False), want)


def test_it_is_another_model_to_tune_and_the_same_to_heads(folder: Path, quantized: Backbone) -> None:
    whole = load_backbone(str(folder))
    ids_BT = prompts((9,))[0][None]
    assert not torch.equal(whole.read(ids_BT).hidden_BTD, quantized.read(ids_BT).hidden_BTD), "it has been quantized"
    assert quantized.precision.startswith("float32 quanto")
    assert whole.contract() == quantized.contract()


def test_without_the_library_a_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum", None)
    with pytest.raises(UserError, match=r"int8 needs optimum-quanto: pip install 'headstart\[quantized\]', or take auto"):
        load_backbone(str(folder), dtype="int8")
