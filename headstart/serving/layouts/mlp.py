"""IBM's accelerators, MLP speculators (2404.19124), with weights of each depth or shared ones (``tie_weights``).

TGI and vLLM up to 0.9.2 load the checkpoint as it is, over the whole vocabulary.
"""

from __future__ import annotations

import re
from pathlib import Path

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.mlp import PREFIX
from headstart.serving.layouts.checkpoint import Checkpoint
from headstart.serving.layouts.files import Files, write_folder
from headstart.serving.layouts.layout import Counting, Heads, Layout, whole_number
from headstart.serving.layouts.parts import over_whole_vocabulary, with_vocabulary
from headstart.support.errors import UserError

SHARED = re.compile(re.escape(PREFIX) + r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)")


class MlpSpeculator(Layout):
    """A stack of linear layers, embeddings and norms, one of each a depth."""

    name, title, methods, engines = "mlp-speculator", "IBM accelerator (MLP speculator)", ("mlp",), ("vllm", "tgi")

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        config, tensors, notes = over_whole_vocabulary(heads, ".head.")
        write_folder(folder, config, tensors)
        return notes

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {} if heads.config["tie_weights"] else {"tgi": "it reads speculators with drafter.tie_weights only"}

    def recognises(self, files: Files) -> bool:
        return files.config.get("model_type") == "mlp_speculator" or bool(files.names(f"{PREFIX}proj."))

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        path, config = files.path, files.config
        if config.get("n_predict") is None:
            raise UserError(f"{path}: config.json does not say n_predict, the number of tokens that it drafts; add it")
        depth, tied = whole_number(config, "n_predict", path), bool(config.get("tie_weights", False))
        tensors = {name if name in ("d2t", "t2d") else PREFIX + name.removeprefix(PREFIX): x for name, x in files.read().items()}
        for name in sorted(tensors) if tied else ():  # files may hold the shared weights once or once for every depth
            match = SHARED.fullmatch(name)
            first = 1 if match and match[1] == "proj" else 0
            if match and int(match[2]) > first:
                shared = tensors.get(f"{PREFIX}{match[1]}.{first}.{match[3]}")
                if shared is None or not shared.equal(tensors[name]):
                    raise UserError(f"{path} says tie_weights, but {name} differs from the {match[1]} of other depths; set it to false")
                del tensors[name]
        inner = config.get("inner_dim") or config.get("emb_dim") or backbone.dim  # 0: the width of the backbone
        arguments = {
            "depth": depth,
            "inner_dim": None if inner == backbone.dim else inner,
            "tie_weights": tied,
            "scale_input": bool(config.get("scale_input", False)),
        }
        heads = Heads("mlp", arguments, tensors)
        return with_vocabulary(heads, [f"{PREFIX}head.{k}.weight" for k in range(1 if tied else depth)], backbone.vocab, path)
