"""Accepted tokens per backbone pass, by really decoding prompts: the number that training is judged by.

Prompts are decoded one at a time and by the given settings alone: what a model's generation_config.json says of sampling is not
used, so that two measurements of one temperature are of the same distribution. Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from headstart.heads.errors import UserError
from headstart.inference.heads import Heads, HeadsOutput
from headstart.inference.tree import TreeShape

PARTS = ("draft", "verify", "host")


@dataclass(frozen=True)
class Settings:
    """How prompts are continued; temperature 0 is greedy, ``top_k`` 0 and ``top_p`` 1 filter nothing."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    tree: TreeShape = field(default_factory=TreeShape)

    def arguments(self) -> dict[str, Any]:
        """For ``model.generate``, ours and transformers' own alike."""
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {
            "max_new_tokens": self.max_new_tokens,
            "stop_strings": list(self.stop) or None,
            "return_dict_in_generate": True,
            **(sampling if self.temperature > 0 else {"do_sample": False}),
        }


@dataclass
class Tally:
    """What decoding several prompts came to."""

    tokens: int = 0
    """All tokens written."""
    passes: int = 0
    """Backbone passes after those over the prompts."""
    emitted: float = 0.0
    """Tokens written by those passes: all but the first of each text."""
    accepted: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, output: HeadsOutput, prompt_T: Tensor) -> None:
        """Count one text in."""
        assert output.passes is not None and output.tau is not None
        assert output.acceptance_per_depth is not None and output.seconds is not None
        self.tokens += output.sequences.shape[1] - len(prompt_T)
        self.passes += output.passes
        self.emitted += output.tau * output.passes
        self.accepted = self.accepted or [0.0] * len(output.acceptance_per_depth)
        self.accepted = [total + share * output.passes for total, share in zip(self.accepted, output.acceptance_per_depth, strict=True)]
        for part in PARTS:
            self.seconds[part] += output.seconds[part]

    @property
    def tau(self) -> float:
        """Tokens per pass, the backbone's own included: 1 is plain decoding."""
        return self.emitted / self.passes if self.passes else 1.0

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Share of passes in which the draft of each depth was accepted."""
        return [total / max(self.passes, 1) for total in self.accepted]

    def milliseconds(self) -> dict[str, float]:
        """Per pass: ``draft_ms``, ``verify_ms``, ``host_ms``."""
        return {f"{part}_ms": 1000 * self.seconds[part] / max(self.passes, 1) for part in PARTS}


@contextmanager
def only_given_settings(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, ``model.generate`` takes nothing from the model's own generation config but its special tokens."""
    own = model.generation_config
    eos = own.eos_token_id
    pad = own.pad_token_id
    if pad is None:   # a single text needs no padding, but a missing token is warned about
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    model.generation_config = GenerationConfig(bos_token_id=own.bos_token_id, eos_token_id=eos, pad_token_id=pad)
    try:
        yield
    finally:
        model.generation_config = own


def continue_text(heads: Heads, prompt_T: Tensor, settings: Settings, seed: int, **own: Any) -> HeadsOutput:
    """One prompt continued by the heads; ``own``: other arguments of `Heads.generate` (speculate, timed, streamer, tokenizer)."""
    model = heads.backbone.model
    ids_BT = prompt_T[None].to(heads.backbone.device)
    with only_given_settings(model):
        return model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            custom_generate=heads.generate,
            seed=seed,
            tree=settings.tree,
            **settings.arguments(),
            **own,
        )


def continue_by_transformers(model: PreTrainedModel, prompt_T: Tensor, settings: Settings, seed: int) -> Any:
    """One prompt continued by transformers' own ``generate``."""
    ids_BT = prompt_T[None].to(model.device)
    torch.manual_seed(seed)
    with only_given_settings(model):
        return model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **settings.arguments())


def measure_tau(
    heads: Heads,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    tree: TreeShape | None = None,
) -> dict[str, Any]:
    """``tau`` (tokens per backbone pass, its own included), ``acceptance_per_depth``, ``tokens`` and ``passes`` over all prompts.

    ``prompts``: int64 [T] each; the i-th is decoded with ``seed + i``. ``tokens`` counts the first of each text too, which the pass
    over the prompt gives, so ``tau`` is a little below ``tokens / passes``. Raises UserError without prompts.
    """
    if not prompts:
        raise UserError("no prompts to measure on; give at least one")
    settings = Settings(max_new_tokens, temperature, tree=tree or TreeShape())
    tally = Tally()
    for i, prompt_T in enumerate(prompts):
        tally.add(continue_text(heads, prompt_T, settings, seed + i), prompt_T)
    return {"tau": tally.tau, "acceptance_per_depth": tally.acceptance_per_depth, "tokens": tally.tokens, "passes": tally.passes}
