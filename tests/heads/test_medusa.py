"""Medusa heads are what the paper says, and start as the backbone's output layer.

Shape suffixes: B batch, D width, K depth.
"""

from __future__ import annotations

import torch
from families import backbone, texts
from test_contract import CLOSE

from headstart.heads.methods import build_drafter


def test_an_untrained_medusa_repeats_the_backbone() -> None:
    on = backbone("llama")
    drafter = build_drafter("medusa", on, {})
    features = on.read(texts(1, 9))
    for k, hidden in enumerate(drafter(features)):
        torch.testing.assert_close(drafter.readout(hidden, k), on.readout(features.hidden_BTD[:, : hidden.shape[1]]), **CLOSE)
