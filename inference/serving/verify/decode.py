"""Headstart's own drafts, by the decoding loop that users run, those of the plain reading of the files, and how far a reading fits.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.serving.layouts.files import Files
from headstart.inference.serving.layouts.layout import ServedLayout, Sizes, layouts, recognise_served
from headstart.inference.serving.layouts.reader.base import NextToken, Reading, Target, Text
from headstart.inference.serving.verify.drafts import EngineSettings, Round, Transcript, judged
from headstart.support.errors import UserError
from headstart.support.terminal import watched

TEXTS, ROUNDS = 2, 4
"""How much of the transcripts is enough to tell readings apart by Headstart's drafts."""
PLACES = 24
"""At how many places of each text drafts are compared with the text itself."""
TOLERANCE = 2e-4
"""The largest difference of logits that fp32 arithmetic in another order makes, relative to the largest logit."""


@torch.no_grad()
def headstart_drafts(heads: SpeculativeModel, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt, of trees that are chains. Raises UserError for a depth that the heads cannot draft."""
    assert heads.drafter is not None
    heads.drafter.require_depth(settings.depth)
    return [_headstart_transcript(heads, list(prompt), settings) for prompt in watched(prompts, "drafting with Headstart", "prompt")]


def _headstart_transcript(heads: SpeculativeModel, prompt: list[int], settings: EngineSettings) -> Transcript:
    """Decode past the end by the length of a draft, so that the last round is as long as an engine's, and cut what is too much."""
    most = min(len(prompt) + settings.new_tokens + settings.depth, heads.backbone.max_positions or 1 << 31)
    engine = heads.engine(True)
    shape = TreeShape(nodes=settings.depth + 1, width=1, depth=settings.depth)
    ids_1T = torch.tensor([prompt], device=heads.backbone.device)
    request = Request.plain(ids_1T, most, settings.end_tokens, LogitsProcessorList(), sample=False)
    decoder = Decoder(engine.reader, engine.speculation, request, shape, None, 1)
    rounds, position, end = [], len(prompt) + 1, len(prompt) + settings.new_tokens
    for step in decoder.run():
        if position < end and step.nodes > 1:
            rounds.append(Round(position, tuple(decoder.tree.tokens[0][1:]), step.kept[0]))
        position += step.written[0]
    return Transcript(tuple(prompt), tuple(decoder.texts.of[0].written[: settings.new_tokens]), tuple(rounds))


@torch.no_grad()
def headstart_logits(drafter: Drafter, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Return the logits ``[K, V]`` of each draft after the text, given the drafts before it; -inf for tokens that are not drafted."""
    next_token = headstart_after(drafter, text, len(drafts))
    return torch.stack([next_token(token) for token in [int(text[-1]), *drafts[:-1]]])


@torch.no_grad()
def headstart_after(drafter: Drafter, text: Sequence[int], depth: int) -> NextToken:
    """Return the draft of Headstart's heads after a text, whose last token is the root; see `Reader.after`."""
    tokens_1T = torch.tensor([text], device=drafter.backbone.device)
    features = drafter.backbone.read(tokens_1T[:, :-1], taps=drafter.taps)
    state = drafter.reserve(drafter.begin(features), len(text) + 2 * depth)
    zero_11, all_BKD, depths = torch.zeros_like(tokens_1T[:, :1]), None, count()

    @torch.no_grad()
    def next_token(token: int) -> Tensor:
        nonlocal state, all_BKD
        depth, token_11 = next(depths), torch.full_like(zero_11, token)
        if drafter.all_depths_at_once:
            if all_BKD is None:
                all_BKD, state = drafter.step(state, token_11, zero_11, 0)
            hidden = all_BKD[:, depth : depth + 1]
        else:
            hidden, state = drafter.step(state, token_11, zero_11, depth)
        logits_DV = drafter.readout(hidden, depth, token_11)[0, 0].float()
        whole_V = logits_DV.new_full((drafter.backbone.vocab,), -torch.inf)
        return logits_DV if drafter.vocabulary is None else whole_V.scatter(0, drafter.vocabulary, logits_DV)

    return next_token


def read_heads(files: Files, on: Backbone) -> Reading:
    """Read heads as the engines do, in fp32. Raises UserError, or DamagedError for files that contradict each other."""
    layout = recognise_served(files)
    if layout is None:
        stated = files.config.get("architectures") or files.config.get("model_type") or "no architecture"
        known = ", ".join(one.name for one in layouts() if one.order and isinstance(one, ServedLayout))
        raise UserError(f"{files.folder} ({stated}) holds no heads that the reference engine reads; it reads {known}")
    reading = layout.stated(files, Sizes.of(on))
    return replace(reading, tensors={name: x.float() if x.is_floating_point() else x for name, x in reading.tensors.items()})


def reference_drafts(reading: Reading, target: Target, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt. Raises UserError for a depth that the heads cannot draft.

    Every text is the backbone's own greedy continuation, so it is computed first, and the drafts at the places of its rounds afterwards.
    """
    shown = watched(prompts, "drafting with the reference engine", "prompt")
    return [_reference_transcript(reading, target, list(prompt), settings) for prompt in shown]


def _reference_transcript(reading: Reading, target: Target, prompt: list[int], settings: EngineSettings) -> Transcript:
    room = (target.max_positions or 1 << 31) - len(prompt)
    truth = [*prompt, *target.continued(prompt, min(settings.new_tokens + settings.depth, room))]
    with torch.no_grad():
        reader = reading.on(target, target.read(truth, reading.taps))
    if reader.max_depth is not None and settings.depth > reader.max_depth:
        fault = f"these heads draft {reader.max_depth} tokens; got a depth of {settings.depth}"
        raise UserError(f"{fault}: give --depth {reader.max_depth} or less")
    return drafted_along(reader.draft, truth, len(prompt), settings)


def drafted_along(draft: Callable[[int, int], list[int]], text: list[int], prompt: int, settings: EngineSettings) -> Transcript:
    """Return the transcript of a text that is known, whose first ``prompt`` tokens are the prompt.

    ``draft`` returns the drafts after so many tokens, to this depth.
    """
    written, rounds, position = settings.ended(text[prompt:]), [], prompt + 1
    while position < prompt + len(written):
        rounds.append(judged(position, draft(position, settings.depth), text))
        position += rounds[-1].kept + 1
    return Transcript(tuple(text[:prompt]), tuple(written), tuple(rounds))


# Which drafts are expected at which places of some texts.


@dataclass(frozen=True)
class Fit:
    """How far a reading gives what is expected."""

    share: float
    """Share of the expected tokens that it drafts."""
    drafted: int
    """How many were expected."""
    distance: float | None = None
    """Largest difference of logits, relative to the largest one; None: no logits are known."""

    @property
    def whole(self) -> bool:
        return self.share == 1 and (self.distance is None or self.distance <= TOLERANCE)


@dataclass(frozen=True)
class Expected:
    """One text with the hidden states of every layer, and the drafts after some of its prefixes."""

    text: Text
    drafts: Mapping[int, tuple[int, ...]]
    logits: Mapping[int, Tensor] = field(default_factory=dict)
    """``[K, V]`` by position."""
    written: bool = False
    """Whether these are tokens of the text in place of drafts."""


def fit_of(reading: Reading, target: Target, texts: Sequence[Expected], first_only: bool = False) -> Fit | None:
    """Draft by this reading at all places, or only up to the first difference; None if its tensors do not fit one another."""
    drafted = equal = 0
    distances = []
    try:
        for one in texts:
            with torch.no_grad():
                reader = reading.on(target, one.text)
            for position, expected in one.drafts.items():
                tokens = expected[: reader.max_depth]
                if one.written:
                    hits = [a == b for a, b in zip(reader.draft(position, len(tokens)), tokens, strict=True)]
                else:
                    found_KV = reader.logits_at(position, tokens)
                    hits = are_picks(found_KV, tokens)
                    if (wanted_KV := one.logits.get(position)) is not None:
                        distances.append(_distance(found_KV, wanted_KV))
                drafted, equal = drafted + len(hits), equal + sum(hits)
                fit = Fit(equal / drafted, drafted, max(distances, default=None))
                if first_only and not fit.whole:
                    return fit
    except (RuntimeError, IndexError, KeyError):
        return None
    return fit if drafted else None


def are_picks(logits_KV: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each token is the most likely one, or as likely but for rounding."""
    rounding_K = TOLERANCE * logits_KV.where(logits_KV.isfinite(), 0.0).abs().amax(-1)
    own_K = logits_KV.gather(-1, torch.tensor(tokens, device=logits_KV.device)[:, None])[:, 0]
    picks: list[bool] = (own_K >= logits_KV.amax(-1) - rounding_K).tolist()
    return picks


@torch.no_grad()
def near_tie(reading: Reading, target: Target, given: Sequence[int], depth: int | None, tokens: tuple[int, int]) -> bool:
    """See `NearTie`: by the logits of a reading, and for the text by the backbone's own."""
    if depth is None:
        logits_V = target.logits(target.read(given, ()).hidden_TD[-1])
    else:
        place = len(given) - depth
        reader = reading.on(target, target.read(given[:place], reading.taps))
        logits_V = reader.logits_at(place, [*given[place:], tokens[0]])[-1]
    return all(are_picks(logits_V.expand(2, -1), tokens))


def _distance(a_KV: Tensor, b_KV: Tensor) -> float:
    """The largest difference from the logits ``b``, relative to the largest one; infinite if other tokens can be drafted.

    An export may write the rows of tokens that are not drafted too, as long as none of them is the most likely.
    """
    finite = ~b_KV.isinf()
    largest_K1 = b_KV.max(-1, keepdim=True).values
    if a_KV.shape != b_KV.shape or bool(a_KV[finite].isinf().any()) or bool((a_KV > largest_K1)[~finite].any()):
        return float("inf")
    return float((a_KV[finite] - b_KV[finite]).abs().max() / b_KV[finite].abs().max().clamp(min=1e-6))


def expected_drafts(target: Target, transcripts: Sequence[Transcript], drafter: Drafter | None = None) -> list[Expected]:
    """Expect what was drafted in the first rounds of some transcripts; with ``drafter``, its logits there too."""
    texts = []
    for one in transcripts[:TEXTS]:
        drafts = {r.position: r.drafts for r in one.rounds[:ROUNDS]}
        logits = {} if drafter is None else {p: headstart_logits(drafter, one.text[:p], tokens).cpu() for p, tokens in drafts.items()}
        texts.append(Expected(target.read(one.text, range(target.num_layers + 1)), drafts, logits))
    return texts


def expected_texts(target: Target, transcripts: Sequence[Transcript], depth: int) -> list[Expected]:
    """Expect what the backbone wrote, where nothing else is known: the right reading drafts more of it than a wrong one."""
    texts = []
    for one in transcripts:
        places = range(len(one.prompt) + 1, len(one.text) - depth + 1)[:PLACES]
        drafts = {place: one.text[place : place + depth] for place in places}
        texts.append(Expected(target.read(one.text, range(target.num_layers + 1)), drafts, written=True))
    return texts
