"""``headstart compile``, and the commands that compile first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from architectures import CHAINS, of_transformers
from chat_templates import make_chat_model
from errors import error_of, refuses, report_of
from families import backbone, random_drafter
from headstart_cpu import compile_model, kernels, store, workers
from headstart_cpu.program import NotCompiled, Program, Region
from needs import needs_a_compiler
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import headstart
from headstart import Backbone, SpeculativeModel, load_backbone
from headstart.cli.main import main
from headstart.inference.capture.capture import choose
from headstart.inference.capture.plugin import all_nearly_equal
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request
from headstart.inference.engine.tree import CPU_WIDTH, TreeShape
from headstart.inference.runtime import Engine
from headstart.support.errors import UserError

REGION = Region("def forward(self, x):\n    return [x + 1]", (("float32", ("rows", 4)),))
BENCH = "--prompts recipes/quickstart/prompts.jsonl --limit 1 --max-new-tokens 2 --rounds 1".split()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a test has traced, the next does not trace again."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads on a small model beside them, ``model``."""
    folder = tmp_path_factory.mktemp("small")
    on = load_backbone(str(make_chat_model(folder / "model")), device="cpu")
    random_drafter("eagle3", on, depth=2).save_pretrained(folder / "heads")
    return str(folder / "heads")


@pytest.fixture
def parts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of regions that commands want to have compiled; nothing is compiled for them."""
    found: list[int] = []

    def note(regions: Any, say: Any) -> int:
        found.append(len(regions))
        return len(regions)

    monkeypatch.delenv("HEADSTART_COMPILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(workers, "compile_parts", note)
    return found


@needs_a_compiler
def test_layers_and_drafts_are_compiled(heads: str, parts: list[int], tmp_path: Path, caplog: Any) -> None:
    model = str(Path(heads).with_name("model"))
    report = report_of(tmp_path, "compile", model, "--heads", heads)
    assert parts == [report["parts"]] and parts[0] > 1 and "without compiled layers" not in caplog.text
    assert (report["backbone"], report["heads"], report["folder"]) == (model, heads, str(kernels.folder()))


@needs_a_compiler
def test_what_is_compiled_beforehand_serves_every_way_of_sampling(heads: str, parts: list[int]) -> None:
    """Transformers' own default, a top-k of 50, had found no drafts compiled, which then took too long to be made."""
    of, seeds_B = headstart.load(heads, load_backbone(str(Path(heads).with_name("model")), device="cpu")), torch.zeros(1, dtype=torch.int64)
    compile_model.compile_model(of, lambda line: None)
    made = {*kernels.folder().glob("pass-*.json")}
    for filters in ([], [TopKLogitsWarper(50)], [TopKLogitsWarper(300), TopPLogitsWarper(0.8)], [MinPLogitsWarper(0.1)]):
        engine = Engine(of, True, lambda *_: None)  # what lacks is traced and kept
        request = Request.plain(torch.arange(8)[None], 24, (), LogitsProcessorList([TemperatureLogitsWarper(0.7), *filters]), True)
        decoder = Decoder(engine.reader, engine.policy, request, TreeShape(9, CPU_WIDTH, 2), seeds_B, 1)
        assert any(step.nodes > 1 for step in decoder.run()) and {*kernels.folder().glob("pass-*.json")} == made, filters


