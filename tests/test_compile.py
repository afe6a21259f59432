"""The backend ``compile``: functions of modules, compiled by inductor; sizes and strides that change; heads and backbone compiled."""

from __future__ import annotations

import pytest
import torch
from families import backbone, left_padded, prompts, random_drafter, say
from test_capture import CPU, Counted
from torch import Tensor, nn

from headstart.inference.capture import compile
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.compile import Compile
from headstart.inference.capture.trace import Trace
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

REASON = Compile.unavailable(CPU)
needs_a_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert Compile.unavailable(CPU) == "torch.compile needs a C++ compiler (no-such-compiler is missing); install one or set CXX"


def test_prompts_and_functions_without_a_module_are_not_compiled() -> None:
    capturer = Capturer("auto", CPU)
    capturer.backend = Compile
    names = {"steps": nn.Identity(), "noise": None}
    captured = {name: capturer.capture(Counted(), name, module) for name, module in names.items()}
    captured["prompts"] = capturer.capture(Counted(), "prompts", nn.Identity(), every_step=False)
    quick = "trace" if Trace.unavailable(CPU) is None else None
    backends = {name: one.backend and one.backend.name for name, one in captured.items()}
    assert backends == {"steps": "compile", "noise": quick, "prompts": quick}
    captured["noise"](torch.zeros(9), torch.ones(2, 3), 1.0)
    assert capturer.report().fallback is None, "nothing has failed"


@pytest.mark.slow
@needs_a_compiler
@torch.no_grad()
def test_a_compiled_function_gives_the_same_at_other_sizes_and_strides() -> None:
    """The cache's slots and the positions are symbols from the start; a width that changes is compiled again, then a symbol too."""
    layer, memory = nn.Linear(6, 6).requires_grad_(False), torch.zeros(1, 512, 6)

    def step(held: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        held.index_copy_(1, torch.arange(x.shape[1]), layer(x[..., :6]))
        return held.sum((0, 1)), x.sum(-1)

    captured = Capturer("compile", CPU).capture(step, "step", layer)
    shapes = [(64, 3, 6), (128, 5, 6), (64, 2, 7), (192, 4, 8)]
    for slots, positions, width in shapes:
        held, x = memory[:, :slots], torch.randn(1, positions, width)
        memory.zero_()
        expected = step(held.clone(), x)
        out = captured(held, x)
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(out, expected, strict=True))
        assert torch.allclose(held[:, :positions], layer(x[..., :6]), atol=1e-5), "the cache is written in place"
    assert captured.fallback is None and captured.captures_made == 2
    turned = torch.zeros(1, 6, 64).mT   # the same sizes, other strides: the code that was compiled would write elsewhere
    x = torch.randn(1, 3, 6)
    assert torch.allclose(captured(turned, x)[0], step(turned.clone(), x)[0], atol=1e-5)
    assert torch.allclose(turned[:, :3], layer(x), atol=1e-5)


def test_the_positions_of_one_row_and_the_number_of_several_change_from_the_start() -> None:
    """Tree passes of 8 rows with a symbol for their positions took inductor more than eight minutes; rows end while a batch is decoded."""
    one, several, other = (torch.Size(sizes) for sizes in ((1, 5), (8, 5), (8, 6)))
    assert compile._changing(False, 1, [one]) == [False, True]
    assert compile._changing(False, 1, [torch.Size((1, 5, 5))]) == [False, True, True], "a tree mask"
    assert compile._changing(False, 1, [torch.Size((1, 5, 384))]) == [False, True, False]
    assert compile._changing(False, 8, [several]) == [True, False]
    assert compile._changing(False, 8, [several, other]) == [True, True]
    assert compile._changing(True, 8, [torch.Size((8, 2, 64, 16))]) == [True, False, True, False]
    assert compile._changing(True, 8, [torch.Size((12, 8, 2, 64, 16))]) == [False, True, False, True, False], "all layers' cache"
    assert compile._changing(True, 8, [torch.Size((16, 3))]) == [False, False], "not a tensor of rows"


@needs_a_compiler
@torch.no_grad()
def test_fused_operations_in_bf16_round_as_single_ones() -> None:
    """Plain steps and trees are fused otherwise, and have to give the same bits."""
    torch.manual_seed(0)
    gain = torch.randn(64).bfloat16()

    def step(held: Tensor, x: Tensor) -> tuple[Tensor]:
        return (x + x * gain * (x * 0.3 + held),)

    captured = Capturer("compile", CPU).capture(step, "step", nn.Identity())
    held, x = torch.randn(1, 5, 64).bfloat16(), torch.randn(1, 5, 64).bfloat16()
    assert torch.equal(captured(held, x)[0], step(held, x)[0]) and captured.fallback is None


@pytest.mark.slow
@needs_a_compiler
@torch.no_grad()
def test_products_in_bf16_give_a_row_the_same_bits_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel of bf16_products.py; outputs that do not fill its blocks, more rows than a block has."""
    from headstart.inference.capture import bf16_products

    if not bf16_products.available():
        pytest.skip("needs a CPU with AVX-512's bf16 instructions and without AMX")
    written: list[str] = []
    write = bf16_products.BF16Products.codegen_define
    monkeypatch.setattr(
        bf16_products.BF16Products, "codegen_define", lambda self, kernel: written.append(self.name) or write(self, kernel)
    )
    torch.manual_seed(0)
    layers = [nn.Linear(size, outputs, bias=False).bfloat16().requires_grad_(False) for size, outputs in ((96, 70), (70, 130))]

    def step(held: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        first = layers[0](x)
        return first, layers[1](first * held)

    captured, held = Capturer("compile", CPU).capture(step, "step", nn.ModuleList(layers)), torch.ones(70).bfloat16()
    rows = torch.randn(1, 15, 96).bfloat16()
    alone = [captured(held, rows[:, i : i + 1].contiguous()) for i in range(3)]
    for count in (2, 3, 15):
        several = captured(held, rows[:, :count].contiguous())
        for i in range(min(count, 3)):
            assert all(torch.equal(one[:, 0], other[:, i]) for one, other in zip(alone[i], several, strict=True))
        exact = rows[:, :count].double() @ layers[0].weight.double().mT
        assert torch.allclose(several[0].double(), exact, rtol=2**-8, atol=1e-6), "sums in fp32, rounded once"
    assert captured.fallback is None and written


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_compiled_heads_and_backbone_write_the_same(kind: str) -> None:
    model = backbone("llama")
    drafter = random_drafter(kind, model)
    plain, compiled = (SpeculativeModel(model, drafter, capture=capture) for capture in ("off", "compile"))   # type: ignore[arg-type]
    shape = TreeShape(6, 2, 2)
    for length in (5, 9):
        rows = left_padded(prompts([length]))
        for options in ({"tree": shape}, {"speculate": False}):
            written = [say(one, rows, max_new_tokens=12, **options) for one in (compiled, plain)]
            assert torch.equal(*written)
    report = compiled.engine(True).capturer.report()
    assert report.backend.split("+")[0] == "compile" and report.fallback is None
