"""One chat template for a checkpoint: saved with the heads, and used by every command and by `load`."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, conversations, make_chat_model, make_chat_recipe, write_rows
from errors import error_of, output_of, report_of
from families import backbone, random_drafter
from small_run import train_once
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from watched import watched

import headstart
from headstart.chat.prompts import Prompter
from headstart.chat.template import ChatSettings, template_hash
from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.serving.model_card import scrubbed
from headstart.support.errors import UserError


def test_heads_that_keep_no_template_need_the_tokenizers(tmp_path: Path) -> None:
    def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), chat_template=template)

    trained = tokenizer("{{ messages }}")
    random_drafter("medusa", backbone("llama")).save_pretrained(tmp_path, {"chat_template": template_hash(trained.chat_template)})
    load_drafter(tmp_path, backbone("llama"), tokenizer=trained)
    load_drafter(tmp_path, backbone("llama"))
    for other in ("{{ messages }} ", None):
        assert "chat template" in str(pytest.raises(UserError, load_drafter, tmp_path, backbone("llama"), tokenizer=tokenizer(other)).value)
        load_drafter(tmp_path, backbone("llama"), tokenizer=tokenizer(other), allow_finetuned=True)
    assert template_hash(None) is None
    kept = {"chat_template": template_hash(trained.chat_template), "chat": ChatSettings().to_card(trained)}
    random_drafter("medusa", backbone("llama")).save_pretrained(tmp_path / "kept", kept)
    for other in ("{{ messages }} ", None):  # the heads bring theirs
        load_drafter(tmp_path / "kept", backbone("llama"), tokenizer=tokenizer(other))


OWN = """{% for m in messages %}{{ '<|im_start|>the ' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' + (mood or 'calm') + '\n' }}{% endif %}"""
ASKED = [{"role": "user", "content": "Hi"}]
OPENED = "<|im_start|>the user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with heads of a recipe whose template is not the tokenizer's, their model, and prompts."""
    folder = tmp_path_factory.mktemp("own")
    train_once(make_chat_recipe(folder, make_chat_model(folder / "model"), chat_template=OWN, template_kwargs={"mood": "merry"}))
    write_rows(folder / "prompts.jsonl", [*conversations(2), {"turns": ["Hi", "Ho"]}])
    return folder


def test_the_checkpoint_holds_the_template_and_its_variables(trained: Path) -> None:
    chat = read_metadata(trained / "out")[1]["provenance"]["chat"]
    assert (chat["template"], chat["template_kwargs"]) == (OWN, {"mood": "merry"}) and 3 in chat["eos_token_id"]
    own = read_metadata(trained / "out")[1]["provenance"]["chat_template"]
    assert own == template_hash(OWN) != template_hash(CHATML)


@pytest.mark.parametrize(("arguments", "mood"), [("", "merry"), ("--template-arg mood=sad", "sad"), ("--template-arg mood=false", "calm")])
def test_every_command_asks_with_it(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, mood: str) -> None:
    heads, short = ["--heads", str(trained / "out")], ["--max-new-tokens", "3", *arguments.split()]
    assert output_of(capsys, "generate", *heads, *short, "--echo", "Hi").startswith(f"the user\nHi\nassistant\n{mood}\n")
    report = report_of(tmp_path, "bench", *heads, "--prompts", trained / "prompts.jsonl", *short)
    shown = [sample["prompt"] for sample in report["samples"]]
    assert shown and all(text.endswith(f"assistant\n{mood}\n") for text in shown)


def test_chat_goes_on_with_it(trained: Path, stdin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    converse = Prompter.converse
    asked = watched(monkeypatch, Prompter, "converse", lambda self, *what: self.tokenizer.decode(converse(self, *what)))
    stdin("Hi\nHo\n")
    assert main(["chat", "--heads", str(trained / "out"), "--max-new-tokens", "3"]) == 0
    assert asked[0] == f"{OPENED}merry\n" and asked[1].startswith("<|im_start|>the user\nHi<|im_end|>\n<|im_start|>the assistant\n")


def test_heads_are_rounded_by_prompts_of_it(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converse = Prompter.converse
    asked = watched(monkeypatch, Prompter, "converse", lambda self, *what: self.tokenizer.decode(converse(self, *what)))
    prompts = ["--prompts", str(trained / "prompts.jsonl"), "--max-new-tokens", "3"]
    main(["quantize", str(trained / "out"), "--out", str(tmp_path / "out"), *prompts])
    assert asked and all(text.endswith("assistant\nmerry\n") for text in asked)


def test_load_makes_prompts_with_it(trained: Path) -> None:
    model, tokenizer = load_backbone(str(trained / "model"), dtype="fp32").model, load_tokenizer(str(trained / "model"))
    with pytest.warns(UserWarning, match="another chat template than this tokenizer's; make prompts with .* heads.chat.prompt"):
        heads = headstart.load(trained / "out", backbone=model, tokenizer=tokenizer)
    assert heads.chat is not None and tokenizer.decode(heads.chat.prompt(ASKED)) == f"{OPENED}merry\n"
    assert tokenizer.decode(heads.chat.with_variables(mood="sad").prompt(ASKED)).endswith("sad\n")
    tokenizer.chat_template = OWN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert headstart.load(trained / "out", backbone=model, tokenizer=tokenizer).chat is not None
        assert headstart.load(trained / "out", backbone=model).chat is None


@pytest.mark.parametrize(("given", "message"), [
    ("mood", "--template-arg 'mood' is no variable; write KEY=VALUE, as in enable_thinking=false"),
    ("1=2", "--template-arg '1=2' is no variable"),
    ("mood={", "--template-arg mood, line 1: not valid YAML"),
])  # fmt: skip
def test_a_wrong_variable_is_one_line(trained: Path, capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    assert message in error_of(capsys, "generate", "--heads", trained / "out", "--template-arg", given, "Hi")


def test_exported_and_published_heads_bring_it(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--heads", str(trained / "out"), "--to", "medusa", "--out", str(tmp_path / "served")]) == 0
    assert (tmp_path / "served" / "chat_template.jinja").read_text() == OWN
    out = capsys.readouterr().out
    assert "written as chat_template.jinja: let the engine ask with it" in out and "chat_template_kwargs {'mood': 'merry'}" in out
    template = "{{ '/no_think' if mood else '</think>' }}"
    card = {"chat": {"template": template}, "recipe": {"data": {"chat_template": template, "train": "/home/me/rows.jsonl"}}}
    kept = {"chat": {"template": template}, "recipe": {"data": {"chat_template": template, "train": "rows.jsonl"}}}
    assert scrubbed(card, {}) == kept


def test_heads_of_two_templates_are_not_measured_together(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card: dict[str, Any] = json.loads((trained / "out" / "headstart.json").read_text())
    other = shutil.copytree(trained / "out", tmp_path / "other")
    card["provenance"]["chat"]["template"] = CHATML
    (other / "headstart.json").write_text(json.dumps(card))
    command = ["bench", "--heads", str(trained / "out"), str(other), "--prompts", str(trained / "prompts.jsonl")]
    assert f"{other} was trained with another chat template than {trained / 'out'}" in error_of(capsys, *command)
    card["provenance"]["chat"]["template"] = 3
    (other / "headstart.json").write_text(json.dumps(card))
    assert main(command) == 2 and "is damaged (provenance.chat.template" in capsys.readouterr().err
