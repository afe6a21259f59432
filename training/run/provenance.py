"""Provenance saved with trained heads, so that a run can be reproduced."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from headstart import __version__
from headstart.support.chat.template import template_hash
from headstart.training.data.tokenise import chat_settings
from headstart.training.recipe.recipe import Recipe, to_dict


def provenance(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> dict[str, Any]:
    """Return the provenance that is constant during a run: recipe, chat template, command, commit and library versions.

    ``ends``: the tokens at which the backbone's decoding stops.
    """
    chat = chat_settings(recipe.data, ends)
    return {
        "recipe": to_dict(recipe),
        "chat_template": template_hash(chat.template_of(tokenizer)),
        "chat": chat.to_card(tokenizer),
        "command": shlex.join(sys.argv),
        "commit": _commit(),
        "versions": {
            "headstart": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "python": platform.python_version(),
        },
    }


def _commit() -> str | None:
    """Return the git commit of this source, with ``-dirty`` if files were changed; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).resolve().parent.parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("-dirty" if changed else "")
