"""A short drafted run, captured beside uncaptured, before a model's first captured text: a fault must not write one.

Backends that replay operations at the addresses they were recorded with (CUDA graphs) would read anything if a store lay elsewhere.
Rounding has a size: what passes of other widths differ by themselves, measured in the same run.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

import headstart
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.inference.capture.backend import Backend
from headstart.inference.capture.capture import Capturer
from headstart.inference.decode import Decoder
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import BEAM_WIDTH, TreeShape
from headstart.inference.self_check.known_text import Known, KnownText, RandomTrees
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.support.devices import machine
from headstart.support.errors import UserError
from headstart.support.files import cache_folder, write_json
from headstart.support.json_text import read_json

FILE = "self-checks.json"
FORMAT = 1
logger = logging.getLogger(__name__)


def results_file() -> Path:
    """The path of the file."""
    return cache_folder() / FILE


def result_key(backbone: Backbone, drafters: Sequence[Drafter], backend: type[Backend] | None) -> str:
    """What a result depends on: backend, machine, driver, versions of libraries and of this code, the model and its drafters."""
    versions = f"torch {torch.__version__} | transformers {transformers.__version__} | code {_code()}"
    modules = [backbone.model, *drafters]
    sizes = [(weight, tensor.dtype, tensor.shape) for module in modules for weight, tensor in module.named_parameters()]
    described = (sizes, [str(one.arguments) for one in drafters], backbone.model.config._attn_implementation)
    model = " + ".join(type(module).__name__ for module in modules) + " " + hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    captured_by = backend.name if backend is not None else "off"
    return f"{captured_by} | {machine(backbone.device)} | driver {_driver()} | {versions} | {model}"


def read_result(key: str) -> str | None:
    """The result kept for this key; None if there is none, or if the file is damaged."""
    try:
        found = read_json(results_file(), "it is ignored")
        result = found["results"].get(key) if found["format"] == FORMAT else None
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return None
    return result if isinstance(result, str) else None


def write_result(key: str, result: str) -> None:
    """Keep a result; without a place for it, the check is made again in the next process."""
    try:
        found = read_json(results_file(), "it is ignored")
        results = dict(found["results"]) if found["format"] == FORMAT else {}
    except (UserError, OSError, KeyError, TypeError, ValueError):
        results = {}
    try:
        write_json(results_file(), {"format": FORMAT, "results": results | {key: result}})
    except (UserError, OSError) as error:
        logger.info("the result of the self-check is not kept: %s", error)


@functools.cache
def _code() -> str:
    """A hash of the code that decodes."""
    digest, root = hashlib.sha256(), Path(headstart.__file__).parent
    for folder in ("heads", "inference"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _driver() -> str:
    """The version of NVIDIA's driver, or that of CUDA."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return str(torch.version.cuda)


PROMPTS = ((50, 9, 30), (50,))
"""Lengths of the prompts of each run: a batch, from which rows leave, and one row."""
WRITTEN = 36
"""Tokens of each text, with which stores grow by an octave or two."""
ROUNDINGS = 4.0
"""Logits may differ by this many times what passes of other widths differ by."""
DRAFT_ROUNDINGS = 16.0
"""The same for the mean difference of the scores of drafts, beside their mean size."""


@dataclass(frozen=True)
class Run:
    """What a run of known texts gave."""

    logits: list[list[Tensor]]
    """``[V]`` by row and token."""
    drafts: dict[tuple[int, int], dict[int, float]]
    """First tokens that drafters drafted and their scores, by place."""


def self_check(reader: Reader, sources: Sequence[DrafterSource], capturer: Capturer) -> None:
    """Compare the captured passes of a model and its drafters with uncaptured ones; if they differ, capture is given up with a line.

    The result is kept, so that it takes its seconds once for a machine, a model and a version of the code.
    """
    capturer.unchecked = False
    known_as = result_key(reader.backbone, [source.drafter for source in sources], capturer.backend)
    known = read_result(known_as)
    fault = _fault(reader, sources) if known is None else known
    if known is None:
        write_result(known_as, fault)
    if fault:
        again = f" (found before; remove {results_file()} to check again)" if known else ""
        capturer.give_up(f"in a check before the first text {fault}{again}")


