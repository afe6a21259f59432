"""Compiled layers: one region for equal layers, programs kept on disk, and what happens where it does not work."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import DRAFTERS, backbone, left_padded, prompts, random_drafter, say, tiny
from needs import needs_a_compiler

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.compiled import beside, compiled_pass, kernels, layer, loaded, store, weights
from headstart.inference.compiled.fakes import EXAMPLES
from headstart.inference.compiled.program import Program
from headstart.inference.compiled.sizes import hold, sizes_named
from headstart.inference.compiled.traced import traced
from headstart.inference.engine import compiled_read
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.proposers import made
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.support.errors import UserError


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it; elsewhere tests compile nothing."""
    monkeypatch.delenv("HEADSTART_COMPILE", raising=False)


def in_bf16(family: str = "llama") -> Backbone:
    return Backbone(tiny(family).bfloat16())


def first(heads: SpeculativeModel, speculate: bool = True) -> Any:
    compiled = heads.engine(speculate).reader.compiled
    assert compiled is not None
    return compiled


# Tracing.


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gpt2", 1), ("gemma3", 1)])
def test_equal_layers_are_one_region(family: str, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products of packed weights: queries, keys and values as one, gate and up as one."""
    found: list[Program] = []
    monkeypatch.setattr(beside, "compile_beside", lambda file: None)
    monkeypatch.setattr(beside.Copy, "doing", lambda work: None)
    monkeypatch.setattr(store, "write_program", lambda file, program: found.append(program))
    heads = SpeculativeModel(backbone(family), proposers=made("suffix"))
    say(heads, left_padded(prompts([9])), max_new_tokens=compiled_pass.PATIENCE + 8, speculate=False)
    (program,) = found
    assert len(program.regions) == kinds and len(program.calls) == backbone(family).num_layers
    assert program.regions[0].text.count("headstart_cpu.product") == 4 and "aten.mm" not in program.text
    assert program.text.count("headstart_cpu.product") == 1, "the readout"
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_a_function_without_layers_or_with_tensors_of_its_own_is_not_compiled() -> None:
    layer = torch.nn.Linear(8, 8)
    with pytest.raises(Exception, match="runs no decoder layer"):
        traced(lambda x: (x + 1,), (("float32", ("rows", 8)),), [layer], [layer])
    own = torch.randn(8)
    with pytest.raises(Exception, match=r"makes a tensor of shape \[8\]"):
        traced(lambda x: (layer(x) + own,), (("float32", ("rows", 8)),), [layer], [layer])


def test_sizes_have_names_and_conditions() -> None:
    shapes = [(1, "nodes"), ("rows", "nodes", 4)]
    assert sizes_named(shapes, [torch.zeros(1, 5), torch.zeros(2, 5, 4)]) == {"nodes": 5, "rows": 2}
    assert sizes_named(shapes, [torch.zeros(1, 5), torch.zeros(2, 6, 4)]) is None, "two sizes of one name"
    assert sizes_named(shapes, [torch.zeros(5, 1).T, torch.zeros(2, 4, 5).mT]) is None, "gaps"
    assert sizes_named(shapes, [torch.zeros(1, 5), torch.zeros(2, 5, 3)]) is None
    conditions = ["slots <= room", "Ne(64*room, 64*slots)", "Eq(Mod(room, 2), 0)", "Ne(rows, 1)"]
    assert hold(conditions, {"slots": 3, "room": 4, "rows": 1}), "a size of 1 is as good as any"
    assert not hold(conditions, {"slots": 4, "room": 4, "rows": 2}) and not hold(conditions, {"slots": 3, "room": 5, "rows": 2})


# Decoding.


@needs_a_compiler
def test_compiled_layers_write_the_texts_of_the_model_and_serve_later_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    on = in_bf16()
    heads, plain = (SpeculativeModel(on, proposers=made("suffix"), capture=one) for one in ("compile", "off"))  # type: ignore[arg-type]
    for lengths in ([9], [5, 1, 17]):
        rows = left_padded(prompts(lengths))
        alone = say(heads, rows, max_new_tokens=20, speculate=False)
        for tree in ("auto", TreeShape(6, 2, 2), TreeShape(1, 1, 1)):
            assert torch.equal(say(heads, rows, max_new_tokens=20, tree=tree), alone)
        assert (say(plain, rows, max_new_tokens=20) == alone).float().mean() > 0.5, "up to near-ties in bf16"
    report = heads.engine(True).capturer.report()
    assert first(heads).active and report.backend.split("+")[0] == "compile" and report.fallback is None
    monkeypatch.setattr(store, "compile_region", lambda *_: pytest.fail("compiled again"))
    later = SpeculativeModel(Backbone(on.model), proposers=made("suffix"))
    say(later, rows, max_new_tokens=4, speculate=False)
    assert first(later, False).active, "from the first token on"


@needs_a_compiler
@pytest.mark.parametrize("kind", ["eagle3", "block", "medusa"])
def test_drafts_of_batches_are_one_program_for_any_number_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Program] = []

    def trace_alone(variant: Any, call: Any) -> bool:
        if not variant.owner.lasting and call.shapes[0][0] > 1:  # of drafts
            variant._trace(call)
            programs.append(variant.program)
        return False

    monkeypatch.setattr(compiled_pass._Variant, "available", trace_alone)
    on = in_bf16()
    heads = SpeculativeModel(on, random_drafter(kind, on), capture="compile")
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "seed": 3}):
        say(heads, left_padded(prompts([9, 14, 5])), max_new_tokens=12, tree=TreeShape(3, 1, 2), **options)
    assert len(programs) >= 2
    for program in programs:
        assert any("rows" in shape for _, shape in program.inputs)
        assert all(hold(program.conditions, EXAMPLES | {"rows": rows}) for rows in (2, 48)), program.conditions
    (source,) = heads.engine(True).speculation.of_kind(DrafterSource)
    assert all(one is None or one.reason is None for one in source._compiled.values())


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("kind", DRAFTERS)
def test_compiled_drafts_are_those_of_the_heads(kind: str) -> None:
    """What a draft is can depend on near-ties, so accepted tokens are compared, of heads that a text was made with."""
    on = in_bf16()
    drafter = random_drafter(kind, on)
    heads, plain = (SpeculativeModel(on, drafter, capture=one) for one in ("compile", "off"))  # type: ignore[arg-type]
    for lengths, shape in (([9], TreeShape(8, 4, 2)), ([9, 14, 5], TreeShape(3, 1, 2))):
        rows = left_padded(prompts(lengths))
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 3}):
            written = say(heads, rows, max_new_tokens=20, tree=shape, **options)
            assert torch.equal(written, say(heads, rows, max_new_tokens=20, speculate=False, **options))
            say(plain, rows, max_new_tokens=4, tree=shape, **options)
    (source,) = heads.engine(True).speculation.of_kind(DrafterSource)
    used = [one for one in source._compiled.values() if one is not None]
    assert all(one.reason is None for one in used) and (any(one.active for one in used) or not used)
    report = heads.engine(True).capturer.report()
    assert report.backend.split("+")[0] == "compile" and report.fallback is None


@needs_a_compiler
@pytest.mark.parametrize("copied", [True, False])
def test_the_first_process_goes_on_at_once_and_finishes_a_text_as_it_began_it(
    copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced in a copy of the process, or in the process itself where it cannot be copied."""
    on, asked, here = in_bf16(), tmp_path / "asked", os.getpid()
    file = kernels.folder() / f"pass-of-this-test-{copied}.json"
    file.unlink(missing_ok=True)
    ready, trace = store.ready, compiled_pass._Variant._trace

    def traced_in(variant: Any, call: Any) -> None:
        assert (os.getpid() != here) is copied
        trace(variant, call)

    def at_once(file: Path) -> None:  # in the middle of the text
        asked.write_text("")
        beside.main(file)

    monkeypatch.setattr(store, "program_file", lambda what: file)
    monkeypatch.setattr(store, "ready", lambda program: asked.exists() and ready(program))
    monkeypatch.setattr(beside, "compile_beside", at_once)
    monkeypatch.setattr(beside, "NICENESS", 0)
    monkeypatch.setattr(compiled_pass._Variant, "_trace", traced_in)
    if not copied:
        monkeypatch.setattr(beside.Copy, "doing", lambda work: None)
    heads = SpeculativeModel(on, capture="auto")
    used: list[bool] = []
    read = heads.engine(False).reader.nodes
    monkeypatch.setattr(heads.engine(False).reader, "nodes", lambda *args: (read(*args), used.append(first(heads, False).active))[0])
    rows = left_padded(prompts([9]))
    for _ in range(2):
        say(heads, rows, max_new_tokens=compiled_pass.PATIENCE + 12, speculate=False)
        while first(heads, False).pending:
            time.sleep(0.1)
    half = len(used) // 2
    assert first(heads, False).reason is None and not any(used[:half]) and all(used[half:])


def test_what_is_slow_beside_compiled_passes_is_soon_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are not compiled may not pay beside passes that are, and would be made too rarely to be traced."""
    calls: list[int] = []
    monkeypatch.setattr(compiled_pass._Variant, "request", lambda variant, call: calls.append(variant.calls))
    for other in (False, True):
        others = [SimpleNamespace(active=other)]
        drafts = compiled_pass.CompiledPass(lambda held, x: (x,), lambda call: [("rows",)], compiled_pass.Where([], [], "no model", others))
        assert others[1:] == [drafts]
        drafts.begin()
        while len(calls) <= other:
            assert drafts([], torch.zeros(2)) is None
    assert calls == [compiled_pass.PATIENCE + 1, compiled_pass.SHORT_PATIENCE + 1] and calls[1] == 2


def test_a_text_that_begins_is_told_that_something_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = iter([False, True, True, False, False])
    monkeypatch.setattr(compiled_pass.CompiledPass, "pending", property(lambda _: next(pending)))
    one = compiled_pass.CompiledPass(lambda held, x: (x,), lambda call: None, compiled_pass.Where([], [], "no model", []))
    assert [one.begin() for _ in range(5)] == [False, False, False, True, False]


@needs_a_compiler
def test_weights_that_change_are_packed_again() -> None:
    on = in_bf16()
    rows = left_padded(prompts([9]))
    heads = SpeculativeModel(on, capture="compile")
    before = say(heads, rows, max_new_tokens=12)
    with torch.no_grad():
        on.model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    after, fresh = say(heads, rows, max_new_tokens=12), say(SpeculativeModel(on, capture="compile"), rows, max_new_tokens=12)
    assert torch.equal(after, fresh) and not torch.equal(after, before) and first(heads, False).active
    on.model.lm_head.weight.data.mul_(-1)
    assert torch.equal(say(heads, rows, max_new_tokens=12), say(SpeculativeModel(on, capture="compile"), rows, max_new_tokens=12))


@needs_a_compiler
@pytest.mark.parametrize("fault", ["memory", "result", "compiler"])
def test_where_it_does_not_work_decoding_goes_on_with_one_line(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on, rows = in_bf16(), left_padded(prompts([9]))
    expected = say(SpeculativeModel(on, capture="off"), rows, max_new_tokens=12)
    if fault == "memory":
        monkeypatch.setattr(weights.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1 << 40))
        monkeypatch.setattr(weights, "_SHARED", {})
        line = "more than a third of the"
    elif fault == "result":
        run = loaded.Loaded.__call__
        monkeypatch.setattr(loaded.Loaded, "__call__", lambda self, tensors: [-one for one in run(self, tensors)])
        line = "what compiled layers compute differs from what the model does"
    else:
        monkeypatch.setattr(store, "ready", lambda program: False)
        monkeypatch.setattr(store, "why_not", lambda program: "InductorError: no such operation")
        line = "InductorError: no such operation"
    heads = SpeculativeModel(on, capture="compile")
    assert torch.equal(say(heads, rows, max_new_tokens=12), expected)
    assert [line in record.message for record in caplog.records].count(True) == 1, caplog.messages
    assert line in str(heads.engine(False).capturer.report().fallback)


@pytest.mark.slow
@needs_a_compiler
def test_damaged_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(store, "code", lambda: "of this test")  # other tests have layers of their own
    on, rows = in_bf16(), left_padded(prompts([9]))
    say(SpeculativeModel(on, capture="compile"), rows, max_new_tokens=4)
    file = store.layer_folder(programs_of(on)[0].regions[0]) / layer.FILE
    part = file.read_bytes()[:9000]
    file.unlink()  # this process has it in memory
    file.write_bytes(part)
    heads = SpeculativeModel(on, capture="compile")
    for active in (False, True):  # the first text finds the damage
        say(heads, rows, max_new_tokens=4)
        assert first(heads, False).active is active
    assert any("is damaged; it is made again" in one.message for one in caplog.records)


def programs_of(on: Backbone) -> list[Program]:
    """The programs on disk for a model's plain steps."""
    found = [store.read_program(file) for file in kernels.folder().glob("pass-*.json")]
    return [one for one in found if one is not None and len(one.calls) == on.num_layers and one.inputs[0][0] == "bfloat16"]


def test_without_a_compiler_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled_read.say_once.cache_clear()
    for _ in range(2):
        assert SpeculativeModel(backbone("llama")).engine(False).reader.compiled is None
    assert len([one for one in caplog.records if "no C++ compiler (no-such-compiler is missing)" in one.message]) == 1
    with pytest.raises(UserError, match="no-such-compiler is missing.*choose 'auto' or 'off'"):
        SpeculativeModel(backbone("llama"), capture="compile").engine(False)
