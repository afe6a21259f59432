"""vLLM as an engine, without vLLM: a stand-in for its Python answers as the driver would. tests/engines has the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.serving.verify import vllm
from headstart.serving.verify.drafts import EngineSettings, Round
from headstart.support.errors import UserError


def write_model(folder: Path, head_dim: int = 32, **arguments: object) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, initializer_range=0.3, max_position_embeddings=64, **arguments,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with vLLM: called as PYTHON -I DRIVER JOB RESULT."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setenv(vllm.PYTHON, str(python))


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
    monkeypatch.setattr(vllm, "ENGINES", tmp_path / "none")
    monkeypatch.delenv(vllm.PYTHON, raising=False)
    with pytest.raises(UserError, match="vLLM is not installed: run `make engines`"):
        vllm.draft(heads, model, [[1]], EngineSettings(2, 4))
    monkeypatch.setenv(vllm.PYTHON, str(tmp_path / "none"))
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
