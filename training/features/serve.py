"""``headstart serve-features``: the line that starts a vLLM server of a recipe's hidden states on this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.shipped import resolve
from headstart.support.errors import UserError
from headstart.support.files import require_folder
from headstart.training.features.served import extracted, served_name
from headstart.training.recipe.recipe import Recipe

PORT = 8000
CONNECTOR, ON_CPU = "ExampleHiddenStatesConnector", "HiddenStatesOnCPU"
"""vLLM's own connector, and the one for its CPU build."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Line:
    """A command with the environment variables that it needs."""

    command: list[str]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *(shlex.quote(word) for word in self.command)])


def server_line(recipe: Recipe, taps: tuple[int, ...], layers: int, *, port: int, gpus: int | None, cpu: bool) -> Line:
    """Return the line for a backbone of so many layers and these taps. Raises UserError for a backbone that vLLM cannot take so."""
    section, served = recipe.backbone, recipe.features
    if find_gguf(section.path) is not None:
        raise UserError(f"backbone {section.path} is a GGUF file; hidden states are served of a folder or hub id with safetensors")
    chosen = extracted(taps, layers)
    speculative = {
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(chosen)}},
    }  # fmt: skip
    transfer: dict[str, Any] = {"kv_connector": ON_CPU if cpu else CONNECTOR, "kv_role": "kv_producer"}
    transfer |= {"kv_connector_module_path": "hidden_states_on_cpu"} if cpu else {}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(Path(served.folder).absolute())}
    length = recipe.data.max_length + 1  # a request asks for one token more
    if recipe.cache.dir is not None and recipe.regenerate.out is not None:
        length = recipe.data.max_length + recipe.regenerate.max_new_tokens
    command = [
        *(["python", "-m", "vllm.entrypoints.openai.api_server", "--model"] if cpu else ["vllm", "serve"]), resolve(section.path),
        "--served-model-name", served.model or served_name(section.path, chosen), "--port", str(port),
        "--max-model-len", str(length), "--max-num-batched-tokens", str(max(length, 8192)), "--no-enable-prefix-caching",
        "--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer),
        *(["--dtype", DTYPES[section.dtype]] if section.dtype in DTYPES else []),
        *(["--tensor-parallel-size", str(gpus)] if gpus and gpus > 1 else []),
        *(["--trust-remote-code"] if section.trust_remote_code else []), *(["--enforce-eager"] if cpu else []),
    ]  # fmt: skip
    return Line(command, {"PYTHONPATH": str(Path(__file__).parent / "connector"), "VLLM_CPU_KVCACHE_SPACE": "4"} if cpu else {})


def run_server(line: Line, folder: str) -> None:
    """Become the server. Raises UserError if vLLM is not installed here, or its folder cannot be written."""
    require_folder("features.folder", folder).mkdir(parents=True, exist_ok=True)
    if find_spec("vllm") is None:
        raise UserError("--run starts vLLM from this environment, which has none: pip install vllm, or run the printed line in another one")
    command = line.command if line.command[0] != "python" else [sys.executable, *line.command[1:]]
    os.execvpe(command[0], command, {**os.environ, **line.environment})


def on_cpu() -> bool:
    """Return True if this machine has no accelerator."""
    return not torch.accelerator.is_available()
