"""Answers and their hidden states in one pass: the cache equals one that is written by the backbone afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import make_recipe
from vllm_of_states import StatesServer, states_server

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.training.data.packing import collate
from headstart.training.features.cached import CachedFeatures
from headstart.training.recipe.recipe import load_recipe
from headstart.training.setup import prepare

pytestmark = pytest.mark.usefixtures("on_the_cpu")
NAME = "backbone-layers-1-3-5-6"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[StatesServer]:
    make_recipe(tmp_path, 6, drafter={"kind": "eagle3", "depth": 2, "taps": [1, 3, 5]}, data={"max_length": 40})
    backbone = load_backbone(str(tmp_path / "backbone"), dtype="fp32", device="cpu")
    with states_server(backbone, tmp_path / "states", (1, 3, 5, 6), NAME) as server:
        yield server


def command(server: StatesServer, folder: Path, *more: str) -> list[str]:
    endpoint = [f"features.endpoint={server.url}", f"features.folder={server.folder}", "features.patience=5"]
    sampling = ["regenerate.max_new_tokens=8", "regenerate.unfinished=keep", "regenerate.temperature=0"]
    answers = [f"regenerate.out={folder}/answers.jsonl", *sampling]
    return [str(folder / "recipe.yaml"), *endpoint, *answers, "regenerate.prompt_tokens=6", f"cache.dir={folder}/cache", *more]


def test_the_cache_has_the_backbones_own_features(served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    assert main(["regenerate", *command(served, tmp_path, "cache.dtype=exact"), "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows_written"] == 40 and report["cache"]["shards_missing"] == 0
    assert f"next      train with data.train={tmp_path}/answers.jsonl cache.dir={tmp_path}/cache" in capsys.readouterr().err
    generated = [body for body in served.asked if body["kv_transfer_params"]["include_output_tokens"]]
    assert len(generated) == 40 and len(served.asked) - len(generated) == 1, "but for those that start values come from, none is read twice"
    assert list(served.folder.iterdir()) == [] and not (tmp_path / "cache" / "answers").exists()
    options = [f"data.train={tmp_path}/answers.jsonl", f"cache.dir={tmp_path}/cache", "cache.dtype=exact", f"save.dir={tmp_path}/out"]
    run = prepare(load_recipe(tmp_path / "recipe.yaml", options))
    run.log.close()
    assert isinstance(run.source, CachedFeatures) and len(run.feed.samples) == 36
    whole = served.backbone
    for i in range(0, 36, 5):
        batch = collate(run.feed.samples, [[i]])
        kept, read = run.source.read(batch), whole.read(batch.tokens_BT, taps=(1, 3, 5))
        assert kept.taps is not None and read.taps is not None
        for tap in (1, 3, 5):  # the last token was generated, and never an input
            torch.testing.assert_close(kept.taps[tap][:, :-1], read.taps[tap][:, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept.hidden_BTD[:, :-1], read.hidden_BTD[:, :-1], rtol=1e-4, atol=1e-5)


def test_tokens_that_are_no_samples_end_it(served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    served.choose = lambda log_probs: int(log_probs.argmin())
    assert main(["regenerate", *command(served, tmp_path, "regenerate.max_new_tokens=16")]) == 2
    assert "so improbable as samples are once in 1,000: it samples wrongly while it extracts" in capsys.readouterr().err


def test_wrong_states_end_it_and_it_goes_on(served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    served.change = lambda hidden, tokens: (hidden * 0 if len(served.asked) == 15 else hidden, tokens)
    assert main(["regenerate", *command(served, tmp_path, "regenerate.concurrency=1")]) == 2
    assert "zeros in layers 1, 3, 5, 6" in capsys.readouterr().err and not (tmp_path / "cache" / "manifest.json").exists()
    served.change = lambda hidden, tokens: (hidden, tokens)
    assert main(["regenerate", *command(served, tmp_path)]) == 0
    assert (tmp_path / "cache" / "manifest.json").exists() and len(served.asked) <= 15 + 1 + 26 + 1
