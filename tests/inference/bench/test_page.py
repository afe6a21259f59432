"""The HTML page of a benchmark: self-contained, with the numbers of the JSON report; nothing in a prompt is taken for markup."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from families import random_drafter
from talker import talker
from webpage import Reader

from headstart.chat.prompts import Prompt
from headstart.cli.main import main
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.compare import Comparison, comparison_page
from headstart.inference.bench.table import report_page
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.support.page import Series, charts, page

NASTY = "</pre><script>alert(1)</script> $x_1$ & \"'\x1b[31m 漢"


@pytest.fixture(scope="module")
def report() -> dict:
    heads, prompter = talker()
    prompts = [Prompt(prompter.ask(text), task) for text, task in ((f"{NASTY} two & two", "a<b"), ("six", "qa"))]
    plan = Plan(8, (0.0, 1.0), tree=TreeShape(9, 3), batches=(1, 2))
    two = SpeculativeModel(heads.backbone, random_drafter("eagle3", heads.backbone, depth=4), capture="off")
    results = compare([("out/<m>", heads), ("e", two)], prompts, plan, prompter)
    return results | {"backbone": "tiny & small", "prompts_files": ["p.jsonl"]}


def test_a_page_complete_in_itself(report: dict) -> None:
    text = report_page(report)
    read = Reader(text)
    assert not re.search(r"<script|<link|<img|@import|url\([^#]|src=|href=\"[^#]", text)  # of another place; "#" is in the page
    assert ("meta", "charset", "utf-8") in read.attributes
    for expected in ("tiny & small", "out/<m>", "a<b", "Acceptance by depth", "Speed by batch size", "MBU"):
        assert expected in read.words, expected
    for row in (*report["baselines"], *report["results"]):
        assert f"{row['tokens_per_second']:.1f}" in read.words and f"{row['mbu']:.0%}" in read.words
    for row in report["results"]:
        assert all(f"{share:.2f}" in read.words for one in row["tasks"].values() for share in one["acceptance_per_depth"])
    assert text.count("<svg") == 2
    assert text.count("<table>") == len(re.findall(r'<div class="scroll">\s*<table>', text)) > 1 and ".scroll { overflow-x: auto" in text
    bare = report | {"results": [row | {"acceptance_per_depth": []} for row in report["results"] if row["batch"] == 1]}
    words = Reader(report_page(json.loads(json.dumps(bare)))).words
    assert "tokens/s" in words and not [one for one in ("Speed by batch", "Acceptance by") if one in words]


def test_a_comparison_has_the_changes(report: dict) -> None:
    read = Reader(comparison_page(Comparison(("a.json", "b.json"), report, report)))
    assert "Before and after" in read.words and "+0.0%" in read.words and "out/<m>, temperature 1, before" in read.words


def test_a_chart_shows_names_as_they_are() -> None:
    names = (NASTY, "_hidden", "日本")
    series = [Series(name, [(1, 0.5), (8, 97.0)], i, dashed=i == 1) for i, name in enumerate(names)]
    (drawn,) = charts(series, "batch size", "tokens/s")
    figure = ElementTree.fromstring(drawn)
    words = [text.text for text in figure.iter("{http://www.w3.org/2000/svg}text")]
    assert [*words[-3:]] == [NASTY.replace("\x1b", "\\x1b"), "_hidden", "日本"] and {"1", "8", "batch size", "tokens/s"} <= {*words}
    assert charts([Series("x", [], 0)], "", "") == []
    assert charts(series, "batch size", "tokens/s") == [drawn]  # the same figures make the same page
    assert "<script" not in page(NASTY, [NASTY], [])


@pytest.mark.parametrize("command", [["bench", "--heads", "embedded", "--prompts", "prompts.jsonl"], ["compare", "a.json", "b.json"]])
def test_without_matplotlib_it_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command, "--html", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said == "error: --html draws charts with matplotlib, which is not installed; run: pip install 'headstart[report]'\n"
    assert not list(tmp_path.iterdir())
