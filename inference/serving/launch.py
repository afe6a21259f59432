"""The line that starts an engine with exported heads."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from headstart.inference.serving.engines import Support, support

LORA_NAME = "adapted"
"""Name under which requests ask vLLM for the backbone with the heads' adapter."""


@dataclass(frozen=True)
class Served:
    """Exported heads, as an engine starts with them."""

    method: str
    folder: str
    backbone: str
    """Folder or hub id of the backbone, with the adapter merged into it if it was."""
    depth: int
    """Tokens drafted in a pass."""
    config: dict[str, Any]
    """``config.json`` of the exported folder."""
    adapter: str | None = None
    """Folder of an adapter that is kept apart."""
    rank: int = 0
    """Rank of that adapter; 0 without one."""


def launch_line(engine: str, served: Served) -> str:
    """Return the command that starts an engine with these heads; for transformers the lines of Python."""
    assert isinstance(support(engine, served.method), Support)
    return LINES[engine](served)


def speculative_config(served: Served) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` for these heads."""
    methods = {"pard": "draft_model", "mlp": "mlp_speculator"}
    config: dict[str, Any] = {"method": methods.get(served.method, served.method), "num_speculative_tokens": served.depth}
    if served.method != "mtp":
        config["model"] = served.folder
    return config | ({"parallel_drafting": True} if served.method == "pard" else {})


def _vllm(served: Served) -> str:
    target = served.folder if served.method == "mtp" else served.backbone
    words = ["vllm", "serve", target]
    if served.adapter is not None:
        words += ["--enable-lora", "--max-lora-rank", str(max(served.rank, 8)), "--lora-modules", f"{LORA_NAME}={served.adapter}"]
    return shlex.join([*words, "--speculative-config", json.dumps(speculative_config(served))])


def _sglang(served: Served) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", served.folder if served.method == "mtp" else served.backbone]
    block = str(served.config.get("block_size"))
    chain = ["--speculative-num-steps", str(served.depth), "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens",
             str(served.depth + 1)]  # fmt: skip
    algorithm, rest = {
        "eagle3": ("EAGLE3", chain),
        "eagle": ("EAGLE", chain),
        "mtp": ("NEXTN", chain),
        "draft_model": ("STANDALONE", chain),
        "dflash": ("DFLASH", ["--speculative-dflash-block-size", block]),
        "domino": ("DFLASH", ["--speculative-dflash-block-size", block, "--tp-size", "1"]),
        "dspark": ("DSPARK", ["--speculative-dspark-block-size", block]),
    }[served.method]
    draft = [] if served.method == "mtp" else ["--speculative-draft-model-path", served.folder]
    return shlex.join([*words, "--speculative-algorithm", algorithm, *draft, *rest])


def _trtllm(served: Served) -> str:
    if served.method in ("medusa", "eagle"):
        return f"convert_checkpoint.py and trtllm-build of TensorRT-LLM 1.2.1, with {shlex.quote(served.folder)}"
    types = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark", "draft_model": "DraftTarget", "pard": "PARD"}
    config: dict[str, Any] = {"decoding_type": types[served.method], "max_draft_len": served.depth, "speculative_model": served.folder}
    if served.method == "eagle3":
        config["eagle3_layers_to_capture"] = [tap - 1 for tap in served.config["eagle_aux_hidden_state_layer_ids"]]
    options = json.dumps({"speculative_config": config})   # JSON is YAML
    return f"echo {shlex.quote(options)} > options.yaml && " + shlex.join(
        ["trtllm-serve", served.backbone, "--extra_llm_api_options", "options.yaml"]
    )


def _tgi(served: Served) -> str:
    return shlex.join(["text-generation-launcher", "--model-id", served.folder, "--speculate", str(served.depth)])


def _transformers(served: Served) -> str:
    if served.method == "dflash":
        load, how = f"AutoModel.from_pretrained({served.folder!r}, dtype=model.dtype)", ', speculation_type="dflash"'
    else:
        load, how = f"AutoModelForCausalLM.from_pretrained({served.folder!r})", ""
    return f"model.generate(**inputs, assistant_model={load}{how})"


LINES = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "tgi": _tgi, "transformers": _transformers}
