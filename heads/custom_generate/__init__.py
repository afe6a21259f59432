"""The code that a checkpoint carries so that `transformers` decodes with it: `generate.py`, copied as it is, and its requirements."""

from __future__ import annotations

from pathlib import Path

from headstart import __version__

FOLDER = "custom_generate"
"""Where `transformers` looks for it in a repository."""


def carried_files() -> dict[str, bytes]:
    """Return the files by their path in the checkpoint."""
    code = Path(__file__).with_name("generate.py")
    return {f"{FOLDER}/generate.py": code.read_bytes(), f"{FOLDER}/requirements.txt": f"headstart>={__version__}\n".encode()}
