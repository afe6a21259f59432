"""Verification on stored features, of texts that a feature cache keeps: for a backbone that does not run here, because it is too large or
because its trees cannot be verified. Headstart's heads and the plain reader draft after the same places of the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.base import Drafter
from headstart.inference.serving.layouts.reader.base import Reading, Target, Text
from headstart.inference.serving.verify.decode import drafted_along, headstart_after
from headstart.inference.serving.verify.drafts import EngineSettings, Transcript
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors
from headstart.support.terminal import watched


class StoredTarget(Target):
    """A backbone that knows the features of some texts and no others; their tokens stand for what it writes."""

    def __init__(self, model: PreTrainedModel, texts: Sequence[Features]) -> None:
        super().__init__(model)
        self.texts = texts

    def features(self, tokens: Sequence[int]) -> Features:
        """Return the features of the first tokens of a stored text."""
        T = len(tokens)
        found = next(one for one in self.texts if one.tokens_BT[0, :T].tolist() == list(tokens))
        return map_tensors(lambda tensor: tensor[:, :T], found)

    def read(self, tokens: Sequence[int], taps: Sequence[int]) -> Text:
        one = self.features(tokens)
        return Text(one.tokens_BT[0], one.hidden_BTD[0], {tap: states_BTD[0] for tap, states_BTD in (one.taps or {}).items()})

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        T = len(prompt)
        rest = next(one for one in self.texts if one.tokens_BT[0, :T].tolist() == list(prompt)).tokens_BT[0, T : T + count]
        written: list[int] = rest.tolist()
        return written

    def lend(self, backbone: HeadOnlyBackbone) -> None:
        """Have a backbone without layers return these features."""

        def stored(tokens_1T: Tensor, taps: tuple[int, ...]) -> Features:
            return self.features(tokens_1T[0].tolist())

        backbone.reader = stored

    def lacking(self, taps: Sequence[int]) -> list[int]:
        """Return those of the taps whose states are not stored with every text."""
        return sorted({tap for tap in taps for one in self.texts if tap not in (one.taps or {})})


def require_states(target: StoredTarget, heads: Drafter | None, reading: Reading, where: str) -> None:
    """Raise UserError unless what the heads read is stored."""
    whole = all(one.hidden_BTD.shape[-1] == target.dim for one in target.texts)
    taps = heads.taps if heads is not None else reading.taps
    if not whole and (heads.reads_hidden if heads is not None else not reading.taps):
        raise UserError(
            f"{where} keeps no final hidden state (cache.teacher=topk), which these heads read; write it with cache.teacher=hidden"
        )
    if lacking := target.lacking(taps):
        raise UserError(f"{where} lacks the states after layers {lacking}, which these heads read; write the cache of their recipe")


def stored_drafts(drafter: Drafter, target: StoredTarget, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return the transcripts of Headstart's heads, a chain of drafts after each place. Raises UserError for too great a depth."""
    drafter.require_depth(settings.depth)
    transcripts = []
    for prompt in watched(prompts, "drafting with Headstart", "text"):
        truth = [*prompt, *target.continued(prompt, settings.new_tokens + settings.depth)]
        transcripts.append(drafted_along(partial(_chain, drafter, truth), truth, len(prompt), settings))
    return transcripts


def _chain(drafter: Drafter, text: Sequence[int], position: int, depth: int) -> list[int]:
    """Return a greedy chain of drafts after the first tokens of a text."""
    next_token, token, drafts = headstart_after(drafter, text[:position], depth), text[position - 1], []
    for _ in range(depth):
        token = int(next_token(token).argmax())
        drafts.append(token)
    return drafts
