"""Hidden states of given tokens from vLLM servers that extract them (``extract_hidden_states`` of vLLM 0.32), through a folder; and the
line that starts such a server of a recipe on this machine (``headstart serve-features``).

A request for one generated token has the server write a safetensors file with ``hidden_states`` ``[T, layers, D]``, the layers in
ascending order and without their numbers, and ``token_ids`` ``[T]``. Layer l is the residual stream after l layers, the last one before the
final norm.
The answer names the file and comes before it: the server holds a lock beside it until the file is there. A file appears whole, or not at
all where the disk is full or the server dies. One prompt a request: of several only the first one's file is named.

Shape suffixes: T positions, L layers, D width.
"""

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.support.devices import NAMES
from headstart.support.errors import UserError
from headstart.support.files import require_folder
from headstart.support.hub import inside, resolve
from headstart.support.post import Client, Passing, Refusal
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.training import Features

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds that a failing server rests, doubled for each further failure up to the maximum."""
GRACE = 2.0
"""Seconds in which a file must follow its lock, on shared disks that are slow to show it."""
MISSING_FILES = 4
"""Answers without a file after which the run ends."""
STALE = 3600.0
"""Age in seconds from which files that runs have left behind are deleted."""
PREFIX = "headstart-"
START = "start the server as headstart serve-features RECIPE prints it"
CONNECTOR, ON_CPU = "ExampleHiddenStatesConnector", "HiddenStatesOnCPU"
"""vLLM's own connector, and the one for its CPU build."""


@dataclass(frozen=True)
class Answer:
    """What a server gave for one sample."""

    hidden_TLD: Tensor
    tokens: list[int]
    """The tokens of these positions, as the server has them."""
    generated: list[int]
    choice: dict[str, Any]
    """The rest of the answer."""
    url: str


