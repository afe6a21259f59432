"""Every quantization that loads here: with drafts every token of decoding without, or a line at load that drafts rest; docs say which.

`make test-quantized` runs it in an environment of its own, which has the quantizers.
"""

import logging
from pathlib import Path

import pytest
import torch
from schemes import SCHEMES, save_small, versions

import headstart
from headstart import Backbone, SpeculativeModel
from headstart.inference.capture.capture import warn_once

PROMPTS, WRITTEN = 4, 40
SHAPE = headstart.TreeShape(8, 2, 4)
RESTS = "drafts rest, and rows are decoded one at a time"
DEPENDENT: dict[str, bool] = {}
"""What was found, by scheme."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("small")
    save_small(where)
    return where


def text(heads: SpeculativeModel, ids_BT: torch.Tensor, sample: bool, speculate: bool) -> torch.Tensor:
    asked = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "max_new_tokens": WRITTEN, "do_sample": sample}
    drafted = {"tree": SHAPE, "seed": [7 + int(row[0]) for row in ids_BT], "speculate": speculate}
    return heads.backbone.model.generate(**asked, custom_generate=heads.generate, return_dict_in_generate=True, **drafted)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_token_is_that_without_drafts(name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model = SCHEMES[name][1](folder, tmp_path)
    with caplog.at_level(logging.WARNING, "headstart"):
        heads = headstart.load(None, Backbone(model), proposers=("suffix", "recycling"), capture="off")
    DEPENDENT[name] = heads.backbone.dependence is not None
    assert DEPENDENT[name] == any(line.endswith(RESTS) for line in caplog.messages)
    rows = [torch.randint(1, 512, (1, 7), generator=torch.Generator().manual_seed(seed)).repeat(1, 4) for seed in range(PROMPTS)]
    for sample in (False, True):
        alone = [text(heads, row, sample, speculate=False).sequences for row in rows]
        drafted = [text(heads, row, sample, speculate=True) for row in rows]
        assert all(torch.equal(found.sequences, plain) for found, plain in zip(drafted, alone, strict=True))
        assert torch.equal(text(heads, torch.cat(rows), sample, speculate=True).sequences, torch.cat(alone))
        assert sample or (sum(found.tau > 1 for found in drafted) > 0) != DEPENDENT[name]


def test_the_docs_say_so() -> None:
    page = (Path(__file__).parents[2] / "docs" / "decode.md").read_text(encoding="utf-8")
    assert DEPENDENT.keys() == SCHEMES.keys(), "every scheme was tried"
    found = versions()
    for name, (library, _) in SCHEMES.items():
        does = ("no", "one line; drafts rest, rows one at a time") if DEPENDENT[name] else ("yes", "drafts; every token as without")
        row = f"| {library} {found[library]} | {name} | {' | '.join(does)} |"
        assert row in page, f"docs/decode.md lacks, or says otherwise: {row}"
