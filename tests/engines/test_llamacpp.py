"""llama.cpp drafts with an exported GGUF what Headstart drafts, token by token (``make engines`` installs it in .venv-llamacpp)."""

import json
from pathlib import Path

import pytest
from engines_alone import headstart
from gguf_models import write_gguf
from trained import ROOT, trained

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.serving.export import Request, export
from headstart.serving.layouts.layout import read_checkpoint
from headstart.serving.layouts.llamacpp import BLOCK_FILE, FILE, LlamaCpp
from headstart.serving.verify.drafts import EngineSettings, Transcript, acceptance
from headstart.serving.verify.llamacpp import LLAMACPP, serve, transcript
from headstart.support.errors import UserError

SETTINGS = EngineSettings(4, 25)


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    try:
        LLAMACPP.find_python()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded backbone as a GGUF file in fp32."""
    return write_gguf(tmp_path_factory.mktemp("target") / "t.gguf", load_backbone("embedded").model, load_tokenizer("embedded"), "F32")


def accepted(one: Transcript) -> int:
    """The written drafts of a text: all tokens but one a pass, the first pass being the prompt's."""
    return SETTINGS.new_tokens - 1 - len(one.rounds)


def test_llama_cpp_drafts_what_headstart_drafts(target: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    folder = trained("eagle3-for-llama.cpp")
    export(Request(str(folder), "llama.cpp", tmp_path / "out"))
    found, plain = (serve(heads, str(target), prompts, SETTINGS)["texts"] for heads in (tmp_path / "out" / FILE, None))
    ours = headstart(folder, "embedded", prompts, SETTINGS)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain] == [list(one.written) for one in ours]
    assert [one["accepted"] for one in found] == [accepted(one) for one in ours]
    for theirs, one in zip(found, ours, strict=True):  # of the last round llama.cpp drafts no more than the text takes, or nothing
        assert len(one.rounds) - 1 <= len(theirs["drafts"]) <= len(one.rounds)
        assert theirs["drafts"] == [list(at.drafts[: len(draft)]) for draft, at in zip(theirs["drafts"], one.rounds, strict=False)]
        rounds = transcript(one.prompt, theirs, SETTINGS).rounds
        assert [(at.position, at.kept) for at in rounds[:-1]] == [(at.position, at.kept) for at in one.rounds[: len(rounds) - 1]]
    kept = acceptance(ours)["acceptance_rate_per_pos"]
    print(sum(len(one["drafts"]) for one in found), "drafts; accepted by depth:", kept)
    assert kept[1] > 0.05, "few drafts were accepted: this test compares heads that have learnt nothing"


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_llama_cpp_accepts_as_many_drafts_of_blocks(target: Path, prompts: list[list[int]], tmp_path: Path, name: str) -> None:
    """Its log names no drafts of DFlash2."""
    folder, settings = trained(name), EngineSettings(5, 25)
    export(Request(str(folder), "llama.cpp", tmp_path / "out"))
    found = serve(tmp_path / "out" / BLOCK_FILE, str(target), prompts, settings)["texts"]
    ours = headstart(folder, "embedded", prompts, settings)
    assert [one["tokens"] for one in found] == [list(one.written) for one in ours]
    assert [one["accepted"] for one in found] == [accepted(one) for one in ours] and sum(map(accepted, ours)) > 5


def test_heads_that_are_refused_are_accepted_less(target: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Heads that feed back the normed state, written all the same: why the export refuses them."""
    folder = ROOT / "recipes" / "quickstart" / "heads" / "eagle3"
    heads = read_checkpoint(str(folder), "embedded")
    assert "drafter.norm_output=false" in LlamaCpp().unread(heads)["llama.cpp"]
    LlamaCpp().write(heads, tmp_path)
    theirs = sum(one["accepted"] for one in serve(tmp_path / FILE, str(target), prompts, SETTINGS)["texts"])
    ours = sum(map(accepted, headstart(folder, "embedded", prompts, SETTINGS)))
    print(f"accepted: Headstart {ours}, llama.cpp {theirs}")
    assert theirs < 0.8 * ours


def test_verify(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(Request(str(trained("eagle3-for-llama.cpp")), "llama.cpp", tmp_path / "out"))
    files = ["--backbone", str(target), "--json", str(tmp_path / "verdict.json")]
    assert main(["verify", str(tmp_path / "out"), "--engine", "llama.cpp", *files]) == 0, capsys.readouterr()
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["engine"] == "llama.cpp" and verdict["comparison"]["drafts"] == verdict["comparison"]["equal_drafts"] > 50
