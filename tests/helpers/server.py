"""A small server that implements the part of OpenAI's protocol that ``regenerate`` uses, scripted by a test."""

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone, load_tokenizer

Reply = tuple[int, Any]
"""HTTP status and body: a mapping sent as JSON, or text."""


class Server:
    """Answers with ``reply(path, body)``; keeps the requests and the highest number of concurrent ones."""

    def __init__(self, reply: Callable[[str, dict[str, Any]], Reply], seconds: float = 0.0) -> None:
        self.reply, self.seconds = reply, seconds
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        with self.lock:
            self.asked.append(body)
            self.headers.append(headers)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self.lock:  # one at a time, so that a script can count requests
            self.at_once -= 1
            return self.reply(path, body)


def said(content: str | None, finish: str = "stop", tokens: int = 3, **fields: Any) -> Reply:
    """A complete chat answer."""
    message = {"role": "assistant", "content": content, **fields}
    return 200, {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": tokens}}


@contextmanager
def in_thread(server: BaseServer) -> Iterator[None]:
    """Serve in a thread while the block runs, then close the server."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(answer: Callable[[str, dict[str, Any], dict[str, str]], Reply]) -> Iterator[str]:
    """Serve JSON in the block; yields the address. ``answer(path, body, headers)`` may raise ConnectionAbortedError: no answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, reply = answer(self.path, body, dict(self.headers))
            except ConnectionAbortedError:
                self.connection.close()
                return
            content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Silence the request log."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    loud = http.handle_error
    http.handle_error = lambda *by: None if isinstance(sys.exception(), ConnectionError) else loud(*by)  # type: ignore[method-assign]
    with in_thread(http):
        yield f"http://127.0.0.1:{http.server_port}"


@contextmanager
def serving(reply: Callable[[str, dict[str, Any]], Reply], seconds: float = 0.0) -> Iterator[Server]:
    """Run the server in the block; its ``url`` is a value for ``regenerate.endpoint``."""
    server = Server(reply, seconds)
    with answering(lambda path, body, headers: server.answer(path.removeprefix("/v1"), body, headers)) as url:
        server.url = f"{url}/v1"
        yield server


# A stand-in for a vLLM server of hidden states: a tiny model in a thread, files and locks as its connector's, and its faults.

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden states [T, L, D], tokens [T]) as they are -> as the file has them."""


class StatesServer:
    """Serves the hidden states of ``layers``; a script may change files, and what is done with a request."""

    def __init__(self, backbone: Backbone, folder: Path, layers: tuple[int, ...], name: str) -> None:
        self.backbone, self.folder, self.layers, self.name, self.url = backbone, folder, layers, name, ""
        self.asked: list[dict[str, Any]] = []
        self.change: Change = lambda hidden, tokens: (hidden, tokens)
        self.before: Callable[[int], str] = lambda number: ""
        """By the number of a request, what happens to it: "" is answered, "die", "busy", "no file", "slow", "torn", "other user"."""
        self.readout: Callable[[Tensor], Tensor] = backbone.readout
        self.choose: Callable[[Tensor], int] = lambda log_probs: int(log_probs.argmax())
        self.lock = threading.Lock()
        tokenizer = load_tokenizer(backbone.name)
        self.encode: Callable[[str], list[int]] = lambda text: list(tokenizer(text)["input_ids"])
        self.decode: Callable[[list[int]], str] = tokenizer.decode
        folder.mkdir(parents=True, exist_ok=True)

    def states(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            read = self.backbone.read(torch.tensor([tokens]), taps=self.layers)
        assert read.taps is not None
        return torch.stack([read.taps[layer][0] for layer in self.layers], 1)

    def log_probs(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return self.readout(self.backbone.read(torch.tensor([tokens])).hidden_BTD)[0].float().log_softmax(-1)

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.asked.append(body)
            fate = self.before(len(self.asked))
            if fate == "die":
                raise ConnectionAbortedError
            if fate == "busy":
                return 503, {"error": "overloaded"}
            if body["model"] != self.name:
                return 404, {"error": f"The model `{body['model']}` does not exist."}
            return 200, self._answered(body, fate)

    def _answered(self, body: dict[str, Any], fate: str) -> dict[str, Any]:
        prompt = body["prompt"]
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        written: list[int] = []
        values: list[float] = []
        for _ in range(body["max_tokens"]):
            log_probs = self.log_probs([*tokens, *written])[-1]
            written.append(self.choose(log_probs))
            values.append(float(log_probs[written[-1]]))
        whole = tokens + written[:-1] if body["kv_transfer_params"]["include_output_tokens"] else tokens
        hidden, ids = self.change(self.states(whole), torch.tensor(whole))
        file = self.folder / f"cmpl-{body['request_id']}-0.safetensors"
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(file, lock, {"hidden_states": hidden, "token_ids": ids}, fate)).start()
        choice: dict[str, Any] = {"text": self.decode(written), "token_ids": written, "prompt_token_ids": tokens, "finish_reason": "length"}
        if "logprobs" in body:
            choice["logprobs"] = {"token_logprobs": values}
        if "prompt_logprobs" in body:
            before = self.log_probs(tokens)
            tops = [{str(int(one.argmax())): {"logprob": float(one.max())}, str(token): {"logprob": float(one[token])}}
                    for one, token in zip(before, tokens[1:], strict=False)]  # fmt: skip
            choice["prompt_logprobs"] = [None, *tops]
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(file)}}

    def _write(self, file: Path, lock: int, tensors: dict[str, Tensor], fate: str) -> None:
        """As the connector does, after the answer: under a temporary name, renamed, then the lock is released."""
        time.sleep(0.3 if fate == "slow" else 0.005)
        if fate != "no file":
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{file}.tmp")
            if fate == "torn":
                Path(f"{file}.tmp").write_bytes(Path(f"{file}.tmp").read_bytes()[:-30])
            os.replace(f"{file}.tmp", file)
        os.close(lock)


@contextmanager
def states_server(
    backbone: Backbone, folder: Path, layers: tuple[int, ...], name: str, kind: type[StatesServer] = StatesServer
) -> Iterator[StatesServer]:
    """Serve in the block; ``url`` is a value for ``features.endpoint``."""
    server = kind(backbone, folder, layers, name)
    with answering(lambda path, body, headers: server.answer(body)) as server.url:
        yield server
