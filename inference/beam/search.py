"""Beam search of some rows: the steps of transformers' ``_beam_search``, by its own methods; and the beams of a row as one trie.

A trie is the tokens that all beams share, followed by the tokens and drafts of each beam as nodes. A row's KV cache holds the shared
tokens, each in the slot of its position, followed by the nodes in the order of their numbers. After every pass, nodes that are neither
ancestors nor descendants of a beam's last token are dropped. Levels count from the end of the shared tokens.

Shape suffixes: B rows, K beams, C candidates, T positions, P positions after the prompt or nodes of a path, N nodes verified in this pass,
M all nodes of the trie, R paths, V vocabulary, X several dimensions as one, Y what is known after a token: the processed log-probabilities
and, if the call asks for them, the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.layers.ragged_cache import RaggedCache, ancestors_from_parents
from headstart.heads.layers.rows import octave_up, whole_steps
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import BeamRules, Request
from headstart.inference.engine.tree import graph_size, padded_size
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors

STEPS = GenerationMixin()
"""For its methods, which need no model."""
EXCLUDED = -1e9
"""The score of beams and sequences that are none yet, as in transformers."""


class Sequences(NamedTuple):
    """Sequences, prompt and padding included, their scores, and the beam that each token continued (-1: behind the end)."""

    ids_BKT: Tensor
    scores_BK: Tensor
    origins_BKP: Tensor

    def padded(self, count: int, fill: int) -> Sequences:
        """The same with ``count`` more positions."""
        return Sequences(F.pad(self.ids_BKT, (0, count), value=fill), self.scores_BK, F.pad(self.origins_BKP, (0, count), value=-1))


class Search:
    """The search of one row, or of all rows of a call that go on together: its running beams, best first, and the best that have ended."""

    def __init__(self, request: Request, rules: BeamRules, rows: list[int]) -> None:
        self.request, self.rules, self.rows, device = request, rules, rows, request.ids_BT.device
        ids_BKT = request.ids_BT[rows][:, None].expand(-1, rules.beams, -1)
        self.prompt = self.length = ids_BKT.shape[-1]
        excluded_BK = torch.full(ids_BKT.shape[:2], EXCLUDED, device=device)
        self.best = Sequences(ids_BKT, excluded_BK, torch.empty(*ids_BKT.shape[:2], 0, dtype=torch.int32, device=device))
        self.running = self.best._replace(scores_BK=torch.where(torch.arange(rules.beams, device=device) > 0, excluded_BK, 0.0))
        self.finished_BK = torch.zeros_like(excluded_BK, dtype=torch.bool)
        """For each of the best, whether it has ended; the others are placeholders."""
        self.may_improve_B1 = torch.ones_like(self.finished_BK[:, :1])
        """False once no running beam can beat the best, by transformers' estimate."""
        self.going = True
        self.after: list[Tensor] = []
        """What was known after each beam at each step ``[B, K, Y, V]``, if the call asks for it."""
        self._scores: tuple[Tensor, ...] | None = () if request.scores else None

    def step(self, after_BKYV: Tensor) -> None:
        """Make a step from what is known after each beam."""
        self.after += [after_BKYV] if self.request.scores or self.request.logits else []
        scores_BKV = after_BKYV[:, :, 0]
        if bool(scores_BKV.isneginf().flatten(1).all(1).any()):
            raise UserError("the logits processors rule out every token after every beam; allow some, such as the one that ends a sequence")
        rules, B, early, penalty = self.rules, len(self.rows), self.rules.early_stopping, self.rules.length_penalty
        running, best = (kept.padded(1, rules.fill) for kept in (self.running, self.best))
        candidates_BC = STEPS._get_top_k_continuations(
            accumulated_log_probs=(scores_BKV + running.scores_BK[..., None]).flatten(1),
            running_sequences=running.ids_BKT,
            running_beam_indices=running.origins_BKP,
            cur_len=self.length,
            decoder_prompt_len=self.prompt,
            do_sample=False,
            beams_to_keep=rules.candidates,
            num_beams=rules.beams,
            batch_size=B,
        )
        totals_BC, ids_BCT, origins_BCP = candidates_BC
        ends_BC = self._ends(ids_BCT, scores_BKV)
        self.running = Sequences(*STEPS._get_running_beams_for_next_iteration(*candidates_BC, ends_BC, rules.beams))
        *kept, self.finished_BK = STEPS._update_finished_beams(
            *(best.ids_BKT, ids_BCT, best.scores_BK, totals_BC, best.origins_BKP, origins_BCP),
            *(self.may_improve_B1, self.finished_BK, ends_BC, torch.arange(rules.candidates, device=ends_BC.device) < rules.beams),
            *(rules.beams, self.length, self.prompt, penalty, early),
        )
        self.best, self.length = Sequences(*kept), self.length + 1
        scores = self.running.scores_BK, self.best.scores_BK, self.finished_BK
        lengths = self.length, rules.longest, self.prompt
        self.may_improve_B1 = STEPS._check_early_stop_heuristic(self.may_improve_B1, *scores, *lengths, early, penalty)
        self.going = bool(STEPS._beam_search_has_unfinished_sequences(self.may_improve_B1, self.finished_BK, ends_BC, early))

    def _ends(self, ids_BCT: Tensor, scores_BKV: Tensor) -> Tensor:
        """Which candidates end: by an end token, by their length, or by a criterion of the user's own."""
        last_BC = ids_BCT[..., -1]
        ends_BC = torch.isin(last_BC, last_BC.new_tensor(sorted(self.request.eos))) | (self.length + 1 >= self.request.limit)
        if self.request.criteria:
            if self._scores is not None:
                self._scores += (scores_BKV.flatten(0, 1),)
            ends_BC |= self.request.criteria(ids_BCT.flatten(0, 1), self._scores).view(ends_BC.shape)
        return ends_BC

    def returned(self, length: int) -> Sequences:
        """The sequences that the call returns ``[B * returned, length]``; the beams that they continued are numbered over all rows."""
        ids_BKT, scores_BK, origins_BKP = self.best.padded(length - self.length, self.rules.fill)
        origins_BKP = torch.where(origins_BKP >= 0, origins_BKP + self.rows[0] * self.rules.beams, -1)
        return Sequences(*(value_BK[:, : self.rules.returned].flatten(0, 1) for value_BK in (ids_BKT, scores_BK, origins_BKP)))


