"""Format a plan (training/plan/plan.py) as text."""

from typing import Any

from headstart.support.text import gigabytes
from headstart.training.run.start import Chosen

BUSY = 0.2
"""Processors that other programs may keep busy beside what is timed."""


def lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of a plan's report, but for the time of its steps."""
    machine, batch = report["machine"], report["micro_batch"]
    each = " each" if machine["processes"] > 1 else ""
    head = [
        f"for       {machine['processes']} x {machine['name']} of {gigabytes(machine['memory'])}{each}; "
        f"{batch['rows']} rows of {batch['length']:,} tokens per forward, {batch['label_tokens']:,} of them label tokens",
        *([] if report["gguf"] is None else [f"backbone  {report['gguf']['summary']}"]),
        *([] if report["decoding"] is None else [f"decoding  {report['decoding']}"]),
        *_data(report),
        "",
    ]
    end = [*_verdict(report), *_disk(report["disk"]), *_estimate(report)]
    return [*head, *_memory(report["memory"]["phases"]), "", *end]


def _memory(phases: dict[str, dict[str, int]]) -> list[str]:
    parts = list(dict.fromkeys(part for parts_of in phases.values() for part in parts_of))
    rows = [[part, *(gigabytes(sizes[part]) if part in sizes else "" for sizes in phases.values())] for part in parts]
    totals = ["total", *(gigabytes(sum(sizes.values())) for sizes in phases.values())]
    table = [["memory", *phases], *rows, totals]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    cells = [[row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in table]
    return ["  ".join(row).rstrip() for row in cells]


def _verdict(report: dict[str, Any]) -> list[str]:
    memory, machine, fits = report["memory"], report["machine"], report["fits"]
    usable = gigabytes(machine["usable"])
    reserve = " (the rest is left to the allocator)" if machine["usable"] < machine["memory"] else ""
    if memory["fits"]:
        verdict = f"fits      {gigabytes(memory['peak'])} at most, during {memory['phase']}, of {usable}{reserve}"
    else:
        size = gigabytes(memory["phases"][memory["phase"]][memory["largest_part"]])
        largest = f"the largest part is {memory['largest_part']}, {size}: {memory['advice']}"
        verdict = f"does not fit: {gigabytes(memory['peak'])} during {memory['phase']}, but there are {usable}{reserve}; {largest}"
    if fits is None:
        return [verdict]
    limits = (
        f"largest   {fits['rows']:,} rows of {fits['at_length']:,} tokens per forward (train.micro_batch), so batches of "
        f"{fits['batch_size']:,} without accumulation; or {fits['at_rows']:,} rows of {fits['length']:,} tokens (data.max_length)"
    )
    none = "largest   nothing fits: not even one row, or rows of four tokens"
    return [verdict, limits if fits["rows"] or fits["length"] else none]


def _data(report: dict[str, Any]) -> list[str]:
    tokens = report["tokens"]
    if tokens["tokens"] is None:
        return [f"data      none yet, so rows of data.max_length are assumed: {report['data_unavailable']}"]
    share = tokens["label_tokens"] / tokens["tokens"]
    return [
        f"data      {tokens['summary']}; {share:.0%} are labels",
        f"training  {tokens['steps']:,} steps over {tokens['rows']:,} rows an epoch, about {tokens['training_tokens']:,} tokens",
        *(f"chosen    {f'{name}: ' if name else ''}{Chosen(**chosen)}" for name, chosen in report["chosen"].items() if chosen["values"]),
        *([] if report["advice"] is None else [f"advice    {report['advice']}"]),
    ]


def _disk(disk: dict[str, Any]) -> list[str]:
    states = f"states to resume from {gigabytes(disk['states'])} ({disk['kept']} kept, one being written)"
    parts = [f"heads {gigabytes(disk['heads'])}", states]
    named = {"features": "features (cache.dir)", "between_epochs": "features between epochs", "answers": "answers (regenerate.out), about"}
    for name, what in named.items():
        if disk.get(name, 0) != 0:
            parts.append(f"{what} {'not known without the data' if disk[name] is None else gigabytes(disk[name])}")
    return [f"disk      {', '.join(parts)}"]


def time_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of the time of a plan's steps."""
    if report["time"] is None:
        return [f"time      not measured: {report['time_unavailable']}"]
    seconds, hours = report["time"]["seconds_per_step"], report["time"]["hours"]
    notes = "" if report["machine"]["processes"] == 1 else ", measured on one process, without communication"
    if report["time"]["without_cache"]:
        notes += ", with the live backbone, since there is no feature cache yet; training from it is faster"
    if (others := report["time"]["other_programs"]) > BUSY:
        notes += f"; other programs used {others:.1f} processors meanwhile, so neither this nor the next line is certain"
    gains = [f"pays      {f'{name}: ' if name else ''}{_gain(gain)}" for name, gain in report["gain"].items()]
    return [f"time      {duration(hours)}: {seconds:.2f} s per step{notes}; evaluations come on top", *gains]


def _gain(gain: dict[str, Any] | str) -> str:
    if isinstance(gain, str):
        return f"not known here: {gain}"
    if gain["break_even"] is None:
        return "never on this machine, with drafts one by one: drafting and verifying takes longer than the steps it saves"
    gains = {p: f"{at['speedup']:.2f} x with {p:.0%} ({at['depth']} drafted, tau {at['tau']:.2f})" for p, at in gain["expected"].items()}
    most = gains.pop(gain["likely"], None)
    likely = "" if most is None else f"likely {most}, if the answers are the model's own; "
    pays = f"{likely}from {gain['break_even']:.0%} of drafts accepted at each depth"
    return f"{pays}; {', '.join(gains.values())}; a step takes {gain['step_ms']:.1f} ms"


def duration(hours: float) -> str:
    """Return a duration for people: hours, minutes or seconds."""
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.0f} minutes" if hours >= 1 / 30 else f"{3600 * hours:,.0f} seconds"


def _estimate(report: dict[str, Any]) -> list[str]:
    estimate = report["estimate"]
    if estimate is None:
        return []
    count = sum(estimate["operations_per_step"].values())
    each = f"{count / 1e12:,.0f} TFLOP per device and step at {estimate['utilisation']:.0%} of {estimate['tflops']:,.0f} TFLOP/s"
    if estimate["hours"] is None:
        return [f"estimate  {each}; how many steps there are depends on data that are not here"]
    return [f"estimate  {duration(estimate['hours'])} for {estimate['steps']:,} steps: {each}"]
