"""IBM's accelerators, MLP speculators (2404.19124), with weights of each depth or shared ones (``tie_weights``)."""

from __future__ import annotations

import re

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.mlp import PREFIX
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes, whole_number
from headstart.inference.serving.imports.vocabulary import with_vocabulary
from headstart.support.errors import UserError

NAME = "IBM accelerator (MLP speculator)"


def recognises(foreign: Foreign) -> bool:
    return foreign.config.get("model_type") == "mlp_speculator" or bool(foreign.names(f"{PREFIX}proj."))


def sizes(foreign: Foreign) -> Sizes:
    emb = foreign.shapes.get(f"{PREFIX}emb.0.weight") or foreign.shapes.get("emb.0.weight")
    return Sizes(foreign.config.get("emb_dim"), emb[0] if emb else foreign.config.get("vocab_size"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    path, config = foreign.path, foreign.config
    depth, tied = whole_number(config, "n_predict", path), bool(config.get("tie_weights", False))
    if depth is None:
        raise UserError(f"{path}: config.json does not say n_predict, the number of tokens that it drafts; add it")
    tensors = {PREFIX + name.removeprefix(PREFIX) if name not in ("d2t", "t2d") else name: tensor
               for name, tensor in foreign.read(foreign.shapes).items()}  # fmt: skip
    if tied:
        for name in sorted(tensors):   # files may hold the shared weights once or once for every depth
            match = re.fullmatch(re.escape(PREFIX) + r"(emb|proj|ln|head)\.(\d+)\.(weight|bias)", name)
            first = 1 if match and match[1] == "proj" else 0
            if match and int(match[2]) > first:
                shared = tensors.get(f"{PREFIX}{match[1]}.{first}.{match[3]}")
                if shared is None or not shared.equal(tensors[name]):
                    raise UserError(f"{path} says tie_weights, but {name} differs from the {match[1]} of other depths; set it to false")
                del tensors[name]
    heads = [f"{PREFIX}head.{k}.weight" for k in range(1 if tied else depth)]
    tensors, size, of_vocabulary = with_vocabulary(tensors, heads, backbone.vocab, path)
    inner = config.get("inner_dim") or config.get("emb_dim") or backbone.dim   # 0: the width of the backbone
    arguments = {
        "depth": depth,
        "inner_dim": None if inner == backbone.dim else inner,
        "tie_weights": tied,
        "scale_input": bool(config.get("scale_input", False)),
        "draft_vocab_size": size,
    }
    return [Reading("mlp", arguments, tensors, notes=tuple(of_vocabulary))]