class BeamTrie:
    """The trie of one row. A parent precedes its children; parent -1 is the last token that all beams share."""

    def __init__(self, shared: int) -> None:
        self.shared = shared
        """The number of tokens that all beams share, prompt included."""
        self.shared_tokens: list[int] = []
        """The shared tokens after the prompt."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.levels: list[int] = []
        self.after: list[Tensor] = []
        """What is known after each verified node ``[Y, V]``."""
        self.features: Features | None = None
        """The features of the verified nodes ``[1, M]``, where drafters read them."""
        self.nodes: dict[tuple[int, int], int] = {}
        """The node of a token below a parent."""

    @property
    def verified(self) -> int:
        """The number of verified nodes; they come first."""
        return len(self.after)

    @property
    def new(self) -> int:
        """The number of nodes not verified yet."""
        return len(self.tokens) - len(self.after)

    def add(self, parent: int, token: int) -> int:
        """The node of that token below that parent, added if there is none."""
        return self.nodes[parent, token] if (parent, token) in self.nodes else self.append(parent, token)

    def append(self, parent: int, token: int) -> int:
        """A further node of that token below that parent."""
        node = self.nodes[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.levels.append(0 if parent < 0 else self.levels[parent] + 1)
        return node

    def path(self, node: int) -> list[int]:
        """The nodes from the top of the trie down to that one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def verify(self, after_NYV: Tensor, features: Features | None) -> None:
        """Add what a pass found for the new nodes, which come first. ``features``: ``[1, N]``."""
        if features is not None:
            features = map_tensors(lambda value_1N: value_1N[:, : self.new], features)
            self.features = features if self.features is None else join_features([self.features, features])
        self.after += after_NYV[: self.new]

    def along(self, paths: list[list[int]], longest: int) -> Features:
        """The features ``[R, longest]`` of paths of verified nodes, right-padded."""
        assert self.features is not None
        device, count = self.features.tokens_BT.device, len(paths[0])  # all are equally long
        index_RP = torch.tensor([path + [0] * (longest - count) for path in paths], device=device)
        of_paths = self.features.rows(torch.zeros(len(paths), dtype=torch.int64, device=device))
        return of_paths.gather(index_RP, (torch.arange(longest, device=device) < count).expand(index_RP.shape))

    def keep(self, last: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Drop the nodes that no beam needs, once all nodes have been verified. Beam i continues with ``tokens[i]`` after node ``last[i]``;
        the nodes in ``last`` have one level.

        Returns the old numbers of the nodes kept, and the new numbers of ``last``.
        """
        paths = [{*self.path(node)} for node in last]
        ahead = {self.nodes[node] for node in zip(last, tokens, strict=True) if node in self.nodes}
        for node, parent in enumerate(self.parents):
            if parent in ahead:
                ahead.add(node)
        kept, common = sorted(set.union(*paths, ahead)), len(set.intersection(*paths))
        shared, nodes = kept[:common], kept[common:]
        numbers = dict.fromkeys([-1, *shared], -1) | {node: i for i, node in enumerate(nodes)}
        self.shared += common
        self.shared_tokens += [self.tokens[node] for node in shared]
        self.tokens, self.levels = [self.tokens[node] for node in nodes], [self.levels[node] - common for node in nodes]
        self.parents, self.after = [numbers[self.parents[node]] for node in nodes], [self.after[node] for node in nodes]
        self.features = map_tensors(lambda value_1M: value_1M[:, nodes], self.features)
        self.nodes = {key: i for i, key in enumerate(zip(self.parents, self.tokens, strict=True))}
        return kept, [numbers[node] for node in last]

    def ancestors(self) -> np.ndarray:
        """``[M, M]``, True where the second node is an ancestor of the first, or the first itself."""
        return ancestors_from_parents([[0, *(parent + 1 for parent in self.parents)]])[0, 1:, 1:]  # node 0 is a temporary root


def read_tries(reader: Reader, cache: RaggedCache, tries: list[BeamTrie]) -> tuple[Features, Tensor]:
    """Compute the features ``[B, N]`` and logits ``[B, N, V]`` of every row's new nodes in one forward pass.

    A row with fewer nodes is padded with its first new one, tries as slots are, so that few shapes occur. The cache's lengths count the
    shared tokens.
    """
    padded, rounded = (padded_size, whole_steps) if cache.memory is None else (graph_size, octave_up)
    B, N = len(tries), padded(max(trie.new for trie in tries))
    M = rounded(max(trie.verified + N for trie in tries))
    tokens_BN, index_BN, levels_BM = np.empty((B, N), np.int64), np.empty((B, N), np.int64), np.empty((B, M), np.int64)
    ancestors_BNM = np.zeros((B, N, M), np.bool_)
    for b, trie in enumerate(tries):
        first, count = trie.verified, len(trie.tokens)
        index_BN[b] = first + np.arange(N)
        new_N = np.where(index_BN[b] < count, index_BN[b], first)
        tokens_BN[b], ancestors_BNM[b, :, :count] = np.array(trie.tokens)[new_N], trie.ancestors()[new_N]
        levels_BM[b, :count], levels_BM[b, count:] = trie.levels, trie.levels[first]
    # Every row has room for the longest trie: the paths of all rows are moved together when nodes are dropped.
    slots = max(trie.shared for trie in tries) + max(trie.verified for trie in tries) + N
    nodes = (torch.from_numpy(array).to(cache.lengths_B.device) for array in (tokens_BN, levels_BM, ancestors_BNM, index_BN))
    return reader.nodes(cache, cache.room(slots - cache.longest), *nodes)[:2]
