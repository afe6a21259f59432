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
    assert [name for name, one in captured.items() if one.backend is not None] == ["steps"]
    captured["noise"](torch.zeros(9), torch.ones(2, 3), 1.0)
    assert capturer.report().fallback is None, "nothing has failed"


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


def test_only_the_positions_of_one_row_change_from_the_start() -> None:
    """Tree passes of 8 rows with a symbol for their positions took inductor more than eight minutes."""
    one, several, others = (torch.Size(sizes) for sizes in ((1, 5), (8, 5), (7, 5)))
    assert [compile._changing(False, [shape]) for shape in (one, several)] == [[False, True], [False, False]]
    assert compile._changing(False, [several, others]) == [True, False]
    assert compile._changing(True, [torch.Size((8, 2, 64, 16))]) == [False, False, True, False]


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
    assert report.backend == "compile" and report.fallback is None
