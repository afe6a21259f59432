"""Results of self-checks, in a file of the user's cache folder: "" for a check that passed, else what was wrong."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import headstart
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.inference.capture.backend import Backend
from headstart.inference.speculation.tuned import machine
from headstart.support.errors import UserError
from headstart.support.files import cache_folder, write_json
from headstart.support.json_text import read_json

FILE = "self-checks.json"
FORMAT = 1
logger = logging.getLogger(__name__)


def place() -> Path:
    """The path of the file."""
    return cache_folder() / FILE


def key(backbone: Backbone, drafters: Sequence[Drafter], backend: type[Backend] | None) -> str:
    """What a result depends on: backend, machine, driver, versions of libraries and of this code, the model and its drafters."""
    versions = f"torch {torch.__version__} | transformers {transformers.__version__} | code {_code()}"
    modules = [backbone.model, *drafters]
    sizes = [(weight, tensor.dtype, tensor.shape) for module in modules for weight, tensor in module.named_parameters()]
    described = (sizes, [str(one.arguments) for one in drafters], backbone.model.config._attn_implementation)
    model = " + ".join(type(module).__name__ for module in modules) + " " + hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    captured_by = backend.name if backend is not None else "off"
    return f"{captured_by} | {machine(backbone.device)} | driver {_driver()} | {versions} | {model}"


def read(key: str) -> str | None:
    """The result kept for this key; None if there is none, or if the file is damaged."""
    try:
        found = read_json(place(), "it is ignored")
        result = found["results"].get(key) if found["format"] == FORMAT else None
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return None
    return result if isinstance(result, str) else None


def write(key: str, result: str) -> None:
    """Keep a result; without a place for it, the check is made again in the next process."""
    try:
        found = read_json(place(), "it is ignored")
        results = dict(found["results"]) if found["format"] == FORMAT else {}
    except (UserError, OSError, KeyError, TypeError, ValueError):
        results = {}
    try:
        write_json(place(), {"format": FORMAT, "results": results | {key: result}})
    except (UserError, OSError) as error:
        logger.info("the result of the self-check is not kept: %s", error)


@functools.cache
def _code() -> str:
    """A hash of the code that decodes."""
    digest, root = hashlib.sha256(), Path(headstart.__file__).parent
    for folder in ("heads", "inference"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _driver() -> str:
    """The version of NVIDIA's driver, or that of CUDA."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return str(torch.version.cuda)
