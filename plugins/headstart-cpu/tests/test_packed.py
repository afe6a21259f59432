"""oneDNN's products equal `F.linear`, have the same bits for any number of rows from two on, packed or not, and change no text."""

import pytest
import torch
import torch.nn.functional as F
from headstart_cpu import trace
from headstart_cpu.trace import PackedWeight, ProductFunction, fits_in_memory, pack
from headstart_cpu.trace import trace as traced
from torch import Tensor, nn

from headstart.inference.capture import onednn
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.onednn import OneDNNProducts

pytestmark = pytest.mark.skipif(not onednn.available(torch.float32), reason="this torch has no oneDNN")
CPU = torch.device("cpu")
SHAPES = [(1536, 256), (1536, 576), (576, 1536), (896, 4864), (2048, 2048)]
SLOW = [(2048, 8192), (1024, 14336), (49152, 576)]


def multiply(x: Tensor, weight: PackedWeight) -> Tensor:
    return onednn.product(x, weight.packed, weight.bias_N)


@pytest.mark.parametrize("biased", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("shape", [(1, 1, 48), (2, 5, 48), (7, 48), (48,)])
def test_a_packed_product_equals_linear(shape: tuple[int, ...], biased: tuple[bool, bool]) -> None:
    x, weights = torch.randn(shape), [torch.randn(33, 48), torch.randn(70, 48)]
    biases = [torch.randn(len(weight)) if has else None for weight, has in zip(weights, biased, strict=True)]
    product = multiply(x, pack(weights, biases))
    expected = torch.cat([F.linear(x, *both) for both in zip(weights, biases, strict=True)], -1)
    assert product.shape == expected.shape and torch.allclose(product, expected, atol=1e-4)
    assert torch.equal(product, multiply(x, pack(weights, biases)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_a_row_has_the_same_bits_among_any_number_of_rows_packed_or_not(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """From two rows on, at widths of released models."""
    if not onednn.available(dtype):
        pytest.skip("this CPU has no such products")
    torch.manual_seed(0)
    most = 32 if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else 64
    x_RK, weight_NK = torch.randn(most, shape[1]).to(dtype), (torch.randn(shape) * shape[1] ** -0.5).to(dtype)
    weight = pack([weight_NK], [None])
    together = multiply(x_RK, weight)
    assert torch.allclose(together.float(), F.linear(x_RK.float(), weight_NK.float()), rtol=0.02, atol=0.02)
    for rows in (2, 3, 4, 5, 7, 12, 16, 24, 32, 33, 64):
        some = x_RK[:rows].contiguous()
        if rows > most:
            break
        assert torch.equal(multiply(some, weight), together[:rows]), rows
        with OneDNNProducts():  # in bf16 torch's own
            assert torch.equal(F.linear(some, weight_NK), together[:rows]), rows
            assert dtype != torch.float32 or torch.equal(F.linear(x_RK[:1], weight_NK), together[:1]), "a single row"


def test_the_mode_leaves_other_functions_and_dtypes_alone() -> None:
    x, weight, bias = torch.randn(2, 8), torch.randn(3, 8), torch.randn(3)
    with OneDNNProducts():
        assert torch.equal(F.silu(x), x * torch.sigmoid(x)) or torch.allclose(F.silu(x), x * torch.sigmoid(x))
        assert F.linear(x.double(), weight.double()).dtype == torch.float64
        assert torch.allclose(torch.addmm(bias, x, weight.t()), F.linear(x, weight, bias), atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).dtype == torch.bfloat16


def test_layers_that_read_the_same_input_are_one_product() -> None:
    weights, bias = [torch.randn(32, 16), torch.randn(8, 16), torch.randn(70, 16)], torch.randn(8)

    def layers(x: Tensor) -> tuple[Tensor, ...]:
        normed = F.rms_norm(x, (16,))
        heads = F.linear(normed, weights[0]).view(x.shape[0], -1, 4, 8).transpose(1, 2)
        return heads, F.linear(normed, weights[1], bias), F.linear(F.linear(x, weights[2]), weights[2].t())

    function = ProductFunction(traced(layers, [torch.randn(2, 3, 16)]), packed=True)
    assert [weight.sizes for weight in function.weights] == [(32, 8), (70,)] and "aten::linear" not in str(function.traced.graph)
    apart = ProductFunction(traced(layers, [torch.randn(2, 3, 16)]), packed=False)
    assert not apart.weights and "aten::linear" not in str(apart.traced.graph) and str(apart.traced.graph).count("_linear_pointwise") == 4
    for shape in ((2, 3, 16), (1, 1, 16), (3, 9, 16)):
        x = torch.randn(shape)
        for one, other, expected in zip(function(x), apart(x), layers(x), strict=True):
            assert torch.allclose(one, expected, atol=1e-3) and torch.allclose(other, expected, atol=1e-3)


def test_conv1d_of_gpt2_is_packed_too() -> None:
    weight_KN, bias_N = torch.randn(16, 16), torch.randn(16)
    function = ProductFunction(traced(lambda x: (torch.addmm(bias_N, x, weight_KN),), [torch.randn(3, 16)]), packed=True)
    x = torch.randn(5, 16)
    assert len(function.weights) == 1 and torch.allclose(function(x)[0], x @ weight_KN + bias_N, atol=1e-4)


def test_captures_share_packed_weights_until_the_weights_change() -> None:
    weight, other = torch.randn(8, 8), torch.randn(8, 8)
    first = pack([weight], [None])
    assert pack([weight], [None]) is first and pack([other], [None]) is not first
    assert pack([weight.t()], [None]) is not first, "at the same address, in another order"
    weight.mul_(2)
    changed = pack([weight], [None])
    x = torch.randn(3, 8)
    assert changed is not first and torch.allclose(multiply(x, changed), F.linear(x, weight), atol=1e-5)
    before = len(trace._SHARED)
    del first, changed
    assert len(trace._SHARED) < before, "packed weights that no capture uses are freed"


def test_only_constant_weights_in_a_dtype_that_onednn_multiplies_are_packed() -> None:
    weight = torch.randn(4, 4, dtype=torch.float16)
    given = ProductFunction(traced(lambda x: (F.linear(x, x + 1), F.linear(x.half(), weight)), [torch.randn(2, 4)]), packed=True)
    assert not given.weights


def test_a_function_that_cannot_use_them_is_captured_without() -> None:
    """A view across the parts of a joined product: the captured function fails, and layers stay apart."""
    layer, other = (nn.Linear(6, 4).requires_grad_(False) for _ in range(2))
    captured = Capturer("trace", CPU).capture(lambda held, x: (layer(x).view(-1), other(x)), "layers", layer)
    for rows in (3, 5):
        x = torch.randn(rows, 6)
        assert torch.allclose(captured(None, x)[0], layer(x).view(-1), atol=1e-6)
    assert captured.captures_made == 1 and captured.fallback is None


def test_fp64_results_may_differ_as_the_fp32_products_they_are_made_of() -> None:
    """Scores of drafts are fp64; compared as exactly as fp64 allows, every packed function and every new size would be refused."""
    layer = nn.Linear(257, 64).requires_grad_(False)
    captured = Capturer("trace", CPU).capture(lambda held, x: layer(x).log_softmax(-1).double(), "scores", layer)
    differ = False
    for rows in (3, 5, 9, 17):
        x = torch.randn(rows, 257)
        expected = layer(x).log_softmax(-1).double()
        captured(None, x)
        differ |= not torch.equal(captured(None, x), expected)
    (capture,) = captured._captures.values()
    assert isinstance(capture, trace._Traced) and capture.packed and captured.captures_made == 1 and differ


def test_packed_weights_need_memory() -> None:
    assert fits_in_memory(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)))
    assert not fits_in_memory(nn.Sequential(nn.Linear(64, 64), nn.Linear(1 << 23, 1 << 20, device="meta")))
