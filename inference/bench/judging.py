"""Judges what a benchmark wrote: every token, and some of the logits, of every system by the uncaptured model.

Systems mostly write the same text, which is read once. An entry of the report gets ``teacher_forced``, what was found, and ``verdict``:
"identical" to the text that it is compared with, "near-tie" if tokens differ from it and each is the model's pick up to rounding, or
"fault" if a token or a logit is off by more. The tolerance is known when everything has been read, so verdicts are filled in at the end.

Do drafts compute the logits of autoregressive decoding, bit for bit, or by how much do they differ? A pass over a tree may round otherwise
than one over a single position. Then two nearly equal logits can change places, and another token is written. So both systems continue
some prompts once more, keeping their logits: first those whose tokens differ. Logits are compared up to the first token that differs, since
the texts are the same before it; and those of each system with the uncaptured model's.

Shape suffixes: T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Images
from headstart.inference.bench.systems import AR, AR_TRANSFORMERS, Beside, HeadstartSystem, System, SystemResult
from headstart.inference.engine.inputs import read_images
from headstart.inference.engine.judge import Judge, Judgement, Text, differences
from headstart.inference.engine.noise import row_seeds
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.request import Request
from headstart.inference.measure import Settings, continue_texts, only_given_settings, padded
from headstart.support.terminal import progress

Row = dict[str, Any]
IDENTICAL, NEAR_TIE, FAULT = "identical", "near-tie", "fault"


class Judging:
    """The judgements of one report."""

    def __init__(self, backbone: Backbone, beside: Beside | None = None) -> None:
        self.judge, self.beside = Judge(backbone), beside
        self.entries: list[Entry] = []
        self._read: dict[tuple[Any, ...], Judgement] = {}

    def add(self, row: Row, measured: SystemResult, seed: int) -> Entry:
        """Judge every text of an entry of the report; prompt ``i`` has seed ``seed + i``. With a `dependence` texts are only compared."""
        entry = Entry(row, measured)
        self.entries.append(entry)
        if self.judge.backbone.dependence is not None:  # one pass over a text computes other logits
            return entry
        asked = [(i, *pair) for i, texts in measured.sequences.items() for pair in zip(measured.prompts[i], texts, strict=True)]
        for i, prompt_T, answer_T in tqdm(asked, desc=f"judging {measured.system.name}", unit="text", leave=False, delay=1.0):
            entry.texts.append(self._text(prompt_T, answer_T, row["temperature"], seed + i))
        return entry

    def add_logits(self, entry: Entry, prompt_T: Tensor, answer_T: Tensor, logits_TV: Tensor, seed: int) -> None:
        """Judge a further text of an entry and the logits that its first tokens were chosen by."""
        if self.judge.backbone.dependence is None:
            entry.with_logits.append(self._text(prompt_T, answer_T, entry.row["temperature"], seed, logits_TV))

    def _text(self, prompt_T: Tensor, answer_T: Tensor, temperature: float, seed: int, logits_TV: Tensor | None = None) -> Judgement:
        key = (temperature, seed, tuple(prompt_T.tolist()), tuple(answer_T.tolist()))  # a seed is of one prompt, with its images
        if logits_TV is None and key in self._read:
            return self._read[key]
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature > 0 else [])
        seed_1 = row_seeds([seed], 1, torch.device("cpu")) if temperature > 0 else None
        images = self._images(prompt_T)
        text = Text(torch.cat([prompt_T, answer_T.to(prompt_T)]), len(answer_T), seed_1, Processing(warpers, 1), images=images)
        self._read[key] = found = self.judge.judge(text, logits_TV)
        if not self.judge.rounding.texts:  # the report says how large it is
            self.judge.rounding.measure(text.ids_T.to(self.judge.backbone.device), text.prompt, images=images)
        return found

    def _images(self, prompt_T: Tensor) -> Images | None:
        """A prompt's images, as transformers' ``generate`` hands them on."""
        backbone = self.judge.backbone
        if not (given := {} if self.beside is None else self.beside(prompt_T, backbone.device)):
            return None

        def read(model: Any, ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **given: Any) -> Any:
            return read_images(backbone, Request.plain(ids, 0, (), LogitsProcessorList(), False), given)[0]

        with only_given_settings(backbone.model):
            return backbone.model.generate(**padded([prompt_T], backbone.model), **given, custom_generate=read, max_new_tokens=1)

    def finish(self, report: Row) -> None:
        """Fill in ``teacher_forced`` and ``verdict`` of every entry, and the size of rounding and the ``verdict`` of the report."""
        rounding = self.judge.rounding
        report["rounding"] = {"size": rounding.size, "tolerance": rounding.tolerance, "texts": rounding.texts, "beside": rounding.beside}
        for entry in self.entries:
            entry.row |= {"teacher_forced": entry.counts(rounding.tolerance), "verdict": entry.verdict(rounding.tolerance)}
        theirs = {*map(id, report["results"]), *(id(row) for row in report["baselines"] if row["name"] == AR)}
        verdicts = {entry.row["verdict"] for entry in self.entries if id(entry.row) in theirs}
        report["verdict"] = next(verdict for verdict in (FAULT, NEAR_TIE, IDENTICAL) if verdict in verdicts)


@dataclass
class Entry:
    """An entry of the report, and what was found about its texts."""

    row: Row
    measured: SystemResult
    texts: list[Judgement] = field(default_factory=list)
    with_logits: list[Judgement] = field(default_factory=list)
    """Of texts that were decoded once more, keeping logits."""

    def verdict(self, tolerance: float) -> str | None:
        """None: it is compared with no other text, and nothing is wrong with it."""
        if any(not judged.worst[0] <= tolerance for judged in [*self.texts, *self.with_logits]):
            return FAULT
        return {True: IDENTICAL, False: NEAR_TIE if self.texts else FAULT, None: None}[self.row["identical"]]

    def counts(self, tolerance: float) -> Row:
        """Tokens judged, near-ties and faults among them and the largest shortfall; positions whose logits were kept, those that are off
        by more than rounding, and the largest difference. None: no number.
        """
        judged = [*self.texts, *self.with_logits]
        shortfalls = [shortfall for text in judged for shortfall in text.shortfalls.values()]
        differences = [difference for text in judged for difference in text.differences]
        faults, beyond = (sum(not size <= tolerance for size in sizes) for sizes in (shortfalls, differences))
        return {
            "tokens": sum(text.tokens for text in judged),
            "near_ties": len(shortfalls) - faults,
            "faults": faults,
            "largest_shortfall": _finite(max(shortfalls, default=0.0)),
            "logits": len(differences),
            "logits_beyond": beyond,
            "largest_difference": _finite(max(differences, default=0.0)),
        }


def _finite(size: float) -> float | None:
    return size if math.isfinite(size) else None


TITLES = {IDENTICAL: "yes", NEAR_TIE: "near-tie", FAULT: "no", None: ""}
"""What a table says of an entry, in the column `identical`."""


def sentence(report: Row) -> str:
    """What the verdict is, and the figures that it rests on."""
    own = [*report["results"], *(row for row in report["baselines"] if row.get("name") == AR)]
    if report["verdict"] == FAULT:
        return _fault(report, [row for row in own if row["verdict"] == FAULT])
    differing = [row for row in own if row["identical"] is False]
    if not differing:
        to_transformers = {row["identical_to_transformers"] for row in report["results"] if row["temperature"] == 0}
        also = "; at temperature 0 also to transformers' generate" if to_transformers == {True} else ""
        return f"Every token of every prompt is identical to autoregressive decoding with the same seed{also}.{_bits(report)}"
    systems = ", ".join(f"{name(row)} {setting(row)} in {row['prompts_differing']}" for row in differing)
    shortfall = max(row["teacher_forced"]["largest_shortfall"] for row in own)
    return (
        f"Not every token is identical to autoregressive decoding: {systems} of {report['prompts']} prompts. These are near-ties: each"
        f" token is the model's own pick or falls short of it by {shortfall:.2g} at most, and the model's passes of other widths differ by"
        f" up to {report['rounding']['size']:.2g} by themselves.{_bits(report)} --dtype fp32 rounds less."
    )


def _fault(report: Row, rows: list[Row]) -> str:
    found = "; ".join(f"{name(row)} {setting(row)} {_wrong(row['teacher_forced'])}" for row in rows)
    captured = any((row["capture"] or {}).get("backend", "off") != "off" for row in rows)
    off = " If --capture off mends it, a capture is at fault." if captured else ""
    theirs = any(row["verdict"] == FAULT for row in report["baselines"] if row.get("name") == AR_TRANSFORMERS)
    same = theirs and all(row["identical_to_transformers"] is not False for row in rows if "head" in row)
    known = ", nor of drafts: transformers' generate wrote the same, as where its cache keeps a window that passes over a text lack"
    size, beside = report["rounding"]["size"], report["rounding"]["beside"]
    other = (
        f" A token's logits change by up to {beside:.2g} with the tokens beside it in a pass, so drafts change the text." if beside else ""
    )
    return (
        f"FAULT: {found}. The model's passes of other widths differ by {size:.2g} at most by themselves, so this is no rounding"
        f"{known if same else '; please report it'}.{other}{off}"
    )


def _wrong(found: Row) -> str:
    sizes = (found["largest_shortfall"], found["largest_difference"])
    shortfall, difference = ("any size" if size is None else f"{size:.3g}" for size in sizes)
    tokens = f"wrote {found['faults']} of {found['tokens']:,} tokens that the model does not pick, short by up to {shortfall}"
    logits = f"has logits off by up to {difference} at {found['logits_beyond']} of {found['logits']:,} positions"
    return " and ".join([tokens] * bool(found["faults"]) + [logits] * bool(found["logits_beyond"]))


def _bits(report: Row) -> str:
    """A sentence on the logits, where they were compared."""
    compared = [row["logits"] for row in report["results"]]
    positions, differing = (sum(comparison[key] for comparison in compared) for key in ("positions", "differing"))
    if not positions:
        return ""
    if not differing:
        return f" So is every bit of the logits ({positions:,} positions compared)."
    largest, logit = (max(comparison[key] for comparison in compared) for key in ("largest_difference", "largest_logit"))
    return f" Logits differ by at most {largest:.2g}, the largest is {logit:.3g} ({differing:,} of {positions:,} positions differ)."


def name(row: Row) -> str:
    """The name of an entry's system."""
    return str(row["head"] if "head" in row else row["name"])


