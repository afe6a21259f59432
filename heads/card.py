"""A drafter's checkpoint: a directory that serving engines load, plus ``headstart.json`` with metadata.

config.json             for serving engines (`Drafter.engine_config`)
<file_name>             safetensors weights under the engines' names (`Drafter.tensors`)
...                     further files that engines expect (`Drafter.engine_files`)
headstart.json          kind and arguments, the backbone's contract, a hash of the weights, provenance
adapter/                the backbone's PEFT adapter, if any: heads trained with it draft for the adapted backbone
custom_generate/        code for transformers' `custom_generate`; loading heads does not run it

The classes of `Form` are that of the metadata, for what is read of it; further keys are free.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat
from safetensors.torch import save_file
from torch import Tensor

from headstart import __version__
from headstart.heads.backbone.adapter import ADAPTER
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.fingerprint import VERSION
from headstart.support.files import file_hash, transaction
from headstart.support.json_text import Form

METADATA = "headstart.json"
FORMAT = 1
GENERATE = "custom_generate/generate.py"


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds of a drafter."""

    kind: str
    arguments: dict[str, Any]
    taps: tuple[int, ...]
    config: dict[str, Any]
    files: dict[str, bytes]
    file_name: str
    tensors: Mapping[str, Tensor]


def write_checkpoint(folder: Path, contents: Contents, backbone: Backbone, extra: dict[str, Any]) -> None:
    """Write the checkpoint; its files replace those of an earlier save in one step (see `transaction`)."""
    trained_on: dict[str, Any] = {"fingerprint": VERSION, "precision": backbone.precision}
    if "tokenizer" in extra:
        trained_on["tokenizer"] = extra.pop("tokenizer")
    if backbone.gguf is not None:
        trained_on["stored"], extra = backbone.gguf.stored, {**extra, "gguf": backbone.gguf.provenance}
    with transaction(folder) as new:
        for name, content in (contents.files | _carried_files()).items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_bytes(content)
        if backbone.adapter is not None:
            (new / ADAPTER).mkdir()
            backbone.adapter.save(new / ADAPTER)
        file, config_file = new / contents.file_name, new / "config.json"
        config_file.write_text(json.dumps(contents.config, indent=2) + "\n")
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in contents.tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(config_file.stat().st_mode)  # safetensors creates it with mode 600
        card = {
            "format": FORMAT,
            "kind": contents.kind,
            "arguments": contents.arguments,
            "backbone": backbone.name,
            "contract": backbone.contract() | trained_on | {"taps": list(contents.taps), "adapter": backbone.adapter_digest},
            "weights": {"file": contents.file_name, "sha256": file_hash(file)},
            "provenance": extra,
        }
        (new / METADATA).write_text(json.dumps(card, indent=2) + "\n")


def _carried_files() -> dict[str, bytes]:
    """Return the code with which `transformers` decodes, as it looks for it in a repository, and its requirements, by their path."""
    code = Path(__file__).parent / GENERATE
    return {GENERATE: code.read_bytes(), "custom_generate/requirements.txt": f"headstart>={__version__}\n".encode()}


class Weights(Form):
    file: str
    """Name of the weights file, in the checkpoint's folder."""
    sha256: str


class Contract(Form):
    weights: list[FiniteFloat] | None = None
    """Fingerprint of the backbone's weights."""
    fingerprint: int | None = None
    """Version of the fingerprint."""
    precision: str | None = None
    """Dtype of the backbone, and how its weights are quantized."""
    stored: list[str] | None = None
    """How a GGUF file stores the embedding and the output layer, if in blocks."""
    adapter: str | None = None
    tokenizer: str | None = None
    """Digest of the tokenizer's ids of fixed texts."""


class Vocabulary(Form):
    size: int
    vocab_size: int
    training: FiniteFloat
    held_out: FiniteFloat | None


class Start(Form):
    path: str
    weights: Weights


class Chat(Form):
    """How conversations become tokens (`ChatSettings.to_card`)."""

    template: str | dict[str, str] | None
    template_kwargs: dict[str, Any]
    eos_token_id: list[int]


class Provenance(Form):
    steps: int | None = None
    tokens: int | None = None
    tau: FiniteFloat | None = None
    acceptance: dict[str, Any] | None = None
    """What drafts were worth in the last evaluation, by score and depth; decoding starts from it."""
    command: str | None = None
    versions: dict[str, Any] | None = None
    chat_template: str | None = None
    """Hash of the chat template."""
    chat: Chat | None = None
    init: Start | None = None
    draft_vocabulary: Vocabulary | None = None


class Card(Form):
    kind: str
    arguments: dict[str, Any]
    backbone: str
    contract: Contract
    weights: Weights
    provenance: Provenance
