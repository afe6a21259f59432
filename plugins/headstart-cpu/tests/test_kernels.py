"""The kernels of compiled layers: right, and a row has the same bits alone and among others."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart_cpu import kernels
from needs import needs_a_compiler

from headstart.support.devices import cxx


@pytest.fixture(scope="module")
def ops() -> Any:
    kernels.build()
    kernels.load()
    return torch.ops.headstart_cpu


@needs_a_compiler
def test_every_vector_fits_the_registers_of_this_processor(tmp_path: Path) -> None:
    """Of longer ones GCC computes every number by itself: products took 18 times as long."""
    root = Path(torch.__file__).parent / "include"
    options = [one for one in kernels.OPTIONS if one not in ("-O3", "-shared")] + ["-O1", "-S", "-Wvector-operation-performance"]
    includes = [f"-I{root}", f"-I{root / 'torch/csrc/api/include'}"]
    command = [cxx(), str(kernels.SOURCES[0]), *options, *includes, "-o", str(tmp_path / "kernels.s")]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "vector-operation-performance" not in found, found


@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (49, 64), (32, 2)])
def test_products_give_a_row_the_same_bits_alone_and_among_others(ops: Any, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(70, inputs).to(dtype), torch.randn(-(-outputs // 32) * 32)
    packed = torch.zeros(len(bias) * inputs, dtype=dtype)
    ops.pack(weight, packed, 0)
    y, plain = ops.product(x, packed, bias, outputs), ops.product(x, packed, None, outputs)
    exact = x.double() @ weight.double().T
    small = 1e-6 if dtype == torch.float32 else 2**-8
    for found, expected in ((y, exact + bias[:outputs].double()), (plain, exact)):
        assert found.shape == (70, outputs) and ((found - expected).abs() <= small * expected.abs() + 1e-5 * inputs**0.5).all()
    for rows in (1, 2, 5, 12, 13, 64):
        assert torch.equal(torch.cat([ops.product(part, packed, bias, outputs) for part in x.split(rows)]), y)
    turned = torch.zeros_like(packed)
    ops.pack(weight.T.contiguous().T, turned, 0)
    assert torch.equal(packed, turned), "a weight that lies otherwise in memory"


@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("B", "H", "G", "C", "D", "N", "S"),
    [(1, 9, 3, 64, 64, 12, 139), (3, 8, 8, 96, 96, 5, 64), (2, 4, 1, 24, 40, 3, 33), (1, 16, 2, 128, 128, 1, 300)],
)
def test_attention_gives_a_query_the_same_bits_alone_and_among_others(
    ops: Any, dtype: torch.dtype, B: int, H: int, G: int, C: int, D: int, N: int, S: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(B, N, H, C).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(B, G, S + 9, width).to(dtype)[:, :, :S] for width in (C, D))
    allowed = torch.rand(B, 1, N, S) < 0.6
    allowed[..., 0] = True
    mask = torch.zeros(B, 1, N, S, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
    found = ops.attention(query, keys, values, mask, 0.2)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), allowed, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(found.double(), exact, atol=2e-6 if dtype == torch.float32 else 2**-7)
    assert torch.equal(ops.attention(query, keys, values, allowed, 0.2), found), "a boolean mask"
    for n in range(N):
        assert torch.equal(ops.attention(query[:, :, n : n + 1], keys, values, mask[:, :, n : n + 1], 0.2), found[:, n : n + 1])
    if N > 1:  # the keys that a query sees may lie elsewhere
        order = torch.randperm(S)
        moved = ops.attention(query, keys[:, :, order], values[:, :, order], mask[..., order], 0.2)
        assert torch.allclose(moved.double(), found.double(), atol=2**-7)


OTHER_PROCESSOR = """
import sys
import pytest
from headstart_cpu import kernels

kernels.OPTIONS += (sys.argv[1],)
sys.exit(pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86-64")
@pytest.mark.parametrize("option", ["-mno-amx-tile", "-mno-avx512f", "-mno-avx2"])
def test_kernels_for_processors_with_less(option: str) -> None:
    files = [str(Path(__file__).with_name(name)) for name in ("test_kernels.py", "test_codes.py")]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESSOR, option, *files], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout[-3000:]
