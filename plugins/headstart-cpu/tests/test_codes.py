"""Weights dequantized from blocks of 4 bits: packed as codes, of which products make the same numbers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import chat_model, write_gguf
from headstart_cpu import kernels, weights
from headstart_cpu.program import Packed
from needs import needs_a_compiler
from torch import Tensor

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.inference.generate import load

pytestmark = needs_a_compiler


@pytest.fixture(scope="module", autouse=True)
def ops() -> Any:
    kernels.build()
    kernels.load()
    if not len(torch.ops.headstart_cpu.encoded(torch.zeros(1, 32).bfloat16())):
        pytest.skip("codes are for processors with AVX-512's bf16")
    return torch.ops.headstart_cpu


def dequantized(kind: str, outputs: int, inputs: int) -> Tensor:
    """A random weight in bf16, as transformers makes it of a file's blocks."""
    torch.manual_seed(0)
    type_ = gguf.GGMLQuantizationType[kind]
    if kind == "Q4_K":  # which the package does not write: scales and offsets of 6 bits, and what these are multiplied with
        blocks = np.random.default_rng(0).integers(0, 256, (outputs, inputs // 256, 144), np.uint8)
        blocks[..., :4] = np.array([0.001, 0.0085], np.float16).view(np.uint8)
        blocks[..., 4:16] = 0b10101101
        stored = blocks.reshape(outputs, -1)
    else:
        stored = gguf.quants.quantize((torch.randn(outputs, inputs) * 0.05).numpy(), type_)
    return torch.from_numpy(gguf.quants.dequantize(stored, type_)).bfloat16()


@pytest.mark.parametrize(("kind", "outputs", "inputs"), [("Q4_0", 70, 96), ("Q4_1", 576, 1536), ("Q4_K", 33, 512)])
def test_products_with_codes_use_the_same_weights(ops: Any, kind: str, outputs: int, inputs: int) -> None:
    weight = dequantized(kind, outputs, inputs)
    codes = ops.encoded(weight)
    assert codes.dtype == torch.uint8 and len(codes) == 0.75 * inputs * -(-outputs // 32) * 32
    assert torch.equal(ops.product(torch.eye(inputs).bfloat16(), codes, None, outputs), weight.T), "each input alone"
    x, bias = torch.randn(70, inputs).bfloat16(), torch.randn(-(-outputs // 32) * 32)
    exact = x.double() @ weight.double().T + bias[:outputs].double()
    found = ops.product(x, codes, bias, outputs)
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * inputs**0.5).all()
    for rows in (1, 2, 5, 12, 13, 33):
        assert torch.equal(torch.cat([ops.product(part, codes, bias, outputs) for part in x.split(rows)]), found)
    assert torch.equal(ops.encoded(weight.T.contiguous().T), codes), "a weight that lies otherwise in memory"


def test_numbers_at_the_limits() -> None:
    steps, tenth = torch.arange(16).float(), torch.full((32,), 0.1)
    rows = [
        torch.zeros(32),
        tenth,
        -tenth,
        torch.cat([-tenth[:9], tenth[:23]]),
        (steps * 0.0123 - 0.07).repeat(2),
        (8 - steps).repeat(2) * 2e37,
    ]
    weight = torch.stack(rows).bfloat16()
    codes = torch.ops.headstart_cpu.encoded(weight)
    assert len(codes) and torch.equal(torch.ops.headstart_cpu.product(torch.eye(32).bfloat16(), codes, None, 6), weight.T)


@pytest.mark.parametrize("change", ["random", "one", "nan", "tiny", "inputs"])
def test_other_weights_have_no_codes(ops: Any, change: str) -> None:
    weight = dequantized("Q4_1", 64, 64)
    other = {"one": float(weight[50, 40]) * 1.02 + 1e-3, "nan": float("nan"), "tiny": 1e-39}
    if change == "random":
        weight = torch.randn(64, 64).bfloat16()
    elif change == "inputs":
        weight = weight[:, :62]
    else:
        weight[50, 40] = other[change]
    assert ops.encoded(weight).shape == (0,)


def test_layers_with_the_same_input_are_packed_as_codes_if_all_are_of_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"q": dequantized("Q4_0", 40, 64), "k": dequantized("Q4_1", 33, 64), "v": torch.randn(33, 64).bfloat16()}
    both, mixed = Packed(("q", "k"), (40, 33)), Packed(("q", "v"), (40, 33))
    packed = weights.Weights()
    packed.add([both, mixed], held)
    found = packed.of({"both": both, "mixed": mixed}, held)
    assert [found[name].dtype for name in found] == [torch.uint8, torch.bfloat16]
    x = torch.randn(3, 64).bfloat16()
    for one in (both, mixed):
        y = torch.ops.headstart_cpu.product(x, packed.of({"it": one}, held)["it"], None, 128)
        for name, at, outputs in zip(one.names, (0, 64), one.outputs, strict=True):
            assert torch.allclose(y[:, at : at + outputs].float(), x.float() @ held[str(name)].float().T, rtol=2**-8, atol=1e-4)
    monkeypatch.setattr(weights, "MEMORY_SHARE", 0)
    other = {name: tensor.clone() for name, tensor in held.items()}
    with pytest.raises(weights.NoMemory, match="the packed weights take"):
        packed.add([both], other)


@pytest.mark.slow
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
    assert torch.uint8 in {tensor.dtype for tensor in compiled.weights._of.values()}
