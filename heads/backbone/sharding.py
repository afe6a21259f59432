"""Backbones whose layers are sharded with FSDP2."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from headstart.heads.backbone.backbone import Backbone


def is_sharded(backbone: Backbone) -> bool:
    """Return True if the backbone's layers are sharded over the processes."""
    return any(isinstance(layer, FSDPModule) for layer in backbone.layers)
