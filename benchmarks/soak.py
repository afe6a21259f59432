"""Generates for long in one process: does memory stay flat, is every text that of plain decoding, and is nothing left behind?

    python benchmarks/soak.py [--minutes 60] [--seed 0] [--json FILE]

Each call has random prompts, lengths, batch, processors, temperature and filters, tree, heads and proposers, on a small random backbone
in fp32, whose passes are short, so that there are many calls; its texts repeat, so that drafts are accepted. Greedy texts and beams are
compared with transformers' own, sampled ones with autoregressive decoding of the same seeds. One call in eight is cancelled at a random
token by an exception. Memory, file descriptors, threads and hooks are counted every `EVERY` calls; memory is flat if its median over the
last fifth of the time is at most `GROWTH` above that of the second fifth. Captures take some MB each until their limit is reached: while
more of them are kept than in the second fifth, the run is too short to tell (``flat`` is null). Prints JSON; the exit status is 1 if a
text differs, memory grows or something is left.
"""

import ctypes
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from program import options, run
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.inference.capture.plugin import Backend
from headstart.inference.early_exit import EarlyExit
from headstart.inference.engine.history import HistoryProposer
from headstart.inference.engine.recycling import RecyclingProposer
from headstart.inference.engine.suffix import SuffixProposer
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

EVERY = 10
"""Calls between two counts."""
GROWTH = 0.03
"""Share by which memory may grow after the warm-up."""
KEPT = 3
"""Captures of a function that are kept: few, so that the limit is soon reached and captures are given up and made again."""
REMEMBERED = 2000
"""Tokens of earlier texts that a `HistoryProposer` keeps: few, so that it too is soon full; at its default of 100,000 it takes an hour."""
KINDS = ("medusa", "eagle3", "block")
TREES = ("auto", "auto", TreeShape(6, 1), TreeShape(12, 4), TreeShape(30, 8))
LONGEST_PROMPT, LONGEST_TEXT, MOST_ROWS = 96, 48, 4


VOCAB, EOS = 256, 3
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, initializer_range=0.2, bos_token_id=None, eos_token_id=EOS, pad_token_id=0,
)  # fmt: skip


class Cancelled(Exception):
    """What a user's code raises to end a call."""


class CancelAt(StoppingCriteria):
    """Raises at a call's token."""

    def __init__(self, token: int) -> None:
        self.left = token

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Cancelled
        return torch.zeros(len(input_ids), dtype=torch.bool)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of generate."""

    system: str
    rows: dict[str, Tensor]
    settings: dict[str, Any]
    """transformers' own."""
    own: dict[str, Any]
    """Headstart's."""
    cancel: int | None
    """The token at which it is cancelled, if it is."""


def random_heads(kind: str, backbone: Backbone) -> Drafter:
    torch.manual_seed(len(kind))
    return build_drafter(kind, backbone, {"depth": 3}).eval().requires_grad_(False)


def systems_of(backbone: Backbone) -> dict[str, SpeculativeModel]:
    """Heads of several kinds, each with other proposers beside it."""
    free: list[list[Any]] = [[EarlyExit(backbone, layers=2)], [SuffixProposer()], [RecyclingProposer(), HistoryProposer(REMEMBERED)]]
    systems = {
        kind: SpeculativeModel(backbone, random_heads(kind, backbone), proposers=proposers)
        for kind, proposers in zip(KINDS, free, strict=True)
    }
    all_three = [SuffixProposer(), RecyclingProposer(), HistoryProposer(REMEMBERED)]
    return systems | {"proposers": SpeculativeModel(backbone, proposers=all_three)}


def draw(rng: random.Random, systems: list[str]) -> Call:
    """Draw the arguments of a call."""
    lengths = [rng.randint(1, LONGEST_PROMPT) for _ in range(rng.choice((1, 1, 2, MOST_ROWS)))]
    rows = [torch.tensor([rng.randrange(1, VOCAB) for _ in range(length)]) for length in lengths]
    settings: dict[str, Any] = {"max_new_tokens": rng.randint(1, LONGEST_TEXT), "eos_token_id": EOS, "pad_token_id": 0}
    for name, value in (
        ("repetition_penalty", 1.3), ("no_repeat_ngram_size", 3), ("min_new_tokens", 9), ("bad_words_ids", [[17], [30, 31]]),
        ("suppress_tokens", [5, 6, 7]), ("sequence_bias", {(40,): 1.5, (41, 42): -3.0}),
    ):  # fmt: skip
        if rng.random() < 0.2:
            settings[name] = value
    manner = rng.choice(("greedy", "greedy", "sampled", "sampled", "beams"))
    own: dict[str, Any] = {"tree": rng.choice(TREES)}
    if manner == "sampled":
        settings |= {"do_sample": True, "temperature": rng.uniform(0.4, 1.4), "top_k": rng.choice((0, rng.randint(1, 2 * VOCAB)))}
        settings |= {"top_p": rng.choice((1.0, rng.uniform(0.2, 1.0))), "min_p": rng.choice((0.0, rng.uniform(0.0, 0.3)))}
        own["seed"] = rng.randrange(1 << 40)
    else:
        settings |= {"do_sample": False, "num_beams": rng.choice((2, 3)) if manner == "beams" else 1}
    if rng.random() < 0.3:
        own["batch_size"] = rng.randint(1, MOST_ROWS)
    cancel = rng.randint(0, 20) if manner != "beams" and rng.random() < 1 / 6 else None
    if cancel is not None and own.get("batch_size", len(rows)) < len(rows):
        del own["batch_size"]  # refused: `CancelAt` is asked about all rows together
    return Call(rng.choice(systems), left_padded(rows), settings, own, cancel)


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def say(heads: SpeculativeModel, call: Call, **more: Any) -> Tensor:
    text: Tensor = heads.backbone.model.generate(**call.rows, **call.settings, **more, custom_generate=heads.generate)
    return text