class Servers:
    """Asks the servers of ``features.endpoint`` in turn, passing over those that fail until they have rested."""

    def __init__(self, settings: Features, layers: tuple[int, ...], model: str) -> None:
        """``layers``: those that the servers extract, ascending. Raises UserError if the key is not in the environment."""
        assert settings.endpoint is not None
        self.settings, self.layers, self.model = settings, layers, settings.model or model
        self.urls, self.folder = [url.rstrip("/").removesuffix("/v1") for url in settings.endpoint], Path(settings.folder)
        self.client = Client("features", settings.api_key, settings.timeout, settings.concurrency)
        self.run, self.numbers = f"{PREFIX}{os.urandom(6).hex()}", count()
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.turn, self.missing = 0, 0
        self.resting: dict[str, tuple[float, int]] = {}
        """Address -> until when it rests, and how often it has failed in a row."""
        self._sweep()

    def ask(self, tokens: Sequence[int], **options: Any) -> Answer:
        """Return the hidden states of the tokens. ``options``: further parameters of the request.

        Raises UserError if the servers refuse it, or all fail for ``features.patience``.
        """
        body = {
            "model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": False}, **options,
        }  # fmt: skip
        end, problem = time.monotonic() + self.settings.patience, ""
        while not self.stopped.is_set():
            url, wait = self._next()
            if time.monotonic() + wait > end or self.stopped.wait(wait):
                break
            try:
                answer = self._ask(url, body)
                with self.lock:
                    self.resting.pop(url, None)
                return answer
            except Passing as passing:
                problem = f"{url}: {passing}"
                with self.lock:
                    failures = self.resting.get(url, (0.0, 0))[1] + 1
                    self.resting[url] = (time.monotonic() + min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1)), failures)
        remedy = "see that a server of features.endpoint runs; the same command then goes on from here"
        fault = f"no hidden states for {self.settings.patience:g} s (features.patience), at last {problem or 'since the run ends'}"
        raise UserError(f"{fault}; {remedy}")

    def _next(self) -> tuple[str, float]:
        """Return the server whose turn it is among those that do not rest, or the one that rests least, and the seconds until then."""
        with self.lock:
            self.turn += 1
            order = [self.urls[(self.turn + i) % len(self.urls)] for i in range(len(self.urls))]
            waits = {url: max(0.0, self.resting.get(url, (0.0, 0))[0] - time.monotonic()) for url in order}
            url = min(order, key=lambda endpoint: waits[endpoint])
            return url, waits[url]

    def _ask(self, url: str, body: dict[str, Any]) -> Answer:
        try:
            answer = self.client.post(f"{url}/v1/completions", body | {"request_id": self.new_id()})
        except Refusal as refusal:
            raise UserError(f"{url} {self._refused(refusal)}") from None
        try:
            return self.taken(answer, url)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self.client.no_protocol(answer) from None

    def new_id(self) -> str:
        """Return an id for a request, which the server makes part of the file's name: by it abandoned ones are found."""
        return f"{self.run}-{next(self.numbers)}"

    def taken(self, answer: dict[str, Any], url: str) -> Answer:
        """Return the server's answer with the states of its file, which is deleted. Raises Passing (none this time) or UserError."""
        choice = answer["choices"][0]
        params = answer.get("kv_transfer_params") or choice.get("kv_transfer_params") or {}
        generated, path = choice.get("token_ids") or [], params.get("hidden_states_path")
        if not isinstance(path, str):
            raise UserError(f"{url} gives no hidden states; {START}, or one that does")
        tensors = self._take(Path(path).name, url)
        hidden_TLD, tokens = tensors.get("hidden_states"), tensors.get("token_ids")
        if hidden_TLD is None or tokens is None or hidden_TLD.ndim != 3:
            raise UserError(f"{url} writes {sorted(tensors)}, not hidden_states [tokens, layers, width] and token_ids; vLLM 0.32 does")
        return Answer(hidden_TLD, tokens.tolist(), list(generated), choice, url)

    def _refused(self, refusal: Refusal) -> str:
        if refusal.status == 404:
            return f"does not serve {self.model!r} ({refusal}); {START}, or name it by features.model"
        if refusal.status in (401, 403):
            return f"refuses with {refusal}; name the environment variable that holds the key with features.api_key"
        return f"refuses a sample with {refusal}; {START}, whose --max-model-len holds data.max_length"

    def _take(self, name: str, url: str) -> dict[str, Tensor]:
        """Read and delete a file of hidden states, when the server has written it."""
        file, lock = inside(self.folder, name), inside(self.folder, f"{name}.lock")
        try:
            if lock.exists():  # not every connector locks
                with FileLock(lock, self.settings.timeout, poll_interval=0.005):
                    pass
            end = time.monotonic() + GRACE
            while not file.exists() and time.monotonic() < end:
                time.sleep(0.01)
            content = file.read_bytes()  # not mapped, since it is deleted now
        except Timeout:
            raise Passing("holds the lock of a file that it does not write") from None
        except FileNotFoundError:
            self._count_missing(url)
            raise Passing("answered but wrote no file") from None
        except PermissionError:
            raise UserError(f"{file} belongs to another user, as which it alone can be read; run server and training as one user") from None
        finally:
            lock.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
        try:
            return load(content)
        except SafetensorError as error:
            raise Passing(f"{name} is damaged ({error})") from None

    def _count_missing(self, url: str) -> None:
        with self.lock:
            self.missing += 1
        if not self.folder.is_dir() or self.missing >= MISSING_FILES * len(self.urls):
            here = "" if self.folder.is_dir() else ", which is not there"
            remedy = "it writes to another folder, or its disk is full; give both the same folder, with room"
            raise UserError(f"{url} answers but its files do not arrive in features.folder={self.folder}{here}: {remedy}")

    def _sweep(self) -> None:
        """Delete files that requests without a reader have left: this run's, and `STALE` ones of others."""
        for file in self.folder.glob(f"*{PREFIX}*") if self.folder.is_dir() else ():
            try:
                if self.run in file.name or time.time() - file.stat().st_mtime > STALE:
                    file.unlink()
            except OSError:  # another run's, or gone
                continue

    def close(self) -> None:
        """End requests that wait, and delete what they leave behind."""
        self.stopped.set()
        self.client.close()
        self._sweep()


def extracted(taps: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the layers that a server extracts for these taps: the last one too, from which the final hidden state is made."""
    return tuple(sorted({*taps, layers}))


def served_name(path: str, layers: tuple[int, ...]) -> str:
    """Return a model's name on a server that extracts these layers: files do not name theirs, so a server of others is told by it."""
    return f"{Path(path).name or path}-layers-{'-'.join(map(str, layers))}"


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
        *(["--dtype", NAMES[section.dtype]] if section.dtype in NAMES else []),
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
