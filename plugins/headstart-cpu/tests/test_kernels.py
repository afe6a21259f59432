"""The kernels of compiled layers: right, and a row has the same bits alone and among others."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import chat_model, write_gguf
from headstart_cpu import kernels, weights
from headstart_cpu.program import NotCompiled, Packed
from needs import needs_a_compiler
from torch import Tensor

from headstart import load, load_backbone, load_tokenizer
from headstart.serving.quantize import rounded
from headstart.support.devices import cxx

pytestmark = needs_a_compiler


@pytest.fixture(scope="module")
def ops() -> Any:
    kernels.build()
    kernels.load()
    return torch.ops.headstart_cpu


def test_every_vector_fits_the_registers_of_this_processor(tmp_path: Path) -> None:
    """Of longer ones GCC computes every number by itself: products took 18 times as long."""
    root = Path(torch.__file__).parent / "include"
    options = [one for one in kernels.OPTIONS if one not in ("-O3", "-shared")] + ["-O1", "-S", "-Wvector-operation-performance"]
    includes = [f"-I{root}", f"-I{root / 'torch/csrc/api/include'}"]
    command = [cxx(), str(kernels.SOURCES[0]), *options, *includes, "-o", str(tmp_path / "kernels.s")]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "vector-operation-performance" not in found, found


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
    places = torch.randperm(3 * S)[:S].sort().values  # the keys that a query sees may lie elsewhere, in the same order
    spread = [torch.randn(B, G, 3 * S, width).to(dtype).index_copy(2, places, part) for width, part in ((C, keys), (D, values))]
    hidden = torch.zeros(B, 1, N, 3 * S, dtype=torch.bool).index_copy(3, places, allowed)
    assert torch.equal(ops.attention(query, *spread, hidden, 0.2), found)


OTHER_PROCESSOR = """
import sys
import pytest
from headstart_cpu import kernels

