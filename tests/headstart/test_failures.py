"""What is refused before weights are read; and the last line of defence: whatever leaves a command is one line and a status, and an
unforeseen error keeps its traceback in a file."""

import errno
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from chat_templates import make_chat_model
from errors import error_of, refuses
from families import say
from gguf_models import chat_model, write_gguf
from small_run import make_recipe
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from headstart import SpeculativeModel, TreeShape, load_backbone
from headstart.cli.main import Guard, main
from headstart.heads.methods import build_drafter
from headstart.serving.engines import nearest as unknown_format
from headstart.support.errors import UserError, did_you_mean


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def guarded(work: Callable[[], int], folder: Path | None = None, debug: bool = False) -> int:
    with Guard(folder, debug) as guard:
        guard.status = work()
    return guard.status


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "cache" / "headstart" / "failures"


@pytest.mark.parametrize(("error", "status", "said"), [
    (UserError("give a folder"), 2, "error: give a folder"),
    (MemoryError(), 2, "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "out of memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), 2, "the accelerator is out of memory"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "the disk is full"),
    (ConnectionResetError("reset"), 2, "the connection was lost"),
    (KeyboardInterrupt(), 130, "interrupted"),
])  # fmt: skip
def test_what_is_known_is_one_line_that_says_what_to_try(
    error: BaseException, status: int, said: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error)) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and not cache.exists()


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("two\nlines"), RecursionError("too deep")])
def test_what_nobody_foresaw_is_logged(error: Exception, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, expected in ((None, cache), (tmp_path, tmp_path)):
        assert guarded(raising(error), folder) == 70
        (line,) = capsys.readouterr().err.splitlines()
        (log,) = expected.glob("failure-*.txt")
        assert type(error).__name__ in line and str(log) in line
        assert "Traceback" in log.read_text() and log.stat().st_mode & 0o077 == 0


def test_debug_prints_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyError("x")), debug=True) == 70 and "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    assert guarded(raising(KeyError("x"))) == 70 and "Traceback" in capsys.readouterr().err
    assert guarded(lambda: 1) == 1


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize(("error", "said"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
    (MemoryError(), "out of memory"),
    (torch.AcceleratorError("CUDA error: unspecified launch failure"), "the accelerator failed or was lost"),
    (RuntimeError("CUDA error: device lost"), "the accelerator failed or was lost"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["generate", "train"])
def test_an_accelerator_that_fails_in_a_forward_pass(
    command: str, error: Exception, said: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"save.dir={recipe.parent / type(error).__name__}"
    words = {"generate": ["generate", "--backbone", str(recipe.parent / "backbone"), "a cat"], "train": ["train", str(recipe), out]}
    with register_module_forward_pre_hook(Mock(side_effect=error)):
        status = main(words[command])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert status == (2 if said == "out of memory" else 70) and len(errors) == 1 and said in errors[0]


def test_what_the_memory_cannot_hold_is_refused_before_anything_is_computed(recipe: Path) -> None:
    ids_BT: Tensor = torch.ones(1 << 22, 1, dtype=torch.long)
    on = SpeculativeModel(load_backbone(str(recipe.parent / "backbone")))
    many = {"tree": TreeShape(4096, 4), "max_new_tokens": 4}
    line = "4194304 sequences of 1 tokens with trees of 4096 nodes need at least .*; lower the batch size"
    with register_module_forward_pre_hook(lambda *of: pytest.fail("computed")):
        refuses(line, say, on, {"input_ids": ids_BT}, **many)
        with pytest.raises(pytest.fail.Exception, match="computed"):  # one sequence at a time fits
            say(on, {"input_ids": ids_BT[:9]}, **many, batch_size=1)


def test_changes_of_a_recipe_stand_before_options_or_after_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "recipes/quickstart/eagle3.yaml", "--json", str(tmp_path / "plan.json")]
    for words in (["train.steps=0", *command[2:]], [*command[2:], "train.steps=0"]):
        assert "train.steps" in error_of(capsys, *command[:2], *words)
    for unknown in ("--jsno", "x"):
        with pytest.raises(SystemExit):
            main([*command, unknown, "train.steps=1"])
        assert f"error: unrecognized arguments: {unknown} (see" in capsys.readouterr().err


# What files show is said before weights are read: data, prompts, heads of another model, tokenizers.


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone with its recipe, and the same model as a GGUF file; heads of a model of another width; prompts."""
    root = tmp_path_factory.mktemp("house")
    make_recipe(root)
    other = make_chat_model(root / "other", None, special="", ends=[1])
    build_drafter("medusa", load_backbone(str(other), device="cpu"), {"depth": 2}).save_pretrained(root / "heads")
    write_gguf(root / "chat.gguf", *chat_model(), kind="Q8_0")
    (root / "bare").mkdir()
    shutil.copy(root / "backbone" / "config.json", root / "bare")  # neither weights nor a tokenizer
    (root / "backbone" / "model.safetensors").unlink()  # whatever reads weights fails otherwise
    (root / "prompts.jsonl").write_text('{"prompt": "What is two?"}\n')
    (root / "empty.jsonl").write_text("\n")
    (root / "broken.jsonl").write_text('{"text": \n')
    (root / "odd.jsonl").write_text('{"ask": "What?", "say": "Two."}\n')
    (root / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}))
    return root


@pytest.fixture
def refused(house: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail without reading weights; return its error."""
    monkeypatch.chdir(house)
    return functools.partial(error_of, capsys)


@pytest.mark.matrix
@pytest.mark.parametrize("command", ["train", "cache", "inspect", "plan", "regenerate"])
@pytest.mark.parametrize(("file", "message"), [
    ("missing.jsonl", "data file missing.jsonl: there is no such file"),
    ("empty.jsonl", "empty.jsonl holds no rows"),
    ("broken.jsonl", "broken.jsonl, line 1: not valid JSON"),
    ("odd.jsonl", "odd.jsonl has the columns ask, say, not "),
])  # fmt: skip
def test_data(refused: Callable[..., str], command: str, file: str, message: str) -> None:
    given = ["cache.dir=features", "regenerate.out=answers.jsonl"]
    assert message in refused(command, "recipe.yaml", f"data.train={file}", *given)
    if command in ("train", "cache", "inspect", "plan"):
        assert message in refused(command, "recipe.yaml", f"data.eval={file}", *given)


@pytest.mark.parametrize("command", ["train", "cache", "inspect"])
def test_a_chat_template_and_a_tokenizer(refused: Callable[..., str], command: str) -> None:
    assert "has no chat template" in refused(command, "recipe.yaml", "data.train=chats.jsonl", "cache.dir=features")
    assert refused(command, "recipe.yaml", "backbone.path=bare", "cache.dir=features") == (
        "error: no tokenizer in 'bare': a tokenizer.json is missing there; save the model's with tokenizer.save_pretrained"
    )


@pytest.mark.parametrize("backbone", ["bare", "chat.gguf"])
@pytest.mark.parametrize("command", [
    ["generate", "--heads", "heads", "Hi"], ["chat", "--heads", "heads"],
    ["bench", "--heads", "heads", "--prompts", "prompts.jsonl"], ["verify", "heads"],
])  # fmt: skip
def test_heads_of_another_model(refused: Callable[..., str], command: list[str], backbone: str) -> None:
    line = refused(*command, "--backbone", backbone)
    assert "heads was trained on " in line and f"this backbone is {backbone} (" in line and "hidden_size 32" in line


@pytest.mark.parametrize("backbone", ["backbone", "chat.gguf"])
def test_heads_to_start_from_and_to_regenerate_with(refused: Callable[..., str], backbone: str) -> None:
    given = ["recipe.yaml", f"backbone.path={backbone}", "train.precision=no"]
    assert "drafter.init: heads was trained on " in refused("train", *given, "drafter.init=heads")
    error = refused("train", *given, "drafter={kind: eagle3, init: heads}")
    assert "drafter.init: heads holds medusa heads, this recipe trains eagle3" in error
    assert "heads was trained on " in refused("regenerate", *given, "regenerate.heads=heads", "regenerate.out=answers.jsonl")


@pytest.mark.parametrize(("given", "message"), [
    (["bench", "--propose", "suffix", "--prompts", "missing.jsonl"], "--prompts missing.jsonl: there is no such file"),
    (["bench", "--propose", "suffix", "--prompts", "empty.jsonl"], "empty.jsonl holds no prompts"),
    (["bench", "--propose", "suffix", "--prompts", "prompts.jsonl", "--assistant", "./nowhere"], "no backbone at './nowhere'"),
    (["bench", "--propose", "suffix", "--prompts", "broken.jsonl"], "broken.jsonl, line 1: not valid JSON"),
    (["verify", "other", "--prompts", "missing.jsonl"], "--prompts missing.jsonl: there is no such file"),
    (["generate", "--draft-model", "./nowhere", "Hi"], "no backbone at './nowhere'"),
    (["generate", "--adapter", "other", "Hi"], "other lacks adapter_config.json"),
    (["chat", "--json-schema", "broken.jsonl"], "broken.jsonl: not valid JSON"),
])  # fmt: skip
def test_other_files(refused: Callable[..., str], given: list[str], message: str) -> None:
    assert message in refused(*given, "--backbone", "backbone")


def test_data_of_a_new_recipe(refused: Callable[..., str]) -> None:
    assert "data file missing.jsonl: there is no such file" in refused("new-recipe", "./nowhere", "--data", "missing.jsonl")


# What earlier versions had is refused in one line that says what takes its place; of other unknown names the likely one is offered.

RECIPE = "recipes/quickstart/eagle3.yaml"


@pytest.mark.parametrize(("words", "said"), [
    (["plan", RECIPE, "drafter.lora.rank=4"], "unknown key drafter.lora; it is gone: heads are trained whole, from drafter.init"),
    (["cache", RECIPE, "cache.dir=x", "cache.teacher=topk"], "cache.teacher; it is gone: a cache holds the final hidden states"),
    (["tune", "--heads", "heads"], "; it is gone: decoding times this machine in its first steps"),
    (
        ["export", "--heads", "heads", "--to", "vllm", "--out", "out", "--quantize", "int8"],
        "; it is gone: engines' own tools quantise heads",
    ),
    (["verify", "served", "--features", "cache"], "; it is gone: the folder's drafts are compared with those that its export stored"),
    (["bench", "--prompts", "p.jsonl", "--draft-sink=3"], "arguments: --draft-sink=3; it is gone: say --num-sink-tokens"),
])  # fmt: skip
def test_one_line_says_what_to_use(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, *words)


@pytest.mark.parametrize(("words", "offered"), [
    (["generate", "--backbone", "embedded", "--propose", "sufix"], "did you mean 'suffix'? choose from suffix, recycling"),
    (["trian", "recipe.yaml"], "did you mean 'train'? choose from train, new-recipe"),
    (["generate", "--backbone", "embedded", "--propose", "grammar"], "invalid choice: 'grammar' (choose from 'suffix'"),
])  # fmt: skip
def test_choices_of_the_command_line(words: list[str], offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offered in error_of(capsys, *words)


def test_a_name_that_is_not_alike_is_not_offered() -> None:
    formats = ["vllm", "sglang", "transformers"]
    assert "did you mean 'vllm'" in str(unknown_format("vlm", formats)) and "did you mean" not in str(unknown_format("ollama", formats))
    assert did_you_mean("medsua", ["medusa", "mlp"]) == "did you mean 'medusa'? " and did_you_mean("mpt2", ["mtp", "mlp"]) == ""
