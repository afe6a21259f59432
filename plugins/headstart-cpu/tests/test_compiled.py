"""Compiled layers: one region for equal layers, programs kept on disk, and what happens where it does not work."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DRAFTERS, backbone, left_padded, prompts, random_drafter, say, tiny
from headstart_cpu import kernels, store, workers
from headstart_cpu.compile_model import compile_model
from headstart_cpu.compiled_pass import BEGUN, Loaded
from headstart_cpu.passes import described
from headstart_cpu.program import Program, hold, sizes_named
from headstart_cpu.traced import EXAMPLES, traced
from needs import needs_a_compiler

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.inference.capture.captured import warn_once
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.proposer import made
from headstart.inference.runtime import Engine
from headstart.support.errors import UserError


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it, in a process that begins; elsewhere tests compile nothing."""
    monkeypatch.delenv("HEADSTART_COMPILE", raising=False)
    BEGUN.clear()


def in_bf16(family: str = "shallow") -> Backbone:
    return Backbone(tiny(family).bfloat16())


def test_a_model_that_was_saved_is_still_the_compiled_one(tmp_path: Path) -> None:
    """transformers notes the class in the configuration when it saves a model; what changes the arithmetic is another model."""
    model = tiny("shallow")
    before = described(model)
    model.save_pretrained(tmp_path)
    assert described(model) == before
    model.config.rms_norm_eps *= 2
    assert described(model) != before


def first(heads: SpeculativeModel, speculate: bool = True) -> Any:
    compiled = heads.engine(speculate).reader.read.compiled
    assert compiled is not None
    return compiled


# Tracing.


