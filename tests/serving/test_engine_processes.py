"""vLLM and llama.cpp as engines, without them: a stand-in for their Python answers as the driver would. tests/engines has the real ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines_alone
import pytest
import torch
from engines_alone import plain_reader_agrees
from errors import output_of, refuses
from families import SIZES, build, random_drafter, tiny
from gguf_models import write_gguf
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.checkpoint import load_drafter
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.serving.export import TOLERANCE, Request, agreement, export, reference
from headstart.serving.layouts.llamacpp import FILE
from headstart.serving.verify import llamacpp, vllm
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript
from headstart.serving.verify.llamacpp_driver import drafts_of
from headstart.serving.verify.verify import Check, recorded, verify
from headstart.support.errors import UserError


def write_model(folder: Path, head_dim: int = 32, **arguments: object) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, initializer_range=0.3, max_position_embeddings=64, **arguments,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, variable: str = vllm.VLLM.variable) -> None:
    """A Python with an engine: called as PYTHON -I DRIVER JOB RESULT."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setenv(variable, str(python))


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "hidden_size": 64}))
    return folder


def test_rounds_of_what_the_driver_recorded(tmp_path: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [{"kept": [5], "drafted": [6, 7]}, {"kept": [6, 8], "drafted": [9, 1]}, {"kept": [2], "drafted": [3, 4]}]
    result = {"version": "0.32.0", "texts": [[5, 6, 8, 2], [5]], "passes": [passes, passes[:1]], "counters": {"num_drafts": 2}}
    (tmp_path / "canned.json").write_text(json.dumps(result))
    write_python(tmp_path, f'[ "$1" = -I ] && cp "$3" {tmp_path}/job.json && cp {tmp_path}/canned.json "$4"', monkeypatch)
    model = write_model(tmp_path / "model")
    (first, second), _ = vllm.serve(heads, str(model), [[1, 2, 3], [4]], EngineSettings(2, 4, (0,)))
    assert first.rounds == (Round(4, (6, 7), 1), Round(6, (9, 1), 0)) and first.text == (1, 2, 3, 5, 6, 8, 2)
    assert second.rounds == () and second.written == (5,)
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["speculative"] == {"method": "medusa", "model": str(heads), "num_speculative_tokens": 2}
    assert job["backbone"] == str(model) and job["stop"] == [0] and job["prompts"] == [[1, 2, 3], [4]] and job["new_tokens"] == 4


def test_what_vllm_says_is_one_line(tmp_path: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = str(write_model(tmp_path / "model")), EngineSettings(2, 4)
    write_python(tmp_path, """echo '{"error": "ValueError: no such\\\\n method"}' > "$4" """, monkeypatch)
    refuses("^vLLM cannot serve this: ValueError: no such method$", vllm.draft, heads, model, [[1]], settings)
    write_python(tmp_path, "echo 'no module named' >&2; echo 'vllm' >&2; exit 3", monkeypatch)
    refuses("^vLLM ended with status 3 and without a result: no module named vllm$", vllm.draft, heads, model, [[1]], settings)


def test_bad_input(tmp_path: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_model(tmp_path / "model"))
    monkeypatch.delenv(vllm.VLLM.variable, raising=False)
    refuses("vLLM is not installed: run `make engines`", replace(vllm.VLLM, python=tmp_path / "none").find_python)
    monkeypatch.setenv(vllm.VLLM.variable, str(tmp_path / "none"))
    refuses("is no file; name the Python", vllm.draft, heads, model, [[1]], EngineSettings(2, 4))
    write_python(tmp_path, "exit 1", monkeypatch)
    refuses("take 69 positions, and the backbone has 64; take shorter prompts", vllm.draft, heads, model, [[1] * 40], EngineSettings(2, 23))
    refuses("config.json: there is no such file", vllm.speculative_config, tmp_path, 2)


@pytest.mark.parametrize(("config", "method"), [
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "pard_token": 3}, "eagle3"),
    ({"architectures": ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]}, "eagle"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 0}}, "dflash"),
    ({"architectures": ["Qwen3DSparkModel"], "dflash_config": {"mask_token_id": 0}}, "dspark"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
    ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
    ({"architectures": ["LlamaForCausalLM"], "pard_token": 3}, "draft_model"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "holds domino heads"),
    ({"hydra_num_heads": 2}, "no method for"),
])  # fmt: skip
def test_the_method_of_a_folder(tmp_path: Path, config: dict[str, object], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if " " in method:
        refuses(method, vllm.speculative_config, tmp_path, 3)
        return
    found = vllm.speculative_config(tmp_path, 3)
    assert found.pop("parallel_drafting", False) == ("pard_token" in config)
    assert found == {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}


LOG = """slot launch_slot_: id 0 | task 0 | processing task, is_child = 0
 - draft candidate   0, pos   0:    6 (   0.9) '6'
 - draft candidate   1, pos   0:    9 (   0.1) '9'
 - draft candidate   0, pos   1:    7 (   0.5) '7'
 - draft candidate   0, pos   0:    4 (   0.5) '4'
slot launch_slot_: id 0 | task 9 | processing task, is_child = 0
"""


def test_rounds_of_llama_cpps_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft continues the root; what the text has too is kept, and the next one begins after a token of the backbone's."""
    assert drafts_of(LOG) == [[[6, 7], [4]], []]
    texts = [{"tokens": [5, 6, 8, 2, 9], "drafts": [[6, 7], [2], [3]], "accepted": 1}, {"tokens": [5], "drafts": [], "accepted": 0}]
    (tmp_path / "canned.json").write_text(json.dumps({"texts": texts}))
    write_python(tmp_path, f'cp "$3" {tmp_path}/job.json && cp {tmp_path}/canned.json "$4"', monkeypatch, llamacpp.LLAMACPP.variable)
    model = write_gguf(tmp_path / "m.gguf", load_backbone("embedded").model, load_tokenizer("embedded"), "F32")
    with pytest.raises(UserError, match=f"holds no {FILE} or dflash.gguf, which llama.cpp drafts with: headstart export"):
        llamacpp.draft(tmp_path, str(model), [[1, 2, 3], [4]], EngineSettings(2, 4))
    (tmp_path / FILE).touch()
    first, second = llamacpp.draft(tmp_path, str(model), [[1, 2, 3], [4]], EngineSettings(2, 9, (2,)))
    assert first.written == (5, 6, 8, 2) and first.rounds == (Round(4, (6, 7), 1), Round(6, (2,), 1))
    assert second.written == (5,) and second.rounds == ()
    job = json.loads((tmp_path / "job.json").read_text())
    assert (job["backbone"], job["heads"], job["ends"], job["depth"]) == (str(model), str(tmp_path / FILE), True, 2)
    (tmp_path / "canned.json").write_text(json.dumps({"texts": [{"tokens": [5, 6], "drafts": [], "accepted": 1}]}))
    with pytest.raises(UserError, match="llama.cpp's log names no drafts of DFlash2 heads, .* without --engine"):
        llamacpp.draft(tmp_path, str(model), [[1, 2, 3]], EngineSettings(2, 9))
    with pytest.raises(UserError, match="llama.cpp is verified with the backbone as a GGUF file, and embedded is none: give"):
        llamacpp.draft(tmp_path, "embedded", [[1]], EngineSettings(2, 4))
    write_python(tmp_path, """echo 'ASSERT failed' > "$(dirname "$4")/stderr"; exit 134""", monkeypatch, llamacpp.LLAMACPP.variable)
    with pytest.raises(UserError, match="^llama.cpp ended with status 134 and without a result: ASSERT failed$"):
        llamacpp.draft(tmp_path, str(model), [[1]], EngineSettings(2, 4))


# ``headstart verify``: of two tokens that are equally likely either may be picked, of others neither.

PROMPTS = [[5, 9, 33, 12, 7], [1, 2, 3, 4, 50, 60, 7]]
KINDS: dict[str, dict[str, Any]] = {"eagle3": {}, "eagle": {}, "medusa": {}, "block": {"correction": "none"}}
CLOSE, APART = 1 + TOLERANCE / 10, 1 + 100 * TOLERANCE
"""How much larger the logit of an odd token is than that of the even one before it."""


def swapped(one: Transcript) -> Transcript:
    """The last draft of each round and the last token written are the other of two."""
    rounds = tuple(replace(at, drafts=(*at.drafts[:-1], at.drafts[-1] ^ 1)) for at in one.rounds)
    return replace(one, written=(*one.written[:-1], one.written[-1] ^ 1), rounds=rounds)


def engine(*arguments: Any) -> list[Transcript]:
    return [swapped(one) for one in engines_alone.reference(*arguments)]


@torch.no_grad()
def pair(weight_VD: Tensor, apart: float) -> None:
    """Give tokens 2 k and 2 k + 1 logits that differ by a factor."""
    weight_VD[1::2] = weight_VD[: len(weight_VD) // 2 * 2 : 2] * apart


def served(folder: Path, kind: str, apart: float) -> Check:
    """Heads of a backbone, both with such pairs of tokens, and what engines load of them."""
    model = tiny("llama", vocab_size=62)
    pair(model.get_output_embeddings().weight, apart)
    model.save_pretrained(folder / "backbone")
    backbone = load_backbone(str(folder / "backbone"))
    drafter = random_drafter(kind, backbone, depth=3, **KINDS[kind])
    if isinstance(drafter, OwnReadoutDrafter):
        for layer in drafter.output_layers():
            pair(layer.weight, apart)
    drafter.save_pretrained(folder / "heads")
    shutil.copytree(folder / "heads", folder / "served", ignore=shutil.ignore_patterns("headstart.json"))
    return Check(folder / "served", backbone, str(folder / "heads"), "reference", PROMPTS, new_tokens=5)


@pytest.mark.parametrize("apart", [1.0, CLOSE, APART])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_of_equal_logits_either_token_may_be_drafted(tmp_path: Path, kind: str, apart: float) -> None:
    check = served(tmp_path, kind, apart)
    drafter = load_drafter(tmp_path / "heads", check.backbone)
    other = [one | {"drafts": [one["drafts"][0] ^ 1], "logits": one["logits"][:1]} for one in reference(drafter)]
    found = agreement(drafter, other)
    assert found.whole is (apart != APART) and (found.equal < found.drafts) is (apart == APART)


@pytest.mark.parametrize("kind", KINDS)
def test_near_ties_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    engines_alone.stand_in(monkeypatch, engine)
    verdict = verify(replace(served(tmp_path, kind, CLOSE), engine="vllm"))
    text, one = "\n".join(verdict.lines()), verdict.comparison
    assert verdict.equal and one is not None and one.first is None and one.equal_texts == one.prompts, text
    assert one.equal_drafts == one.drafts == verdict.report()["comparison"]["equal_drafts"] and one.rounds > one.prompts


def test_tokens_that_are_not_equally_likely_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines_alone.stand_in(monkeypatch, engine)
    verdict = verify(replace(served(tmp_path, "eagle3", APART), engine="vllm"))
    one = verdict.comparison
    assert not verdict.equal and one is not None and one.equal_texts == 0 and one.equal_drafts == one.drafts - one.rounds
    assert one.first is not None and one.first.depth is None and one.first.ours == one.first.theirs ^ 1


def test_a_text_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    backbone = load_backbone(str(tmp_path / "backbone"))
    random_drafter("eagle3", backbone, depth=3).save_pretrained(tmp_path / "heads")

    def other(*arguments: Any) -> list[Transcript]:
        return [replace(one, written=(one.written[0] ^ 1, *one.written[1:]), rounds=()) for one in engines_alone.reference(*arguments)]

    engines_alone.stand_in(monkeypatch, other)
    verdict = verify(Check(tmp_path / "heads", backbone, None, "vllm", PROMPTS[:1], new_tokens=5))
    named = "first difference: prompt 1, after 5 tokens, the text: tokens headstart"
    assert not verdict.equal and any(line.startswith(named) for line in verdict.lines())


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_output_layer_of_a_backbone_may_have_a_bias(tmp_path: Path, kind: str) -> None:
    model = build("Phi", SIZES | {"num_key_value_heads": 4})
    torch.nn.init.normal_(model.get_output_embeddings().bias, std=5)  # otherwise it changes few tokens
    model.save_pretrained(tmp_path / "backbone")
    backbone = load_backbone(str(tmp_path / "backbone"))
    random_drafter(kind, backbone, depth=3).save_pretrained(tmp_path / "heads")
    export(Request(str(tmp_path / "heads"), kind, tmp_path / "out"))
    verdict = verify(Check(tmp_path / "out", backbone, str(tmp_path / "heads"), "reference", [], 5))
    assert verdict.equal and plain_reader_agrees(tmp_path / "out", str(tmp_path / "heads"), backbone), list(verdict.lines())


def test_an_export_knows_its_heads_and_backbone(on: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = tmp_path / "heads"
    random_drafter("eagle", on).save_pretrained(heads)
    export(Request(str(heads), "eagle", tmp_path / "out"))
    assert "drafts are those of the trained heads" in output_of(capsys, "verify", str(tmp_path / "out"))
    random_drafter("eagle", on, seed=9).save_pretrained(heads)  # trained on since
    assert recorded(tmp_path / "out")[:2] == (None, on.name)
    assert main(["verify", str(tmp_path / "out")]) == 0  # by the drafts that are stored
    assert "is not as in the original heads" in output_of(capsys, "verify", str(tmp_path / "out"), "--heads", str(heads), status=1)
