"""A benchmark report on the terminal (tables, the capture backends in use, and the verdict), and as one self-contained HTML page; and
the report's sample outputs."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TextIO

from markupsafe import Markup
from rich.console import RenderableType
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from headstart.chat.prompts import Prompt
from headstart.inference.bench.judging import FAULT, IDENTICAL, NEAR_TIE, TITLES, name, sentence, setting
from headstart.inference.bench.systems import AR, AR_TRANSFORMERS, SystemResult
from headstart.support.terminal import Section, Table, page, show
from headstart.support.text import shortened, token_texts

Row = dict[str, Any]
SPEEDS = ("accept len (tau)", "tokens/s", "x AR", "x transformers")
STEP = ("x AR by round", "rested", "MBU", "draft ms", "verify ms", "host ms", "identical")
STYLES = {IDENTICAL: "green", NEAR_TIE: "", FAULT: "bold red"}


def print_report(report: Row, out: TextIO) -> None:
    """Print settings and machine, a row for each system, a table by task if there are several, and the verdict."""
    parts: list[RenderableType] = [Text("\n".join(header(report))), systems_table(report), *tasks_table(report)]
    parts.append(Text("\n".join(notes(report))))
    show([*parts, *(Text(text, style=style) for text, style in conclusions(report))], out)


def conclusions(report: Row) -> list[tuple[str, str]]:
    """The verdict, and before it what makes the speeds uncertain, each with its style: nothing is green beside uncertain speeds."""
    verdict = report["verdict"]
    if report["busy"] is None:
        return [(sentence(report), STYLES[verdict])]
    return [(report["busy"], "bold red"), (sentence(report), "" if verdict == IDENTICAL else STYLES[verdict])]


def settings_of(report: Row) -> list[tuple[float, int]]:
    """The measured pairs of temperature and batch size."""
    return list(dict.fromkeys((row["temperature"], row["batch"]) for row in report["results"]))


def rows_at(report: Row, temperature: float, batch: int) -> Iterator[Row]:
    """The entries of baselines and heads at one temperature and batch size."""
    return (row for row in (*report["baselines"], *report["results"]) if (row["temperature"], row["batch"]) == (temperature, batch))


def setting_titles(report: Row) -> list[str]:
    """Titles of the columns that identify a row; the batch size is among them only if one exceeds 1."""
    return ["temperature", *(["batch"] if any(batch > 1 for _, batch in settings_of(report)) else []), "system"]


def setting_cells(report: Row, row: Row) -> list[str]:
    """The cells of `setting_titles`."""
    return [f"{row['temperature']:g}", *([str(row["batch"])] if len(setting_titles(report)) > 2 else []), name(row)]


def systems_table(report: Row) -> Table:
    """A row for each system at each temperature and batch size."""
    titles = [*setting_titles(report), *SPEEDS, *STEP, "accepted at depth 0, 1, ..."]
    rows: list[tuple[str, list[str | Text]]] = []
    for temperature, batch in settings_of(report):
        for row in rows_at(report, temperature, batch):
            *cells, shown = step_cells(row)
            marked = Text(shown, style=STYLES.get(row["verdict"], ""))
            rows.append((_style(row), [*setting_cells(report, row), *speeds(row), *cells, marked, _acceptance(row)]))
    return Table(titles, rows, left=[len(setting_titles(report)) - 1, len(titles) - 1])


def tasks_table(report: Row) -> list[Table]:
    """A row for each task of each system that drafts; nothing for a single task."""
    if len(report["tasks"]) < 2:
        return []
    setting = len(setting_titles(report))
    titles = [*setting_titles(report), "task", *SPEEDS, "accepted at depth 0, 1, ..."]
    rows = [
        (_style(row), [*setting_cells(report, row), task, *speeds(result), _acceptance(result)])
        for temperature, batch in settings_of(report)
        for row in rows_at(report, temperature, batch)
        if row["kind"] != "ar"  # the ratios of autoregressive decoding add nothing
        for task, result in row["tasks"].items()
    ]
    return [Table(titles, rows, left=[setting - 1, setting, len(titles) - 1])]


def _style(row: Row) -> str:
    return "dim" if row["kind"] == "ar" else ""


def notes(report: Row) -> list[str]:
    """All lines below the table."""
    parts = (engine_notes, capture_notes, transformers_notes, vocabulary_notes, repetition_notes)
    return [line for part in parts for line in part(report)]


def capture_notes(report: Row) -> list[str]:
    """A line for each capture backend and fallback reason, with the systems that have them."""
    systems: dict[tuple[str, str | None], dict[str, None]] = {}
    for row in (*report["baselines"], *report["results"]):
        if row["capture"] is not None:
            systems.setdefault((row["capture"]["backend"], row["capture"]["fallback"]), {})[name(row)] = None
    return [
        f"capture: {backend} ({', '.join(names)})" + (f"; fallback: {fallback}" if fallback else "")
        for (backend, fallback), names in systems.items()
    ]


def engine_notes(report: Row) -> list[str]:
    """A line for each entry of heads with its acceptance under vLLM's names, as vLLM counts it (docs/serving.md)."""
    return [
        f"as vLLM counts it: {name(row)} {setting(row).rstrip(',')}: mean acceptance length {row['mean_acceptance_length']:.3f},"
        f" draft acceptance rate {row['draft_acceptance_rate']:.1%},"
        f" per position {' '.join(f'{share:.3f}' for share in row['acceptance_rate_per_pos'])}"
        for row in report["results"]
        if row["mean_acceptance_length"] is not None
    ]


