"""What is installed: transformers with the KV cache under either of its names or newer than tested, and the package for CPUs, or none."""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, refuses
from families import backbone, heads, left_padded, prompts, random_drafter, say, tiny
from torch import nn
from transformers import DynamicCache

import headstart
from headstart import Backbone, SpeculativeModel
from headstart.heads.backbone import model_config
from headstart.heads.backbone.model_config import CACHE, NAMES, TESTED, say_untested
from headstart.inference.capture import captured
from headstart.inference.capture import plugin as plugins

ROW = {"input_ids": prompts((9,))[0][None].repeat(1, 3)}
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
OTHER = next(name for name in NAMES if name != CACHE)
"""The name in another version."""


class Old:
    """A module of one's own, written for a version that names the cache `past_key_values`."""

    def forward(self, *given: Any, past_key_values: Any = None, **options: Any) -> Any:
        return super().forward(*given, **options | {CACHE: past_key_values})  # type: ignore[misc]


class New:
    """The same for one that names it `cache`."""

    def forward(self, *given: Any, cache: Any = None, **options: Any) -> Any:
        return super().forward(*given, **options | {CACHE: cache})  # type: ignore[misc]


def with_own(part: nn.Module, kind: type[Old | New]) -> None:
    part.__class__ = type(kind.__name__, (kind, type(part)), {})


def test_the_cache_goes_under_the_name_that_transformers_has() -> None:
    """Fails without `CACHE` on 5.24, where custom_generate is given `cache` alone."""
    model = tiny("llama")
    heads = headstart.load(None, backbone=model, proposers="suffix", capture="off")
    cache = DynamicCache()
    out = model.generate(**ROW, **HOW, custom_generate=heads.generate, return_dict_in_generate=True, **{CACHE: cache})
    assert torch.equal(out.sequences, model.generate(**ROW, **HOW))
    assert out[CACHE] is cache and list(out)[-1] != CACHE and cache.get_seq_length() == out.sequences.shape[1] - 1
    plain = model.generate(**ROW, **HOW, return_dict_in_generate=True)
    assert [name for name in out if name in NAMES] == [name for name in plain if name in NAMES] == [CACHE]


@pytest.mark.parametrize("kind", [Old, New])
def test_a_model_of_ones_own_takes_it_under_the_name_of_another_version(kind: type[Old | New]) -> None:
    model = tiny("llama")
    plain = model.generate(**ROW, **HOW)
    with_own(model.model, kind)
    heads = headstart.load(None, backbone=model, proposers="suffix", capture="off")
    assert torch.equal(say(heads, ROW, **HOW), plain)


def test_layers_that_lose_it_are_refused_in_one_line() -> None:
    own, other = (Old, New) if CACHE == NAMES[1] else (New, Old)
    model = tiny("llama")
    for layer in model.model.layers:
        with_own(layer.self_attn, own)
    plain = model.generate(**ROW, **HOW)
    assert torch.equal(say(headstart.load(None, backbone=model, capture="off"), ROW, **HOW), plain)
    for layer in model.model.layers:
        with_own(layer.self_attn, other)
    said = f"^LlamaForCausalLM leaves the KV cache empty, .* calls '{CACHE}': name that argument so"
    assert Backbone(model, trees=False).refusal == refuses(said, headstart.load, None, backbone=model), "it trains"


def test_a_model_whose_own_loop_loses_it() -> None:
    """Headstart's loop calls the decoder; transformers' calls the model, which writes another text then."""
    other = New if CACHE == NAMES[1] else Old
    model = tiny("llama")
    plain, heads = model.generate(**ROW, **HOW), SpeculativeModel(Backbone(model), random_drafter("medusa", Backbone(model)), capture="off")
    with_own(model, other)
    assert not torch.equal(model.generate(**ROW, **HOW), plain), "transformers' own"
    assert torch.equal(say(heads, ROW, **HOW), plain)


@pytest.mark.parametrize("installed, said", [(f"{TESTED}.9", False), ("5.20.0", False), ("5.99.0.dev0", True), ("6.0.0", True)])
def test_a_newer_version_is_named_once(installed: str, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(model_config.transformers, "__version__", installed)
    say_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        Backbone(tiny("llama"))
        Backbone(tiny("llama"))
    lines = [record.getMessage() for record in caplog.records if record.name == model_config.__name__]
    known = f"transformers {installed} is newer than {TESTED}, the newest that headstart was tested with; "
    assert len(lines) == int(said) and all(line.startswith(known) and line.endswith(f"'transformers=={TESTED}.*'") for line in lines)
    say_untested.cache_clear()


# Without the package for CPUs everything decodes, and one line says how to get it; one that cannot be loaded is named.


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
    assert "pip install ./plugins/headstart-cpu" in error_of(capsys, *words)


def test_it_is_installed_with_the_project() -> None:
    assert plugins.plugin() is not None and Path(plugins.plugin().__class__.__module__.split(".")[0]).name == "headstart_cpu"
    assert heads("llama", "medusa").engine(True).capturer.backend is plugins.required().trace
