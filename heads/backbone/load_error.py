"""What is wrong with a backbone that transformers cannot load, in one line."""

from __future__ import annotations

from pathlib import Path

from headstart.heads.backbone.adapter import CONFIG as ADAPTER_CONFIG
from headstart.heads.backbone.embedded import EMBEDDED
from headstart.support.errors import UserError

ALLOWED = "a folder with config.json and safetensors, a GGUF file, a hub id, or 'embedded'"


def load_error(what: str, path: str, error: Exception) -> UserError:
    """Return the error to raise; ``what``: backbone or tokenizer."""
    cause = " ".join(str(error).split())[:300]
    if (Path(path) / ADAPTER_CONFIG).is_file():
        return UserError(f"{path} is a PEFT adapter: give it as backbone.adapter (--adapter), and its base model as the backbone")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and path != EMBEDDED and not Path(path).exists():
        return UserError(f"no {what} at {path!r}: no such folder; give {ALLOWED}")
    if "does not support an attention implementation" in str(error):
        return UserError(f"{what} {path!r} cannot compute attention with sdpa (transformers has only eager for it); set attention to auto")
    if "trust_remote_code" in str(error):
        return UserError(f"{what} {path!r} wants to run code from its repository; read that code, then set trust_remote_code=true")
    hint = "; of a repository of GGUF files name one: USER/REPO/FILE.gguf" if "gguf" in path.lower() else ""
    return UserError(f"cannot load {what} {path!r}: {cause}{hint} (allowed: {ALLOWED})")