@needs_a_compiler
def test_bench_compiles_first_unless_it_is_not_to(heads: str, parts: list[int]) -> None:
    command = ["bench", "--heads", heads, *BENCH]
    assert main([*command, "--no-compile"]) == 0 and not parts
    assert main(command) == 0 and len(parts) == 1


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "no model named; give MODEL, or --heads DIR"),
    (["nowhere"], "no backbone at 'nowhere'"),
    (["embedded", "--dtype", "fp16"], "cannot be compiled: the model is in float16"),
    (["embedded", "--batch-size", "0"], "a whole number of at least 1"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_said_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error_of(capsys, "compile", *arguments)


def test_chains_are_not_compiled() -> None:
    on = Backbone(of_transformers({"LFM2": CHAINS["LFM2"]})[0].model())
    with pytest.raises(UserError, match="the model cannot be compiled: its drafts are chains, which are read with transformers' own cache"):
        compile_model.compile_model(SpeculativeModel(on), lambda line: None)


@needs_a_compiler
def test_heads_that_use_no_compiled_code_are_told(parts: list[int]) -> None:
    with pytest.raises(UserError, match=r"compiled code is not used \(capture is 'trace'"):
        compile_model.compile_model(SpeculativeModel(backbone("llama"), capture="trace"), lambda line: None)
    assert not parts


# Programs and compiled code on disk: what is damaged, what is of other code, and what cannot be compiled.


def test_damaged_programs_and_those_of_other_code_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pass.json"
    program = Program("def forward(self): pass", (("float32", (1,)),), (), {}, {}, (), ())
    store.write_program(file, program)
    assert store.read_program(file) == program
    file.write_text(file.read_text().replace("inputs", "outputs"))
    assert store.read_program(file) is None
    file.write_text(file.read_text()[:40])
    assert store.read_program(file) is None and store.read_program(tmp_path / "none.json") is None
    usual = kernels.code()
    monkeypatch.setenv("CXX", "true")
    assert kernels.code.__wrapped__() != usual, "of another compiler, under another name"


def test_a_file_is_whole_if_it_ends_with_its_hash(tmp_path: Path) -> None:
    """What is cut short would end the process that loads it."""
    file = tmp_path / "layer.so"
    for damage in (lambda: file.write_bytes(b"cod"), lambda: file.write_bytes(file.read_bytes()[:-1])):
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
def test_a_region_is_kept_with_the_file_about_operations_of_ours(ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of Medusa's and MLP heads that select a row have none."""

    def compiled(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Path:
        built = Path(config_patches["aot_inductor.output_path"]) / "c1.wrapper.so"
        for suffix in (".so", ".json") if ours else (".so",):
            built.with_suffix(suffix).write_text("code")
        return built

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_aot", compiled)
    store.compile_region(REGION, tmp_path / "layer-1.so")
    assert {file.name for file in tmp_path.iterdir()} == {"layer-1.so"} | ({"layer-1.json"} if ours else set())
    kernels.require_whole(tmp_path / "layer-1.so")


def test_compiled_layers_are_for_the_cpu() -> None:
    refuses("'compile' is for the CPU; the model is on cuda: choose 'auto', 'cuda-graph' or 'off'", choose, "compile", torch.device("cuda"))


def test_scores_in_fp32_may_differ_by_the_rounding_of_what_they_are_computed_of() -> None:
    """The scores of drafts are fp32 numbers; those of heads in bf16 differ by what bf16 rounds."""
    hidden, scores = torch.ones(2, 8), torch.tensor([[0.4, 3.53]])
    others = scores + torch.tensor([[0.002, 0.003]])
    assert all_nearly_equal([scores, hidden.bfloat16()], [others, hidden.bfloat16()], slice(0, 1))
    assert not all_nearly_equal([scores, hidden], [others, hidden], slice(0, 1))
    assert not all_nearly_equal([scores, hidden.bfloat16()], [scores + 0.5, hidden.bfloat16()], slice(0, 1))


# Processes that compile: they end with the command that began them, however it ends, and say what fails.

SCRIPT = f"""
from headstart_cpu import workers
from headstart_cpu.program import Region
print(workers.compile_parts([Region({REGION.text!r}, {REGION.inputs!r})], lambda line: print(line, flush=True)))
"""


def begun(cache: Path) -> subprocess.Popen[str]:
    """A process that compiles into a folder of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)


def left(cache: Path) -> list[psutil.Process]:
    """Processes of ours that compile into that folder; the compilers that they started may end later."""

    def works_there(process: psutil.Process) -> bool:
        try:
            return "headstart" in " ".join(process.cmdline()) and str(cache) in process.environ().get("XDG_CACHE_HOME", "")
        except psutil.Error:  # gone, or a zombie
            return False

    return [process for process in psutil.process_iter() if works_there(process)]


@needs_a_compiler
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_command_that_is_ended(end: signal.Signals, tmp_path: Path) -> None:
    with begun(tmp_path) as command:
        while len(left(tmp_path)) < 2:
            time.sleep(0.1)
        command.send_signal(end)
        command.wait()
    end_of_wait = time.monotonic() + 10
    while left(tmp_path) and time.monotonic() < end_of_wait:
        time.sleep(0.1)
    assert left(tmp_path) == []


@pytest.mark.slow
@needs_a_compiler
def test_parts_are_compiled_with_lines_about_the_progress(tmp_path: Path) -> None:
    with begun(tmp_path) as command:
        said, _ = command.communicate()
    assert said.splitlines()[-1] == "2" and "of 2 parts, about" in said and not left(tmp_path)
    folder = tmp_path / "headstart" / "compiled"
    assert len([*folder.glob("kernels-*.so")]) == 1 and [*folder.glob("layer-*.so")]


@needs_a_compiler
def test_a_process_that_ends_before_its_work_is_done_is_an_error_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.folder().mkdir(parents=True)
    kernels.library().touch()
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refuses("has ended before its work was done", workers.compile_parts, [REGION], lambda line: None)
