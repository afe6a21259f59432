"""The HTML page of a benchmark: self-contained, with the numbers of the JSON report; no name is taken for markup."""

import re

from families import random_drafter
from talker import talker
from webpage import Reader

from headstart.chat.prompts import Prompt
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.compare import Comparison, comparison_page
from headstart.inference.bench.table import report_page
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel


def test_a_page_complete_in_itself() -> None:
    heads, prompter = talker()
    prompts = [Prompt(prompter.ask(text), task) for text, task in (("two & two", "</td><script>a<b"), ("six", "qa"))]
    two = SpeculativeModel(heads.backbone, random_drafter("eagle3", heads.backbone, depth=4), capture="off")
    report = compare([("out/<m>", heads), ("e", two)], prompts, Plan(8, (0.0, 1.0), tree=TreeShape(9, 3), batches=(1, 2)), prompter)
    text = report_page(report | {"backbone": "tiny & small"})
    read = Reader(text)
    assert not re.search(r"<script|<link|<img|@import|url\([^#]|src=|href=\"[^#]", text)  # of another place; "#" is in the page
    assert ("meta", "charset", "utf-8") in read.attributes
    for expected in ("tiny & small", "out/<m>", "</td><script>a<b", "MBU"):
        assert expected in read.words, expected
    for row in (*report["baselines"], *report["results"]):
        assert f"{row['tokens_per_second']:.1f}" in read.words and f"{row['mbu']:.0%}" in read.words
    for row in report["results"]:
        assert all(f"{share:.2f}" in read.words for one in row["tasks"].values() for share in one["acceptance_per_depth"])
    assert text.count("<table>") == len(re.findall(r'<div class="scroll">\s*<table>', text)) == 2 and ".scroll { overflow-x: auto" in text
    report |= {"backbone": "tiny & small", "versions": {}}
    read = Reader(comparison_page(Comparison(("a.json", "b.json"), report, report)))
    assert "Before and after" in read.words and "+0.0%" in read.words
