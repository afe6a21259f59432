"""``headstart compile``, and the commands that compile first."""

import json
from pathlib import Path
from typing import Any

import pytest
from architectures import CHAINS, of_transformers
from chat_run import make_chat_model
from families import backbone, random_drafter
from headstart_cpu import compile_model, kernels, workers
from needs import needs_a_compiler
from small_run import status_of

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.inference.generate import SpeculativeModel
from headstart.support.errors import UserError

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
def test_the_layers_of_a_model_and_the_drafts_of_its_heads_are_compiled(heads: str, parts: list[int], tmp_path: Path) -> None:
    model = str(Path(heads).with_name("model"))
    assert main(["compile", model, "--heads", heads, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert parts == [report["parts"]] and parts[0] > 1
    assert (report["backbone"], report["heads"], report["folder"]) == (model, heads, str(kernels.folder()))


@needs_a_compiler
def test_bench_compiles_first_unless_it_is_not_to(heads: str, parts: list[int]) -> None:
    command = ["bench", "--heads", heads, *BENCH]
    assert main([*command, "--no-compile"]) == 0 and not parts
    assert main(command) == 0 and len(parts) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model named; give MODEL, or --heads DIR"),
        (["nowhere"], "no backbone at 'nowhere'"),
        (["embedded", "--dtype", "fp16"], "cannot be compiled: the model is in float16"),
        (["embedded", "--batch-size", "0"], "a whole number of at least 1"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = status_of(["compile", *arguments])
    said = capsys.readouterr().err
    assert status == 2 and message in said and "Traceback" not in said


def test_chains_are_not_compiled() -> None:
    on = Backbone(of_transformers({"LFM2": CHAINS["LFM2"]})[0].model())
    with pytest.raises(UserError, match="the model cannot be compiled: its drafts are chains, which are read with transformers' own cache"):
        compile_model.compile_model(SpeculativeModel(on), lambda line: None)


@needs_a_compiler
def test_heads_that_use_no_compiled_code_are_told(parts: list[int]) -> None:
    with pytest.raises(UserError, match=r"compiled code is not used \(capture is 'trace'"):
        compile_model.compile_model(SpeculativeModel(backbone("llama"), capture="trace"), lambda line: None)
    assert not parts
