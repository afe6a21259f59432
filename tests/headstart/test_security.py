"""What docs/security.md promises: no pickle, no code but what the user asks for, no path out of a folder, no secret in a file, no escape
sequence on a terminal, nothing that others may read while it is written."""

import contextlib
import io
import json
import os
import pickle
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import make_tokenizer
from errors import error_of, refusal
from families import backbone, random_drafter
from small_run import make_recipe
from torch import _weights_only_unpickler
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import load_backbone, load_recipe
from headstart.cli.conversation import Painter
from headstart.cli.loading import SafeStreamer
from headstart.cli.main import main
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.heads.methods import methods
from headstart.serving.layouts.files import read_files
from headstart.support.files import atomic
from headstart.support.hub import inside
from headstart.support.text import visible
from headstart.training.features.manifest import Manifest, open_shard

SECRETS = {"SERVER_KEY": "sk-0123456789", "HF_TOKEN": "hf_abcdefgh", "WANDB_API_KEY": "77777777", "OPENAI_API_KEY": "sk-zzzzzz"}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone, a recipe and, in ``out``, a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    drafter, evaluation = {"kind": "eagle3", "depth": 2, "draft_vocab_size": 40}, {"prompts": 1, "max_new_tokens": 4}
    recipe = make_recipe(folder, drafter=drafter, train={"steps": 2}, eval=evaluation, log={"tensorboard": True})
    recipe.write_text(recipe.read_text() + "regenerate:\n  api_key: SERVER_KEY\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        assert main(["train", str(recipe)]) == 0
    return folder


@pytest.fixture
def heads(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "out", tmp_path / "heads"))