kernels.OPTIONS += (sys.argv[1],)
sys.exit(pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86-64")
@pytest.mark.parametrize("option", ["-mno-amx-tile", "-mno-avx512f", "-mno-avx2"])
def test_kernels_for_processors_with_less(option: str) -> None:
    command = [sys.executable, "-c", OTHER_PROCESSOR, option, __file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:]


# Weights dequantized from GGUF's blocks: packed as codes, of which products make the same numbers.

D = [*np.array([0.001], np.float16).view(np.uint8)]
BLOCKS = {  # types that the package does not write: the bytes of 256 numbers, and where their scales and offsets are
    "Q3_K": (110, {108: D}),
    "Q4_K": (144, {0: [*D, *np.array([0.0085], np.float16).view(np.uint8)], 4: [0b10101101] * 12}),
    "Q5_K": (176, {0: [*D, *np.array([0.0085], np.float16).view(np.uint8)], 4: [0b10101101] * 12}),
    "Q6_K": (210, {208: D}),
}


def dequantized(kind: str, outputs: int, inputs: int) -> Tensor:
    """A random weight in fp32, as transformers makes it of a file's blocks."""
    torch.manual_seed(0)
    type_ = gguf.GGMLQuantizationType[kind]
    if kind in BLOCKS:
        size, scales = BLOCKS[kind]
        blocks = np.random.default_rng(0).integers(0, 256, (outputs, inputs // 256, size), np.uint8)
        for at, numbers in scales.items():
            blocks[..., at : at + len(numbers)] = numbers
        stored = blocks.reshape(outputs, -1)
    else:
        stored = gguf.quants.quantize((torch.randn(outputs, inputs) * 0.05).numpy(), type_)
    return torch.from_numpy(gguf.quants.dequantize(stored, type_))


def packed(layers: dict[str, Tensor]) -> Tensor:
    one = Packed(tuple(layers), tuple(map(len, layers.values())))
    return weights.packed_weights({"it": one}, layers)["it"]


KINDS = {"Q4_0": 0.75, "Q4_1": 0.75, "Q4_K": 0.75, "Q3_K": 1.25, "Q5_0": 1.25, "Q5_1": 1.25, "Q5_K": 1.25, "Q6_K": 1.25, "Q8_0": 1.25}
"""Bytes of a weight."""


ROUNDED = {"bf16": lambda x: x.bfloat16(), "bf16 in fp32": lambda x: x.bfloat16().float(), "fp32": lambda x: x}


@pytest.mark.parametrize("numbers", ROUNDED)
@pytest.mark.parametrize(("kind", "outputs", "inputs"), [(kind, 33, 512) for kind in KINDS] + [("Q4_1", 576, 1536), ("Q8_0", 576, 1536)])
def test_products_with_codes_use_the_same_weights(ops: Any, kind: str, outputs: int, inputs: int, numbers: str) -> None:
    weight = ROUNDED[numbers](dequantized(kind, outputs, inputs))
    found, _ = ops.encoded(weight)
    assert found.dtype == torch.uint8 and found.numel() == KINDS[kind] * inputs * -(-outputs // 32) * 32
    assert torch.equal(ops.encoded(weight.T.contiguous().T)[0], found), "a weight that lies otherwise in memory"
    codes = packed({"w": weight})
    assert torch.equal(ops.product(torch.eye(inputs).to(weight), codes, None, outputs), weight.T), "each input alone"
    x, bias = torch.randn(70, inputs).to(weight), torch.randn(-(-outputs // 32) * 32)
    exact = x.double() @ weight.double().T + bias[:outputs].double()
    found = ops.product(x, codes, bias, outputs)
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * inputs**0.5).all()
    for rows in (1, 2, 5, 12, 13, 33):
        assert torch.equal(torch.cat([ops.product(part, codes, bias, outputs) for part in x.split(rows)]), found)


def test_numbers_of_bf16_in_fp32_are_kept_in_half_the_memory(ops: Any) -> None:
    weight, x = torch.randn(49, 96).bfloat16().float(), torch.randn(7, 96)
    half, whole = packed({"w": weight}), torch.zeros(64 * 96)
    ops.pack(weight, whole, 0)
    assert half.dtype == torch.bfloat16 and torch.equal(ops.product(x, half, None, 49), ops.product(x, whole, None, 49))
    weight[48, 95] += 1e-3
    assert packed({"w": weight}).dtype == torch.float32


def test_heads_that_were_rounded_have_codes(ops: Any) -> None:
    moments = torch.randn(200, 96)
    assert ops.encoded(rounded(torch.randn(70, 96) / 30, moments.T @ moments).bfloat16())[0].numel() == 0.75 * 96 * 96


@pytest.mark.usefixtures("ops")
def test_numbers_at_the_limits() -> None:
    steps, tenth = torch.arange(16).float(), torch.full((32,), 0.1)
    rows = [
        torch.zeros(32), tenth, -tenth, torch.cat([-tenth[:9], tenth[:23]]), (steps * 0.0123 - 0.07).repeat(2),
        (8 - steps).repeat(2) * 2e37,
    ]  # fmt: skip
    weight = torch.stack(rows).bfloat16()
    codes = packed({"w": weight})
    assert codes.dtype == torch.uint8
    assert torch.equal(torch.ops.headstart_cpu.product(torch.eye(32).bfloat16(), codes, None, 6), weight.T)


@pytest.mark.parametrize("change", ["random", "one", "nan", "tiny", "inputs"])
def test_other_weights_have_no_codes(ops: Any, change: str) -> None:
    weight = dequantized("Q4_1", 64, 64).bfloat16()
    other = {"one": float(weight[50, 40]) * 1.02 + 1e-3, "nan": float("nan"), "tiny": 1e-39}
    if change == "random":
        weight = torch.randn(64, 64).bfloat16()
    elif change == "inputs":
        weight = weight[:, :62]
    else:
        weight[50, 40] = other[change]
    assert ops.encoded(weight)[0].shape == (0,)


@pytest.mark.usefixtures("ops")
def test_layers_with_the_same_input_are_packed_as_codes_if_all_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {
        "q": dequantized("Q4_0", 40, 256).bfloat16(),
        "k": dequantized("Q6_K", 33, 256).bfloat16(),
        "v": torch.randn(33, 256).bfloat16(),
    }
    both, mixed = Packed(("q", "k"), (40, 33)), Packed(("q", "v"), (40, 33))
    found = weights.packed_weights({"both": both, "mixed": mixed}, held)
    assert [found[name].dtype for name in found] == [torch.uint8, torch.bfloat16]
    x = torch.randn(3, 256).bfloat16()
    assert weights.packed_weights({"it": both}, held)["it"] is found["both"], "another program's is shared"
    for one, packed in ((both, found["both"]), (mixed, found["mixed"])):
        y = torch.ops.headstart_cpu.product(x, packed, None, 128)
        for name, at, outputs in zip(one.names, (0, 64), one.outputs, strict=True):
            assert torch.allclose(y[:, at : at + outputs].float(), x.float() @ held[str(name)].float().T, rtol=2**-8, atol=1e-4)
    monkeypatch.setattr(weights, "MEMORY_SHARE", 0)
    other = {name: tensor.clone() for name, tensor in held.items()}
    with pytest.raises(NotCompiled, match="the packed weights take"):
        weights.packed_weights({"it": both}, other)


@pytest.mark.slow
@pytest.mark.usefixtures("ops")
def test_a_file_of_4_bits_is_decoded_with_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_COMPILE", raising=False)
    path = write_gguf(tmp_path / "model.gguf", *chat_model(), kind="Q4_1")
    backbone, tokenizer = load_backbone(str(path)), load_tokenizer(str(path))
    heads = load(None, backbone, tokenizer=tokenizer, proposers=["suffix", "recycling"], capture="compile")
    ids = torch.tensor([heads.chat.prompt([{"role": "user", "content": "one two one two one two"}])])
    texts = [
        backbone.model.generate(ids, custom_generate=heads.generate, max_new_tokens=40, do_sample=False, speculate=on)
        for on in (True, False)
    ]
    assert torch.equal(*texts)
    compiled = heads.engine(True).reader.read.compiled
    assert compiled is not None and compiled.active
    loaded = [variant.loaded for variant in compiled._variants.values() if variant.loaded is not None]
    assert loaded and all(torch.uint8 in {tensor.dtype for tensor in one.weights.values()} for one in loaded)
