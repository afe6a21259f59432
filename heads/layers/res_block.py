"""The residual block of Medusa (2401.10774) and Hydra (2402.05109) heads.

Shape suffixes: D width, X input width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResBlock(nn.Module):
    """``x + silu(Wx + b)``; with an input of another width, ``Vx + c + silu(Wx + b)``."""

    def __init__(self, dim: int, width: int | None = None) -> None:
        """``width`` is that of the input; None: ``dim``."""
        super().__init__()
        self.linear = nn.Linear(width or dim, dim)
        self.res_connection = nn.Identity() if width is None else nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """Return the input's first D entries until it is trained."""
        for weight in self.parameters():
            weight.zero_()
        if isinstance(self.res_connection, nn.Linear):
            self.res_connection.weight.diagonal().fill_(1.0)
