"""vLLM and llama.cpp as engines, without them: a stand-in for their Python answers as the driver would. tests/engines has the real ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_models import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.serving.layouts.llamacpp import FILE
from headstart.serving.verify import llamacpp, vllm
from headstart.serving.verify.drafts import EngineSettings, Round
from headstart.serving.verify.llamacpp_driver import drafts_of
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
    with pytest.raises(UserError, match="^vLLM cannot serve this: ValueError: no such method$"):
        vllm.draft(heads, model, [[1]], settings)
    write_python(tmp_path, "echo 'no module named' >&2; echo 'vllm' >&2; exit 3", monkeypatch)
    with pytest.raises(UserError, match="^vLLM ended with status 3 and without a result: no module named vllm$"):
        vllm.draft(heads, model, [[1]], settings)


def test_bad_input(tmp_path: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_model(tmp_path / "model"))
    monkeypatch.delenv(vllm.VLLM.variable, raising=False)
    with pytest.raises(UserError, match="vLLM is not installed: run `make engines`"):
        replace(vllm.VLLM, python=tmp_path / "none").find_python()
    monkeypatch.setenv(vllm.VLLM.variable, str(tmp_path / "none"))
    with pytest.raises(UserError, match="is no file; name the Python"):
        vllm.draft(heads, model, [[1]], EngineSettings(2, 4))
    write_python(tmp_path, "exit 1", monkeypatch)
    with pytest.raises(UserError, match="take 69 positions, and the backbone has 64; take shorter prompts"):
        vllm.draft(heads, model, [[1] * 40], EngineSettings(2, 23))
    with pytest.raises(UserError, match="config.json: there is no such file"):
        vllm.speculative_config(tmp_path, 2)


@pytest.mark.parametrize(
    ("config", "method"),
    [
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
    ],
)
def test_the_method_of_a_folder(tmp_path: Path, config: dict[str, object], method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if " " in method:
        with pytest.raises(UserError, match=method):
            vllm.speculative_config(tmp_path, 3)
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