def transformers_notes(report: Row) -> list[str]:
    """A line for each setting in which transformers' greedy ``generate`` wrote another text than autoregressive decoding here."""
    return [
        f"transformers: its generate wrote another text {setting(row).rstrip(',')} for {row['prompts_differing_from_headstart']} of"
        f" {report['prompts']} prompts{', by more than rounding' if row['verdict'] == FAULT else ': near-ties'}"
        for row in report["baselines"]
        if row["name"] == AR_TRANSFORMERS and row["prompts_differing_from_headstart"]
    ]


def vocabulary_notes(report: Row) -> list[str]:
    """A line for each entry with a draft vocabulary: its share of the generated tokens, which bounds the acceptance."""
    return [
        f"draft vocabulary: {name(row)} {setting(row)}, {coverage['size']:,} of {coverage['vocab_size']:,} tokens,"
        f" which are {coverage['coverage']:.1%} of those generated"
        for row in report["results"]
        if (coverage := row["draft_vocabulary"]) is not None
    ]


def repetition_notes(report: Row) -> list[str]:
    """A line for each temperature: how much of what AR wrote repeats itself, from which n-gram drafts gain."""
    return [
        f"repetition: {row['repeated_8grams']:.1%} of the 8-grams written {setting(row)} by {name(row)} occur earlier in the same text"
        for row in report["baselines"]
        if row["name"] == AR and row["repeated_8grams"] is not None
    ]


def header(report: Row) -> list[str]:
    """Lines that say what was measured, and on what."""
    lines = [
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads;"
        f" {report['prompts']} prompts, up to {report['max_new_tokens']} tokens each; milliseconds are per decoding step",
        f"MBU: share of the memory bandwidth measured here ({report['memory_bytes_per_second'] / 1e9:.1f} GB/s) that reading the weights"
        f" takes ({report['weight_bytes'] / 1e6:.1f} MB per forward pass)",
    ]
    if report["dropped_prompts"] or report["dropped_turns"]:
        named = f" {shortened(report['set_aside'])}" if report["set_aside"] else ""
        prompts = f"{report['dropped_prompts']} prompts{named}"
        lines.append(f"dropped, too long for the context or refused by the template: {prompts}, {report['dropped_turns']} later turns")
    return lines


def speeds(row: Row) -> list[str]:
    """The cells of `SPEEDS`."""
    forms = {"tau": ".2f", "tokens_per_second": ".1f", "speedup_vs_ar": ".2f", "speedup_vs_transformers": ".2f"}
    return [format(row[key], form) for key, form in forms.items()]


def step_cells(row: Row) -> list[str]:
    """The cells of `STEP`."""
    times = [f"{row[key]:.2f}" if key in row else "" for key in ("draft_ms", "verify_ms", "host_ms")]
    spread = "-".join(f"{ratio:.2f}" for ratio in row["spread"])
    return [spread, f"{row['rested']:.0%}" if "rested" in row else "", f"{row['mbu']:.0%}", *times, TITLES[row["verdict"]]]


def _acceptance(row: Row) -> str:
    return " ".join(f"{share:.2f}" for share in row.get("acceptance_per_depth", ()))


SAMPLES = 6
"""Maximum number of samples of each system, the first of each task."""
TOKENS = 300
"""Maximum number of tokens per sample."""
SHOWN = 300
"""Characters of the end of the prompt that are shown."""


def samples(
    results: Sequence[SystemResult], prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, temperature: float
) -> list[dict[str, Any]]:
    """One sample for each system and the first prompt of each task: the tokens of the first answer as text, and the accept lengths.

    The prefill writes the first token, decoding step n the next ``accept_lengths[n]`` tokens.
    """
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt.task, i)
    return [
        {
            "head": result.system.name,
            "temperature": temperature,
            "task": task,
            "prompt": str(tokenizer.decode(prompts[i].ids_T, skip_special_tokens=True))[-SHOWN:],
            "tokens": token_texts(tokenizer, result.sequences[i][0].tolist()[:TOKENS]),
            "accept_lengths": result.accept_lengths[i],
        }
        for result in results
        for task, i in islice(first.items(), SAMPLES)
    ]


SPEED = (
    "Mean acceptance length (tau): tokens a sequence gets per forward pass of the backbone, its own included; 1 is autoregressive decoding."
)


def report_page(report: Row) -> str:
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items())
    said = [Markup('<p class="{}">{}</p>').format(style, text) for text, style in conclusions(report)]
    below = [Markup("<p class=soft>{}</p>").format(note) for note in notes(report)]
    sections = [
        Section("Speed", SPEED, [*said, systems_table(report), *below]),
        Section("Tasks", "The same by task.", tasks_table(report)),
    ]
    return page(report["backbone"], [*header(report), f"seed {report['seed']}; {versions}"], sections)
