"""Split the answered conversations into training data, evaluation data for tuning, and benchmark data.

    python recipes/conversations/hold_out.py ANSWERS.jsonl FOLDER COUNT

Writes `train.jsonl`, `eval.jsonl` and `bench.jsonl` to FOLDER, with up to COUNT rows in each of the last two. Held-out rows are evenly
spaced, since files are often sorted. Rows with the same prompt as a held-out row are left out of the other files, because the model would
answer them alike.
"""

import json
import sys
from pathlib import Path

from headstart.support.files import write_text


def asked(line: str) -> str:
    """A key of the row's prompt: the messages that the model did not write, or the whole text of a plain-text row."""
    row = json.loads(line)
    said = [message for message in row["messages"] if message["role"] != "assistant"] if "messages" in row else row["text"]
    return json.dumps([said, row.get("tools")], sort_keys=True)


def part(lines: list[str], count: int) -> dict[str, list[str]]:
    """The rows of each file, in order; no two files share a prompt."""
    held = {i * len(lines) // (2 * count): "bench" if i % 2 else "eval" for i in range(2 * count)}
    files: dict[str, list[str]] = {"bench": [], "eval": [], "train": []}
    taken: dict[str, str] = {}
    for name in files:
        for i, line in enumerate(lines):
            if held.get(i, "train") == name and taken.setdefault(asked(line), name) == name:
                files[name].append(line)
    return files


def main(answers: str, folder: str, held: str) -> int:
    """Write the files, each atomically, `train.jsonl` last."""
    count, out = int(held), Path(folder)
    with Path(answers).open(encoding="utf-8") as file:
        lines = list(file)
    files = part(lines, count)
    if len(files["train"]) < 2 * count or not all(files.values()):
        few = f"{answers} has {len(lines)} rows; with {count} held out to evaluate on and {count} to measure on"
        left = f"too few that ask something else are left to learn from ({len(files['train'])}, at least {2 * count} are needed)"
        print(f"error: {few}, {left}; take more conversations, or hold out fewer (--held-out)", file=sys.stderr)
        return 2
    for name, rows in files.items():
        write_text(out / f"{name}.jsonl", "".join(rows))
    left_out = len(lines) - sum(map(len, files.values()))
    print(f"held out  {len(files['eval'])} rows to evaluate on, {len(files['bench'])} to measure on; {len(files['train']):,} to learn from"
          + (f"; {left_out} left out, which ask the same as a held-out one" if left_out else ""))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
