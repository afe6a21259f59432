"""IBM's accelerators, MLP speculators (2404.19124), with weights of each depth or shared ones (``tie_weights``).

TGI and vLLM up to 0.9.2 load the checkpoint as it is, over the whole vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.mlp import PREFIX
from headstart.inference.serving.layouts.checkpoint import Checkpoint, Dtype
from headstart.inference.serving.layouts.files import Contents, Files
from headstart.inference.serving.layouts.layout import Counting, Imported, RenamedLayout, Sizes, whole_number
from headstart.inference.serving.layouts.parts import WHOLE, over_whole_vocabulary, vocabulary_shapes, with_vocabulary
from headstart.inference.serving.layouts.reader.base import Reading, Shapes
from headstart.inference.serving.layouts.reader.heads import MlpReader
from headstart.support.errors import UserError

SHARED = re.compile(re.escape(PREFIX) + r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)")


class MlpSpeculator(RenamedLayout):
    """A stack of linear layers, embeddings and norms, one of each a depth."""

    name, title, methods, engines = "mlp-speculator", "IBM accelerator (MLP speculator)", ("mlp",), ("vllm", "tgi")
    order = 4

    def lay_out(self, heads: Checkpoint, dtype: Dtype) -> Contents:
        config, tensors = heads.cast(dtype)
        stated = {key: value for key, value in config.items() if key != "draft_vocab_size"} | {"base_model_name_or_path": heads.served}
        return Contents(stated, over_whole_vocabulary(tensors, ".head.", config["vocab_size"]))

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {} if heads.config["tie_weights"] else {"tgi": "it reads speculators with drafter.tie_weights only"}

    def notes(self, heads: Checkpoint) -> list[str]:
        return [WHOLE] if "t2d" in heads.tensors else []

    def recognises(self, files: Files) -> bool:
        return files.config.get("model_type") == "mlp_speculator" or bool(files.names(f"{PREFIX}proj."))

    def read(self, files: Files, on: Sizes, counting: Counting | None = None) -> list[Reading]:
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
        inner = config.get("inner_dim") or config.get("emb_dim") or on.width  # 0: the width of the backbone
        options = {"n_predict": depth, "inner_dim": inner, "tied": tied, "scale_input": bool(config.get("scale_input", False))}
        return [Reading(MlpReader, config, tensors, options=options)]

    def shaped(self, reading: Reading, on: Sizes) -> Reading:
        config, K, inner, tied = reading.config, *(reading.options[key] for key in ("n_predict", "inner_dim", "tied"))
        (V, DV), D = on.vocabularies(config), config.get("emb_dim") or on.width
        shapes: Shapes = {}
        for i in range(1 if tied else K):
            shapes |= {f"emb.{i}.weight": (V, inner), f"head.{i}.weight": (DV, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
        shapes |= {f"proj.{i}.weight": (inner, inner if i else D) for i in range(min(K, 2) if tied else K)}
        named = {PREFIX + name: size for name, size in shapes.items()}
        return replace(reading, shapes=named | vocabulary_shapes(DV, V), optional=frozenset({"t2d"}))

    def imported(self, reading: Reading, files: Files, backbone: Backbone) -> Imported:
        options = reading.options
        heads = [f"{PREFIX}head.{k}.weight" for k in range(1 if options["tied"] else options["n_predict"])]
        tensors, size, notes = with_vocabulary(reading.tensors, heads, backbone.vocab, files.path)
        arguments = {
            "depth": options["n_predict"],
            "inner_dim": None if options["inner_dim"] == backbone.dim else options["inner_dim"],
            "tie_weights": options["tied"],
            "scale_input": options["scale_input"],
            "draft_vocab_size": size,
        }
        return Imported("mlp", arguments, tensors, notes=tuple(notes))