def _fault(reader: Reader, sources: Sequence[DrafterSource]) -> str:
    """What is wrong with captured passes; "" if nothing is."""
    backbone, drafters = reader.backbone, [source.drafter for source in sources]
    for lengths in PROMPTS:
        plain, drafted = (_uncaptured(backbone, drafters, lengths, plain) for plain in (True, False))
        try:
            captured = run(reader, sources, lengths)
        except Exception as error:  # such as running out of memory: without captures there may be enough
            return f"captured passes failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        size = max(float(logits.abs().max()) for row in plain.logits for logits in row)
        rounding = max(_difference(drafted, plain), torch.finfo(backbone.dtype).eps * size)
        difference = _difference(captured, drafted)
        if not difference <= ROUNDINGS * rounding:
            return f"logits differ by {difference:.3g} of {size:.3g}, where passes of other widths differ by {rounding:.2g}"
        if not (difference := _draft_difference(captured, drafted)) <= DRAFT_ROUNDINGS * rounding / size:
            return f"the scores of drafts differ by {difference:.2g} of their size, where logits round by {rounding / size:.2g}"
    return ""


def _uncaptured(backbone: Backbone, drafters: Sequence[Drafter], lengths: Sequence[int], plain: bool) -> Run:
    capturer = Capturer("off", backbone.device)
    sources = [DrafterSource(f"{i}", drafter, capturer) for i, drafter in enumerate(drafters)]
    taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
    return run(Reader(backbone, taps, capturer), sources, lengths, plain)


@torch.no_grad()
def run(reader: Reader, sources: Sequence[DrafterSource], lengths: Sequence[int], plain: bool = False) -> Run:
    """Write known texts after random prompts of these lengths. ``plain``: without drafts."""
    backbone, chance = reader.backbone, random.Random(1)
    room = backbone.max_positions or 1 << 31
    written = min(WRITTEN, room // 2)
    lengths = [min(length, room - written) for length in lengths]
    longest = max(lengths)
    ids_BT = torch.tensor([[chance.randrange(backbone.vocab) for _ in range(longest)] for _ in lengths], device=backbone.device)
    pads = [longest - length for length in lengths]
    request = Request(
        ids_BT, pads, longest + written, frozenset(), StoppingCriteriaList(), Processing(LogitsProcessorList([Known()]), len(pads)),
        logits=True,
    )  # fmt: skip
    ends = [longest + written] * len(lengths)  # padding included, as processors see it
    trees = RandomTrees([KnownText(ends, backbone.vocab, chance), *sources], chance, plain)
    decoder = Decoder(reader, trees, request, TreeShape(64, BEAM_WIDTH), None, len(lengths))
    for _ in decoder.run():
        pass
    return Run([text.logits for text in decoder.texts.of.values()], trees.drafts)


def _difference(one: Run, other: Run) -> float:
    """The largest difference of the logits; infinity where only one is a number."""
    pairs = [pair for rows in zip(one.logits, other.logits, strict=True) for pair in zip(*rows, strict=True)]
    return max(float((a - b).masked_fill(a == b, 0.0).abs().nan_to_num(nan=torch.inf).max()) for a, b in pairs)


def _draft_difference(one: Run, other: Run) -> float:
    """The mean difference of the scores of first drafted tokens that both have, as a share of their mean size; 1 for one that lacks."""
    pairs = [(drafts, other.drafts[place]) for place, drafts in one.drafts.items() if drafts and other.drafts.get(place)]
    shared = [(drafts[token], others[token]) for drafts, others in pairs for token in drafts if token in others]
    lacking = sum(len(drafts) for drafts, _ in pairs) - len(shared)
    size = sum(abs(score) for _, score in shared) / max(len(shared), 1)
    return (sum(abs(a - b) for a, b in shared) / size + lacking) / (len(shared) + lacking) if shared else float(bool(pairs))