def setting(row: Row) -> str:
    """The temperature of an entry and, above 1, the size of its batches."""
    return f"at temperature {row['temperature']:g}" + (f", batch {row['batch']}," if row["batch"] > 1 else "")


Kept = tuple[Tensor, Tensor]
"""The tokens ``[T]`` of a text, and the logits ``[T, V]`` that they were chosen by."""
PROMPTS, POSITIONS = 4, 64
"""How many batches of prompts are compared, and how many tokens of prompts whose tokens are the same."""
MOST_LOGITS = 2**26
"""How many logits of a batch are kept; of large batches and vocabularies, fewer positions are compared."""


@dataclass
class LogitsComparison:
    """Positions compared, how many of them have other logits in any bit, and by how much.

    Where no logit differs by more than d, only tokens whose logits are at most 2 d apart (divided by the temperature) can change places.
    """

    positions: int = 0
    differing: int = 0
    largest_difference: float = 0.0
    """Of one logit."""
    largest_logit: float = 0.0

    def add(self, logits_TV: Tensor, others_TV: Tensor) -> None:
        """Compare logits at the same positions."""
        largest_T = differences(logits_TV, others_TV)
        self.positions += len(largest_T)
        self.differing += int((largest_T > 0).sum())
        self.largest_difference = max(self.largest_difference, float(largest_T.max()))
        self.largest_logit = max(self.largest_logit, float(logits_TV.max()))

    def add_texts(self, texts: Sequence[Kept], others: Sequence[Kept]) -> int:
        """Compare the texts of two systems up to the first token that differs; returns the number of texts that differ."""
        differing = 0
        for (tokens_T, logits_TV), (others_T, others_TV) in zip(texts, others, strict=True):
            same = _same(tokens_T, others_T)
            count = min(same + 1, len(tokens_T), len(others_T))
            self.add(logits_TV[:count], others_TV[:count])
            differing += not len(tokens_T) == len(others_T) == same
        return differing


