"""A plan (training/plan/plan.py) as lines of text."""

from __future__ import annotations

from typing import Any

from headstart.support.units import gigabytes

NOTES = {
    "reading": "the backbone reads", "learning": "the drafter learns", "stepping": "the optimiser steps", "saving": "a checkpoint is made",
}  # fmt: skip


def lines(report: dict[str, Any]) -> list[str]:
    """What `plan` found, for people."""
    machine, batch = report["machine"], report["micro_batch"]
    each = " each" if machine["processes"] > 1 else ""
    head = [
        f"for       {machine['processes']} x {machine['name']} of {gigabytes(machine['memory'])}{each}; "
        f"{batch['rows']} rows of {batch['length']:,} tokens at once, {batch['learned']:,} of them learned",
        *_data(report),
        "",
    ]
    return [*head, *_memory(report["memory"]["phases"]), "", *_verdict(report), *_disk(report["disk"]), *_time(report)]


def _memory(phases: dict[str, dict[str, int]]) -> list[str]:
    """A column a phase."""
    parts = list(dict.fromkeys(part for found in phases.values() for part in found))
    rows = [[part, *(gigabytes(found[part]) if part in found else "" for found in phases.values())] for part in parts]
    totals = ["in all", *(gigabytes(sum(found.values())) for found in phases.values())]
    table = [["memory while", *(NOTES[phase] for phase in phases)], *rows, totals]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    cells = [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in table]
    return ["  ".join(row).rstrip() for row in cells]


def _verdict(report: dict[str, Any]) -> list[str]:
    memory, machine, fits = report["memory"], report["machine"], report["fits"]
    room = gigabytes(machine["usable"])
    free = " (the rest is left to the allocator)" if machine["usable"] < machine["memory"] else ""
    if memory["fits"]:
        said = f"fits      {gigabytes(memory['most'])} at most, while {NOTES[memory['phase']]}, of {room}{free}"
    else:
        size = gigabytes(memory["phases"][memory["phase"]][memory["largest"]])
        said = (
            f"does not fit: {gigabytes(memory['most'])} while {NOTES[memory['phase']]}, but there are {room}{free}; "
            f"the largest part is {memory['largest']}, {size}: {report['advice']}"
        )
    most = (
        f"largest   {fits['rows']:,} rows of {fits['of_length']:,} tokens at once (train.micro_batch), so batches of "
        f"{fits['batch_size']:,} without accumulation; or {fits['of_rows']:,} rows of {fits['length']:,} tokens (data.max_length)"
    )
    none = "largest   nothing fits: not even one row, or rows of four tokens"
    return [said, most if fits["rows"] or fits["length"] else none]


def _data(report: dict[str, Any]) -> list[str]:
    tokens = report["tokens"]
    if tokens["tokens"] is None:
        return [f"data      not here, so rows are taken to be of data.max_length: {report['not_read']}"]
    share = tokens["learned"] / tokens["tokens"]
    return [
        f"data      {tokens['said']} ({share:.0%})",
        f"training  {tokens['steps']:,} steps over {tokens['rows']:,} rows an epoch, about {tokens['trained_on']:,} tokens read",
    ]


def _disk(disk: dict[str, Any]) -> list[str]:
    states = f"states to resume from {gigabytes(disk['states'])} ({disk['kept']} kept, one being written)"
    parts = [f"heads {gigabytes(disk['heads'])}", states]
    for name, what in (("features", "features (cache.dir)"), ("answers", "answers (regenerate.out), about")):
        if name in disk:
            parts.append(f"{what} {'not known without the data' if disk[name] is None else gigabytes(disk[name])}")
    return [f"disk      {', '.join(parts)}"]


def _time(report: dict[str, Any]) -> list[str]:
    if report["time"] is None:
        return [f"time      not measured: {report['no_time']}"]
    seconds, hours = report["time"]["seconds_a_step"], report["time"]["hours"]
    alone = "" if report["machine"]["processes"] == 1 else ", by one process alone, without what processes say to each other"
    alone += ", the backbone reading, since there is no cache yet: from it training is faster" if report["time"]["before_cache"] else ""
    span = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.0f} minutes" if hours >= 1 / 30 else f"{3600 * hours:,.0f} seconds"
    return [f"time      {span}: {seconds:.2f} s a step{alone}; evaluations come on top"]
