"""A small server that implements the part of OpenAI's protocol that ``regenerate`` uses, scripted by a test."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any

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
    with in_thread(http):
        yield f"http://127.0.0.1:{http.server_port}"


@contextmanager
def serving(reply: Callable[[str, dict[str, Any]], Reply], seconds: float = 0.0) -> Iterator[Server]:
    """Run the server in the block; its ``url`` is a value for ``regenerate.endpoint``."""
    server = Server(reply, seconds)
    with answering(lambda path, body, headers: server.answer(path.removeprefix("/v1"), body, headers)) as url:
        server.url = f"{url}/v1"
        yield server
