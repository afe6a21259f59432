"""Features from servers of the backbone: asked for ahead, while earlier steps compute, normed here, checked, and kept nowhere.

Shape suffixes: B batch, T positions, L layers, D width.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.backbone.shipped import resolve
from headstart.support.errors import UserError
from headstart.support.files import require_folder
from headstart.training.data.batches import Batch
from headstart.training.features.arrival import asked, check, require_whole
from headstart.training.features.codec import CacheFormat, Record, concatenate
from headstart.training.features.server import Answer, Servers
from headstart.training.features.source import FeatureSource
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.served import Features as Settings

CHECKED_FIRST = 8
"""Samples, the first ones, that are all checked."""


class FeaturesLost(UserError):
    """No hidden states arrive, or wrong ones: the run ends, and goes on from its last step."""


class ServedFeatures(FeatureSource):
    """Asks servers for the hidden states of each document of a batch alone; the backbone here has no layers."""

    def __init__(self, settings: Settings, backbone: HeadOnlyBackbone, taps: tuple[int, ...]) -> None:
        """Raises UserError for settings that cannot be. No request is sent."""
        self.settings, self.backbone, self.taps, self.ahead = settings, backbone, taps, settings.prefetch
        self.norm = backbone.norm
        self.layers = extracted(taps, backbone.num_layers)
        self.servers = Servers(settings, self.layers, served_name(backbone.name, self.layers))
        self.form = CacheFormat(tuple(sorted(taps)), backbone.dim, backbone.dtype, "exact")
        self.pool = ThreadPoolExecutor(settings.concurrency, "features")
        self.waiting: dict[bytes, Future[tuple[Answer, bool]]] = {}
        """Hidden states asked for and not used yet, by the bytes of their tokens."""
        self.lock, self.count = threading.Lock(), 0
        self.checking = threading.Lock()
        """Held by a check, since logits are large."""

    def read(self, batch: Batch) -> Features:
        rows = documents_of(batch)
        documents = [tokens_T for row in rows for tokens_T in row]
        for tokens_T in documents:
            self._begin(tokens_T)
        records = [self._record(tokens_T) for tokens_T in documents]
        members = tuple(tuple(range(len(row))) for row in rows)
        if not records:  # padding alone
            return self._empty(batch)
        needed = [{name: record[name] for name in (*self.form.states, "tokens")} for record in records]
        return self.form.decode(concatenate(needed), Batch(batch.tokens_BT, batch.loss_mask_BT, batch.document_BT, members), self.taps)

    def _empty(self, batch: Batch) -> Features:
        zeros_BTD = torch.zeros(*batch.tokens_BT.shape, self.backbone.dim, dtype=self.backbone.dtype, device=batch.tokens_BT.device)
        return Features(batch.tokens_BT, zeros_BTD, dict.fromkeys(self.taps, zeros_BTD) or None, batch.loss_mask_BT, batch.document_BT)

    def prefetch(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for row in documents_of(batch):
                for tokens_T in row:
                    self._begin(tokens_T)

    def _begin(self, tokens_T: Tensor) -> None:
        key = _key(tokens_T)
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
            answer, checked = self.waiting.pop(_key(tokens_T)).result()
            if checked:
                self.check(answer)
        except UserError as error:
            raise FeaturesLost(str(error)) from None
        return self.record(answer.hidden_TLD)

    @torch.no_grad()
    def check(self, answer: Answer) -> Tensor:
        """See `check`."""
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
        lengths = torch.bincount(document_T[kept_T]).tolist() if kept_T.any() else []
        rows.append(list(tokens_T[kept_T].split(lengths)) if lengths else [])
    return rows


def extracted(taps: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the layers that a server extracts for these taps: the last one too, from which the final hidden state is made."""
    return tuple(sorted({*taps, layers}))


def served_name(path: str, layers: tuple[int, ...]) -> str:
    """Return a model's name on a server that extracts these layers: files do not name theirs, so a server of others is told by it."""
    return f"{Path(path).name or path}-layers-{'-'.join(map(str, layers))}"


def _key(tokens_T: Tensor) -> bytes:
    return tokens_T.numpy().tobytes()


# ``headstart serve-features``: the line that starts a vLLM server of a recipe's hidden states on this machine.

CONNECTOR, ON_CPU = "ExampleHiddenStatesConnector", "HiddenStatesOnCPU"
"""vLLM's own connector, and the one for its CPU build."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Line:
    """A command with the environment variables that it needs."""

    command: list[str]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *(shlex.quote(word) for word in self.command)])


def server_line(recipe: Recipe, taps: tuple[int, ...], layers: int, *, port: int, gpus: int | None, cpu: bool) -> Line:
    """Return the line for a backbone of so many layers and these taps. Raises UserError for a backbone that vLLM cannot take so."""
    section, served = recipe.backbone, recipe.features
    if find_gguf(section.path) is not None:
        raise UserError(f"backbone {section.path} is a GGUF file; hidden states are served of a folder or hub id with safetensors")
    chosen = extracted(taps, layers)
    speculative = {
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(chosen)}},
    }  # fmt: skip
    transfer: dict[str, Any] = {"kv_connector": ON_CPU if cpu else CONNECTOR, "kv_role": "kv_producer"}
    transfer |= {"kv_connector_module_path": "hidden_states_on_cpu"} if cpu else {}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(Path(served.folder).absolute())}
    length = recipe.data.max_length + 1  # a request asks for one token more
    if recipe.cache.dir is not None and recipe.regenerate.out is not None:
        length = recipe.data.max_length + recipe.regenerate.max_new_tokens
    command = [
        *(["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if cpu else ["vllm", "serve"]), resolve(section.path),
        "--served-model-name", served.model or served_name(section.path, chosen), "--port", str(port),
        "--max-model-len", str(length), "--max-num-batched-tokens", str(max(length, 8192)), "--no-enable-prefix-caching",
        "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer),
        *(["--dtype", DTYPES[section.dtype]] if section.dtype in DTYPES else []),
        *(["--tensor-parallel-size", str(gpus)] if gpus and gpus > 1 else []),
        *(["--trust-remote-code"] if section.trust_remote_code else []), *(["--enforce-eager"] if cpu else []),
    ]  # fmt: skip
    return Line(command, {"PYTHONPATH": str(Path(__file__).parent / "connector"), "VLLM_CPU_KVCACHE_SPACE": "4"} if cpu else {})


def run_server(line: Line, folder: str) -> None:
    """Become the server. Raises UserError if vLLM is not installed here, or its folder cannot be written."""
    require_folder("features.folder", folder).mkdir(parents=True, exist_ok=True)
    if find_spec("vllm") is None:
        raise UserError("--run starts vLLM from this environment, which has none: pip install vllm, or run the printed line in another one")
    command = line.command if line.command[0] != "python" else [sys.executable, *line.command[1:]]
    os.execvpe(command[0], command, {**os.environ, **line.environment})


def on_cpu() -> bool:
    """Return True if this machine has no accelerator."""
    return not torch.accelerator.is_available()
