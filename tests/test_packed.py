"""Products with packed weights equal `F.linear`, with oneDNN in the same bits for any number of rows, and change no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, backbone, left_padded, prompts, random_drafter, say, tiny
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture import forms, packed, trace
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.folding import trace as traced
from headstart.inference.capture.forms import Form, fastest_form, fastest_kind
from headstart.inference.capture.packed import KINDS, Kind, multiply, pack
from headstart.inference.capture.products import PackedFunction
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

AVAILABLE = packed.available(torch.float32)
IN_BF16 = packed.available(torch.bfloat16)
CPU = torch.device("cpu")


@pytest.fixture(params=KINDS[torch.float32])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param not in AVAILABLE:
        pytest.skip(f"this torch has no {request.param}")
    return request.param


@pytest.mark.parametrize("biased", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("shape", [(1, 1, 48), (2, 5, 48), (7, 48), (48,)])
def test_a_packed_product_equals_linear(kind: Kind, shape: tuple[int, ...], biased: tuple[bool, bool]) -> None:
    x, weights = torch.randn(shape), [torch.randn(33, 48), torch.randn(70, 48)]
    biases = [torch.randn(len(weight)) if has else None for weight, has in zip(weights, biased, strict=True)]
    product = multiply(x, pack(weights, biases, kind), kind)
    expected = torch.cat([F.linear(x, *both) for both in zip(weights, biases, strict=True)], -1)
    assert product.shape == expected.shape and torch.allclose(product, expected, atol=1e-4)
    assert torch.equal(product, multiply(x, pack(weights, biases, kind), kind))


@pytest.mark.parametrize("shape", [(320, 192), (192, 512), (192, 192), (1024, 192), (160, 33)])
@pytest.mark.skipif("onednn" not in AVAILABLE, reason="this torch has no oneDNN")
def test_with_onednn_a_row_gives_the_same_bits_alone_and_among_others(shape: tuple[int, int]) -> None:
    """Not so with MKL: on an AMD EPYC up to three rows differ from the same rows among more."""
    x_RK, weight = torch.randn(64, shape[1]), pack([torch.randn(shape)], [None], "onednn")
    together = multiply(x_RK, weight, "onednn")
    for rows in (1, 2, 7, 12, 16, 24):
        assert torch.equal(multiply(x_RK[:rows].contiguous(), weight, "onednn"), together[:rows]), rows


def test_layers_that_read_the_same_input_are_one_product(kind: Kind) -> None:
    weights, bias = [torch.randn(32, 16), torch.randn(8, 16), torch.randn(70, 16)], torch.randn(8)

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        normed = F.rms_norm(x, (16,))
        heads = F.linear(normed, weights[0]).view(x.shape[0], -1, 4, 8).transpose(1, 2)
        return heads, F.linear(normed, weights[1], bias), F.linear(x, weights[2])

    function = PackedFunction(traced(layers, [torch.randn(2, 3, 16)]), kind)
    assert [weight.sizes for weight in function.weights] == [(32, 8), (70,)]
    assert "aten::linear" not in str(function.graph) and str(function.graph).count("linear") == 2
    for shape in ((2, 3, 16), (1, 1, 16), (3, 9, 16)):
        x = torch.randn(shape)
        for one, other in zip(function(x), layers(x), strict=True):
            assert torch.allclose(one, other, atol=1e-4)


def test_captures_share_packed_weights_until_the_weights_change(kind: Kind) -> None:
    weight, other = torch.randn(8, 4), torch.randn(8, 4)
    first = pack([weight], [None], kind)
    assert pack([weight], [None], kind) is first and pack([other], [None], kind) is not first
    weight.mul_(2)
    changed = pack([weight], [None], kind)
    x = torch.randn(3, 4)
    assert changed is not first and torch.allclose(multiply(x, changed, kind), F.linear(x, weight), atol=1e-5)
    before = len(packed._SHARED)
    del first, changed
    assert len(packed._SHARED) < before, "packed weights that no capture uses are freed"


@pytest.mark.skipif(not IN_BF16, reason="this torch packs no weights in bf16")
@pytest.mark.parametrize("shape", [(320, 192), (192, 512), (1024, 192), (96, 2048), (160, 65)])
def test_in_bf16_a_row_gives_the_same_bits_alone_and_among_others(shape: tuple[int, int]) -> None:
    x_RK, weight_NK, bias_N = torch.randn(32, shape[1]).bfloat16(), torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    weight = pack([weight_NK], [bias_N], "onednn")
    together = multiply(x_RK, weight, "onednn")
    assert torch.allclose(together.float(), F.linear(x_RK.float(), weight_NK.float(), bias_N.float()), rtol=0.01, atol=0.1)
    for rows in (1, 2, 7, 12, 16, 24):
        assert torch.equal(multiply(x_RK[:rows].contiguous(), weight, "onednn"), together[:rows]), rows


def test_only_constant_weights_in_a_dtype_that_the_kind_multiplies_are_packed(kind: Kind) -> None:
    weight = torch.randn(4, 4, dtype=torch.float16)

    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, x + 1), F.linear(x.half(), weight)

    assert not PackedFunction(traced(layers, [torch.randn(2, 4)]), kind).weights


def test_a_function_that_cannot_use_them_is_captured_without() -> None:
    """A view across the parts of a joined product: the captured function fails, and layers stay apart."""
    if not AVAILABLE:
        pytest.skip("this torch packs no weights")
    layer, other = (nn.Linear(6, 4).requires_grad_(False) for _ in range(2))
    captured = Capturer("trace", CPU).capture(lambda held, x: (layer(x).view(-1), other(x)), "layers", layer)
    assert isinstance(captured.backend, trace.Trace)
    captured.backend.form = Form(AVAILABLE[0])
    for rows in (3, 5):
        x = torch.randn(rows, 6)
        assert torch.allclose(captured(None, x)[0], layer(x).view(-1), atol=1e-6)
    assert captured.captures_made == 1 and captured.fallback is None


def test_fp64_results_may_differ_as_the_fp32_products_they_are_made_of(kind: Kind) -> None:
    """Scores of drafts are fp64; compared as exactly as fp64 allows, every packed function and every new size would be refused."""
    layer = nn.Linear(257, 64).requires_grad_(False)
    captured = Capturer("trace", CPU).capture(lambda held, x: layer(x).log_softmax(-1).double(), "scores", layer)
    assert isinstance(captured.backend, trace.Trace)
    captured.backend.form = Form(kind)
    differ = False
    for rows in (3, 5, 9, 17):
        x = torch.randn(rows, 257)
        expected = layer(x).log_softmax(-1).double()
        captured(None, x)
        differ |= not torch.equal(captured(None, x), expected)
    (capture,) = captured._captures.values()
    assert isinstance(capture, trace._Traced) and capture.packed and captured.captures_made == 1 and differ


@pytest.mark.parametrize("family", [pytest.param(one, marks=[pytest.mark.slow] if i else []) for i, one in enumerate(FAMILIES)])
def test_packed_passes_write_the_same_sequences(kind: Kind, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "fastest_form", lambda module: Form(kind))
    on = backbone(family)
    drafter = random_drafter("eagle3", on)
    plain, heads = SpeculativeModel(on, drafter, capture="off"), SpeculativeModel(on, drafter, capture="trace")
    rows = left_padded(prompts((9, 14)))
    for sample in (False, True):
        options: dict[str, Any] = {"do_sample": sample, "seed": 3, "max_new_tokens": 10}
        truth = say(plain, rows, speculate=False, **options)
        assert torch.equal(say(heads, rows, tree=TreeShape(12, 4), **options), truth)
        assert torch.equal(say(heads, rows, speculate=False, **options), truth)
    assert heads.engine(True).reader.captured and heads.engine(True).reader.read.fallback is None


def test_weights_changed_in_place_are_packed_anew(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "fastest_form", lambda module: Form(kind))
    model = tiny("llama")
    of, row = SpeculativeModel(Backbone(model), capture="trace"), {"input_ids": prompts((9,))[0][None]}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    first = say(of, row, **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    second = say(of, row, **options)
    assert torch.equal(second, model.generate(**row, **options)) and not torch.equal(first, second)


def test_the_form_is_timed_once_and_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_KNOWN", {})
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).requires_grad_(False)
    assert fastest_kind(model) in (None, *KINDS[torch.float32]) and len(forms._KNOWN) == 1
    monkeypatch.setattr(forms, "_measure", lambda weights: pytest.fail("timed twice"))
    fastest_kind(model)
    monkeypatch.setattr(forms, "_memory", lambda: 100)
    assert fastest_kind(model) is None and fastest_form(nn.ReLU()) == fastest_form(None) == Form()


def test_without_a_gain_the_transposed_layout_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {None: 1.0, "mkl": 0.97, "onednn": 2.0}
    monkeypatch.setattr(forms, "_KNOWN", {})
    monkeypatch.setattr(forms, "_least", lambda ways, inputs: {way: times[way] for way in ways})
    monkeypatch.setattr(forms, "max_transposed_rows", lambda module: 4)
    model = nn.Linear(64, 64).requires_grad_(False)
    assert fastest_form(model) == Form(None, 4)
    if "mkl" in AVAILABLE:
        monkeypatch.setattr(forms, "_KNOWN", {})
        times["mkl"] = 0.9
        assert fastest_form(model) == Form("mkl")
