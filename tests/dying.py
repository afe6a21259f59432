"""A head of the user's own (found by its dotted name) that sends its own process a signal at a forward of choice.

So a test can have a run killed at one certain step, without waiting for it with a stopwatch.
"""

from __future__ import annotations

import os

from torch import Tensor

from headstart.heads.base import Features
from headstart.heads.eagle3 import Eagle3

SIGNAL, FORWARD = "HEADSTART_TEST_SIGNAL", "HEADSTART_TEST_FORWARD"


class Dying(Eagle3):
    """EAGLE-3, 2503.01840, with an end."""

    forwards = 0

    def forward(self, features: Features) -> list[Tensor]:
        self.forwards += 1
        if str(self.forwards) == os.environ.get(FORWARD):
            os.kill(os.getpid(), int(os.environ[SIGNAL]))
        return super().forward(features)
