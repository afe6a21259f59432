"""Candidate trees against slow and obvious ones: how they grow, who descends from whom, which path is accepted.

Shape suffixes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
import math

import pytest
import torch
from families import VOCAB, backbone
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.noise import gumbel
from headstart.inference.tree import LEVEL_COST, CandidateTree, Ranking, TreeShape, grow, root_only
from headstart.inference.verify import pick, walk

Path = tuple[int, ...]


class Table(Drafter):
    """Its logits are a fixed function of the depth and of the tokens on the way to the node; the state holds each node's tokens."""

    def __init__(self, depth: int, vocabulary: Tensor | None = None, spread: float = 1.0) -> None:
        super().__init__(backbone("llama"))
        self.depth, self.spread = depth, spread
        self.vocabulary = vocabulary
        self.DV = VOCAB if vocabulary is None else len(vocabulary)

    def logits(self, path: Path) -> Tensor:
        return self.spread * torch.randn(self.DV, generator=torch.Generator().manual_seed(hash(path) % 2**31))

    def step(self, state: list[list[Path]], tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, list[list[Path]]]:
        rows = zip(state, tokens_BN.tolist(), parents_BN.tolist(), strict=True)
        paths = [[((*row[p], t) if depth else (t,)) for t, p in zip(tokens, parents, strict=True)] for row, tokens, parents in rows]
        return torch.stack([torch.stack([self.logits(path) for path in row]) for row in paths]), paths

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return hidden


def paths_of(tree: CandidateTree, row: int) -> list[Path]:
    """The tokens on the way to each node; fails unless a parent stands before its children."""
    found: list[Path] = []
    for n, (token, parent) in enumerate(zip(tree.tokens_BN[row].tolist(), tree.parents_BN[row].tolist(), strict=True)):
        assert parent < n or n == 0
        found.append((*found[parent], token) if n else (token,))
    return found


def best_first(drafter: Table, root: int, nodes: int, noise_PV: Tensor | None, temperature: float, sharpness: float) -> set[Path]:
    """The likeliest nodes by a heap: take the best, put in its children."""
    heap: list[tuple[float, Path]] = [(0.0, (root,))]
    kept: set[Path] = set()
    while heap and len(kept) < nodes:
        cost, path = heapq.heappop(heap)
        kept.add(path)
        if len(path) <= drafter.depth:
            logits = drafter.logits(path)
            if noise_PV is not None:
                noise = noise_PV[len(path) - 1]
                logits = sharpness * (logits / temperature + (noise if drafter.vocabulary is None else noise[drafter.vocabulary]))
            for index, logp in enumerate(logits.log_softmax(-1).tolist()):
                token = index if drafter.vocabulary is None else int(drafter.vocabulary[index])
                heapq.heappush(heap, (cost - logp + LEVEL_COST, (*path, token)))
    return kept


@pytest.mark.parametrize("nodes", [1, 2, 7, 24])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_grow_keeps_what_best_first_search_keeps(nodes: int, noisy: bool, small: bool) -> None:
    vocabulary = torch.arange(3, VOCAB, 4) if small else None
    drafter, roots = Table(4, vocabulary), torch.tensor([5, 9])
    noise = gumbel(torch.tensor([3, 4]), torch.arange(20, 25).expand(2, 5), VOCAB) if noisy else None
    ranking = Ranking(0.7, noise, 0.8) if noisy else Ranking()
    tree = grow(drafter, [[], []], roots, TreeShape(nodes, width=nodes), ranking)
    for row in range(2):
        paths = paths_of(tree, row)
        assert len(set(paths)) == nodes
        assert set(paths) == best_first(drafter, int(roots[row]), nodes, None if noise is None else noise[row], 0.7, 0.8)


@pytest.mark.parametrize("spread", [1.0, 300.0, 3000.0])
def test_trees_hold_only_what_was_drafted(spread: float) -> None:
    """Scores in the thousands leave no room for ties to be broken by; every node must still hang where it was drafted."""
    drafter, roots = Table(5, spread=spread), torch.arange(8)
    tree = grow(drafter, [[]] * 8, roots, TreeShape(12, 6), Ranking())
    for row in range(8):
        paths = paths_of(tree, row)
        assert len(set(paths)) == 12
        for path in paths[1:]:
            rank = (drafter.logits(path[:-1]) > drafter.logits(path[:-1])[path[-1]]).sum()
            assert rank < 6, "not among the parent's likeliest: it hangs on another parent than it was drafted for"