class TestPickles:
    @pytest.fixture
    def sealed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever unpickles fails the test."""

        def unpickled(*args: Any, **options: Any) -> Any:
            raise AssertionError("a pickle is read")

        for module, name in (
            (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "_Unpickler"), (torch, "load"),
            (_weights_only_unpickler, "Unpickler"), (_weights_only_unpickler, "load"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, unpickled)

    @pytest.mark.usefixtures("sealed", "on_the_cpu")
    def test_no_command_reads_one(self, trained: Path, heads: Path, tmp_path: Path) -> None:
        recipe = str(trained / "recipe.yaml")
        assert main(["train", recipe, f"save.dir={heads}", "train.steps=3"]) == 0, "resumed"
        assert main(["train", recipe, f"save.dir={tmp_path / 'warm'}", "train.steps=1", f"drafter.init={heads}"]) == 0
        assert main(["cache", recipe, f"cache.dir={tmp_path / 'cache'}"]) == 0
        assert main(["train", recipe, f"save.dir={tmp_path / 'cached'}", "train.steps=1", f"cache.dir={tmp_path / 'cache'}"]) == 0
        assert main(["inspect", str(heads)]) == 0
        assert main(["generate", "--heads", str(heads), "--max-new-tokens", "4", "the cat"]) == 0
        assert main(["export", "--heads", str(heads), "--to", "vllm", "--out", str(tmp_path / "exported")]) == 0
        assert main(["push", str(heads), "me/heads", "--dry-run", str(tmp_path / "pushed")]) == 0

    def test_a_backbone_of_pickles_is_refused(self, trained: Path, tmp_path: Path, capsys: Any, sealed: None) -> None:
        copy = shutil.copytree(trained / "backbone", tmp_path / "backbone")
        (copy / WEIGHTS).rename(copy / "pytorch_model.bin")
        assert "cannot load backbone" in error_of(capsys, "generate", "--backbone", copy, "--max-new-tokens", "2", "the cat")


class TestCode:
    CODE = (
        "import os, pathlib\npathlib.Path(os.environ['TRACE']).touch()\n"
        "from transformers import LlamaConfig as Own, LlamaForCausalLM as Model\n"
    )

    @pytest.fixture
    def trace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A file that the code of a repository makes."""
        monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
        monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
        yield tmp_path / "trace"
        for cls in (LlamaConfig, LlamaForCausalLM):  # transformers notes there whose code they are, which `save_pretrained` then copies
            cls._auto_class = None

    def with_code(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text(self.CODE)

    def edit(self, folder: Path, **changes: Any) -> None:
        card = json.loads((folder / METADATA).read_text())
        (folder / METADATA).write_text(json.dumps(card | changes))

    def test_a_checkpoint_cannot_ask_for_the_code_of_its_backbone(self, trained: Path, heads: Path, trace: Path, capsys: Any) -> None:
        model, recipe_file = trace.with_name("model"), str(trained / "recipe.yaml")
        shutil.copytree(trained / "backbone", model)
        self.with_code(model)
        self.with_code(heads)
        recipe = read_metadata(heads)[1]["provenance"]["recipe"]
        recipe["backbone"] |= {"path": str(model), "trust_remote_code": True}
        self.edit(heads, backbone=str(model), trust_remote_code=True, provenance={"recipe": recipe, "trust_remote_code": True})
        for command in (
            ["generate", "--heads", str(heads), "the cat"], ["inspect", str(heads)], ["verify", str(heads)],
            ["export", "--heads", str(heads), "--to", "vllm", "--out", str(trace.with_name("exported"))],
            ["push", str(heads), "a/b", "--dry-run", str(trace.with_name("pushed"))],
            ["import", str(heads), "--backbone", str(model), "--out", str(trace.with_name("imported"))],
            ["train", recipe_file, f"backbone.path={model}", f"drafter.init={heads}", f"save.dir={trace.with_name('new')}"],
        ):  # fmt: skip
            assert main(command) in (0, 2), command
            assert not trace.exists(), command
            assert "Traceback" not in capsys.readouterr().err
        main(["generate", "--heads", str(heads), "--trust-remote-code", "--max-new-tokens", "2", "the cat"])
        assert trace.exists(), "the flag allows it: otherwise the test shows nothing"

    @pytest.mark.parametrize("kind", ["stranger", "stranger.heads", "os", "os.path", "..stranger", "subprocess"])
    def test_a_card_cannot_name_a_module(self, heads: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, kind: str, trained: Path) -> None:
        package = trace.with_name("path") / "stranger"
        package.mkdir(parents=True)
        for name in ("__init__.py", "heads.py"):
            (package / name).write_text(self.CODE)
        monkeypatch.syspath_prepend(str(package.parent))
        self.edit(heads, kind=kind)
        on = load_backbone(str(trained / "backbone"), device="cpu")
        assert refusal(load_drafter, heads, on)
        for command in (["inspect", str(heads)], ["push", str(heads), "a/b", "--dry-run", str(trace.with_name("pushed"))]):
            assert main(command) in (0, 2)
        assert not trace.exists() and "stranger" not in sys.modules and kind not in methods()


class TestPaths:
    @pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..", "sub/file"])
    def test_a_card_names_files_of_its_folder(self, heads: Path, name: str) -> None:
        card = json.loads((heads / METADATA).read_text())
        card["weights"]["file"] = name
        (heads / METADATA).write_text(json.dumps(card))
        message = refusal(read_metadata, heads)
        assert METADATA in message or "leads out of the folder" in message

    @pytest.mark.parametrize("name", [WEIGHTS, METADATA, "config.json", "adapter/adapter_config.json"])
    def test_a_link_out_of_the_folder_is_not_followed(self, heads: Path, tmp_path: Path, name: str, capsys: Any) -> None:
        (heads / name).parent.mkdir(exist_ok=True)
        if (heads / name).exists():
            (heads / name).rename(tmp_path / "elsewhere")
        else:
            (tmp_path / "elsewhere").write_text("{}")
        (heads / name).symlink_to(tmp_path / "elsewhere")
        target = tmp_path / "elsewhere"
        assert refusal(read_metadata, heads).startswith(f"{heads / name} leads out of the folder, to {target}; fetch")
        for command in (["generate", "--heads", str(heads), "a"], ["push", str(heads), "a/b", "--dry-run", str(tmp_path / "pushed")]):
            assert main(command) == 2 and "leads out of the folder" in capsys.readouterr().err
        assert not (tmp_path / "pushed").exists()

    def test_nothing_behind_a_link_is_published(self, heads: Path, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "private").write_text("mine")
        (heads / "tokenizer_notes.txt").symlink_to(tmp_path / "private")
        assert "leads out of the folder" in error_of(capsys, "push", heads, "a/b", "--dry-run", tmp_path / "pushed")
        assert not (tmp_path / "pushed").exists()

    def test_links_of_the_cache_of_the_hub_and_within_a_folder(self, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "models--me--x" / "snapshots" / "abc", tmp_path / "models--me--x" / "blobs"
        for folder in (snapshot, blobs, tmp_path / "other" / "blobs"):
            folder.mkdir(parents=True)
        for folder in (blobs, tmp_path / "other" / "blobs"):
            (folder / "123").touch()
        (snapshot / WEIGHTS).symlink_to("../../blobs/123")
        (snapshot / "again").symlink_to(WEIGHTS)
        (snapshot / "out").symlink_to(tmp_path / "other" / "blobs" / "123")
        assert inside(snapshot, WEIGHTS) == snapshot / WEIGHTS and inside(snapshot, "again").is_file()
        assert "leads out of the folder" in refusal(inside, snapshot, "out")
        assert "leads out of the folder" in refusal(inside, snapshot, "../../../other/blobs/123")

    def test_files_of_other_trainers_and_shards_of_caches(self, heads: Path, tmp_path: Path) -> None:
        (heads / WEIGHTS).rename(tmp_path / "x.safetensors")
        (heads / WEIGHTS).symlink_to(tmp_path / "x.safetensors")
        assert "leads out of the folder" in refusal(read_files, heads)
        manifest = Manifest(heads, {}, ((0, 1),))
        manifest.shard(0).symlink_to(tmp_path / "x.safetensors")
        assert "leads out of the folder" in refusal(open_shard, manifest, 0)


class TestSecrets:
    def test_no_file_of_a_run_holds_one(self, trained: Path) -> None:
        files = [file for file in (trained / "out").rglob("*") if file.is_file()]
        assert {"headstart.json", "log.jsonl", "state.json"} <= {file.name for file in files}
        assert any(file.name.startswith("events.out") for file in files), "TensorBoard's"
        for file in files:
            content = file.read_bytes()
            assert not [value for value in SECRETS.values() if value.encode() in content], file
        assert b"SERVER_KEY" in (trained / "out" / "headstart.json").read_bytes(), "the variable's name is no secret"

    @pytest.mark.parametrize(("key", "value"), [
        ("api_key", "sk-proj-1234567"), ("api_key", "hf_AbCdEfGh1234"), ("api_key", "0123abcd"), ("api_key", ""),
        ("endpoint", "https://me:hunter2@host/v1"), ("endpoint", "https://hunter2@host/v1"), ("endpoint", "http://host/v1?key=hunter2"),
    ])  # fmt: skip
    def test_a_key_in_a_recipe_is_refused_and_not_shown(self, trained: Path, key: str, value: str) -> None:
        message = refusal(load_recipe, trained / "recipe.yaml", [f"regenerate.{key}={json.dumps(value)}"])
        assert f"regenerate.{key} is " in message and "not shown" in message and "hunter2" not in message
        assert not value or value not in message


class TestOutput:
    NASTY = "\x1b]0;title\x07\x1b[31mred\x1b[0m \x9b2J\r\x08\u202egnp.exe ok\ttab\nline"

    def test_controls_are_written_out(self) -> None:
        assert visible(self.NASTY) == "\\x1b]0;title\\x07\\x1b[31mred\\x1b[0m \\x9b2J\\r\\x08\\u202egnp.exe ok\ttab\nline"
        assert visible("naïve 漢字 🙂 ok\n") == "naïve 漢字 🙂 ok\n"

    @pytest.mark.parametrize("terminal", [True, False])
    def test_generate_and_chat_send_none_to_a_terminal(self, terminal: bool) -> None:
        """In a pipe the text is the model's, byte for byte."""

        class Screen(io.StringIO):
            def isatty(self) -> bool:
                return terminal

        tokenizer, screen = make_tokenizer(), Screen()
        tokenizer.decode = lambda tokens, **options: self.NASTY if len(tokens) else ""
        with contextlib.redirect_stdout(screen):
            streamer = SafeStreamer(tokenizer)
            streamer.put(torch.tensor([1]))
            streamer.end()
        painter = Painter(tokenizer, screen, colours=False)
        painter.put(torch.tensor([[1]]))
        painter.put(torch.tensor([2]))
        painter.end()
        shown = visible(self.NASTY) if terminal else self.NASTY
        assert screen.getvalue().expandtabs().count(shown.expandtabs()) == 2 or not terminal
        assert terminal or screen.getvalue() == f"{shown}\n{shown}\n"
        assert not terminal or not set("\x1b\x07\x9b\r\x08\u202e") & set(screen.getvalue())
        assert painter.text == self.NASTY, "what the model reads in the next turn is its own text"


class TestTemporaryFiles:
    @pytest.mark.parametrize("folder", [False, True])
    def test_others_cannot_read_what_is_being_written(self, tmp_path: Path, folder: bool) -> None:
        before = os.umask(0o022)
        try:
            with atomic(tmp_path / "made", folder=folder) as temporary:
                assert stat.S_IMODE(temporary.stat().st_mode) == (0o700 if folder else 0o600)
            assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == (0o755 if folder else 0o644)
        finally:
            os.umask(before)

    def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "theirs").write_text("theirs")
        (tmp_path / "log.jsonl").symlink_to(tmp_path / "theirs")
        with atomic(tmp_path / "log.jsonl") as temporary:
            temporary.write_text("ours")
        assert (tmp_path / "theirs").read_text() == "theirs" and not (tmp_path / "log.jsonl").is_symlink()

    def test_saving_heads_follows_no_link(self, tmp_path: Path) -> None:
        drafter = random_drafter("medusa", backbone("llama"), depth=2)
        (tmp_path / "theirs").write_text("theirs")
        (tmp_path / "heads").mkdir()
        for name in (METADATA, "config.json", drafter.file_name):
            (tmp_path / "heads" / name).symlink_to(tmp_path / "theirs")
        drafter.save_pretrained(tmp_path / "heads")
        assert (tmp_path / "theirs").read_text() == "theirs"
        load_drafter(tmp_path / "heads", backbone("llama"))
