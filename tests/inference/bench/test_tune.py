"""`headstart tune`: its measurements, where they are stored, and their use on loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import heads, prompts, say, tiny

import headstart
from headstart.inference.bench.tune import TunePlan, contexts_of, summary, tune
from headstart.inference.generate import SpeculativeModel
from headstart.inference.proposers.suffix import SuffixProposer
from headstart.inference.speculation.tuned import FILE, GREEDY, SAMPLED, Tuned, key, place, read_tuned, write_tuned
from headstart.support.errors import UserError

PLAN = TunePlan(rows=(1, 2), contexts=(20, 40), nodes=(1, 4, 16), repeats=2, max_new_tokens=16)


@pytest.fixture(scope="module")
def measured() -> tuple[SpeculativeModel, Tuned]:
    of = heads("llama", "eagle3")
    of = SpeculativeModel(of.backbone, of.drafter, proposers=[SuffixProposer()])
    return of, tune(of, prompts((9, 5)), PLAN)


def test_it_measures_passes_drafting_and_what_scores_are_worth(measured: tuple[SpeculativeModel, Tuned]) -> None:
    of, tuned = measured
    assert {context: set(curves) for context, curves in tuned.curves.items()} == {"20": {"1", "2"}, "40": {"1", "2"}}
    for curve in (curve for curves in tuned.curves.values() for curve in curves.values()):
        assert [nodes for nodes, _ in curve] == [1, 4, 16] and all(seconds > 0 for _, seconds in curve)
    assert [(one["context"], one["rows"]) for one in tuned.details["by_context"]] == [(20, 1), (20, 2), (40, 1), (40, 2)]
    times = tuned.details["by_context"][0]["drafting_ms"][0]
    assert [depths for depths, _ in times][-1] == of.drafter.deepest and all(ms > 0 for _, ms in times)
    assert set(tuned.calibration) == {GREEDY, SAMPLED}
    assert all(any(sum(table["trials"]) > 5 for table in tables) for tables in tuned.calibration[GREEDY].values())
    assert set(tuned.details["tau_of_wide_trees"]) == {"0", "1"}
    assert "batch size 1 after 20 tokens" in summary(tuned)


def test_loading_takes_it_up_on_this_machine_alone(measured: tuple[SpeculativeModel, Tuned], tmp_path: Path) -> None:
    of, tuned = measured
    of.drafter.save_pretrained(tmp_path / "heads")
    model = tiny("llama")
    assert headstart.load(tmp_path / "heads", backbone=model).tuned is None
    file = write_tuned(tmp_path / "heads", of.backbone, tuned)
    assert file == tmp_path / "heads" / FILE
    loaded = headstart.load(tmp_path / "heads", backbone=model)
    assert loaded.tuned == tuned
    speculation = loaded.engine(True).speculation
    assert set(speculation.cost_model.at(9).curves) == {1, 2}
    assert all(source.by_mode[True].calibration.tables for source in speculation.sources)
    rows = {"input_ids": prompts((9,))[0][None]}
    assert torch.equal(say(loaded, rows, max_new_tokens=20, do_sample=False), say(of, rows, max_new_tokens=20, do_sample=False))

    elsewhere = json.loads(file.read_text())
    elsewhere["entries"] = {"another machine": elsewhere["entries"][key(of.backbone)]}
    file.write_text(json.dumps(elsewhere))
    assert headstart.load(tmp_path / "heads", backbone=model).tuned is None
    write_tuned(tmp_path / "heads", of.backbone, tuned)
    assert set(json.loads(file.read_text())["entries"]) == {"another machine", key(of.backbone)}, "entries of other machines stay"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 3}', '{"format": 9, "entries": {}}', '{"format": 3, "entries": 3}'])
def test_a_damaged_file_is_refused_by_name(measured: tuple[SpeculativeModel, Tuned], tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=f"{FILE}.*headstart tune again"):
        read_tuned(tmp_path, measured[0].backbone)


def test_an_entry_of_another_form_is_refused(measured: tuple[SpeculativeModel, Tuned], tmp_path: Path) -> None:
    of, tuned = measured
    write_tuned(tmp_path, of.backbone, Tuned({"20": {"1": "no curve"}}, tuned.calibration, {}))
    with pytest.raises(UserError, match="damaged.*headstart tune again"):
        read_tuned(tmp_path, of.backbone)


def test_heads_that_are_no_folder_keep_theirs_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    on = heads("llama", "medusa").backbone
    assert place("someone/their-heads", on) == tmp_path / "headstart" / "someone--their-heads" / FILE
    assert place(None, on).is_relative_to(tmp_path / "headstart")


def test_contexts_fit_the_backbone() -> None:
    on = heads("llama", "medusa").backbone  # 256 positions
    assert contexts_of(None, 56, on) == (200,) and contexts_of([7], 56, on) == (7,)
    with pytest.raises(UserError, match="--contexts or --max-nodes"):
        tune(heads("llama", "medusa"), [], TunePlan(contexts=(250,), nodes=(1, 16)))