@pytest.mark.parametrize(("family", "kinds"), [("shallow", 1), ("gpt2", 1), pytest.param("gemma3", 1, marks=pytest.mark.slow)])
def test_equal_layers_are_one_region(family: str, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With products of packed weights: queries, keys and values as one, gate and up as one."""
    found: list[Program] = []
    monkeypatch.setattr(workers, "compile_parts", lambda regions, say: len(regions))
    monkeypatch.setattr(store, "write_program", lambda file, program: found.append(program))
    made_of = SpeculativeModel(backbone(family), proposers=made("suffix"))
    assert compile_model(made_of, lambda line: None)["parts"] >= 0
    (program,) = found
    assert len(program.regions) == kinds and len(program.calls) == backbone(family).num_layers
    assert program.regions[0].text.count("headstart_cpu.product") == 4 and "aten.mm" not in program.text
    assert program.text.count("headstart_cpu.product") == 1, "the readout"
    assert program.text.count("unbind.int(") == 2 and "select" not in program.text, "keys and values of all layers"
    assert store.PROGRAM.validate_json(store.PROGRAM.dump_json(program)) == program


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
def test_compiled_layers_write_the_texts_of_the_model_and_serve_later_processes() -> None:
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
    before = {file: file.stat().st_mtime_ns for file in kernels.folder().rglob("*")}
    later = SpeculativeModel(Backbone(on.model), proposers=made("suffix"))
    say(later, rows, max_new_tokens=4, speculate=False)
    assert first(later, False).active, "from the first token on"
    assert before == {file: file.stat().st_mtime_ns for file in kernels.folder().rglob("*")}, "nothing is compiled again"


@needs_a_compiler
@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", ["eagle3", "block", "medusa"])
def test_drafts_of_batches_are_one_program_for_any_number_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[Path, Program] = {}
    monkeypatch.setattr(store, "ready", lambda program: False)
    monkeypatch.setattr("headstart.inference.generate.Engine", partial(Engine, collect=found.__setitem__))
    on = in_bf16()
    heads = SpeculativeModel(on, random_drafter(kind, on), capture="compile")
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "seed": 3}):
        say(heads, left_padded(prompts([9, 14, 5])), max_new_tokens=12, tree=TreeShape(3, 1, 2), **options)
    drafts = [program for program in found.values() if len(program.calls) != on.num_layers]
    programs = [program for program in drafts if any("rows" in shape for _, shape in program.inputs)]  # others of the last row alone
    assert len(programs) >= 2
    for program in programs:
        assert all(hold(program.conditions, EXAMPLES | {"rows": rows}) for rows in (2, 48)), program.conditions
    (source,) = heads.engine(True).policy.of_kind(DrafterSource)
    assert all(one.compiled is None or one.compiled.reason is None for one in (source._steps, source._round))


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
    (source,) = heads.engine(True).policy.of_kind(DrafterSource)
    used = [one.compiled for one in (source._steps, source._round) if one.compiled is not None]
    assert all(one.reason is None for one in used) and (any(one.active for one in used) or not used)
    report = heads.engine(True).capturer.report()
    assert report.backend.split("+")[0] == "compile" and report.fallback is None


@pytest.mark.slow
@needs_a_compiler
def test_a_process_goes_on_as_it_began_with_heads_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Another process may compile at any moment: here between two texts."""
    monkeypatch.setattr(store, "code", lambda: str(tmp_path))  # nothing is kept for it
    store.compile_kernels()
    monkeypatch.setattr(workers, "compile_parts", lambda regions, say: len([store.compile_part(one) for one in regions]))
    on, rows = in_bf16(), left_padded(prompts([9]))
    heads, plain = (SpeculativeModel(on, drafter) for drafter in (random_drafter("eagle3", on), None))
    warn_once.cache_clear()
    asked = [say(heads, rows, max_new_tokens=6)]
    begun = {*BEGUN}
    asked.append(say(plain, rows, max_new_tokens=6, speculate=False))
    assert {*BEGUN} == begun, "one program for both"
    assert not first(heads).active and not first(plain, False).active and not any(BEGUN.values())
    assert ["headstart compile" in one.message for one in caplog.records].count(True) == 1
    compile_model(SpeculativeModel(Backbone(on.model)), lambda line: None)
    BEGUN.update(dict.fromkeys(begun, False))  # as where another process did it
    assert all(torch.equal(say(one, rows, max_new_tokens=6, speculate=one is heads), asked[0]) for one in (plain, heads))
    assert not first(heads).active and not first(plain, False).active
    BEGUN.clear()  # a later process
    heads, plain = (SpeculativeModel(on, drafter) for drafter in (random_drafter("eagle3", on), None))
    asked = [say(one, rows, max_new_tokens=40, speculate=one is heads) for one in (heads, plain)]
    assert first(heads).active and first(plain, False).active and torch.equal(*asked)


@pytest.mark.slow
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
def test_where_it_computes_otherwise_decoding_goes_on_with_one_line(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    on, rows, run = in_bf16(), left_padded(prompts([9])), Loaded.__call__
    expected = say(SpeculativeModel(on, capture="off"), rows, max_new_tokens=12)
    monkeypatch.setattr(Loaded, "__call__", lambda self, tensors: [-one for one in run(self, tensors)])
    heads, line = SpeculativeModel(on, capture="compile"), "what compiled layers compute differs from what the model does"
    assert torch.equal(say(heads, rows, max_new_tokens=12), expected)
    assert [line in record.message for record in caplog.records].count(True) == 1, caplog.messages
    assert line in str(heads.engine(False).capturer.report().fallback)


@needs_a_compiler
def test_what_is_not_compiled_is_said_once_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warn_once.cache_clear()
    heads = SpeculativeModel(on := in_bf16(), random_drafter("eagle3", on))
    for lengths in ([9], [4], [9, 5]):
        say(heads, left_padded(prompts(lengths)), max_new_tokens=4)
    said = [message.split("`")[1] for message in caplog.messages]
    assert said == ["headstart compile MODEL", "headstart compile MODEL --batch-size N"]


def test_without_a_compiler_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    warn_once.cache_clear()
    for _ in range(2):
        assert SpeculativeModel(backbone("llama")).engine(False).reader.read.compiled is None
    assert len([one for one in caplog.records if "no C++ compiler (no-such-compiler is missing)" in one.message]) == 1
    with pytest.raises(UserError, match="no-such-compiler is missing.*choose 'auto' or 'off'"):
        SpeculativeModel(backbone("llama"), capture="compile").engine(False)
