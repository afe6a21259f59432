"""Which serving engine reads the heads of which method, from which version to which, how that is known, and the line that starts it.

An entry says what was done with the versions named: ``run`` (heads were loaded and drafted in them), ``read`` (in the engine's source) or
``documented``. A version in ``since`` or ``until`` that is not known is left out. docs/serving.md holds the table.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.heads.backbone.gguf_file import find_gguf
from headstart.serving.layouts.layout import METHODS
from headstart.serving.layouts.llamacpp import BLOCK_FILE, FILE
from headstart.support.errors import UserError, did_you_mean

ENGINES = {
    "vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "tgi": "TGI", "transformers": "transformers", "llama.cpp": "llama.cpp",
    "openvino": "OpenVINO",
}  # fmt: skip


@dataclass(frozen=True)
class Support:
    """That an engine reads a method's heads, or did."""

    how: Literal["run", "read", "documented"]
    versions: str
    """The versions in which it was run, read or is documented."""
    since: str | None = None
    until: str | None = None
    """The last version that reads them; None: the newest known does."""
    note: str = ""
    """A condition on the heads or the engine; why the engine dropped them."""

    def __str__(self) -> str:
        """Say which versions read the heads, and how that is known."""
        how = {"run": "run in", "read": "read in the source of", "documented": "as documented for"}[self.how]
        spans = [f"from {self.since}"] if self.since else []
        spans += [f"up to {self.until}"] if self.until else []
        return ", ".join([*spans, f"{how} {self.versions}", *([self.note] if self.note else [])])


NO_MODULE = "it has no module for them"
V2_RUNNER = "needs the V2 model runner, the default on a GPU"
NO_GGUF = "it drafts with them from GGUF, which export writes of EAGLE-3, DFlash and DFlash2 heads only"
BLOCK_ROW = Support("documented", "1.4.0rc1")

TABLE: dict[tuple[str, str], Support | str] = {
    ("vllm", "eagle3"): Support("run", "0.32.0, 0.33.0", since="0.8.5"),
    ("vllm", "peagle"): Support("run", "0.32.0", note="needs the V1 model runner, the default on a CPU"),
    ("vllm", "eagle"): Support("run", "0.32.0, 0.33.0"),
    ("vllm", "dflash"): Support("run", "0.32.0", since="0.19", note="its CPU build norms the context's keys wrongly, see Verify"),
    ("vllm", "dflash2"): Support("read", "0.33.0", note=V2_RUNNER),
    ("vllm", "dspark"): Support("read", "0.32.0, 0.33.0", note=V2_RUNNER),
    ("vllm", "domino"): "it has no module for Domino's correction (read in the source of 0.32.0)",
    ("vllm", "mtp"): Support("run", "0.32.0", note="MiMo run; Qwen3.5 read in its source"),
    ("vllm", "draft_model"): Support("run", "0.32.0", note="not from 0.10 to 0.13"),
    ("vllm", "pard"): Support("run", "0.32.0"),
    ("vllm", "medusa"): Support("run", "0.32.0", until="0.32", note="removed in 0.33"),
    ("vllm", "mlp"): Support("documented", "0.9.1", until="0.9.2", note="0.10 removed the V0 engine, which ran them"),
    ("vllm", "hydra"): NO_MODULE,
    ("sglang", "eagle3"): Support("run", "0.5.23", note="the module alone was run"),
    ("sglang", "peagle"): "it drafts with EAGLE heads one token a pass",
    ("sglang", "eagle"): Support("run", "0.5.23", note="the module alone was run"),
    ("sglang", "dflash"): Support("read", "0.5.23"),
    ("sglang", "dflash2"): Support("read", "0.5.23"),
    ("sglang", "dspark"): Support("read", "0.5.23"),
    ("sglang", "domino"): Support("read", "0.5.23", note="one GPU, --tp-size 1"),
    ("sglang", "mtp"): Support("read", "0.5.23"),
    ("sglang", "draft_model"): Support("read", "0.5.23"),
    ("sglang", "pard"): "its STANDALONE drafts one token a pass; it has no parallel draft models",
    ("sglang", "medusa"): NO_MODULE,
    ("sglang", "mlp"): NO_MODULE,
    ("sglang", "hydra"): NO_MODULE,
    ("trtllm", "eagle3"): Support("read", "main of 2026", note="the PyTorch backend"),
    ("trtllm", "peagle"): NO_MODULE,
    ("trtllm", "eagle"): Support(
        "documented", "1.2.1", until="1.2.1", note="the TensorRT backend, removed since, read them; the PyTorch backend reads EAGLE-3 only"
    ),
    ("trtllm", "dflash"): BLOCK_ROW,
    ("trtllm", "dflash2"): NO_MODULE,
    ("trtllm", "dspark"): BLOCK_ROW,
    ("trtllm", "domino"): NO_MODULE,
    ("trtllm", "mtp"): "its MTP is that of DeepSeek-V3 and R1, whose layers Headstart does not train",
    ("trtllm", "draft_model"): Support("documented", "1.4.0rc1"),
    ("trtllm", "pard"): Support("documented", "1.4.0rc1"),
    ("trtllm", "medusa"): Support("documented", "1.2.1", until="1.2.1", note="the TensorRT backend, removed since, read them"),
    ("trtllm", "mlp"): NO_MODULE,
    ("trtllm", "hydra"): NO_MODULE,
    ("tgi", "medusa"): Support("read", "commit db931fc", note="in maintenance since 2025-12"),
    ("tgi", "mlp"): Support("read", "commit db931fc", note="with tie_weights only"),
    ("llama.cpp", "eagle3"): Support("run", "xllamacpp 2026.10.11549", note="GGUF; Llama run, other backbones read in its source"),
    **dict.fromkeys([("llama.cpp", method) for method in ("dflash", "dflash2")], Support("run", "xllamacpp 2026.10.11549", note="GGUF")),
    **dict.fromkeys([("llama.cpp", method) for method in ("dspark", "mtp", "draft_model")], NO_GGUF),
    ("openvino", "eagle3"): Support("run", "2026.4.1", note="converted by optimum-intel 2.2.0; greedy chains"),
    ("transformers", "dflash"): Support("run", "5.20.0, 5.22.0, 5.23.0", note="by the layout dflash-hf"),
    ("transformers", "draft_model"): Support("run", "5.20.0, 5.22.0, 5.23.0"),
}
"""Why not, for heads that an engine never read. What is not listed for TGI, transformers and llama.cpp is not supported."""


