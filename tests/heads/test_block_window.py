"""Block heads with a sliding window, while they draft; tests/heads/test_block.py has their training.

Shape suffixes: B batch, T positions, K depth.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import backbone, random_drafter, read, texts
from test_window import CLOSE

from headstart.inference.contract import chain, part


@pytest.mark.parametrize("correction", ["none", "markov", "recurrent"])
def test_a_sliding_window_of_a_block(correction: str) -> None:
    """What lies before it changes no draft, in whatever pieces a text comes; `limit` narrows it; no more than a window is kept."""
    drafter = random_drafter("block", backbone("llama"), depth=4, layers=1, correction=correction, sliding_window=10)
    tokens_BT, next_BK = texts(2, 60), texts(2, 4, seed=5)
    features = read(backbone("llama"), tokens_BT, drafter)
    assert features.taps is not None
    far = {tap: torch.cat([x[:, :40] + 1, x[:, 40:]], 1) for tap, x in features.taps.items()}
    near = {tap: torch.cat([x[:, :57] + 1, x[:, 57:]], 1) for tap, x in features.taps.items()}
    drafts = [chain(drafter, drafter.begin(replace(features, taps=taps)), next_BK) for taps in (features.taps, far, near)]
    state = drafter.begin(part(features, 0, 33))
    for start, end in ((33, 34), (34, 47), (47, 60)):
        state = drafter.begin(part(features, start, end), drafter.reserve(state, end + 20))
    drafts.append(chain(drafter, drafter.reserve(state, 80), next_BK))
    assert {cache.ring.slots for cache in state.caches} == {10}  # type: ignore[attr-defined]
    for one, other, third, pieces in zip(*drafts, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        torch.testing.assert_close(one, pieces, **CLOSE)
        assert not torch.allclose(one, third)
    drafter.limit(4)
    assert not any(map(torch.allclose, drafts[0], chain(drafter, drafter.begin(features), next_BK)))
