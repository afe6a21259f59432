"""The decoding loop: draft a tree, verify it in one forward pass, keep the tokens that autoregressive decoding would have written.

When a sequence has ended, a waiting one takes the place of its row, or else the row is removed; rows do not affect each other's tokens.

Shape suffixes: B batch, N tree nodes, P positions after the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, Images
from headstart.heads.backbone.model_config import CACHE
from headstart.heads.backbone.recurrent import Added
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.noise import NoiseBuffer, gumbel
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request
from headstart.inference.engine.source import Accepted, DraftScoring, Rows
from headstart.inference.engine.texts import Prompts, Texts
from headstart.inference.engine.tree import CandidateTree, TreeShape, VerifiedTree, accept, pick
from headstart.inference.policy import Policy
from headstart.inference.steps import PARTS, GenerateOutput, Step, Tally, cut

if TYPE_CHECKING:
    from headstart.inference.beam.beam import BeamDecoder

PREFILL_POSITIONS = (16_384, 2048)
"""Positions of a prefill of several prompts, padding included, on an accelerator and on a CPU: more take memory and bring no speed."""
PADDING = 1024
"""Positions of a prefill that may be padding, even if they are more than a quarter of it."""


class Decoder:
    """Decodes the sequences of one call. Sequences being decoded are rows; each has a root: its last token, not yet read by the backbone.

    ``policy`` without sources: autoregressive decoding. ``shape`` None: adaptive trees. ``batch``: rows decoded at once.
    """

    def __init__(
        self, reader: Reader, policy: Policy, request: Request, shape: TreeShape | None, seeds_B: Tensor | None, batch: int
    ) -> None:
        self.reader, self.policy, self.request, self.shape, self.seeds_B = reader, policy, request, shape, seeds_B
        self.prompts, self.batch, self.device = Prompts(request, reader), batch, request.ids_BT.device
        self.texts = Texts(request)
        self.noise = None if seeds_B is None else NoiseBuffer(reader.backbone.vocab, seeds_B)
        self.waiting = list(self.texts.of)
        self.rows: list[int] = []
        """The number of each row's sequence."""
        self.over: list[int] = []
        """The rows whose sequences have ended, until others take their places or they are removed."""
        self.roots: list[int] = []
        self.cache: RaggedCache
        policy.start(seeds_B is not None)

    def put(self, number: int, ids_T: Tensor, limit: int, seed: int, images: Images | None = None) -> None:
        """Let another sequence wait: a prompt that ends at a length of ``limit``. ``number``: new, or that of one which has ended."""
        self.prompts.put(number, ids_T, limit, images)
        self.texts.put(number, ids_T, limit)
        self.waiting.append(number)
        if self.noise is not None:
            self.noise.put(number, seed)

    def sequences(self) -> Tensor:
        """Prompts and what was written, ``[B, T]``."""
        return self.texts.sequences()

    def kept(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """The scores and the logits that the call asks for, by row and token."""
        texts = self.texts.of.values()
        return [text.scores for text in texts], [text.logits for text in texts]

    def run(self, exact_times: bool = False) -> Iterator[Step]:
        """Make decoding steps until every sequence has ended."""
        while self.admit():
            yield self.step(exact_times)

    def step(self, exact_times: bool = False) -> Step:
        """One decoding step of every row: draft, verify the tree in one forward pass, keep what the backbone picks, learn from it."""
        with Stopwatch(self.device if exact_times else None) as watch:
            draft = self.policy.draft(self._to_draft(), self.policy.costs.at(self.cache.longest, self.reader.read.made))
            tree = self.policy.choose(draft)
            noise_BPV = self._noise(0, tree.height + 1)
            drafting = watch.lap()
            features, logits_BNV, added = self.reader.tree(self.cache, tree)
            scores_BNV = self._scores(logits_BNV, self.rows, tree)
            picks = pick(scores_BNV, self._noise_by_node(noise_BPV, tree)).tolist()
            verifying = watch.lap()
            paths = accept(tree, picks)
            accepted = self._write(paths, picks, scores_BNV, logits_BNV, features)
            self._advance(paths, added, accepted)
            draft = self.policy.learn(draft, tree, paths, picks, logits_BNV)
            host = watch.lap()
        if watch.valid:
            self.policy.time(draft, tree, drafting + verifying + host)
        seconds = dict(zip(PARTS, (drafting, verifying, host), strict=True))
        rows = zip(accepted.sequences, tree.tokens, tree.parents, paths, strict=True)
        trees = {number: VerifiedTree(*row) for number, *row in rows}
        written = {number: len(tokens) for number, tokens in zip(trees, accepted.tokens, strict=True)}
        return Step(written, tree.size, seconds, trees, bool(self.policy.sources) and draft.rested(tree))

    # Drafting.

    def _to_draft(self) -> Rows:
        """The rows to draft for."""
        in_full = self.shape is not None and self.shape.width == 1  # a chain: as serving engines draft it, so that counts agree
        return Rows(
            roots=self.roots,
            remaining=[self.prompts.remaining(number, len(self.texts.of[number].written), in_full) for number in self.rows],
            sequences=self.rows,
            cache=self.cache,
            shape=self.shape,
            scoring=lambda depths: DraftScoring.sampled(self._noise(0, 1 + depths), self.request.processing),
            queued=bool(self.waiting),
        )

    def _noise(self, first: int, end: int) -> Any:
        """The noise ``[B, P, V]`` for the picks at levels ``first`` to ``end - 1``; None at temperature 0."""
        if self.noise is None:
            return None
        positions = [self.prompts.end(number, len(self.texts.of[number].written)) + first for number in self.rows]
        return self.noise.of(self.rows, positions, end - first)

    def _noise_by_node(self, noise_BPV: Tensor | None, tree: CandidateTree) -> Tensor | None:
        if noise_BPV is None or tree.size == 1:
            return noise_BPV
        levels_BN = torch.tensor([row + [0] * (tree.size - len(row)) for row in tree.levels], device=self.device)
        return noise_BPV[torch.arange(len(self.rows), device=self.device)[:, None], levels_BN]

    # Keeping.

    def _write(
        self, paths: list[list[int]], picks: list[list[int]], scores_BNV: Tensor, logits_BNV: Tensor, features: Features
    ) -> Accepted:
        """Write each row's picks along its path until its sequence ends."""
        runs = [[picked[node] for node in path] for picked, path in zip(picks, paths, strict=True)]
        written = self._add(self.rows, runs, paths, scores_BNV, logits_BNV)
        self.roots = self.texts.ids_BT[:, -1].tolist() if self.request.in_order else [run[-1] for run in runs]
        return Accepted(self.rows, written, paths, features)

    def _advance(self, paths: list[list[int]], added: Added | None, accepted: Accepted) -> None:
        """Keep the accepted paths."""
        if self.prompts.continued.cache is not None:
            self.prompts.continued.note(accepted.features)
        self.cache.keep(paths, added)
        for source in self.policy.sources:
            source.extend(accepted)
        self.over = [b for b, number in enumerate(self.rows) if self._leaves(number)]

    # Admitting.

    def admit(self) -> bool:
        """Start waiting sequences in the places of those that have ended, or some in free rows; remove the other rows that have ended.

        After one prefill in free rows a step is made, so that a large batch begins to write at once. False: every sequence has ended.
        """
        while self.over or self.waiting:
            free = not self.over
            ready = self._ready()
            self._remove(self.over[len(ready) :])
            numbers = ready[: len(self.over) or self.batch - len(self.rows)]
            if not self.request.in_order:  # else all rows begin together
                numbers = self._of_similar_length(numbers)
            if not numbers:
                break
            self.waiting = [number for number in self.waiting if number not in {*numbers}]
            self._start(numbers)
            if free and not self.over:
                break
        return bool(self.rows)

    def _leaves(self, number: int) -> bool:
        """True if a row is given up: its text has ended, or waits to be read again."""
        if not self.texts.goes_on(number):
            return True
        if turns := self.prompts.turns(number, self.texts.of[number].written):
            self.waiting.append(number)
        return turns

    def _ready(self) -> list[int]:
        """The waiting sequences that may begin beside the rows that go on, whose rotary frequencies are the same; all begin in one way."""
        going = [number for b, number in enumerate(self.rows) if b not in {*self.over}]
        before = self.prompts.is_before((going or self.waiting or [0])[0])
        found = [number for number in self.waiting if self.prompts.is_before(number) == before]
        return [number for number in found if (number in self.prompts.again) == (found[0] in self.prompts.again)]

    def _of_similar_length(self, numbers: list[int]) -> list[int]:
        """As many of these sequences as are worth a prefill together: with little padding, the shortest prompts first."""
        lengths = sorted((self.prompts.length(number), number) for number in numbers)
        while len(lengths) > 1:
            positions, tokens = len(lengths) * lengths[-1][0], sum(length for length, _ in lengths)
            if positions <= PREFILL_POSITIONS[self.device.type == "cpu"] and positions - tokens <= max(PADDING, positions // 4):
                break
            lengths = lengths[: len(lengths) // 2]
        return numbers if len(lengths) == len(numbers) else [number for _, number in lengths]

    def _remove(self, over: list[int]) -> None:
        if not over:
            return
        going = [b for b in range(len(self.rows)) if b not in {*over}]
        self.over = [going.index(b) for b in self.over if b not in over]
        self.rows, self.roots = [self.rows[b] for b in going], [self.roots[b] for b in going]
        for source in self.policy.sources:
            source.select(going)
        if going:
            self.cache.select(going)

    def _start(self, numbers: list[int]) -> None:
        """Prefill the prompts of these sequences and pick their first tokens: rows in places of `over`, or after the others."""
        if numbers[0] in self.prompts.again:
            roots = [self.texts.of[number].written[-1] for number in numbers]
            features, cache = self.prompts.read_again(numbers, roots)
            self._place(numbers, roots, cache, features)
            return
        features, cache, logits_B1V = self.prompts.prefill(numbers)
        scores_B1V = self._scores(logits_B1V, numbers, None)
        noise_B1V = None
        if self.seeds_B is not None:
            lengths_B1 = torch.tensor([[self.prompts.length(number)] for number in numbers], device=self.device)
            noise_B1V = gumbel(self.seeds_B[numbers], lengths_B1, self.reader.backbone.vocab)
        roots = pick(scores_B1V, noise_B1V)[:, 0].tolist()
        self._add(numbers, [[root] for root in roots], [[0]] * len(numbers), scores_B1V, logits_B1V)
        self.policy.begin(numbers)
        self._place(numbers, roots, cache, features)

    def _place(self, numbers: list[int], roots: list[int], cache: RaggedCache, features: Features) -> None:
        """Put the rows of new sequences in the places of the first of `over`, or after the others if there are none."""
        replaced = self.over[: len(numbers)]
        going = [b for b in range(len(self.rows)) if b not in {*replaced}]
        places = replaced or [*range(len(going), len(going) + len(numbers))]
        if not going:
            self.cache = cache
        elif replaced:
            self.cache.replace(replaced, cache)
        else:
            self.cache.join(cache)
        tokens = [[*self.prompts.tokens(number), root] for number, root in zip(numbers, roots, strict=True)]
        order = sorted(range(len(going) + len(numbers)), key=(going + places).__getitem__)  # of the rows that go on, then the new ones
        for source in self.policy.sources:
            if replaced:
                source.select(going)
            source.join(numbers, tokens, features)
            if order != sorted(order):
                source.select(order)
        rows, picked = [self.rows[b] for b in going] + numbers, [self.roots[b] for b in going] + roots
        self.rows, self.roots = [rows[i] for i in order], [picked[i] for i in order]
        ended = [place for place, number in zip(places, numbers, strict=True) if self._leaves(number)]
        self.over = sorted(self.over[len(replaced) :] + ended)

    def _scores(self, logits_BNV: Tensor, numbers: list[int], tree: CandidateTree | None) -> Tensor:
        """Processed scores of the nodes of these sequences."""
        processing = self.request.processing
        if processing.unknown:
            return processing.in_order(self.texts.ids_BT, logits_BNV[:, 0])[:, None]
        needed = [] if not processing.processors else numbers[:1] if processing.blind else numbers
        return processing(logits_BNV, [self.texts.history(number) for number in needed], tree)

    def _add(
        self, numbers: list[int], runs: list[list[int]], paths: list[list[int]], scores_BNV: Tensor, logits_BNV: Tensor
    ) -> list[list[int]]:
        """Write runs of tokens, with their scores and logits if the call asks for them; returns what was kept."""
        scores, logits = (
            [values_NV[path] for values_NV, path in zip(values_BNV, paths, strict=True)] if asked else []
            for values_BNV, asked in ((scores_BNV, self.request.scores), (logits_BNV, self.request.logits))
        )
        return self.texts.write(numbers, runs, scores, logits)


def output_of(decoder: Decoder | BeamDecoder, steps: list[Step], request: Request) -> GenerateOutput:
    """``steps``: those of the call."""
    if isinstance(decoder, Decoder):
        beams, steps = None, cut(steps, {number: len(text.written) - 1 for number, text in decoder.texts.of.items()})
    else:
        beams = decoder.best()
    scores, logits = decoder.kept()
    cache: dict[str, Any] = {CACHE: decoder.prompts.continued.cache}
    return GenerateOutput(
        sequences=decoder.sequences(),
        scores=_by_step(scores) if request.scores else None,
        logits=_by_step(logits) if request.logits else None,
        **cache,
        steps=steps,
        tally=Tally.of(steps, len(request.ids_BT), max([0, *(source.depth for source in decoder.policy.of_kind(DrafterSource))])),
        capture=decoder.reader.read.captured_by,
        sequences_scores=beams.scores_BK if beams is not None and request.scores else None,
        beam_indices=beams.origins_BKP if beams is not None else None,
    )


def _by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Turn lists by row and token into tensors ``[B, V]`` by step; zeros after the end of a row."""
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[i] if i < len(row) else torch.zeros_like(rows[0][0]) for row in rows]) for i in range(longest))
