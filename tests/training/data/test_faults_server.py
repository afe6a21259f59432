"""A server that is slow, wrong, partial, busy, broken or silent costs a wait or one line; what was answered is kept, and the next run asks
for the rest."""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_templates import read_rows
from server import in_thread
from test_endpoint import questions

from headstart.support import post
from headstart.training.regenerate import endpoint

Manner = Callable[[Any, str], None]
"""Answers a question by writing to the connection."""


def head(status: str, length: int | None, *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *([] if length is None else [f"Content-Length: {length}"]), "Connection: close", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def body(question: str) -> bytes:
    message = {"role": "assistant", "content": f"to {question}"}
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}).encode()


def right(out: Any, question: str) -> None:
    out.write(head("200 OK", len(body(question))) + body(question))


def slow(out: Any, question: str) -> None:
    for byte in head("200 OK", len(body(question))) + body(question):
        out.write(bytes([byte]))
        out.flush()
        time.sleep(0.0005)


def sends(status: str, content: bytes, *more: str, length: int | None = None) -> Manner:
    return lambda out, question: out.write(head(status, len(content) if length is None else length, *more) + content)


def partial(out: Any, question: str) -> None:
    out.write(head("200 OK", len(body(question))) + body(question)[:-20])


def trickles(out: Any, question: str) -> None:
    """A byte now and then, without end."""
    out.write(head("200 OK", None))
    end = time.monotonic() + 20
    while time.monotonic() < end:
        out.write(b" ")
        out.flush()
        time.sleep(0.05)


def floods(out: Any, question: str) -> None:
    out.write(head("200 OK", None))
    for _ in range(200):
        out.write(b" " * (1 << 16))


def silent(out: Any, question: str) -> None:
    time.sleep(1.0)


def closes(out: Any, question: str) -> None:
    """Nothing is sent before the connection ends."""


PASSING: dict[str, Manner] = {
    "slow": slow, "partial": partial, "trickles": trickles, "floods": floods, "silent": silent, "closes": closes,
    "no gzip": sends("200 OK", b"this is no gzip", "Content-Encoding: gzip"),
    "no HTTP": lambda out, question: out.write(b"\x00\x01\x02 what?\r\n\r\n"),
    "short": sends("200 OK", b"{}", length=500),
}  # fmt: skip
"""Faults that pass: the same request is sent again."""
LASTING: dict[str, Manner] = {
    "array": sends("200 OK", b"[]"), "empty": sends("200 OK", b""),
    "redirect": sends("302 Found", b"", "Location: http://127.0.0.1:1/"),
}  # fmt: skip
"""Faults that asking again does not mend: the run ends. (Statuses and other bodies are test_endpoint's.)"""


SIX, HOW = questions(6), ("regenerate.concurrency=1", "regenerate.retries=2", "regenerate.timeout=0.5")


class Server(socketserver.ThreadingTCPServer):
    """Serves connections in the manner ``script`` says for the number of a request, from 0."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, script: Callable[[int], Manner]) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.script, self.asked, self.counting = script, 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Connection(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        lines = list(iter(self.rfile.readline, b"\r\n"))
        length = next(int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length"))
        question = json.loads(self.rfile.read(length))["messages"][-1]["content"]
        with self.server.counting:
            number, self.server.asked = self.server.asked, self.server.asked + 1
        try:
            self.server.script(number)(self.wfile, question)
        except OSError:  # the client has gone
            pass


@contextmanager
def serving(script: Callable[[int], Manner]) -> Iterator[Server]:
    server = Server(script)
    with in_thread(server):
        yield server


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "MAX_BYTES", 1 << 20)


def require_all(folder: Path) -> None:
    assert [row["messages"][-1]["content"] for row in read_rows(folder / "new.jsonl")] == [f"to question {i}" for i in range(6)]


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes(ask_server: Any, tmp_path: Path, name: str) -> None:
    """The third request meets it."""
    with serving(lambda number: PASSING[name] if number == 2 else right) as server:
        assert ask_server(SIX, server.url, *HOW) == 0
        assert server.asked == (6 if name == "slow" else 7)
    require_all(tmp_path)


def test_an_answer_that_comes_together_with_a_fault_is_kept(ask_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def faults_first(futures: Any, return_when: str) -> Any:
        return sorted(wait(futures).done, key=lambda future: future.exception() is None), set()

    monkeypatch.setattr(endpoint, "wait", faults_first)  # two at a time: the third request is answered, the fourth meets the fault
    with serving(lambda number: right if number < 3 else LASTING["array"]) as server:
        assert ask_server(SIX, server.url, *HOW) == 2
        server.script = lambda number: right
        assert ask_server(SIX, server.url, *HOW) == 0 and server.asked == 4 + 3


@pytest.mark.parametrize("name", [*(name for name in PASSING if name != "slow"), *LASTING])
def test_a_fault_that_stays_ends_the_run_and_the_next_one_goes_on(ask_server: Any, tmp_path: Path, capsys: Any, name: str) -> None:
    manner = (PASSING | LASTING)[name]
    start = time.monotonic()
    with serving(lambda number: right if number < 3 else manner) as server:
        assert ask_server(SIX, server.url, *HOW) == 2
        said = capsys.readouterr().err
        [line] = [line for line in said.splitlines() if line.startswith("error")]
        assert "Traceback" not in said and server.url in line
        assert ("gave no answer in 3 attempts" in line) == (name in PASSING)
        assert time.monotonic() - start < 15, "bounded by timeout and retries"
        assert not (tmp_path / "new.jsonl").exists()
    with serving(lambda number: right) as another:  # with the same model
        assert ask_server(SIX, another.url, *HOW) == 0
        assert another.asked == 3, "what was answered is not asked again"
    require_all(tmp_path)
