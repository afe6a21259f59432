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
from pathlib import Path

sys.path[:0] = [*map(str, (Path(__file__).parent, Path(__file__).parents[1] / "helpers", Path(__file__).parents[2]))]

from command_mistakes import command_lines  # noqa: E402
from data_mistakes import data, prompts  # noqa: E402
from folder_mistakes import caches, cards  # noqa: E402
from mistake import Mistake, write  # noqa: E402
from recipe_mistakes import overrides, places, recipe_files  # noqa: E402


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
