"""What docs/security.md promises of what is written: no secret in a file, no escape sequence on a terminal, private temporary files."""

import contextlib
import io
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from chat_templates import make_tokenizer
from families import backbone, random_drafter
from test_security import SECRETS, heads, refusal, trained

from headstart.cli.conversation import Painter
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import load_drafter
from headstart.support.files import atomic
from headstart.support.text import visible
from headstart.training.recipe.recipe import load_recipe

__all__ = ["heads", "trained"]  # fixtures


class TestSecrets:
    def test_no_file_of_a_run_holds_one(self, trained: Path) -> None:
        files = [file for file in (trained / "out").rglob("*") if file.is_file()]
        assert {"headstart.json", "log.jsonl", "state.json"} <= {file.name for file in files}
        assert any(file.name.startswith("events.out") for file in files), "TensorBoard's"
        for file in files:
            content = file.read_bytes()
            assert not [value for value in SECRETS.values() if value.encode() in content], file
        assert b"SERVER_KEY" in (trained / "out" / "headstart.json").read_bytes(), "the variable's name is no secret"

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("api_key", "sk-proj-1234567"), ("api_key", "hf_AbCdEfGh1234"), ("api_key", "0123abcd"), ("api_key", ""),
            ("endpoint", "https://me:hunter2@host/v1"), ("endpoint", "https://hunter2@host/v1"), ("endpoint", "http://host/v1?key=hunter2"),
        ],
    )  # fmt: skip
    def test_a_key_in_a_recipe_is_refused_and_not_shown(self, trained: Path, key: str, value: str) -> None:
        message = refusal(lambda: load_recipe(trained / "recipe.yaml", [f"regenerate.{key}={json.dumps(value)}"]))
        assert f"regenerate.{key} is " in message and "not shown" in message and "hunter2" not in message
        assert not value or value not in message


class TestOutput:
    NASTY = "\x1b]0;title\x07\x1b[31mred\x1b[0m \x9b2J\r\x08\u202egnp.exe ok\ttab\nline"

    def test_controls_are_written_out(self) -> None:
        shown = visible(self.NASTY)
        assert shown == "\\x1b]0;title\\x07\\x1b[31mred\\x1b[0m \\x9b2J\\r\\x08\\u202egnp.exe ok\ttab\nline"
        assert visible("naïve 漢字 🙂 ok\n") == "naïve 漢字 🙂 ok\n"

    @pytest.mark.parametrize("terminal", [True, False])
    def test_generate_and_chat_send_none_to_a_terminal(self, terminal: bool) -> None:
        """In a pipe the text is the model's, byte for byte."""
        from headstart.cli.loading import SafeStreamer

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
