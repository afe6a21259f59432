"""The arguments with which tests of every head build each kind."""

from typing import Any

from families import backbone

from headstart.heads.methods import build_drafter, methods

ARGUMENTS: dict[str, dict[str, Any]] = {"eagle": {"feature_noise": 0}, "block": {"correction": "selector", "convolution": True}}
"""Kind -> its arguments beside the depth; noise is drawn anew for every batch, so it depends on how a step is split."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {"draft_vocab_size": 2048}),
    ("eagle3", {"layers": 2}),
    ("mtp", {"shared": False}),
    ("block", {"correction": "markov", "convolution": False}),
    ("block", {"correction": "recurrent", "convolution": False}),
    ("block", {"correction": "selector", "convolution": False}),
    ("draft_model", {"parallel": True}),
    ("peagle", {"own_embedding": True, "draft_vocab_size": 2048}),
    ("hydra", {"prefix_attention": False}),
]
"""Further argument sets whose drafts are computed in another way."""


def every_head(depth: int) -> list[tuple[str, dict[str, Any]]]:
    """Every kind of heads/ with its arguments, trained and drafting at that depth."""
    return [(kind, {"depth": depth, "draft_depth": depth, **ARGUMENTS.get(kind, {})}) for kind in methods()]


def following(depth: int) -> list[tuple[str, dict[str, Any]]]:
    """Of these, the heads whose drafts depend on their own drafts."""
    return [(kind, arguments) for kind, arguments in every_head(depth) if build_drafter(kind, backbone("llama"), arguments).sequential]
