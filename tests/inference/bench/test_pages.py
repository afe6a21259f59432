"""The pages in a real browser: no script complains, nothing is wider than the window, light and dark, and the replay moves."""

import json
import re
from pathlib import Path

import pytest
from browser import look
from talker import talker

from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.compare import Comparison, comparison_page
from headstart.inference.bench.prompts import Prompt
from headstart.inference.bench.report import page
from headstart.inference.engine.tree import TreeShape
from headstart.training.log.runs import runs_page

WIDTHS = (1200, 420)


@pytest.fixture(scope="module")
def report() -> dict:
    heads, prompter = talker()
    prompts = [Prompt(prompter.ask(text), task) for text, task in (("</script><b>two", "a<b"), ("six", "qa"))]
    plan = Plan(12, (0.0,), tree=TreeShape(9, 3), replay=True)
    return compare([("out/<m>", heads)], prompts, plan, prompter) | {"backbone": "tiny", "prompts_files": ["p.jsonl"]}


def run(path: str, tau: float) -> list[dict]:
    recipe = {"backbone": {"path": "tiny"}, "drafter": {"kind": "medusa"}, "train": {"lr": tau / 100}, "save": {"dir": path}}
    steps = [
        {"step": step, "loss": 9 / step, "lr": 1e-3, "grad_norm": 1.0, "accuracy": [0.3], "tokens": 100 * step, "tokens_per_second": 50.0}
        for step in (10, 20)
    ]
    sample = {"prompt": "a", "tokens": list("bcdef"), "accept_lengths": [2, 2]}
    return [{"recipe": recipe, "steps": 20}, *steps, {"step": 20, "tau": tau, "acceptance_per_depth": [0.5, 0.1], "examples": [sample]}]


def pages(report: dict) -> dict[str, str]:
    return {
        "bench": page(json.loads(json.dumps(report)) | {"costs": []}),
        "compare": comparison_page(Comparison(("a.json", "b.json"), report, report)),
        "runs": runs_page({"out/a": run("out/a", 1.5), "out/b": run("out/b", 1.9)}),
    }


def test_the_replay_holds_every_token_of_both_runs(report: dict) -> None:
    assert len(report["replays"]) == 2
    for one in report["replays"]:
        alone, heads = one["runs"]
        assert "".join(t for p in alone["passes"] for t in p["tokens"]) == "".join(t for p in heads["passes"] for t in p["tokens"])
        assert all(p["tree"] is None for p in alone["passes"]) and any(p["tree"] for p in heads["passes"])
        times = [p["at"] for p in heads["passes"]]
        assert times == sorted(times) and times[0] >= 0
        for step in heads["passes"][1:]:
            tree = step["tree"]
            if tree is not None:
                assert tree["kinds"].count("kept") == len(step["tokens"]) - 1 and tree["kinds"][-1] == "own" and tree["kinds"][0] == "root"
                assert all(tree["rows"][i] == 0 for i, kind in enumerate(tree["kinds"]) if kind != "lost")   # the path is along the top
                assert len({(tree["rows"][i], level(tree["above"], i)) for i in range(len(tree["rows"]))}) == len(tree["rows"])


def level(above: list[int], box: int) -> int:
    return 0 if box == 0 else 1 + level(above, above[box])


def test_the_pages_hold_what_they_should(report: dict) -> None:
    made = pages(report)
    assert "Acceptance by task" in made["bench"] and "</script><b>two" not in made["bench"]
    assert "Before and after" in made["compare"] and "+0.0%" in made["compare"]
    assert "2 runs" in made["runs"] and "train.lr" in made["runs"] and "save.dir" not in made["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench", "compare", "runs"])
def test_in_a_browser(report: dict, name: str, tmp_path: Path) -> None:
    text = pages(report)[name]
    grounds = set()
    for width in WIDTHS:
        for dark in (False, True):
            seen = look(text, tmp_path, width=width, dark=dark)
            assert seen.console == []
            assert seen.data("wider") == "false", f"wider than a window of {width}"
            grounds.add((dark, seen.data("ground")))
    assert len(grounds) == 2 and len({ground for _, ground in grounds}) == 2   # dark is another page than light


@pytest.mark.slow
def test_the_replay_moves(report: dict, tmp_path: Path) -> None:
    """At time 0 the texts are empty but for the prompt; at the end they are whole; a heads' pass shows its tree."""
    act = "const slider = document.querySelector('.replay input'); slider.value = %s; slider.dispatchEvent(new Event('input'));"
    counts = {}
    for name, value in (("start", "0"), ("end", "slider.max")):
        seen = look(page(report), tmp_path, act=act % value)
        assert seen.console == []
        counts[name] = re.findall(r"(\d+) tokens? in \d+ passes", seen.dom)
    assert all(int(count) <= 1 for count in counts["start"]) and counts["end"] == ["12", "12"]
    rest = look(page(report), tmp_path)
    assert '<svg class="tree"' in rest.dom and "nodes verified" in rest.dom and "</b>" in rest.dom
