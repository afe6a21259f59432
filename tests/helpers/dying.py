"""A user-defined head (given by its dotted name) that signals its own process at a chosen forward pass, or returns NaN there.

A test can so kill a run at a given step without relying on timing, or make the loss of a step non-finite.
"""

import os

from torch import Tensor

from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.eagle3 import Eagle3

SIGNAL, FORWARD, NAN = "HEADSTART_TEST_SIGNAL", "HEADSTART_TEST_FORWARD", "HEADSTART_TEST_NAN"
"""Environment variables: the signal's number; the forward pass (from 1) that sends it; comma-separated forward passes that return NaN."""


class Dying(Eagle3):
    """EAGLE-3 (2503.01840) that kills its process or returns NaN on request."""

    forwards = 0

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        self.forwards += 1
        if str(self.forwards) == os.environ.get(FORWARD):
            os.kill(os.getpid(), int(os.environ[SIGNAL]))
        hidden = super().forward(features, at)
        if str(self.forwards) in os.environ.get(NAN, "").split(","):
            return [draft_BTD * float("nan") for draft_BTD in hidden]
        return hidden
