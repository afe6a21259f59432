"""Hidden states of answers as a server generates them, kept on disk until a feature cache is written from them.

A server has states for all tokens but the last one generated, which was never an input. No loss reads those of a sample's last token; they
repeat the states before it.

Shape suffixes: T positions, L layers, D width.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.support.errors import UserError
from headstart.training.features.arrival import require_samples, require_whole
from headstart.training.features.codec import CacheFormat, Record
from headstart.training.features.manifest import save_tensors
from headstart.training.features.served import CHECKED_FIRST, ServedFeatures
from headstart.training.recipe.recipe import Recipe

FOLDER = "answers"
"""Folder in ``cache.dir`` of the states that are kept."""


class KeptFeatures(ServedFeatures):
    """Keeps the states of answers, and reads samples from them; what is not kept is asked of the servers again."""

    lacks_last = True

    def __init__(self, recipe: Recipe, backbone: HeadOnlyBackbone, taps: tuple[int, ...]) -> None:
        super().__init__(recipe.features, backbone, taps)
        assert recipe.cache.dir is not None
        self.folder, self.longest = Path(recipe.cache.dir) / FOLDER, recipe.data.max_length
        self.stored = CacheFormat(tuple(sorted(taps)), backbone.dim, backbone.dtype, recipe.cache.dtype)
        self.sampled = max(recipe.regenerate.temperatures) <= 1
        self.kept, self.rare = 0, list[Tensor]()

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of a request whose answer's states are kept."""
        return {"kv_transfer_params": {"include_output_tokens": True}, "logprobs": True, "request_id": self.servers.new_id()}

    def keep(self, body: dict[str, Any], prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep the states that the answer ``body`` names. Raises UserError if there are none, or wrong ones."""
        choice, url = body["choices"][0], self.servers.urls[0]
        if not answer:
            raise UserError(f"{url} returns no token ids, without which hidden states cannot be told apart; give vLLM 0.32 or newer")
        tokens = [*prompt, *answer[:-1]]
        taken = replace(self.servers.taken(body, url), generated=list(answer), choice=choice)
        require_whole(taken, tokens, self.layers, self.backbone.embed.weight)
        with self.lock:
            self.kept += 1
            checked = self.kept <= CHECKED_FIRST or self.kept % self.settings.check_every == 0
        record = self.record(taken.hidden_TLD)
        if checked:
            self.rare.append(self.check(taken))
            if self.sampled:
                require_samples(taken, self.rare)
        tokens_1T = torch.tensor([tokens])
        taps = {layer: record[f"tap.{layer}"][None] for layer in self.stored.taps}
        features = Features(tokens_1T, record["hidden"][None], taps, torch.zeros_like(tokens_1T, dtype=torch.bool))
        encoded = self.stored.encode(features)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in {_name(tokens), _name(tokens[: self.longest])}:  # as a whole sample, and as one that is cut off
            save_tensors(encoded, self.folder / name, {})

    def _find(self, tokens_T: Tensor) -> Path | None:
        tokens = tokens_T.tolist()
        names = [_name(tokens[:-1]), *([_name(tokens)] if len(tokens) == self.longest else [])]
        return next((path for name in reversed(names) if (path := self.folder / name).exists()), None)

    def _begin(self, tokens_T: Tensor) -> None:
        if self._find(tokens_T) is None:
            super()._begin(tokens_T)

    def _record(self, tokens_T: Tensor) -> Record:
        path, length = self._find(tokens_T), len(tokens_T)
        if path is None:
            return super()._record(tokens_T)
        encoded = load_file(path)
        sample_P = torch.zeros(int(encoded["tokens"]), dtype=torch.int64)
        states = {name: self.stored.dequantize(encoded, name, sample_P) for name in self.stored.states}
        cut = {name: _of_length(states_TD, length).to(self.backbone.device) for name, states_TD in states.items()}
        return cut | {"tokens": torch.tensor([length])}

    def discard(self) -> None:
        """Delete what was kept: the cache has it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _of_length(states_TD: Tensor, length: int) -> Tensor:
    """Cut the states to a length, or repeat the last row, which the server has not computed."""
    return states_TD[:length] if len(states_TD) >= length else torch.cat([states_TD, states_TD[-1:].expand(length - len(states_TD), -1)])


def _name(tokens: Sequence[int]) -> str:
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).hexdigest()[:32]
    return f"{len(tokens)}-{digest}.safetensors"
