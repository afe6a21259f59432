"""Measures the mean acceptance length (tau), the metric of training, by decoding prompts.

Only the given settings are used: sampling defaults in a model's generation_config.json are ignored, so that measurements at the same
temperature sample the same distribution. Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from headstart.inference.engine.tree import Pass, TreeSize
from headstart.inference.generate import GenerateOutput, SpeculativeModel
from headstart.support.errors import UserError

MOSTLY = 0.5
"""The share of passes above which it is said that drafts rested."""
PARTS = ("draft", "verify", "host")


@dataclass(frozen=True)
class Settings:
    """Decoding settings. Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 filter nothing."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    tree: TreeSize = "auto"
    """Fixed or adaptive tree size."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``model.generate``, with or without heads."""
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {
            "max_new_tokens": self.max_new_tokens,
            "stop_strings": list(self.stop) or None,
            "return_dict_in_generate": True,
            **(sampling if self.temperature > 0 else {"do_sample": False}),
        }


@dataclass
class Tally:
    """Counts over several decoded prompts."""

    tokens: int = 0
    """All tokens written."""
    passes: int = 0
    """Forward passes of the backbone after prefill; a pass over a batch counts once."""
    reads: int = 0
    """All forward passes of the backbone."""
    rested: int = 0
    """Passes in which drafts rested, since they would have cost more than they save."""
    row_passes: int = 0
    """Passes, each counted once for every row it wrote to."""
    emitted: int = 0
    """Tokens written by the row passes: in Headstart's own decoding, all but the first token of each sequence."""
    accepted: list[int] = field(default_factory=list)
    """For each depth, the number of row passes in which a draft was accepted."""
    drafts: int = 0
    """Row passes that verified a draft."""
    draft_tokens: int = 0
    """Tokens drafted."""
    kept: list[int] = field(default_factory=list)
    """As ``accepted``, with the drafts past the end of a text, as engines count them."""
    nodes: Counter[int] = field(default_factory=Counter)
    """Number of passes by the nodes of a row's tree."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds by part of a pass."""
    wall: float = 0.0
    """Wall-clock seconds, prefill included."""
    decoded: int = 0
    """Tokens written after the prefill."""
    decoding: float = 0.0
    """Wall-clock seconds in which they were written."""

    def add(self, output: GenerateOutput) -> None:
        """Add the counts of one call."""
        assert output.passes is not None and output.acceptance_per_depth is not None
        assert output.seconds is not None and output.accept_lengths is not None and output.nodes is not None
        lengths, drafted, kept = ([n for row in rows or [] for n in row] for rows in (output.accept_lengths, output.drafted, output.kept))
        self._count(lengths, drafted, kept, output.seconds, len(output.acceptance_per_depth))
        self.tokens, self.passes = self.tokens + len(output.accept_lengths), self.passes + output.passes
        self.reads, self.nodes = self.reads + output.passes + 1, self.nodes + Counter(output.nodes)
        self.rested += output.rested or 0

    def add_pass(self, one: Pass) -> None:
        """Add the counts of one forward pass."""
        lengths, drafted, kept = ([*counts.values()] for counts in (one.written, one.drafted, one.kept))
        self._count(lengths, drafted, kept, {part: getattr(one, part) for part in PARTS}, max(lengths) - 1)
        self.passes, self.reads, self.nodes = self.passes + 1, self.reads + 1, self.nodes + Counter([one.nodes])

    def _count(self, lengths: list[int], drafted: list[int], kept: list[int], seconds: dict[str, float], depths: int) -> None:
        """Add row passes that wrote ``lengths`` tokens, by the drafts of each and those of them that were kept."""
        self.join(
            Tally(
                tokens=sum(lengths),
                row_passes=len(lengths),
                emitted=sum(lengths),
                accepted=[sum(length > depth + 1 for length in lengths) for depth in range(depths)],
                drafts=sum(count > 0 for count in drafted),
                draft_tokens=sum(drafted),
                kept=[sum(count > depth for count in kept) for depth in range(max([depths, *kept]))],
                seconds=seconds,
                decoded=sum(lengths),
                decoding=sum(seconds.values()),
            )
        )

    def join(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, list):
                mine = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
            elif isinstance(mine, dict):
                mine = type(mine)({key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}})
            else:
                mine += theirs
            setattr(self, one.name, mine)

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per row and pass, the backbone's own token included; 1 for autoregressive decoding."""
        return self.emitted / self.row_passes if self.row_passes else 1.0

    @property
    def rested_share(self) -> float:
        """The share of passes in which drafts rested."""
        return self.rested / max(self.passes, 1)

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Acceptance rate at each depth, as a fraction of row passes."""
        return [count / max(self.row_passes, 1) for count in self.accepted]

    def engine_counts(self) -> dict[str, Any]:
        """Acceptance under vLLM's names and as vLLM counts it: over passes with a draft, with the drafts kept past the end of a text.

        ``draft_acceptance_rate``: drafts kept of all tokens drafted. Nothing is counted (None, []) if no pass had a draft.
        """
        return {
            "mean_acceptance_length": 1 + sum(self.kept) / self.drafts if self.drafts else None,
            "acceptance_rate_per_pos": [count / self.drafts for count in self.kept] if self.drafts else [],
            "draft_acceptance_rate": sum(self.kept) / self.draft_tokens if self.draft_tokens else None,
        }

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all sequences, prefill included."""
        return self.tokens / self.wall

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same after the prefill; None if nothing was written after it."""
        return self.decoded / self.decoding if self.decoded else None

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds per pass: ``draft_ms``, ``verify_ms``, ``host_ms``."""
        return {f"{part}_ms": 1000 * self.seconds[part] / max(self.passes, 1) for part in PARTS}


