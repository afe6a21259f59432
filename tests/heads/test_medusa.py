"""Medusa heads are what the paper says, and start as the backbone's output layer.

Shape suffixes: B batch, D width, K depth.
"""

from __future__ import annotations

import torch
from families import backbone, texts
from test_contract import CLOSE, made

from headstart.heads.methods import build_drafter


def test_medusa_is_what_the_paper_says() -> None:
    on, drafter = made("llama", "medusa", {"depth": 3, "layers": 2})
    x = torch.randn(4, on.dim)
    weights = drafter.tensors()
    for k in range(3):
        y = x
        for block in range(2):
            linear = y @ weights[f"{k}.{block}.linear.weight"].T + weights[f"{k}.{block}.linear.bias"]
            y = y + linear * linear.sigmoid()
        hidden_BKD, _ = drafter.step(x[:, None], torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1, dtype=torch.int64), 0)
        torch.testing.assert_close(drafter.readout(hidden_BKD[:, k], k), y @ weights[f"{k}.2.weight"].T, **CLOSE)


def test_an_untrained_medusa_repeats_the_backbone() -> None:
    on = backbone("llama")
    drafter = build_drafter("medusa", on, {})
    features = on.read(texts(1, 9))
    for k, hidden in enumerate(drafter(features)):
        torch.testing.assert_close(drafter.readout(hidden, k), on.readout(features.hidden_BTD[:, : hidden.shape[1]]), **CLOSE)