def test_the_beam_the_depth_and_the_vocabulary_bound_the_tree() -> None:
    drafter = Table(5, torch.tensor([2, 3, 5]))
    for shape, size, height in (
        (TreeShape(100, 2, 3), 7, 3),
        (TreeShape(100, 50, 1), 4, 1),
        (TreeShape(100, 2, 99), 11, 5),
        (TreeShape(1), 1, 5),
    ):
        tree = grow(drafter, [[]], torch.tensor([7]), shape, Ranking())
        assert tree.tokens_BN.shape == (1, size)
        assert int(tree.depths_BN.max()) <= tree.height == height
        assert set(tree.tokens_BN[0, 1:].tolist()) <= {2, 3, 5} and tree.tokens_BN[0, 0] == 7


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"width": 0}, {"depth": 0}, {"nodes": 2.5}, {"nodes": True}])
def test_a_wrong_shape_is_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=f"tree.{next(iter(wrong))}.*{next(iter(wrong.values()))}"):
        TreeShape(**wrong)


def random_tree(nodes: int, vocab: int, seed: int, rows: int = 3) -> CandidateTree:
    make = torch.Generator().manual_seed(seed)
    parents = torch.stack([torch.tensor([0, *(int(torch.randint(n, (1,), generator=make)) for n in range(1, nodes))]) for _ in range(rows)])
    tokens = torch.randint(vocab, (rows, nodes), generator=make)
    return CandidateTree(tokens, parents, max(nodes - 1, 1))


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 17])
def test_ancestors_and_depths(nodes: int) -> None:
    chain = CandidateTree(torch.zeros(1, nodes, dtype=torch.int64), torch.arange(-1, nodes - 1).clamp(min=0)[None], max(nodes - 1, 0))
    for tree in (random_tree(nodes, 9, nodes), chain):
        for row, parents in enumerate(tree.parents_BN.tolist()):
            for n in range(nodes):
                line = [n]
                while line[-1] != 0:
                    line.append(parents[line[-1]])
                assert tree.ancestors_BNN[row, n].nonzero().flatten().tolist() == sorted(line)
                assert tree.depths_BN[row, n] == len(line) - 1


@pytest.mark.parametrize("nodes,vocab", [(1, 3), (6, 2), (25, 3), (25, 1)])
def test_walk(nodes: int, vocab: int) -> None:
    for seed in range(20):
        tree = random_tree(nodes, vocab, seed)
        picks = torch.randint(vocab, tree.tokens_BN.shape, generator=torch.Generator().manual_seed(seed + 99))
        accepted = walk(tree, picks)
        for row in range(3):
            parents, tokens = tree.parents_BN[row].tolist(), tree.tokens_BN[row].tolist()
            reach = {0: [int(picks[row, 0])]}
            for n in range(1, nodes):  # a node is reached if its parent is and it carries the pick there
                if parents[n] in reach and tokens[n] == picks[row, parents[n]]:
                    reach[n] = [*reach[parents[n]], int(picks[row, n])]
            count = int(accepted.count_B[row])
            path, said = accepted.path_BP[row, :count].tolist(), accepted.picks_BP[row, :count].tolist()
            assert count == max(map(len, reach.values()))
            assert reach[path[-1]] == said and path[0] == 0
            assert all(parents[child] == parent for parent, child in zip(path, path[1:], strict=False))


def test_pick_and_plain_tree() -> None:
    scores = torch.tensor([[1.0, 2.0, -math.inf], [0.0, -math.inf, -math.inf]])
    assert pick(scores, None).tolist() == [1, 0]
    assert pick(scores, torch.tensor([[5.0, 0.0, 99.0], [0.0, 99.0, 99.0]])).tolist() == [0, 0]
    tree = root_only(torch.tensor([4, 6]))
    assert tree.tokens_BN.tolist() == [[4], [6]] and tree.depths_BN.tolist() == [[0], [0]]