def support(engine: str, method: str) -> Support | str:
    """Return in which versions an engine reads a method's heads, or why it does not."""
    return TABLE.get((engine, method), NO_MODULE)


def readers(method: str) -> dict[str, Support]:
    """Return the engines of which some version reads a method's heads, those of today first."""
    found = {engine: entry for engine in ENGINES if isinstance(entry := support(engine, method), Support)}
    return dict(sorted(found.items(), key=lambda item: item[1].until is not None))


def require_engine(engine: str, method: str, layouts: list[str]) -> None:
    """Raise UserError unless the newest known version of an engine reads a method's heads. ``layouts`` are those that hold them."""
    entry = support(engine, method)
    if isinstance(entry, Support) and entry.until is None:
        return
    name, heads = ENGINES[engine], METHODS[method]
    others = [ENGINES[other] for other, found in readers(method).items() if found.until is None and other != engine]
    where = f"{' and '.join(others)} {'reads' if len(others) == 1 else 'read'} them" if others else "no other engine reads them today"
    if isinstance(entry, str):
        advice = f"; write --to {layouts[0]}" if layouts and others else "; decode them with headstart.load"
        if engine == "transformers":
            advice = "; in transformers Headstart decodes them, by custom_generate (docs/serving.md)"
        raise UserError(f"{name} does not read {heads} heads: {entry}; {where}{advice}")
    advice = f"--to {layouts[0]} writes the layout for {name} up to {entry.until}" if layouts else "decode them with headstart.load"
    raise UserError(f"{name} reads {heads} heads up to version {entry.until} only ({entry.note}); {where}; {advice}")


def nearest(name: str, allowed: list[str]) -> UserError:
    """Return the error for an unknown format."""
    return UserError(f"unknown format {name!r}; {did_you_mean(name.lower(), allowed)}allowed: {', '.join(allowed)}")


# Launch lines.

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
    config: Mapping[str, Any]
    """``config.json`` of the exported folder."""
    adapter: str | None = None
    """Folder of an adapter that is kept apart."""
    rank: int = 0
    """Rank of that adapter; 0 without one."""


def speculative_config(served: Served) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` for these heads."""
    methods = {"pard": "draft_model", "mlp": "mlp_speculator", "dflash2": "dflash", "peagle": "eagle3"}
    config: dict[str, Any] = {"method": methods.get(served.method, served.method), "num_speculative_tokens": served.depth}
    if served.method != "mtp":
        config["model"] = served.folder
    return config | ({"parallel_drafting": True} if served.method in ("pard", "peagle") else {})


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
        **dict.fromkeys(("dflash", "dflash2"), ("DFLASH", ["--speculative-dflash-block-size", block])),
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
    options = json.dumps({"speculative_config": config})  # JSON is YAML
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


def _llamacpp(served: Served) -> str:
    target = served.backbone if find_gguf(served.backbone) is not None else "BACKBONE.gguf"
    kind, file = ("draft-eagle3", FILE) if served.method == "eagle3" else ("draft-dflash", BLOCK_FILE)
    draft = ["--spec-type", kind, "--spec-draft-model", f"{served.folder}/{file}", "--spec-draft-n-max", str(served.depth)]
    return shlex.join(["llama-server", "-m", target, *draft, "--spec-draft-p-min", "0"])


def _openvino(served: Served) -> str:
    convert = ["optimum-cli", "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp32", "--model"]
    folders = [[*convert, served.backbone, "backbone-ov"], [*convert, served.folder, "--trust-remote-code", "heads-ov"]]
    outputs = " ".join(str(tap - 1) for tap in served.config["eagle_aux_hidden_state_layer_ids"])
    taps = f's|<eagle3_mode value="True" */>|&<hidden_layers_list value="{outputs}" />|'
    folders.append(["sed", "-i", taps, "heads-ov/openvino_model.xml"])  # by default it reads other layers
    heads = "draft_model=ov.draft_model('heads-ov', 'CPU')"
    use = f"p = ov.LLMPipeline('backbone-ov', 'CPU', {heads}); print(p.generate('Hello', num_assistant_tokens={served.depth}))"
    return " && ".join(map(shlex.join, [*folders, ["python", "-c", f"import openvino_genai as ov; {use}"]]))


LINES = {
    "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "tgi": _tgi, "transformers": _transformers, "llama.cpp": _llamacpp,
    "openvino": _openvino,
}  # fmt: skip
"""The command that starts each engine with heads; for transformers the lines of Python."""
