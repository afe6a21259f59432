"""Compiles what decoding with a model and its heads runs, in the foreground and once for a machine.

A few steps are decoded with trees of every depth, greedy, sampled and filtered, in which passes are traced; then the parts that they
share are compiled. Processes that begin later use them, and this one from its next call on.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from headstart.inference.decode import Decoder
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.runtime import Engine, turn
from headstart.support.errors import UserError, notice
from headstart_cpu import kernels, store, workers
from headstart_cpu.compiled_pass import BEGUN
from headstart_cpu.passes import OFF, not_compilable
from headstart_cpu.program import Program

PROMPT, STEPS = 8, 3
"""Tokens of a prompt, and decoding steps after it."""


@torch.no_grad()
def compile_model(heads: SpeculativeModel, say: Callable[[str], object], batch: int = 1) -> dict[str, Any]:
    """Compile the passes of the model and the drafts of its heads, as adaptive trees make them.

    ``batch``: the most rows that are decoded together. ``say``: is given lines about the progress. Returns ``parts``, how many were
    compiled, ``seconds`` and the ``folder``. Raises UserError where the layers cannot be compiled; drafts that cannot are named by ``say``.
    """
    start, found = time.monotonic(), dict[Path, Program]()
    reason = not_compilable(heads.backbone)
    if reason is None:
        with turn(heads.backbone.model), heads.running():
            engine = Engine(heads, True, found.__setitem__)
            reason = engine.capturer.reason or f"compiled code is not used (capture is {heads.capture!r}, {OFF} is {os.environ.get(OFF)})"
            if engine.reader.read.compiled is not None:
                say("tracing what may not be compiled yet")
                _decode(engine, batch)
                reason = engine.reader.read.compiled.reason
    if reason is not None:
        raise UserError(f"the layers of {heads.backbone.name or 'the model'} cannot be compiled: {reason}")
    parts = workers.compile_parts(store.lacking(found.values()), say)
    for file in found:
        BEGUN.pop(file, None)
    reasons = dict.fromkeys(map(store.why_not, found.values()))
    if reasons and None not in reasons:
        raise UserError(f"the layers of {heads.backbone.name or 'the model'} cannot be compiled: {next(iter(reasons))}")
    for reason in filter(None, reasons):
        say(f"some parts are not compiled: {reason}")
    return {"parts": parts, "seconds": time.monotonic() - start, "folder": str(kernels.folder())}


def compile_lacking(heads: SpeculativeModel, batch: int = 1) -> None:
    """The same where compiled code is used by default, with lines on standard error, also about what cannot be compiled."""
    if heads.capture == "auto" and os.environ.get(OFF) != "0" and not_compilable(heads.backbone) is None:
        try:
            compile_model(heads, notice, batch)
        except UserError as error:
            notice(str(error))


def _decode(engine: Engine, batch: int) -> None:
    """Decode a few steps with every number of depths that adaptive trees may have, greedy, sampled and filtered."""
    backbone, drafters = engine.reader.backbone, engine.policy.of_kind(DrafterSource)
    depths = sorted({count for source in drafters for count in source.counts}) or [1]
    for rows in (1, 2)[: min(batch, 2)]:
        width = max((source.width(rows) for source in drafters), default=1)
        ids_BT = (torch.arange(rows * PROMPT, device=backbone.device) % backbone.vocab).view(rows, PROMPT)
        for sample, filters in ((False, []), (True, []), (True, [TopKLogitsWarper(50)])):  # drafts with other filters are the same program
            seeds_B = torch.zeros(rows, dtype=torch.int64, device=backbone.device) if sample else None
            for depth in depths:
                request = Request.plain(ids_BT, PROMPT + (STEPS + 1) * (depth + 1), (), LogitsProcessorList(filters), sample)
                decoder = Decoder(engine.reader, engine.policy, request, TreeShape(depth * width + 1, width, depth), seeds_B, rows)
                for _, step in zip(range(STEPS), decoder.run(), strict=False):
                    assert step.nodes