def compare_logits(
    judging: Judging, drafting: Sequence[Entry], ar: Entry, groups: Sequence[dict[int, Tensor]], settings: Settings, seed: int
) -> list[dict[str, Any]]:
    """Compare systems with autoregressive decoding on some of the batches ``groups``; prompt ``i`` has seed ``seed + i``."""
    systems, answers = (ar, *drafting), {i: texts[0] for i, texts in ar.measured.sequences.items()}
    differing = {i: {_same(run.measured.sequences[i][0], text_T) for run in drafting} - {len(text_T)} for i, text_T in answers.items()}
    chosen = sorted(groups, key=lambda group: not any(differing[i] for i in group))[:PROMPTS]
    found = [LogitsComparison() for _ in systems]
    bar = progress("comparing logits", "batch", len(systems) * len(chosen))
    for group in chosen:
        wanted = max([POSITIONS, *(place + 1 for i in group for place in differing[i])])
        room, others = max(1, MOST_LOGITS // (len(group) * judging.judge.backbone.vocab)), list[Kept]()
        needed = replace(settings, max_new_tokens=min(settings.max_new_tokens, wanted, room))
        for system, comparison in zip(systems, found, strict=True):
            texts = continued(system.measured.system, group, needed, seed)
            for (i, prompt_T), (tokens_T, logits_TV) in zip(group.items(), texts, strict=True):
                judging.add_logits(system, prompt_T, tokens_T, logits_TV, seed + i)
            others = others or texts  # the first system's
            comparison.add_texts(texts, others)
            bar.update()
    bar.close()
    return [asdict(comparison) for comparison in found[1:]]


def _same(tokens_T: Tensor, others_T: Tensor) -> int:
    """The number of tokens before the first that differs."""
    shorter = min(len(tokens_T), len(others_T))
    differing = (tokens_T[:shorter] != others_T[:shorter]).nonzero()
    return int(differing[0]) if len(differing) else shorter


def continued(system: System, group: dict[int, Tensor], settings: Settings, seed: int) -> list[Kept]:
    """The tokens ``[T]`` with which the system continues each prompt, and the logits ``[T, V]`` that they were chosen by."""
    assert isinstance(system, HeadstartSystem)
    seeds, prompts = [seed + i for i in group], list(group.values())
    output = continue_texts(system.heads, prompts, system.settings(settings), seeds, output_logits=True, **system.images(prompts))
    assert output.logits is not None
    start, logits_BTV = max(map(len, prompts)), torch.stack(output.logits, 1)
    lengths = [1 + sum(accepted) for accepted in output.accept_lengths]  # the prefill writes one token
    rows = zip(output.sequences, logits_BTV, lengths, strict=True)
    return [(row_T[start : start + length], row_TV[:length]) for row_T, row_TV, length in rows]
