"""Compares two reports of ``headstart bench --json``: the same systems before and after a change, as a terminal table and as a page."""

from dataclasses import dataclass
from typing import Any, Literal, TextIO

from pydantic import FiniteFloat

from headstart.inference.bench.judging import FAULT, IDENTICAL, TITLES, name
from headstart.support.errors import UserError
from headstart.support.files import as_path
from headstart.support.json_text import Form, fault, read_json
from headstart.support.terminal import Section, Table, page, show
from headstart.support.text import shortened

Row = dict[str, Any]
MUST_AGREE = ("backbone", "prompts_files", "prompts", "tasks", "max_new_tokens", "seed", "dtype", "device", "threads")
"""What two reports must share to be compared; versions may differ."""
FIGURES = {"tau": ("accept len (tau)", ".2f"), "tokens_per_second": ("tokens/s", ".1f")}


class Figures(Form):
    tau: FiniteFloat
    tokens_per_second: FiniteFloat


class Entry(Figures):
    """What is read of a system's figures."""

    temperature: FiniteFloat
    batch: int
    identical: bool | None
    verdict: Literal["identical", "near-tie", "fault"] | None = None
    acceptance_per_depth: list[FiniteFloat] | None = None


class Baseline(Entry):
    name: str


class Result(Entry):
    head: str
    acceptance_per_depth: list[FiniteFloat]
    tasks: dict[str, Figures]


class Report(Form):
    """What is read of a report."""

    tasks: dict[str, Any]
    versions: dict[str, str]
    baselines: list[Baseline]
    results: list[Result]


@dataclass(frozen=True)
class Pair:
    """A system of both reports at one temperature and batch size."""

    before: Row
    after: Row

    @property
    def system(self) -> str:
        """The system's name; both, where the second report names other heads, and the trees, where they differ."""
        sizes = [(key, self.before.get(key), self.after.get(key)) for key in ("nodes", "width", "depth")]
        changed = ", ".join(f"{key} {_chosen(before)} → {_chosen(after)}" for key, before, after in sizes if before != after)
        return " → ".join(dict.fromkeys((name(self.before), name(self.after)))) + (f" ({changed})" if changed else "")


@dataclass(frozen=True)
class Comparison:
    """Two reports of the same prompts on the same backbone and machine; ``paths``: their files."""

    paths: tuple[str, str]
    before: Row
    after: Row

    @property
    def pairs(self) -> list[Pair]:
        """The systems of both reports, by setting. Systems are paired by name, then those left over in order."""
        pairs = []
        for setting in dict.fromkeys(map(_setting, _rows(self.before))):
            here, there = ([row for row in _rows(report) if _setting(row) == setting] for report in (self.before, self.after))
            ours, theirs = {name(row) for row in here}, {name(row): row for row in there}
            spare = iter([row for row in there if "head" in row and name(row) not in ours])
            for row in here:
                after = theirs.get(name(row)) or (next(spare, None) if "head" in row else None)
                pairs += [Pair(row, after)] if after is not None else []
        return pairs


def read_comparison(before: str, after: str) -> Comparison:
    """Read two reports. Raises UserError, in one line, for other files and for reports that cannot be compared."""
    first, second = read_bench(before), read_bench(after)
    for key in MUST_AGREE:
        if first.get(key) != second.get(key):
            raise UserError(
                f"{before} and {after} cannot be compared: {key} is {shortened(first.get(key))} and {shortened(second.get(key))};"
                " run bench again with the same prompts and settings on one machine"
            )
    both = Comparison((before, after), first, second)
    if not both.pairs:
        raise UserError(f"{before} and {after} share no temperature and batch size; run bench again with the same ones")
    return both


def read_bench(path: str) -> Row:
    """Read a report. Raises UserError unless the file is one of ``headstart bench --json``."""
    report = read_json(as_path("report", path), "give a file of headstart bench --json")
    if not {"results", "baselines", *MUST_AGREE} <= report.keys():
        raise UserError(f"{path} is no report of headstart bench --json; give one, or the folder of a training run")
    if (wrong := fault(Report, report)) is not None:
        raise UserError(f"{path} is damaged ({wrong}); run headstart bench --json again")
    return report


def print_comparison(both: Comparison, out: TextIO) -> None:
    """Print a line for each system and, if there are several tasks, for each of its tasks."""
    show([_about(both), _systems(both), *_tasks(both)], out)


def comparison_page(both: Comparison) -> str:
    tau = "Mean acceptance length (tau): tokens per forward pass, the backbone's own included."
    sections = [
        Section("Before and after", f"{tau} Speed is comparable only if the machine was idle both times.", [_systems(both)]),
        Section("Tasks", "The same by task.", _tasks(both)),
    ]
    about = [_about(both), f"Before: {_versions(both.before)}", f"After: {_versions(both.after)}"]
    return page(f"{both.before['backbone']}: {both.paths[0]} and {both.paths[1]}", about, sections)


def _about(both: Comparison) -> str:
    report = both.before
    return (
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to"
        f" {report['max_new_tokens']} tokens each; before: {both.paths[0]}, after: {both.paths[1]}"
    )


def _versions(report: Row) -> str:
    return ", ".join(f"{library} {version}" for library, version in report["versions"].items())


def _chosen(size: int | None) -> str:
    return "chosen" if size is None else str(size)


def _rows(report: Row) -> list[Row]:
    return [*report["baselines"], *report["results"]]


def _setting(row: Row) -> tuple[float, int]:
    return row["temperature"], row["batch"]


def _systems(both: Comparison) -> Table:
    titles = ["temperature", "system", *_titles(), "identical"]
    several = len({row["batch"] for row in _rows(both.before)}) > 1
    rows = []
    for pair in both.pairs:
        system = pair.system + (f", batch {pair.before['batch']}" if several else "")
        older = {None: None, True: IDENTICAL, False: FAULT}[pair.after["identical"]]  # reports had no verdicts
        identical = TITLES[pair.after.get("verdict", older)]
        cells = [f"{pair.before['temperature']:g}", system, *_changes(pair.before, pair.after), identical]
        rows.append(("" if "head" in pair.before else "dim", cells))
    return Table(titles, rows, left=(1,))


def _tasks(both: Comparison) -> list[Table]:
    """The figures of each task of each system that drafts; nothing for a single task."""
    if len(both.before["tasks"]) < 2:
        return []
    rows = [
        ("", [f"{pair.before['temperature']:g}", pair.system, task, *_changes(result, pair.after["tasks"][task])])
        for pair in both.pairs
        if "head" in pair.before
        for task, result in pair.before["tasks"].items()
        if task in pair.after["tasks"]
    ]
    return [Table(["temperature", "system", "task", *_titles()], rows, left=(1, 2))]


def _titles() -> list[str]:
    return [title for figure, _ in FIGURES.values() for title in (figure, "after", "change")]


def _changes(before: Row, after: Row) -> list[str]:
    cells = []
    for key, (_, form) in FIGURES.items():
        change = f"{after[key] / before[key] - 1:+.1%}" if before[key] else ""
        cells += [format(before[key], form), format(after[key], form), change]
    return cells