def said(tau: float, rested: float) -> str:
    """tau in words, and why it is near 1 if drafts rested in most passes. ``rested``: in which share."""
    mostly = f" (drafts rested in {rested:.0%} of the passes: they cost more than they save here)"
    return f"{tau:.2f}{mostly if rested > MOSTLY else ''}"


@contextmanager
def only_given_settings(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context, ``model.generate`` takes only the special tokens from the model's generation config."""
    config = model.generation_config
    eos = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:  # a single sequence needs no padding, but transformers warns about a missing token
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=pad)
    try:
        yield
    finally:
        model.generation_config = config


def continue_texts(
    heads: SpeculativeModel, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int], **own: Any
) -> GenerateOutput:
    """Continue prompts with the heads in one batch, padded on the left, each with its seed.

    ``own``: other arguments of `SpeculativeModel.generate` (speculate, timed, streamer, tokenizer).
    """
    model = heads.backbone.model
    with only_given_settings(model):
        return model.generate(
            **padded(prompts, model),
            custom_generate=heads.generate,
            seed=list(seeds),
            tree=settings.tree,
            **settings.arguments(),
            **own,
        )


def continue_text(heads: SpeculativeModel, prompt_T: Tensor, settings: Settings, seed: int, **own: Any) -> GenerateOutput:
    """Continue one prompt with the heads; ``own`` as for `continue_texts`."""
    return continue_texts(heads, [prompt_T], settings, [seed], **own)


def continue_by_transformers(model: PreTrainedModel, prompts: Sequence[Tensor], settings: Settings, seed: int, **theirs: Any) -> Any:
    """Continue prompts in one batch with transformers' own ``generate``; ``theirs``: its other arguments."""
    torch.manual_seed(seed)
    with only_given_settings(model):
        return model.generate(**padded(prompts, model), **settings.arguments(), **theirs)


def padded(prompts: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[B, T]`` of prompts padded on the left with token 0, which is masked."""
    ids_BT = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    lengths_B = torch.tensor([len(prompt_T) for prompt_T in prompts])
    mask_BT = torch.arange(ids_BT.shape[1]) >= ids_BT.shape[1] - lengths_B[:, None]
    return {"input_ids": ids_BT.to(model.device), "attention_mask": mask_BT.long().to(model.device)}


def measure_tau(
    heads: SpeculativeModel,
    prompts: Iterable[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    tree: TreeSize = "auto",
) -> dict[str, Any]:
    """Measure ``tau`` (tokens per backbone pass, its own token included), ``acceptance_per_depth``, ``tokens`` and ``passes``.

    ``prompts``: int64 [T] each; prompt i is decoded with ``seed + i``. ``tokens`` includes the first token of each sequence, which the
    prefill writes, so ``tau`` is slightly below ``tokens / passes``. Raises UserError without prompts.
    """
    settings = Settings(max_new_tokens, temperature, tree=tree)
    tally = Tally()
    for i, prompt_T in enumerate(prompts):
        tally.add(continue_text(heads, prompt_T, settings, seed + i))
    if not tally.tokens:
        raise UserError("no prompts to measure on; give at least one")
    return {"tau": tally.tau, "acceptance_per_depth": tally.acceptance_per_depth, "tokens": tally.tokens, "passes": tally.passes}
