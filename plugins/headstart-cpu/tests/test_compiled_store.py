"""Programs and compiled code on disk: what is damaged, what is of other code, and what cannot be compiled."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from headstart_cpu import kernels, store
from headstart_cpu.program import NotCompiled, Program, Region

from headstart.inference.capture.backend import all_nearly_equal
from headstart.inference.capture.capture import choose
from headstart.support.errors import UserError


def test_damaged_programs_and_those_of_other_code_are_made_again(tmp_path: Path) -> None:
    file = tmp_path / "pass.json"
    program = Program("def forward(self): pass", (("float32", (1,)),), (), {}, {}, (), ())
    store.write_program(file, program)
    assert store.read_program(file) == program
    file.write_text(file.read_text().replace(store.code(), "0" * 20))
    assert store.read_program(file) is None
    file.write_text(file.read_text()[:40])
    assert store.read_program(file) is None and store.read_program(tmp_path / "none.json") is None


def test_a_file_is_whole_if_its_hash_is_that_beside_it(tmp_path: Path) -> None:
    """What is cut short would end the process that loads it."""
    file = tmp_path / "layer.so"
    for damage in (lambda: file.write_bytes(b"cod"), (tmp_path / "layer.so.sha256").unlink):
        file.write_bytes(b"code")
        kernels.seal(file)
        assert kernels.require_whole(file) == file
        damage()
        with pytest.raises(kernels.Damaged, match="layer.so is damaged"):
            kernels.require_whole(file)
        assert not file.exists()


def test_why_something_cannot_be_compiled_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "pass-1.json"
    assert store.failure(file) is None
    assert store.note_failure(file, RuntimeError("\nno such operation\nat line 3")) == "RuntimeError: no such operation"
    assert store.note_failure(file, NotCompiled("it runs no decoder layer")) == store.failure(file) == "it runs no decoder layer"


def test_a_compiler_that_fails_is_said_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:3: fatal error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    program = Program("def forward(self): pass", (("float32", (1,)),), (), {}, {}, (), ())
    assert store.lacks(program)
    store.compile_missing(program)
    assert store.why_not(program) == "kernels.cpp does not compile: kernels.cpp:3: fatal error: no such header"
    assert not store.lacks(program) and not kernels.library().exists()
    with pytest.raises(subprocess.CalledProcessError):
        kernels.build()


@pytest.mark.parametrize("ours", [True, False])
def test_a_region_is_kept_with_the_file_about_operations_of_ours_if_it_has_some(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of Medusa's and MLP heads that select a row have none."""

    def compiled(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Path:
        built = Path(config_patches["aot_inductor.output_path"]) / "c1.wrapper.so"
        for suffix in (".so", ".json") if ours else (".so",):
            built.with_suffix(suffix).write_text("code")
        return built

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_aot", compiled)
    store.compile_region(Region("def forward(self, x):\n    return [x + 1]", (("float32", ("rows", 4)),)), tmp_path / "layer-1")
    names = {store.FILE, f"{store.FILE}.sha256"} | ({"layer.json"} if ours else set())
    assert {file.name for file in (tmp_path / "layer-1").iterdir()} == names


def test_compiled_layers_are_for_the_cpu() -> None:
    with pytest.raises(UserError, match="'compile' is for the CPU; the model is on cuda: choose 'auto', 'cuda-graph' or 'off'"):
        choose("compile", torch.device("cuda"))


def test_scores_in_fp32_may_differ_by_the_rounding_of_what_they_are_computed_of() -> None:
    """The scores of drafts are fp32 numbers; those of heads in bf16 differ by what bf16 rounds."""
    hidden, scores = torch.ones(2, 8), torch.tensor([[0.4, 3.53]])
    others = scores + torch.tensor([[0.002, 0.003]])
    assert all_nearly_equal([scores, hidden.bfloat16()], [others, hidden.bfloat16()], slice(0, 1))
    assert not all_nearly_equal([scores, hidden], [others, hidden], slice(0, 1))
    assert not all_nearly_equal([scores, hidden.bfloat16()], [scores + 0.5, hidden.bfloat16()], slice(0, 1))
