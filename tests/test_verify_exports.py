"""What `headstart export` writes verifies as equal to the heads it was written from, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import random_drafter, tiny

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.inference.serving.export.export import Request, export
from headstart.inference.serving.verification.recorded import recorded
from headstart.inference.serving.verification.verification import Check, verify

EXPORTS: list[tuple[str, dict[str, Any], tuple[tuple[str, str | None], ...]]] = [
    ("eagle3", {"draft_vocab_size": 23, "depth": 3}, (("vllm", None), ("speculators", None), ("vllm", "int8"), ("vllm", "fp8"))),
    ("eagle3", {"layers": 2, "depth": 2, "norm_before_residual": True, "qk_norm": True}, (("speculators", None),)),
    ("eagle", {}, (("eagle", None),)),
    ("medusa", {"depth": 3, "draft_vocab_size": 23}, (("medusa", None),)),
    ("mlp", {"depth": 3, "tie_weights": True}, (("mlp-speculator", None),)),
    ("block", {"depth": 3, "correction": "none"}, (("dflash", None), ("dflash-hf", None), ("speculators", None))),
    ("block", {"depth": 3, "correction": "markov", "causal": True}, (("speculators", None),)),
    ("mtp", {}, (("mtp-stitch", None),)),
]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    folder = tmp_path_factory.mktemp("house") / "backbone"
    tiny("llama").save_pretrained(folder)
    return load_backbone(str(folder))


@pytest.mark.parametrize("kind,arguments,layouts", EXPORTS, ids=[f"{kind}-{'-'.join(arguments)}" for kind, arguments, _ in EXPORTS])
def test_exports_are_equal(
    backbone: Backbone, tmp_path: Path, kind: str, arguments: dict[str, Any], layouts: tuple[tuple[str, Any], ...]
) -> None:
    heads = tmp_path / "heads"
    random_drafter(kind, backbone, **arguments).save_pretrained(heads)
    for number, (layout, how) in enumerate(layouts):
        folder = tmp_path / str(number)
        export(Request(str(heads), layout, folder, quantize=how))
        assert recorded(folder) == (str(heads), backbone.name)
        verdict = verify(Check(folder, backbone, str(heads), "reference", [[5, 9, 33, 12, 7]], 5))
        assert verdict.equal, list(verdict.lines())
        assert verdict.comparison is not None and verdict.comparison.drafts > 5


def test_an_export_knows_its_heads_and_backbone(backbone: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tmp_path / "heads"
    random_drafter("eagle", backbone).save_pretrained(heads)
    export(Request(str(heads), "eagle", tmp_path / "out"))
    assert main(["verify", str(tmp_path / "out"), "--max-new-tokens", "4"]) == 0
    assert "headstart and reference: 6 prompts" in capsys.readouterr().out
    random_drafter("eagle", backbone, seed=9).save_pretrained(heads)   # trained on since
    assert recorded(tmp_path / "out") == (None, backbone.name)
