"""A head of the user's own (found by its dotted name) that sends its own process a signal at a forward of choice, or has no number.

So a test can have a run killed at one certain step, without waiting for it with a stopwatch; or a loss that is not finite there.
"""

from __future__ import annotations

import os

from torch import Tensor

from headstart.heads.anchors import Anchors
from headstart.heads.backbone.features import Features
from headstart.heads.eagle3 import Eagle3

SIGNAL, FORWARD, NAN = "HEADSTART_TEST_SIGNAL", "HEADSTART_TEST_FORWARD", "HEADSTART_TEST_NAN"
"""The number of the signal; the forward (from 1) that sends it; forwards that have no number, with commas between."""


class Dying(Eagle3):
    """EAGLE-3, 2503.01840, with an end."""

    forwards = 0

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        self.forwards += 1
        if str(self.forwards) == os.environ.get(FORWARD):
            os.kill(os.getpid(), int(os.environ[SIGNAL]))
        hidden = super().forward(features, at)
        if str(self.forwards) in os.environ.get(NAN, "").split(","):
            return [draft_BTD * float("nan") for draft_BTD in hidden]
        return hidden
