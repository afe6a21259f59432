"""Attributes the accepted tokens of a decoding step to sources."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from headstart.inference.sources.draft import Draft
from headstart.inference.sources.source import Source


def credits(sources: Sequence[Source], draft: Draft, paths: list[list[int]]) -> tuple[dict[Source, float], dict[Source, float]]:
    """For each source, the number of accepted nodes that would be missing without it, and the number of verified nodes that it drafted.

    Accepted nodes are weighted by row (`Draft.weights`). In the second number, nodes drafted by several sources are divided equally among
    them.
    """
    credit, share = dict.fromkeys(sources, 0.0), dict.fromkeys(sources, 0.0)
    for pool, nodes, path, weight in zip(draft.pools, draft.kept, paths, draft.weights, strict=True):
        owners: dict[int, set[Hashable]] = {}
        for proposal in pool.proposals:
            owners.setdefault(proposal.node, set()).add(proposal.source)
        for source in sources:
            share[source] += sum(1 / len(owners[node]) for node in nodes[1:] if source in owners[node])
            credit[source] += weight * _only_drafted_by(source, [owners[nodes[node]] for node in path[1:]])
    return credit, share


def _only_drafted_by(source: Source, owners: list[set[Hashable]]) -> int:
    """The number of path nodes that would be missing without the source: all from the first node that only it drafted."""
    for i, drafted_by in enumerate(owners):
        if drafted_by == {source}:
            return len(owners) - i
    return 0
