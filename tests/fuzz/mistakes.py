# ruff: noqa: E501
"""Mistakes that users and damaged files make, as commands: each must end in a result, or in one line with status 2.

python tests/fuzz/mistakes.py [WORD [N]]   # every mistake, or every Nth, whose name has WORD, in a process of its own, and how it ended
"""

import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [*map(str, (Path(__file__).parent, Path(__file__).parents[1] / "helpers", Path(__file__).parents[2]))]

from data_mistakes import data, prompts  # noqa: E402
from folder_mistakes import caches, cards  # noqa: E402
from mistake import BENCH, CHAT, GENERATE, HUGE, Mistake, write  # noqa: E402
from recipe_mistakes import overrides, places, recipe_files  # noqa: E402


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


def run_apart(mistake: Mistake, house: Path, seconds: float) -> str:
    """Run in a fork, in a copy of ``house``; returns what broke the promise, or nothing."""
    from trial import try_command

    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        os.close(reading)
        answer = "crash"
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):
                os.dup2(null, stream)
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(house, folder, dirs_exist_ok=True)
                os.chdir(folder)
                for name, content in mistake.files.items():
                    write(name, content)()
                if mistake.prepare is not None:
                    mistake.prepare()
                files = [path for path in Path(".").rglob("*") if path.is_file() and not path.is_symlink() and ".lock" not in path.name]
                before = {str(path): path.stat().st_mtime_ns for path in files}
                outcome = try_command(mistake.argv, mistake.stdin, seconds)
                answer = outcome.fault
                changed = [name for name, time in before.items() if not Path(name).exists() or Path(name).stat().st_mtime_ns != time]
                if not answer and outcome.status == 2 and changed:
                    answer = f"changed {changed}"
                answer = f"{answer}\n{outcome.status}\n{outcome.err.strip().splitlines()[-1][:400] if outcome.err.strip() else ''}"
        except BaseException as error:
            answer = f"harness: {error!r}"
        finally:
            os.write(writing, pickle.dumps(answer))
            os._exit(0)
    os.close(writing)
    ready = select.select([reading], [], [], 6 * seconds + 10)[0]
    data = os.read(reading, 100_000) if ready else b""
    os.close(reading)
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    status = os.waitpid(child, 0)[1]
    return pickle.loads(data) if data else ("hang (killed)" if not ready else f"crash: signal {os.WTERMSIG(status)}")


def report(word: str, every: int = 1, seconds: float = 20) -> None:
    from house import make_house

    import conftest  # noqa: F401  (the environment of tests)
    import headstart.cli.loading  # noqa: E401, F401

    sys.stdout.reconfigure(errors="backslashreplace")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        house = make_house(Path(folder))
        for number, mistake in enumerate(mistakes()):
            if number % every == 0 and word in mistake.name:
                answer, *rest = run_apart(mistake, house, seconds).split("\n")
                kind = answer.split(":")[0].split(" ")[0] or ("result" if rest and rest[0] != "2" else "one line")
                counts[kind] += 1
                print(f"{kind:10} | {mistake.name!r:70} | {answer or ' | '.join(rest)}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    report(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else 1)
