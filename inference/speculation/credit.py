"""Which source the accepted tokens of a step are owed to."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from headstart.inference.sources.draft import Draft
from headstart.inference.sources.source import Source


def credits(sources: Sequence[Source], draft: Draft, paths: list[list[int]]) -> tuple[dict[Source, float], dict[Source, float]]:
    """Of each source: how many accepted nodes would not have been drafted without it, and how many of the verified nodes are its.

    Nodes that several sources drafted are shared out among them.
    """
    credit, share = dict.fromkeys(sources, 0.0), dict.fromkeys(sources, 0.0)
    for pool, nodes, path in zip(draft.pools, draft.kept, paths, strict=True):
        owners: dict[int, set[Hashable]] = {}
        for proposal in pool.proposals:
            owners.setdefault(proposal.node, set()).add(proposal.source)
        for source in sources:
            share[source] += sum(1 / len(owners[node]) for node in nodes[1:] if source in owners[node])
            credit[source] += _only_drafted_by(source, [owners[nodes[node]] for node in path[1:]])
    return credit, share


def _only_drafted_by(source: Source, owners: list[set[Hashable]]) -> int:
    """How many nodes of a path would be missing without the source: those from the first one on that only it drafted."""
    for i, drafted_by in enumerate(owners):
        if drafted_by == {source}:
            return len(owners) - i
    return 0
