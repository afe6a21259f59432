"""What differs between the versions of transformers that are supported, and which of them the tests have run with."""

from __future__ import annotations

import inspect
import logging
from functools import cache

import transformers
from packaging.version import Version
from torch import nn
from transformers.generation import GenerateDecoderOnlyOutput

TESTED = "5.24"
"""The newest minor version that the tests have run with."""
NAMES = ("cache", "past_key_values", "cache_params")
CACHE = next(name for name in NAMES if name in GenerateDecoderOnlyOutput.__dataclass_fields__)
"""The name of the KV cache in the arguments of ``generate`` and of models, and in what they return: from 5.24 on ``cache``. Mamba-2 has
its own."""

logger = logging.getLogger(__name__)


def cache_argument(model: nn.Module) -> str:
    """Return the name under which the model's forward takes a KV cache: a model of one's own may have that of another version."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in taken), CACHE)


@cache
def say_untested() -> None:
    """Log, once per process, that transformers is newer than what the tests have run with."""
    installed = transformers.__version__
    if Version(installed).release[:2] > Version(TESTED).release:
        logger.warning(
            "transformers %s is newer than %s, the newest that headstart was tested with; should anything look wrong, try it with "
            "pip install 'transformers==%s.*'",
            installed, TESTED, TESTED,
        )  # fmt: skip
