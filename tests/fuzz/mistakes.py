# ruff: noqa: E501
"""Mistakes that users and damaged files make, as commands: each must end in a result, or in one line with status 2."""

from collections.abc import Iterator

from data_mistakes import data, prompts
from folder_mistakes import caches, cards
from mistake import BENCH, CHAT, GENERATE, HUGE, Mistake
from recipe_mistakes import overrides, places, recipe_files


def command_lines() -> Iterator[Mistake]:
    big = "99999999999999999999"
    for flag, values in {
        "--temperature": ("1e308", "1e-320", "1e39", "1e400", "nan", "inf", "-1", "x", HUGE, "١"), "--seed": ("18446744073709551616", "9223372036854775808", "-1", "x", HUGE, "٣", "²"),
        "--width": ("100000", "100000000", big, "0", HUGE), "--nodes": ("100000", "100000000", big, "0"), "--depth": ("5000", "100000000", big, "0"),
        "--threads": ("100000", "1025", big, "0", "-1", HUGE), "--max-new-tokens": ("10000000", big, "0", HUGE), "--top-k": (big, "-1", HUGE), "--top-p": ("0", "1e-320", "2", "nan"),
        "--draft-window": (big, "0", "1"), "--num-sink-tokens": (big, "3"), "--early-exit": (big, "100", "3", "1"), "--json": ("/proc/x/y.json", "/dev/full", "heads", "rows.jsonl/x.json", ""),
        "--heads": ("", "rows.jsonl", "/dev/zero", "no/such", "a\0b", "../../..", "x" * 5000), "--backbone": ("", "rows.jsonl", "/dev/zero", "a\0b", "no/such", "heads"),
        "--adapter": ("rows.jsonl", "heads", "a\0b"), "--draft-model": ("heads", "rows.jsonl", "a\0b"), "--propose": ("wizard", ""), "--dtype": ("fp64",), "--capture": ("x",),
    }.items():  # fmt: skip
        for value in values:
            yield Mistake(f"generate {flag} {value[:30]!r}", [*GENERATE, "hi", flag, value])
            if flag != "--top-k" and flag != "--top-p":
                yield Mistake(f"bench {flag} {value[:30]!r}", [*BENCH, flag, value])
            if flag in ("--seed", "--temperature", "--width", "--threads"):
                yield Mistake(f"chat {flag} {value[:30]!r}", [*CHAT, flag, value], stdin=b"hi\n")
    for flag, values in {"--batch-size": ("100000000", big, "0", "x"), "--limit": (big, "0"), "--per-task": (big, "0"), "--prompt-tokens": (big, "0"), "--sampled-nodes": (big,),
                         "--html": ("/proc/x.html", "heads"), "--assistant": ("rows.jsonl", "heads", "a\0b")}.items():  # fmt: skip
        for value in values:
            yield Mistake(f"bench {flag} {value}", [*BENCH, flag, value])
    for flag, values in {"--gpus": ("0", "-1", big, "x", "1000000"), "--memory": ("0", "-1", "nan", "inf", "1e308", "x", "1e-300")}.items():
        for value in values:
            yield Mistake(f"plan {flag} {value}", ["plan", "recipe.yaml", "--no-calibration", flag, value])
    for value in ("-1", "4", big, "x", HUGE):
        yield Mistake(f"inspect --row {value[:30]}", ["inspect", "recipe.yaml", "--row", value])
    for argv in ([], ["wizard"], ["train"], ["generate"], ["bench"], ["inspect"], ["inspect", ""], ["inspect", "a\0b"], ["inspect", "/dev/zero"], ["inspect", "rows.jsonl"],
                 ["inspect", "heads", "a=1"], ["generate", "--wizard"], ["generate", "\udcff"], ["train", "recipe.yaml", "--json", "x"], ["export", ""], ["export", "heads"],
                 ["export", "heads", "--to", "rows.jsonl"], ["export", "heads", "--to", ""], ["export", "heads", "--to", "a\0b"], ["push", "heads", "a/b", "--dry-run", "rows.jsonl"],
                 ["import", "heads", "--to", "rows.jsonl"], ["import", "rows.jsonl", "--to", "x"], ["import", "backbone", "--to", "x"], ["verify", "heads"], ["verify", ""]):  # fmt: skip
        yield Mistake(f"command line: {argv}", argv)
    yield Mistake("generate --propose twice", [*GENERATE, "hi", "--propose", "suffix", "suffix", "--nodes", "5000"])


def mistakes() -> list[Mistake]:
    return [*recipe_files(), *overrides(), *places(), *data(), *prompts(), *cards(), *caches(), *command_lines()]
