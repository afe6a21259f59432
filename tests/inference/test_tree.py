"""Candidate trees against slow, simple ones: growth, merging, ancestors, and the accepted path; the most likely candidates of a level.

Shape suffixes: B batch, N tree nodes, V vocabulary.
"""

import heapq
import math
import random
from typing import Any

import pytest
import torch
from families import VOCAB, backbone
from torch import Tensor

from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.own_readout import GROUPED, largest
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.noise import gumbel
from headstart.inference.engine.source import DraftScoring, Rows
from headstart.inference.engine.tree import MAX_PROB, CandidateTree, Pool, TreeShape, accept
from headstart.inference.policy import Policy
from headstart.support.errors import UserError

Path = tuple[int, ...]


class Table(Drafter):
    """Its logits are a fixed function of the depth and of the path to the node; the state holds each node's tokens."""

    def __init__(self, depth: int, vocabulary: Tensor | None = None, spread: float = 1.0) -> None:
        super().__init__(backbone("llama"), DrafterConfig(depth=depth))
        self.spread = spread
        self.vocabulary = vocabulary
        self.DV = VOCAB if vocabulary is None else len(vocabulary)

    def logits(self, path: Path) -> Tensor:
        return self.spread * torch.randn(self.DV, generator=torch.Generator().manual_seed(hash(path) % 2**31))

    def begin(self, features: Any, state: Any = None) -> list[list[Path]]:
        return [[]]

    def step(self, state: list[list[Path]], tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, list[list[Path]]]:
        rows = zip(state, tokens_BN.tolist(), parents_BN.tolist(), strict=True)
        paths = [[((*row[p], t) if depth else (t,)) for t, p in zip(tokens, parents, strict=True)] for row, tokens, parents in rows]
        return torch.stack([torch.stack([self.logits(path) for path in row]) for row in paths]), paths

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return hidden


def grown(drafter: Drafter, roots: list[int], shape: TreeShape, scoring: DraftScoring | None = None, room: int = 99) -> CandidateTree:
    """The tree that the drafter alone drafts below these roots."""
    source = DrafterSource("0", drafter, Capturer("off", torch.device("cpu")))
    rows = Rows(roots, [room] * len(roots), [*range(len(roots))], shape=shape, scoring=lambda _: scoring or DraftScoring())
    source.state = [[] for _ in roots]
    policy = Policy([source])
    return policy.choose(policy.draft(rows, policy.costs.at(0)))


def paths_of(tree: CandidateTree, row: int) -> list[Path]:
    """The tokens on the way to each node; fails unless every parent precedes its children."""
    paths: list[Path] = []
    for n, (token, parent) in enumerate(zip(tree.tokens[row], tree.parents[row], strict=True)):
        assert parent < n or n == 0
        paths.append((*paths[parent], token) if n else (token,))
    return paths


def best_first(drafter: Table, root: int, nodes: int, noise_PV: Tensor | None, temperature: float) -> set[Path]:
    """The likeliest nodes, found with a heap: take the best, push its children."""
    heap: list[tuple[float, Path]] = [(0.0, (root,))]
    kept: set[Path] = set()
    while heap and len(kept) < nodes:
        cost, path = heapq.heappop(heap)
        kept.add(path)
        if len(path) <= drafter.depth:
            logits = drafter.logits(path)
            if noise_PV is not None:
                noise = noise_PV[len(path) - 1]
                logits = logits / temperature + (noise if drafter.vocabulary is None else noise[drafter.vocabulary])
            for index, logp in enumerate(logits.log_softmax(-1).tolist()):
                token = index if drafter.vocabulary is None else int(drafter.vocabulary[index])
                heapq.heappush(heap, (cost - logp, (*path, token)))
    return kept