def plain(heads: SpeculativeModel, call: Call) -> Tensor:
    """transformers' text; if it is sampled, that of autoregressive decoding, whose random numbers are its own."""
    if "seed" in call.own:
        return say(heads, call, seed=call.own["seed"], speculate=False)
    text: Tensor = heads.backbone.model.generate(**call.rows, **call.settings)
    return text


def require_same(heads: SpeculativeModel, call: Call, counts: Counter[str]) -> dict[str, Any] | None:
    """Make the call; returns a description of it if its text differs."""
    if call.cancel is not None:
        try:
            say(heads, call, stopping_criteria=StoppingCriteriaList([CancelAt(call.cancel)]), **call.own)
        except Cancelled:
            counts["cancelled"] += 1
    text, expected = say(heads, call, **call.own), plain(heads, call)
    counts["calls"] += 1
    counts["rows"] += len(text)
    counts["tokens"] += int(text.numel() - call.rows["input_ids"].numel())
    if torch.equal(text, expected):
        return None
    lengths = call.rows["attention_mask"].sum(1).tolist()
    return {"system": call.system, "settings": str(call.settings), "own": str(call.own), "lengths": lengths}


def left(backbone: Backbone) -> dict[str, int]:
    """What a call must not leave behind."""
    process = psutil.Process()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in backbone.model.modules())
    return {"files": process.num_fds(), "threads": process.num_threads(), "hooks": hooks}


def resident_mib() -> float:
    """Resident memory, after malloc has given back its free pages where it can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return psutil.Process().memory_info().rss / 2**20


def captures_kept(systems: dict[str, SpeculativeModel]) -> int:
    engines = [engine for heads in systems.values() for engine in heads._engines.values()]
    return sum(len(one._captures) for engine in engines for one in engine.capturer.functions)


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Generate for that long; returns the figures."""
    Backend.most_captures = KEPT
    logging.set_verbosity_error()  # of lengths that cannot be reached
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    backbone = Backbone(LlamaForCausalLM(CONFIG).eval().requires_grad_(False))
    systems, rng, counts = systems_of(backbone), random.Random(seed), Counter[str]()
    start, memory, differing, before = time.monotonic(), [], [], None
    while (passed := time.monotonic() - start) < 60 * minutes or counts["calls"] < 2 * EVERY:
        call = draw(rng, list(systems))
        difference = require_same(systems[call.system], call, counts)
        if difference is not None:
            differing.append({"call": counts["calls"], **difference})
        if counts["calls"] % EVERY == 0:
            memory.append((passed, resident_mib(), captures_kept(systems)))
            print(f"{passed:.0f} s: {counts['calls']} calls, {memory[-1][1]:.0f} MiB", file=sys.stderr, flush=True)
            before = before or left(backbone)
    return {
        "minutes": (time.monotonic() - start) / 60, "seed": seed, **counts, "differing": differing, **flatness(memory),
        "left_at_first": before, "left_at_last": left(backbone),
        "captures": {name: sum(one.captures_made for engine in heads._engines.values() for one in engine.capturer.functions)
                     for name, heads in systems.items()},
    }  # fmt: skip


def flatness(memory: list[tuple[float, float, int]]) -> dict[str, Any]:
    """Compare resident memory (MiB) after the warm-up with that at the end; of each count: seconds, memory, captures kept."""
    end = memory[-1][0]
    fifths = [[one for one in memory if i * end / 5 <= one[0] <= (i + 1) * end / 5] for i in range(5)]
    sizes, kept = ([statistics.median(one[place] for one in fifth) if fifth else 0.0 for fifth in fifths] for place in (1, 2))
    told = end and all(sizes) and kept[4] <= kept[1]
    return {"memory_mib_by_fifth": sizes, "captures_by_fifth": kept, "flat": sizes[4] <= sizes[1] * (1 + GROWTH) if told else None}


def verdict(report: dict[str, Any]) -> bool:
    nothing_left = all(report["left_at_last"][key] <= count for key, count in report["left_at_first"].items())
    return not report["differing"] and nothing_left and report["flat"] is not False


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to generate")
    parser.add_argument("--seed", type=int, default=0, help="of the calls' arguments")
    found: dict[str, Any] = {}
    run(parser, lambda given: found.setdefault("report", soak(given.minutes, given.seed)))
    sys.exit(0 if verdict(found["report"]) else 1)
