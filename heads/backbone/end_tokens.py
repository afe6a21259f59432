"""The tokens at which a backbone's decoding stops."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from headstart.heads.backbone.embedded import resolve
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import load_config


def end_tokens(config: Any) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a generation or model configuration as a tuple; empty if there is none."""
    stated = getattr(config, "eos_token_id", None)
    return () if stated is None else (stated,) if isinstance(stated, int) else tuple(stated)


def read_end_tokens(path: str, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return those of a backbone that is not loaded, from its ``generation_config.json`` or else its configuration. Raises UserError."""
    gguf = find_gguf(path)
    try:
        found = end_tokens(GenerationConfig.from_pretrained(resolve(path) if gguf is None else gguf.path.parent))
    except (OSError, ValueError, TypeError):  # there is none, or one that transformers cannot read
        found = ()
    return found or end_tokens(load_config(path, trust_remote_code=trust_remote_code).get_text_config())
