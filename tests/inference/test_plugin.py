"""Without the package for CPUs everything decodes, and one line says how to get it; one that cannot be loaded is named."""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from families import backbone, heads, left_padded, prompts, random_drafter, say

from headstart.cli.main import main
from headstart.inference.capture import captured
from headstart.inference.capture import plugin as plugins
from headstart.inference.generate import SpeculativeModel


@pytest.fixture(params=["none", "broken"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package, or one whose module is missing."""
    points = [EntryPoint("cpu", "no_such_package:CPU", plugins.GROUP)] if request.param == "broken" else []
    monkeypatch.setattr(plugins, "entry_points", lambda **of: points)
    for cached in (plugins.plugin, captured.warn_once):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    plugins.plugin.cache_clear()


@pytest.mark.matrix
@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sample", [False, True])
def test_decodes_the_same_text(dtype: torch.dtype, sample: bool, caplog: pytest.LogCaptureFixture) -> None:
    on = type(backbone("llama"))(backbone("llama").model.__class__(backbone("llama").config).to(dtype).eval().requires_grad_(False))
    of, rows = SpeculativeModel(on, random_drafter("eagle3", on)), left_padded(prompts((5, 9)))
    options = {"max_new_tokens": 40, "do_sample": sample, "seed": 3} if sample else {"max_new_tokens": 40}
    with caplog.at_level(logging.WARNING):
        drafted = say(of, rows, **options)
        plain = say(of, rows, **options, speculate=False)
    assert torch.equal(drafted, plain)
    assert sum("pip install ./plugins/headstart-cpu" in line for line in caplog.messages) == 1
    assert of.engine(True).capturer.report().backend == "off"


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("words", [["compile", "embedded"], ["generate", "--heads", "embedded", "--capture", "trace", "x"]])
def test_what_needs_it_says_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "pip install ./plugins/headstart-cpu" in line


def test_it_is_installed_with_the_project() -> None:
    assert plugins.plugin() is not None and Path(plugins.plugin().__class__.__module__.split(".")[0]).name == "headstart_cpu"
    assert heads("llama", "medusa").engine(True).capturer.backend is plugins.required().trace
