"""The loop of a driver for benchmarks/peers.py (see peers_engines.py), by the standard library alone, in an engine's environment."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Found = dict[str, Any]


def answer(load: Callable[[Found], tuple[Any, Found]], write: Callable[[Any, Found, Found], Found]) -> None:
    """Answer lines until there are no more: the first, the job, by what is said of the engine, and the others by what it writes.

    The file descriptor of the answers is the program's argument. What goes wrong is an answer: the refusals of engines are of many types.
    """
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        engine, job = None, {}
        for line in sys.stdin:
            try:
                asked = json.loads(line)
                if engine is None:
                    job = asked
                    engine, found = load(job)
                else:
                    found = write(engine, job, asked)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), file=answers, flush=True)