@pytest.mark.parametrize("nodes", [1, 2, 7, 24])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_what_grows_is_what_best_first_search_keeps(nodes: int, noisy: bool, small: bool) -> None:
    vocabulary = torch.arange(3, VOCAB, 4) if small else None
    drafter, roots = Table(4, vocabulary), [5, 9]
    noise = gumbel(torch.tensor([3, 4]), torch.arange(20, 25).expand(2, 5), VOCAB) if noisy else None
    scoring = DraftScoring(torch.tensor([0.7]), noise) if noisy else None
    tree = grown(drafter, roots, TreeShape(nodes, width=nodes), scoring)
    for row in range(2):
        paths = paths_of(tree, row)
        assert len(set(paths)) == nodes
        assert set(paths) == best_first(drafter, roots[row], nodes, None if noise is None else noise[row], 0.7)


@pytest.mark.parametrize("spread", [1.0, 300.0, 3000.0])
def test_trees_hold_only_what_was_drafted(spread: float) -> None:
    """Scores in the thousands make probabilities 0 or 1; every node must still be attached where it was drafted."""
    drafter = Table(5, spread=spread)
    tree = grown(drafter, list(range(8)), TreeShape(12, 6))
    for row in range(8):
        paths = paths_of(tree, row)
        assert len(set(paths)) == 12
        for path in paths[1:]:
            rank = (drafter.logits(path[:-1]) > drafter.logits(path[:-1])[path[-1]]).sum()
            assert rank < 6, "not among the parent's likeliest: it hangs on another parent than it was drafted for"


def test_beam_depth_budget_and_vocabulary_bound_the_tree() -> None:
    drafter = Table(5, torch.tensor([2, 3, 5]))
    for shape, room, size, height in (
        (TreeShape(100, 2, 3), 99, 7, 3), (TreeShape(100, 50, 1), 99, 4, 1), (TreeShape(100, 2), 99, 11, 5),
        (TreeShape(100, 2, 7), 99, 15, 7), (TreeShape(100, 2, 99), 2, 5, 2), (TreeShape(100, 2, 99), 0, 1, 0), (TreeShape(1), 99, 1, 0),
    ):  # fmt: skip
        tree = grown(drafter, [7], shape, room=room)
        assert (tree.size, tree.height) == (size, height)
        assert set(tree.tokens[0][1:]) <= {2, 3, 5} and tree.tokens[0][0] == 7


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"width": 0}, {"depth": 0}, {"nodes": 2.5}, {"nodes": True}])
def test_a_wrong_shape_is_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=f"tree.{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        TreeShape(**wrong)


def test_a_token_below_a_parent_is_one_node_whoever_drafted_it() -> None:
    pool = Pool(7)
    first = pool.add(0, 0, 3, -1.0, 0.4)
    assert pool.add(1, 0, 3, -0.5, 0.6) == first and pool.probs[first] == 0.6, "the surer one is believed"
    assert pool.add(2, 0, 3, -2.0, 0.1) == first and pool.probs[first] == 0.6
    below = pool.add(1, first, 3, -0.1, 0.9)
    assert pool.add(0, 0, 4, -0.1, 1.0) != below and pool.probs[-1] == MAX_PROB
    assert pool.levels == [0, 1, 2, 1] and [(g.source, g.node) for g in pool.proposals] == [(0, 1), (1, 1), (2, 1), (1, 2), (0, 3)]


def test_path_probabilities_are_products_and_siblings_share() -> None:
    pool = Pool(0)
    a, b = pool.add(0, 0, 1, 0, 0.8), pool.add(1, 0, 2, 0, 0.7)
    below = pool.add(0, a, 3, 0, 0.5)
    reach = pool.path_probs()
    assert reach[a] == pytest.approx(MAX_PROB * 0.8 / 1.5) and reach[b] == pytest.approx(MAX_PROB * 0.7 / 1.5)
    assert reach[below] == pytest.approx(reach[a] * 0.5)
    assert [node for _, node in pool.ranked()] == [a, b, below]


