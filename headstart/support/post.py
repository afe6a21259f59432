"""Requests to servers with OpenAI's API. Answers are bounded: a server that sends a byte now and then, or never stops, is cut off."""

import os
import time
from typing import Any

import httpx2

from headstart.support.errors import UserError, one_line
from headstart.support.json_text import parse_json, repaired

MAX_BYTES = 64 << 20
"""Size of an answer."""
RETRIABLE = (408, 409, 425, 429)
"""Statuses below 500 that may pass; all from 500 may."""


class Passing(Exception):
    """There is no answer, or none of a sound server, this time; the message says how."""

    def __init__(self, problem: str, after: float = 0.0) -> None:
        """``after``: the seconds until the server wants to be asked again."""
        super().__init__(problem)
        self.after = after


class NoProtocol(Passing):
    """What is answered is not OpenAI's protocol."""


class Refusal(Exception):
    """A status that asking again does not change."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class Client:
    """Sends the key of ``section`` of the recipe, if any, and shows it to nobody."""

    def __init__(self, section: str, api_key: str | None, timeout: float, connections: int) -> None:
        """``api_key``: the environment variable with the key. Raises UserError if it is not set. No request is sent."""
        key = self.key = None if api_key is None else os.environ.get(api_key)
        if api_key is not None and not key:
            raise UserError(f"{section}.api_key={api_key} names no environment variable that is set; set it, or null for no key")
        self.timeout, headers = timeout, {"Authorization": f"Bearer {key}"} if key else None
        self.http = httpx2.Client(headers=headers, timeout=timeout, limits=httpx2.Limits(max_connections=connections))

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON and return the answer's. Raises Passing, NoProtocol or Refusal."""
        try:
            status, after, text = self._send(url, body)
        except httpx2.RequestError as error:
            raise Passing(f"{type(error).__name__}: {self.shown(str(error))}") from None
        problem = f"status {status}: {self.shown(text) or '(no body)'}"
        if status >= 500 or status in RETRIABLE:
            raise Passing(problem, float(after) if after.isdecimal() else 0.0)  # a date is not followed
        if status != 200:
            raise Refusal(status, problem)
        try:
            answer = repaired(parse_json(text, url, whole_characters=False))
        except UserError:
            answer = None
        if not isinstance(answer, dict):
            raise self.no_protocol(text)
        return answer

    def _send(self, url: str, body: dict[str, Any]) -> tuple[int, str, str]:
        """Return the status, Retry-After and text of the answer. A client's own time limit holds between two pieces of it only."""
        end, content = time.monotonic() + self.timeout, bytearray()
        with self.http.stream("POST", url, json=body) as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_BYTES:
                    raise httpx2.ReadError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise httpx2.ReadTimeout(f"the answer did not end within {self.timeout:g} s")
        return response.status_code, response.headers.get("retry-after", ""), content.decode(errors="replace")

    def no_protocol(self, answer: object) -> NoProtocol:
        return NoProtocol(f"does not answer as OpenAI's protocol has it: {self.shown(str(answer))}")

    def shown(self, text: str) -> str:
        """Shorten what a server says, without control characters and without the key, which it may echo."""
        return one_line(" ".join((text.replace(self.key, "(the key)") if self.key else text).split()), 300)

    def close(self) -> None:
        self.http.close()
