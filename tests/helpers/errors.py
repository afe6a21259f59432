"""What is said where something is refused: one line. What a command that goes well prints and reports."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headstart.cli.main import main
from headstart.support.errors import UserError

NOTED = ("train", "cache", "regenerate", "inspect", "verify")
"""Commands that say on the way what they have begun with."""


def refusal(call: Callable[..., object], *given: object, **named: object) -> str:
    """The line with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refuses(pattern: str, call: Callable[..., object], *given: object, **named: object) -> str:
    """The same, which has the pattern."""
    line = refusal(call, *given, **named)
    assert re.search(pattern, line), line
    return line


def report_of(folder: Path, *words: object) -> dict[str, Any]:
    """What a command that ends well writes with ``--json``, here to ``report.json`` in the folder."""
    assert main([*map(str, words), "--json", str(folder / "report.json")]) == 0
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def output_of(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    """What a command that ends with this status has printed."""
    assert main([*map(str, words)]) == status
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The error with which a command ends: all that it says, but for such lines."""
    capsys.readouterr()
    try:
        status = main([*map(str, words)])
    except SystemExit as ended:  # by argparse
        status = int(ended.code or 0)
    assert status == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    (error,) = (line for line in lines if line.startswith(("error", "Traceback")))
    assert error.startswith("error: ") and ({*words[:1]} & {*NOTED} or [error] == lines and not printed.out)
    return error