def random_pool(make: random.Random, nodes: int) -> Pool:
    pool = Pool(make.randrange(5))
    while len(pool.tokens) < nodes:
        pool.add(make.randrange(3), make.randrange(len(pool.tokens)), make.randrange(40), -make.random(), make.random())
    return pool


@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_any_beginning_of_the_ranking_is_a_tree(nodes: int) -> None:
    make = random.Random(nodes)
    for _ in range(20):
        pools = [random_pool(make, 40), random_pool(make, 12)]
        kept = [[0, *sorted(node for _, node in pool.ranked()[: nodes - 1])] for pool in pools]
        tree = CandidateTree.of(pools, kept)
        for row, pool in enumerate(pools):
            paths = paths_of(tree, row)
            assert len(set(paths)) == min(nodes, len(pool.tokens))
            reach = pool.path_probs()
            assert min(reach[n] for n in kept[row]) >= max([reach[n] for n in range(len(reach)) if n not in kept[row]], default=0)


def random_tree(nodes: int, vocab: int, seed: int, rows: int = 3) -> CandidateTree:
    """Siblings carry different tokens where the vocabulary allows; rows have different numbers of nodes."""
    make = random.Random(seed)
    tokens, parents = [], []
    for row in range(rows):
        count = max(1, nodes - 2 * row)
        parents.append([0] + [make.randrange(n) for n in range(1, count)])
        taken: dict[int, list[int]] = {}
        labels = [make.randrange(vocab)]
        for parent in parents[-1][1:]:
            free = [t for t in range(vocab) if t not in taken.setdefault(parent, [])] or [-1]
            labels.append(make.choice(free))
            taken[parent].append(labels[-1])
        tokens.append(labels)
    return CandidateTree(tokens, parents)


@pytest.mark.parametrize("nodes,vocab", [(1, 3), (6, 2), (25, 3), (25, 30)])
def test_accept(nodes: int, vocab: int) -> None:
    for seed in range(20):
        tree, make = random_tree(nodes, vocab, seed), random.Random(seed + 99)
        picks = [[make.randrange(vocab) for _ in range(tree.size)] for _ in tree.tokens]
        for row, path in enumerate(accept(tree, picks)):
            parents, tokens = tree.parents[row], tree.tokens[row]
            reach = {0: [0]}
            for n in range(1, len(tokens)):  # a node is accepted if its parent is and it carries the pick there
                if parents[n] in reach and tokens[n] == picks[row][parents[n]]:
                    reach[n] = [*reach[parents[n]], n]
            assert path == max(reach.values(), key=len)


def test_diverged_heads_draft_nothing() -> None:
    class Broken(Table):
        def readout(self, hidden: Tensor, depth: int, parent_tokens: Any = None) -> Tensor:
            return torch.full_like(hidden, math.nan)

    assert grown(Broken(3), [4], TreeShape()).tokens == [[4]]


@pytest.mark.parametrize("count", [1, 4, 10, 300])
@pytest.mark.parametrize("candidates", [300, GROUPED, GROUPED + 1, 3 * GROUPED - 5])
def test_the_largest_are_those_of_topk(candidates: int, count: int) -> None:
    torch.manual_seed(candidates)
    values_BM = torch.randn(3, candidates)
    values_BM[0, 64:76] += 9  # several of them in one group
    values_BM[1, -2:] += 9  # in the last group, which may be padded
    values, indices = largest(values_BM, count)
    expected = values_BM.topk(count)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


def test_padding_is_never_chosen() -> None:
    """Not even before the lowest numbers there are, as those of candidates that a filter excludes."""
    values_BM = torch.full((1, GROUPED + 1), torch.finfo(torch.float32).min)
    values_BM[0, [7, GROUPED]] = 0
    values, indices = largest(values_BM, 5)
    assert {7, GROUPED} < set(indices[0].tolist()) and int(indices.max()) <= GROUPED
    assert values[0, :2].tolist() == [0, 0] and math.isfinite(float(values.min()))
