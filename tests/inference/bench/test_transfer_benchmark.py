"""The sweep of benchmarks/transfer.py: every setting is a recipe, wrong ones are named, tables keep kinds of text apart."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from small_run import ROOT

from headstart.training.recipe.recipe import load_recipe


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("transfer_cells")


def test_every_setting_is_a_recipe(cells: ModuleType) -> None:
    for base in cells.BASES:
        for change in ("", *cells.CHANGES):
            cell = cells.Cell(cells.setting("+".join(filter(None, (base, change)))), "stories260K", 0, 1000)
            overrides = cells.overrides_of(cell, Path("FOLDER"))
            assert not any("{" in one and "}" in one and ":" not in one for one in overrides), "a placeholder is left"
            load_recipe(cells.RECIPE, [*cells.BASE, *overrides])
    even = cells.Cell("default+even", "stories260K", 0, 1000)
    default = load_recipe(cells.RECIPE, [*cells.BASE, *cells.overrides_of(even, Path("FOLDER"))])
    assert default.train.lr == default.train.readout_lr_ratio == "auto" and default.train.min_lr_ratio == 0.1
    assert default.drafter["norm_output"] and default.objective.depth_weights == "geometric"
    assert cells.model_path("embedded", Path("FOLDER")) == "embedded" and cells.model_path("stories260K", Path("FOLDER")) is None
    assert all(cells.setting(name) for names, *_ in cells.TIERS for name in names)


@pytest.mark.parametrize("name", ["", "best", "default+best", "frozen", "default++frozen"])
def test_a_setting_that_is_none_is_named(cells: ModuleType, name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not one of base, rule, default, speculators, followed by any of .*frozen"):
        cells.setting(name)


def test_the_table_keeps_own_text_and_temperatures_apart(cells: ModuleType) -> None:
    report = importlib.import_module("transfer_report")
    rows = [
        {"setting": name, "backbone": "stories260K", "tokens": 1000, "tau": tau, **sampled}
        for name, tau, sampled in (
            ("default", 2.0, {"tau_sampled": 1.5}), ("default+tv", 1.0, {}), ("default+own", 3.0, {"tau_sampled": 1.25}),
        )
    ]  # fmt: skip
    parts = report.table(rows).split("\n\n")
    titles = ["1,000 tokens, T=0", "1,000 tokens, T=1", "1,000 tokens of own text, T=0", "1,000 tokens of own text, T=1"]
    assert [part.split("|")[1].strip() for part in parts] == titles
    assert "| default | **2.000** | 1.000 | 1.000 |" in parts[0] and "| default+tv | 1.000 | 0.500 | 0.500 |" in parts[0]
    assert "default+tv" not in parts[1] and "| default+own | **1.250** | 1.000 | 1.000 |" in parts[3]
