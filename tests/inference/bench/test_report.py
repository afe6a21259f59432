"""The HTML report: self-contained, with every number of the JSON report; nothing in a prompt is taken for markup."""
import json
import re

import pytest
from chat_templates import make_tokenizer
from families import random_drafter
from talker import talker
from webpage import Reader

from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.curve import cost_curve
from headstart.inference.bench.prompts import Prompt
from headstart.inference.bench.report import page
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.support.report.charts import Axes, Series, above, histogram, lines, ticks
from headstart.support.token_text import TokenTextStream, token_texts


@pytest.fixture(scope="module")
def report() -> dict:
    heads, prompter = talker()
    prompts = [Prompt(prompter.ask(text), task) for text, task in (("<script>two & two</script>", "a<b"), ("six", "qa"))]
    plan = Plan(8, (0.0, 1.0), tree=TreeShape(9, 3), batches=(1, 2))
    two = SpeculativeModel(heads.backbone, random_drafter("eagle3", heads.backbone, depth=4), capture="off")
    results = compare([("out/<m>", heads), ("e", two)], prompts, plan, prompter)
    return results | {"costs": [{"head": "out/<m>", "points": cost_curve(heads, prompts[1].ids_T, 4)}], "backbone": "tiny & small"}


def test_a_page_complete_in_itself(report):
    text = page(json.loads(json.dumps(report)))
    read = Reader(text)
    assert not re.search(r"https?:|<link|@import|url\(|src=", text) and text.count("<script>") == 1
    assert ("meta", "charset", "utf-8") in read.attributes and "prefers-color-scheme: dark" in text
    for expected in ("tiny & small", "out/<m>", "a<b", "<script>two & two</script>", "Acceptance by depth", "Speed by batch size", "MBU"):
        assert expected in read.words, expected
    for row in (*report["baselines"], *report["results"]):
        assert f"{row['tokens_per_second']:.1f}" in read.words and f"{row['mbu']:.0%}" in read.words
    for row in report["results"]:
        assert all(f"{share:.2f}" in read.words for one in row["tasks"].values() for share in one["acceptance_per_depth"])
    names = [value for tag, name, value in read.attributes if name == "data-name"]
    assert len(names) == 8 + 4 + 8   # tasks of each row; sizes and samples of each drafter and temperature


def test_the_text_is_whole_and_its_runs_are_marked(report):
    sample = report["samples"][0]
    read = Reader(page(report))
    assert "".join(sample["tokens"]) in read.words
    titles = [value for tag, name, value in read.attributes if name == "title"]
    assert "prefill" in titles and f"step 1: {sample['accept_lengths'][0]} token" in " ".join(titles)
    assert sum(value == "prefill" for value in titles) == len(report["samples"]) == 8


def test_empty_sections_are_left_out(report):
    rows = [row | {"acceptance_per_depth": [], "tree_sizes": {}} for row in report["results"] if row["batch"] == 1]
    bare = {key: value for key, value in report.items() if key != "costs"} | {"results": rows, "samples": []}
    words = Reader(page(bare)).words
    assert "Speed by batch size" not in words and "What each step wrote" not in words and "Tree sizes" not in words
    assert "tokens/s" in words


def test_cost_curve_has_the_sizes_it_read(report):
    points = report["costs"][0]["points"]
    assert points[0]["nodes"] == 1 and [one["nodes"] for one in points] == sorted({one["nodes"] for one in points}) and len(points) > 4
    assert all(0 < one["verify_ms"] <= one["pass_ms"] for one in points)


@pytest.mark.parametrize(
    ("top", "marks"), [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7, [0, 2, 4, 6]), (230, [0, 50, 100, 150, 200]), (0, [0])]
)
def test_marks_are_round(top, marks):
    assert ticks(top) == marks


def test_nothing_is_drawn_outside_its_axes():
    top = above([3.0, 97.0])
    assert 97 < top < 150
    axes = Axes([1, 2, 8], top, "x", "y")
    svg = lines([Series("a", [(1, 3.0), (2, 97.0), (8, 20.0)], 0)], axes)
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert len(places) == 3 and all(56 <= x <= 620 and 16 <= y <= 256 for x, y in places)
    bars = histogram({1: 5, 8: 50}, [], Axes([1, 4, 8], 10.0, "x", "y", even=False))
    assert len(re.findall("<rect", bars)) == 2 and "8 nodes: 50 steps, 91%" in bars


def test_pieces_make_up_the_text():
    tokenizer = make_tokenizer()
    tokens = tokenizer("What is two? Six, ünder one condition.\n\n  日本 two")["input_ids"]
    strings = token_texts(tokenizer, tokens)
    assert len(strings) == len(tokens) and "".join(strings) == tokenizer.decode(tokens) and "\ufffd" not in "".join(strings)
    assert strings[0] == "<s>" and token_texts(tokenizer, []) == []
    half = token_texts(tokenizer, tokenizer("日", add_special_tokens=False)["input_ids"][:2])
    assert half[0] == "" and "\ufffd" in half[1]   # the incomplete character
    pieces = TokenTextStream(tokenizer, skip_special_tokens=True)
    assert "".join(map(pieces.add, tokens)) + pieces.end() == tokenizer.decode(tokens, skip_special_tokens=True)
