"""Drafts of vLLM, for comparison with Headstart's own: `draft` runs `vllm_driver.py` in an environment with vLLM's CPU build.

vLLM and Headstart need other versions of the same libraries, so vLLM runs in an environment of its own, which `make engines` installs.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.shipped import resolve
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript
from headstart.support.errors import UserError
from headstart.support.hub import find_folder
from headstart.support.json_text import read_json

PYTHON = "HEADSTART_VLLM_PYTHON"
"""Environment variable: the Python of the environment with vLLM."""
ENGINES = Path(__file__).resolve().parents[3] / ".venv-engines" / "bin" / "python"
"""Where `make engines` installs vLLM in a checkout."""
DRIVER = Path(__file__).with_name("vllm_driver.py")
METHODS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "EagleLlamaForCausalLM": "eagle",
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "MLPSpeculatorPreTrainedModel": "mlp_speculator",
    "Eagle3Speculator": "eagle3",
    "DFlashSpeculator": "dflash",
    "DSparkSpeculator": "dspark",
}
"""vLLM's method by the architecture in ``config.json``, the last three of the speculators format; Medusa names none, and draft models
name their own."""


def draft(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """Decode the prompts in vLLM with the heads in ``folder``. Raises UserError if vLLM is not installed or refuses the heads."""
    return serve(folder, backbone, prompts, settings)[0]


def serve(
    folder: Path | None, backbone: str, prompts: Sequence[Sequence[int]], settings: EngineSettings
) -> tuple[list[Transcript], dict[str, Any]]:
    """Decode the prompts in vLLM, in fp32, greedily and one at a time, with the heads in ``folder`` or, for None, without policy.

    Returns a transcript per prompt, and all that the driver returns, such as vLLM's version and counters.

    Raises UserError if vLLM is not installed, cannot serve the heads, or the prompts leave no room in the backbone's context.
    """
    if find_gguf(backbone) is not None:
        raise UserError(f"vLLM is verified with a backbone of safetensors, and {backbone} is a GGUF file: give --backbone FOLDER")
    python, base = find_python(), find_folder(resolve(backbone), "backbone")
    config = read_json(base / "config.json", "name the folder of a model")
    speculative = None if folder is None else speculative_config(folder, settings.depth)
    room = max(map(len, prompts)) + settings.new_tokens + 2 * settings.depth + 2
    limit = config.get("max_position_embeddings")
    if limit is not None and room > limit:
        raise UserError(f"prompts, new tokens and drafts take {room} positions, and the backbone has {limit}; take shorter prompts")
    job = {
        "backbone": str(base.resolve()),
        "prompts": [list(prompt) for prompt in prompts],
        "new_tokens": settings.new_tokens,
        "stop": list(settings.end_tokens),
        "max_model_len": room,
        "speculative": speculative,
    }
    result = run_driver(python, DRIVER, job)
    pairs = zip(prompts, result["texts"], result["passes"], strict=True)
    return [_transcript(*pair) for pair in pairs], result


def find_python() -> Path:
    """Return the Python of an environment with vLLM: `PYTHON`, or what `make engines` installed. Raises UserError if there is none."""
    named = os.environ.get(PYTHON)
    if named is not None and not Path(named).is_file():
        raise UserError(f"{PYTHON}={named} is no file; name the Python of an environment with vLLM 0.32")
    python = ENGINES if named is None else Path(named)
    if not python.is_file():
        where = f"in a checkout, or set {PYTHON} to the Python of an environment with vLLM 0.32"
        raise UserError(f"vLLM is not installed: run `make engines` {where}")
    return python


def speculative_config(folder: Path, depth: int) -> dict[str, Any]:
    """Return vLLM's ``--speculative-config`` for the heads in ``folder``. Raises UserError for heads that vLLM has no method for."""
    config = read_json(folder / "config.json", "name the folder of heads")
    architecture = (config.get("architectures") or ["Medusa" if "medusa_num_heads" in config else "none"])[0]
    method = METHODS.get(architecture, "medusa" if architecture == "Medusa" else "draft_model")
    projector = config.get("dflash_config", {}).get("projector_type", "dflash")
    if projector != "dflash":
        raise UserError(f"{folder} holds {projector} heads, which vLLM 0.32 does not have; serve them with SGLang")
    if method == "draft_model" and not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise UserError(f"{folder} holds {architecture}, which vLLM has no method for; export the heads first (`headstart export`)")
    parallel = {"parallel_drafting": True} if method == "draft_model" and "pard_token" in config else {}
    return {"method": method, "model": str(folder), "num_speculative_tokens": depth, **parallel}


def run_driver(python: Path, driver: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run ``driver JOB.json RESULT.json`` by the Python of an environment with vLLM, on one thread, and return the result.

    Raises UserError with vLLM's own words if it fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "job.json").write_text(json.dumps(job))
        files = [str(work / name) for name in ("job.json", "result.json")]
        command = [str(python), "-I", str(driver), *files]  # -I: the vllm.py of this folder is not vLLM
        done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, errors="replace")
        file = work / "result.json"
        if not file.is_file():
            said = (done.stdout + done.stderr).split("\n")[-8:]
            raise UserError(f"vLLM ended with status {done.returncode} and without a result: {_one_line(' '.join(said))}")
        result: dict[str, Any] = json.loads(file.read_text())
    if "error" in result:
        raise UserError(f"vLLM cannot serve this: {_one_line(result['error'])}")
    return result


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _transcript(prompt: Sequence[int], text: list[int], passes: list[dict[str, list[int]]]) -> Transcript:
    """Make rounds of passes: the first pass reads the prompt and keeps the root; each later one keeps drafts and a token of its own."""
    ends = list(accumulate((len(one["kept"]) for one in passes), initial=len(prompt)))
    rounds = [
        Round(position, tuple(before["drafted"]), len(after["kept"]) - 1)
        for position, (before, after) in zip(ends[1:-1], pairwise(passes), strict=True)
    ]
    return Transcript(tuple(prompt), tuple(text), tuple(rounds))
