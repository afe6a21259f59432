"""Decode with the Headstart heads in this repository, on the model that they were trained on:

    model.generate(**inputs, custom_generate="<this folder or hub id>", trust_remote_code=True)

It takes the arguments of ``generate`` and Headstart's own: ``tree``, ``seed``, ``speculate``, ``batch_size``, ``allow_finetuned``.
"""

import sys
from typing import Any


def generate(model: Any, heads: str | None = None, **arguments: Any) -> Any:
    """``heads``: their folder or hub id; None: the one given as ``custom_generate``."""
    try:
        import headstart
    except ImportError as error:
        raise ImportError(f"these heads are decoded by the package headstart: pip install headstart ({error})") from None
    if heads is None:  # transformers copies this file elsewhere and does not pass the name on
        heads = sys._getframe(1).f_locals.get("custom_generate")
    return headstart.custom_generate(model, heads, arguments)
