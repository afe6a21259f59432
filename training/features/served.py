"""Features from servers of the backbone: asked for ahead, while earlier steps compute, normed here, checked, and kept nowhere.

Hidden states of answers, as a server generates them, are kept on disk until a feature cache is written from them. A server has states for
all tokens but the last one generated, which was never an input. No loss reads those of a sample's last token; they repeat the states
before it.

Shape suffixes: B batch, T positions, L layers, D width.
"""

import hashlib
import shutil
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch
from headstart.training.features.arrival import asked, check, require_samples, require_whole
from headstart.training.features.codec import CacheFormat, Record, concatenate, save_tensors
from headstart.training.features.server import Answer, Servers, extracted, served_name
from headstart.training.features.source import FeatureSource
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.training import Features as Settings

CHECKED_FIRST = 8
"""Samples, the first ones, that are all checked."""
FOLDER = "answers"
"""Folder in ``cache.dir`` of the states that are kept."""


class FeaturesLost(UserError):
    """No hidden states arrive, or wrong ones: the run ends, and goes on from its last step."""


class ServedFeatures(FeatureSource):
    """Asks servers for the hidden states of each document of a batch alone; the backbone here has no layers."""

    def __init__(self, settings: Settings, backbone: HeadOnlyBackbone, taps: tuple[int, ...]) -> None:
        """Raises UserError for settings that cannot be. No request is sent."""
        self.settings, self.backbone, self.taps, self.ahead = settings, backbone, taps, settings.prefetch
        if backbone.norm is None:
            raise UserError(f"servers give states before the final norm, and {backbone.name} names none; leave features.endpoint out")
        self.norm = backbone.norm
        self.layers = extracted(taps, backbone.num_layers)
        self.servers = Servers(settings, self.layers, served_name(backbone.name, self.layers))
        self.form = CacheFormat.of(backbone, taps)
        self.pool = ThreadPoolExecutor(settings.concurrency, "features")
        self.waiting: dict[bytes, Future[tuple[Answer, bool]]] = {}
        """Hidden states asked for and not used yet, by the bytes of their tokens."""
        self.lock, self.count = threading.Lock(), 0
        self.checking = threading.Lock()
        """Held by a check, since logits are large."""

    def read(self, batch: Batch) -> Features:
        self.prefetch([batch])
        rows = documents_of(batch)
        records = [self._record(tokens_T) for row in rows for tokens_T in row]
        members = tuple(tuple(range(len(row))) for row in rows)
        if not records:  # padding alone
            zeros_BTD = torch.zeros(*batch.tokens_BT.shape, self.backbone.dim, dtype=self.backbone.dtype, device=batch.tokens_BT.device)
            return Features(batch.tokens_BT, zeros_BTD, dict.fromkeys(self.taps, zeros_BTD) or None, batch.loss_mask_BT, batch.document_BT)
        needed = [{name: record[name] for name in (*self.form.states, "tokens")} for record in records]
        return self.form.decode(concatenate(needed), Batch(batch.tokens_BT, batch.loss_mask_BT, batch.document_BT, members), self.taps)

    def prefetch(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for row in documents_of(batch):
                for tokens_T in row:
                    self._begin(tokens_T)

    def _begin(self, tokens_T: Tensor) -> None:
        key = tokens_T.numpy().tobytes()
        if key not in self.waiting:
            self.waiting[key] = self.pool.submit(self._ask, tokens_T.tolist())

    def _ask(self, tokens: list[int]) -> tuple[Answer, bool]:
        """Return the answer, and whether it is to be checked: by whoever uses it, since memory for logits stays with a thread."""
        with self.lock:
            checked = self.count < CHECKED_FIRST or self.count % self.settings.check_every == 0
            self.count += 1
        answer = self.servers.ask(tokens, **(asked(len(tokens), self.backbone.vocab) if checked else {}))
        require_whole(answer, tokens, self.layers, self.backbone.embed.weight)
        return answer, checked

    def _record(self, tokens_T: Tensor) -> Record:
        self._begin(tokens_T)  # two equal documents of a batch
        try:
            answer, checked = self.waiting.pop(tokens_T.numpy().tobytes()).result()
            if checked:
                self.check(answer)
        except UserError as error:
            raise FeaturesLost(str(error)) from None
        return self.record(answer.hidden_TLD)

    @torch.no_grad()
    def check(self, answer: Answer) -> Tensor:
        with self.checking:
            hidden_TD = answer.hidden_TLD[:, -1].to(self.backbone.device, self.backbone.dtype)
            return check(answer, hidden_TD, self.norm, self.backbone.readout)

    @torch.no_grad()
    def record(self, hidden_TLD: Tensor) -> Record:
        """Return a sample's states by name, the final one normed as the backbone does it, on its device."""
        hidden_LTD = hidden_TLD.to(self.backbone.device, self.backbone.dtype).transpose(0, 1).contiguous()
        states = {f"tap.{layer}": states_TD for layer, states_TD in zip(self.layers, hidden_LTD, strict=True)}
        return {"hidden": self.norm(hidden_LTD[-1]), **states, "tokens": torch.tensor([hidden_LTD.shape[1]])}

    def probe(self, tokens_1T: Tensor) -> Features:
        record = self._record(tokens_1T[0].cpu())
        return Features(tokens_1T, record["hidden"][None], {layer: record[f"tap.{layer}"][None] for layer in self.layers})

    def close(self) -> None:
        self.servers.close()
        self.pool.shutdown(cancel_futures=True)
        self.servers.close()  # of requests that have ended meanwhile


def documents_of(batch: Batch) -> list[list[Tensor]]:
    """Return the tokens of each document of each row, on the CPU."""
    tokens_BT, document_BT = batch.tokens_BT.cpu(), batch.document_BT.cpu()
    rows = []
    for tokens_T, document_T in zip(tokens_BT, document_BT, strict=True):
        kept_T = document_T >= 0
        rows.append(list(tokens_T[kept_T].split(torch.bincount(document_T[kept_T]).tolist())))
    return rows


class KeptFeatures(ServedFeatures):
    """Keeps the states of answers, and reads samples from them; what is not kept is asked of the servers again."""

    lacks_last = True

    def __init__(self, recipe: Recipe, backbone: HeadOnlyBackbone, taps: tuple[int, ...]) -> None:
        super().__init__(recipe.features, backbone, taps)
        assert recipe.cache.dir is not None
        self.folder, self.longest = Path(recipe.cache.dir) / FOLDER, recipe.data.max_length
        self.stored = CacheFormat.of(backbone, taps, recipe.cache.dtype)
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
        # Cut, or the last row again, which the server has not computed.
        place_T = torch.arange(length).clamp(max=int(encoded["tokens"]) - 1)
        cut = {name: states_TD[place_T].to(self.backbone.device) for name, states_TD in states.items()}
        return cut | {"tokens": torch.tensor([length])}

    def discard(self) -> None:
        """Delete what was kept: the cache has it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _name(tokens: Sequence[int]) -> str:
    digest = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).hexdigest()[:32]
    return f"{len(tokens)}-{digest}.safetensors"
