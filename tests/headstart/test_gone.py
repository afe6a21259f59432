"""What earlier versions had is refused in one line that says what takes its place."""

from __future__ import annotations

import pytest

from headstart.cli.main import main

RECIPE = "recipes/quickstart/eagle3.yaml"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", RECIPE, "drafter.lora.rank=4"], "unknown key drafter.lora; it is gone: heads are trained whole, from drafter.init"),
        (["cache", RECIPE, "cache.dir=x", "cache.teacher=topk"], "cache.teacher; it is gone: a cache holds the final hidden states"),
        (["tune", "--heads", "heads"], "; it is gone: decoding times this machine in its first steps"),
        (
            ["export", "--heads", "heads", "--to", "vllm", "--out", "out", "--quantize", "int8"],
            "; it is gone: engines' own tools quantise heads",
        ),
        (["verify", "served", "--features", "cache"], "; it is gone: the folder's drafts are compared with those that its export stored"),
        (["bench", "--prompts", "p.jsonl", "--draft-sink=3"], "arguments: --draft-sink=3; it is gone: say --num-sink-tokens"),
    ],
)
def test_one_line_says_what_to_use(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as exit:
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2 and said in error and error.count("\n") == 1
