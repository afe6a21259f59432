"""Drafts of vLLM, for comparison with Headstart's own: `draft` runs `vllm_driver.py` in an environment with vLLM's CPU build."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.serving.verify.drafts import CHECKOUT, EngineProcess, EngineSettings, Round, Transcript
from headstart.support.errors import UserError
from headstart.support.hub import find_folder, resolve
from headstart.support.json_text import read_json

VLLM = EngineProcess(
    engine="vLLM",
    package="vLLM 0.32",
    variable="HEADSTART_VLLM_PYTHON",
    python=CHECKOUT / ".venv-engines" / "bin" / "python",
    driver=Path(__file__).with_name("vllm_driver.py"),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
)
PEAGLE = "PEagleSpeculator"
METHODS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "EagleLlamaForCausalLM": "eagle",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "MLPSpeculatorPreTrainedModel": "mlp_speculator",
    "Eagle3Speculator": "eagle3",
    PEAGLE: "eagle3",
    "DFlashSpeculator": "dflash",
    "DSparkSpeculator": "dspark",
}
"""vLLM's method by the architecture in ``config.json``, those of Speculators of that format; Medusa names none, and draft models
name their own."""


def draft(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """Decode the prompts in vLLM with the heads in ``folder``. Raises UserError if vLLM is not installed or refuses the heads."""
    return serve(folder, backbone, prompts, settings)[0]


def serve(
    folder: Path | None, backbone: str, prompts: Sequence[Sequence[int]], settings: EngineSettings
) -> tuple[list[Transcript], dict[str, Any]]:
    """Decode the prompts in vLLM, in fp32, greedily and one at a time, with the heads in ``folder`` or, for None, without drafts.

    Returns a transcript per prompt, and all that the driver returns, such as vLLM's version and counters.

    Raises UserError if vLLM is not installed, cannot serve the heads, or the prompts leave no room in the backbone's context.
    """
    if find_gguf(backbone) is not None:
        raise UserError(f"vLLM is verified with a backbone of safetensors, and {backbone} is a GGUF file: give --backbone FOLDER")
    VLLM.find_python()
    base = find_folder(resolve(backbone), "backbone")
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
    result = VLLM.run(job)
    pairs = zip(prompts, result["texts"], result["passes"], strict=True)
    return [_transcript(*pair) for pair in pairs], result


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
    masked = (method == "draft_model" and "pard_token" in config) or bool(config.get("parallel_drafting")) or architecture == PEAGLE
    parallel = {"parallel_drafting": True} if masked else {}
    return {"method": method, "model": str(folder), "num_speculative_tokens": depth, **parallel}


def _transcript(prompt: Sequence[int], text: list[int], passes: list[dict[str, list[int]]]) -> Transcript:
    """Make rounds of passes: the first pass reads the prompt and keeps the root; each later one keeps drafts and a token of its own."""
    ends = list(accumulate((len(step["kept"]) for step in passes), initial=len(prompt)))
    rounds = [
        Round(position, tuple(before["drafted"]), len(after["kept"]) - 1)
        for position, (before, after) in zip(ends[1:-1], pairwise(passes), strict=True)
    ]
    return Transcript(tuple(prompt), tuple(text), tuple(rounds))
