"""Requests whose answers are bounded: a server that sends a byte now and then, or never stops, is cut off."""

from __future__ import annotations

import time
from typing import Any

import httpx2

MAX_BYTES = 64 << 20
"""Size of an answer."""


def post(client: httpx2.Client, url: str, body: dict[str, Any], seconds: float) -> httpx2.Response:
    """Send JSON and read the whole answer.

    Raises httpx2.RequestError: there is no connection, the answer is cut short or not decodable, does not end within ``seconds``, or is
    larger than `MAX_BYTES`. A client's own time limit holds between two pieces of an answer only.
    """
    end, content = time.monotonic() + seconds, bytearray()
    with client.stream("POST", url, json=body) as response:
        for piece in response.iter_bytes():
            content += piece
            if len(content) > MAX_BYTES:
                raise httpx2.ReadError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise httpx2.ReadTimeout(f"the answer did not end within {seconds:g} s")
    after = response.headers.get("retry-after")
    return httpx2.Response(response.status_code, headers={} if after is None else {"retry-after": after}, content=bytes(content))
