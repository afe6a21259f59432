"""Flags that have better names now are taken by their old ones too, with a line that names the new one."""

import argparse

from headstart.cli.arguments import RENAMED
from headstart.cli.bench import add_bench
from headstart.cli.main import main


def test_renamed_flags(caplog):
    parser = argparse.ArgumentParser()
    add_bench(parser)
    for old, new in RENAMED.items():
        value = ["3"] if old == "--draft-sink" else []
        by_old, by_new = (vars(parser.parse_args(["--prompts", "p.jsonl", flag, *value])) for flag in (old, new))
        assert by_old == by_new != vars(parser.parse_args(["--prompts", "p.jsonl"]))
    for flag in ("--also-alone", "--include-heads-only"):
        caplog.clear()
        assert main(["bench", "--prompts", "p.jsonl", flag]) == 2
        assert ("--also-alone is called --include-heads-only now" in caplog.text) == (flag == "--also-alone")
