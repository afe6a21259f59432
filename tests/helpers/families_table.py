"""Write docs/families.md: every architecture through every check of family_checks.py.

python tests/helpers/families_table.py --out docs/families.md           about six minutes on one idle core
python tests/helpers/families_table.py --out docs/families.md --only gpt2 pythia-1b       these rows anew, the others as they are
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
from architectures import Architecture, chained, refused, served  # noqa: E402
from every_model import TITLE  # noqa: E402
from family_checks import CHECKS, Subject  # noqa: E402
from published import UNTRIED, tally, templates_of  # noqa: E402
from released_sizes import PASSED, SMALLEST  # noqa: E402

from headstart.heads.backbone.backbone import Backbone  # noqa: E402
from headstart.support.errors import UserError  # noqa: E402

TABLE = re.compile(r"^\| models \| class \|.*\n\|[-|]+\n(?:\|.*\n)*", re.M)
"""The tables of what is served, of what verifies chains and of what is trained and exported only; the rest of the page is by hand."""
TOKENS = "tokens trained = tokens decoded"
"""The column that tests/training/data/test_published_templates.py shows."""
SIZES = "published sizes"
"""The last column, which tests/project/test_families.py shows."""


def outcome(check: str, of: Subject) -> str:
    """The cell: yes, or the line of a refusal."""
    try:
        CHECKS[check](of)
    except UserError as error:
        return f"no: {error}"
    return "yes"


def refusal(architecture: Architecture) -> str:
    try:
        Backbone(architecture.model())
    except UserError as error:
        return re.sub(r"(?<=copied cache) \(.*?\)(?= \()| \(transformers [\d.]+\)", "", str(error))  # the page is for all versions
    raise AssertionError(f"{architecture.name} is not refused")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def row(values: Iterable[str]) -> str:
    return "| " + " | ".join(values) + " |\n"


def start_of(architecture: Architecture) -> list[str]:
    """The first two cells of a row."""
    return [", ".join(architecture.models), f"`{architecture.title}`"]


def tokens_of(architecture: Architecture) -> str:
    """The cell of the column of templates: how many answers are trained on as they are written."""
    names = dict.fromkeys(name for model in architecture.models for name in templates_of(model))
    found = "; ".join(f"{name}: {tally(name)[0]} of {tally(name)[1]}" for name in names)
    return found or ("not tried" if architecture.name in UNTRIED else "no chat template")


def size_of(architecture: Architecture) -> str:
    """The cell of the last column."""
    model = SMALLEST[architecture.name]
    return f"{model}: {', '.join(dtype for dtype, models in PASSED.items() if model in models) or 'not run'}"


def rows_of(text: str) -> dict[str, list[str]]:
    """First cell -> all cells of each row of the page's tables."""
    return {cells(line)[0]: cells(line) for line in text.partition(TITLE)[0].splitlines() if line.startswith("| ")}


def measured(architecture: Architecture) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(architecture, Path(folder))
        return [*start_of(architecture), *(outcome(check, subject) for check in CHECKS)]


def page(before: str, only: list[str]) -> str:
    """The page with its tables made anew; with ``only``, other rows are as they were."""
    known = rows_of(before) if only else {}

    def shown(architecture: Architecture) -> list[str]:
        kept = known.get(start_of(architecture)[0])
        return kept[: 2 + len(CHECKS)] if kept and not set(only) & set(architecture.models) else measured(architecture)

    columns = ["models", "class", *CHECKS]
    tables = [
        table([*columns, TOKENS, SIZES], ([*shown(one), tokens_of(one), size_of(one)] for one in served())),
        table(columns, map(shown, chained())),
        table(["models", "class", "the line"], ([*start_of(one), refusal(one)] for one in refused())),
    ]
    return TABLE.sub(lambda match: tables.pop(0), before)


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    text = row(columns) + "|" + "---|" * len(columns) + "\n"
    for values in rows:
        text += row(values)
        print(row(values), end="", flush=True)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.write_text(page(args.out.read_text(), args.only))


if __name__ == "__main__":
    main()
