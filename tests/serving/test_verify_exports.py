"""What `headstart export` writes verifies as equal to the heads it was written from, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines_alone import plain_reader_agrees
from families import SIZES, build, random_drafter, tiny

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.serving.export import Request, export
from headstart.serving.verify.verify import Check, recorded, verify

EXPORTS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("eagle3", {"draft_vocab_size": 23, "depth": 3}, ("vllm", "speculators")),
    ("eagle3", {"layers": 2, "depth": 2, "norm_before_residual": True, "qk_norm": True}, ("speculators",)),
    ("eagle", {}, ("eagle",)),
    ("medusa", {"depth": 3, "draft_vocab_size": 23}, ("medusa",)),
    ("mlp", {"depth": 3, "tie_weights": True}, ("mlp-speculator",)),
    ("block", {"depth": 3, "correction": "none"}, ("dflash", "dflash-hf", "speculators")),
    ("block", {"depth": 3, "correction": "markov", "causal": True}, ("speculators",)),
    ("mtp", {}, ("mtp-stitch",)),
]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    folder = tmp_path_factory.mktemp("house") / "backbone"
    tiny("llama").save_pretrained(folder)
    return load_backbone(str(folder))


@pytest.mark.parametrize("kind,arguments,layouts", EXPORTS, ids=[f"{kind}-{'-'.join(arguments)}" for kind, arguments, _ in EXPORTS])
def test_exports_are_equal(backbone: Backbone, tmp_path: Path, kind: str, arguments: dict[str, Any], layouts: tuple[str, ...]) -> None:
    heads = tmp_path / "heads"
    random_drafter(kind, backbone, **arguments).save_pretrained(heads)
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        export(Request(str(heads), layout, folder))
        assert recorded(folder)[:2] == (str(heads), backbone.name)
        for stored in (recorded(folder)[2], None):  # the drafts that the export stored, and those of the heads
            verdict = verify(Check(folder, backbone, None if stored else str(heads), "reference", [], 5, stored=stored))
            assert verdict.equal, list(verdict.lines())
            assert verdict.reference is not None and verdict.reference.drafts > 2
        assert plain_reader_agrees(folder, str(heads), backbone)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_output_layer_of_a_backbone_may_have_a_bias(tmp_path: Path, kind: str) -> None:
    model = build("Phi", SIZES | {"num_key_value_heads": 4})
    torch.nn.init.normal_(model.get_output_embeddings().bias, std=5)  # otherwise it changes few tokens
    model.save_pretrained(tmp_path / "backbone")
    backbone = load_backbone(str(tmp_path / "backbone"))
    random_drafter(kind, backbone, depth=3).save_pretrained(tmp_path / "heads")
    export(Request(str(tmp_path / "heads"), kind, tmp_path / "out"))
    verdict = verify(Check(tmp_path / "out", backbone, str(tmp_path / "heads"), "reference", [], 5))
    assert verdict.equal and plain_reader_agrees(tmp_path / "out", str(tmp_path / "heads"), backbone), list(verdict.lines())


def test_an_export_knows_its_heads_and_backbone(backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tmp_path / "heads"
    random_drafter("eagle", backbone).save_pretrained(heads)
    export(Request(str(heads), "eagle", tmp_path / "out"))
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert "drafts are those of the trained heads" in capsys.readouterr().out
    random_drafter("eagle", backbone, seed=9).save_pretrained(heads)  # trained on since
    assert recorded(tmp_path / "out")[:2] == (None, backbone.name)
    assert main(["verify", str(tmp_path / "out")]) == 0  # by the drafts that are stored
    assert main(["verify", str(tmp_path / "out"), "--heads", str(heads)]) == 1
    assert "is not as in the original heads" in capsys.readouterr().out
