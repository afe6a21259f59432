"""Hydra in the paper's own code (2402.05109): ``hydra_mlp``, ``hydra_lm_head`` and, for Hydra++, ``prefix_embeding_layer``.

No engine loads Hydra heads, so they are read to be imported, and nothing is written.
"""

from __future__ import annotations

import re

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.layouts.files import Files
from headstart.inference.serving.layouts.layout import Counting, Imported, Layout
from headstart.inference.serving.layouts.vocabulary import with_vocabulary
from headstart.support.errors import UserError

ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
"""Head architectures, and whether they have a prefix layer."""
UNUSED = "prefix_embeding_layer.embed_tokens.weight"
"""The prefix layer is a whole Llama model, which is given hidden states: its embedding is not used."""
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")


class Hydra(Layout):
    """Blocks are counted with dropout layers where there is a prefix layer."""

    title = "Hydra"
    order = 3

    def recognises(self, files: Files) -> bool:
        return "hydra_head_arch" in files.config or bool(files.names("hydra_mlp."))

    def imports(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Imported]:
        path, config = files.path, files.config
        kind = config.get("hydra_head_arch", "prefix-mlp" if files.names("prefix_embeding_layer.") else "mlp")
        if kind not in ARCHITECTURES:
            raise UserError(f"{path} has heads of hydra_head_arch {kind!r}; hydra heads here are {' or '.join(ARCHITECTURES)}")
        if not config.get("grounded_heads", True):
            raise UserError(f"{path} has heads that do not read the drafted tokens (grounded_heads false); hydra heads here do")
        if config.get("hidden_state_offset", 0) != 0:
            raise UserError(f"{path} has hidden_state_offset {config['hidden_state_offset']}; hydra heads here read the last hidden state")
        prefix, notes = ARCHITECTURES[kind], []
        blocks = [(int(match[1]), int(match[2])) for name in files.shapes if (match := BLOCK.fullmatch(name))]
        if not blocks:
            raise UserError(f"{path} has no tensors hydra_mlp.0.0.linear.weight and so on, of Hydra heads")
        depth = 1 + max(head for head, _ in blocks)
        stored = 1 + max(block for _, block in blocks) // (2 if prefix else 1)
        if (stated := config.get("hydra_num_heads")) not in (None, depth):
            notes.append(f"config.json states {stated} heads, the file holds {depth}: all {depth} are used")
        tensors = files.read(name for name in files.shapes if name != UNUSED)
        layers = config.get("hydra_num_layers") or stored
        if layers > stored == 2:  # the file holds the repeated block once
            step, first = (2, 3) if prefix else (1, 1)
            for name in [name for name in tensors if re.match(rf"hydra_mlp\.\d+\.{first}\.linear\.", name)]:
                head, part = name.split(".")[1], name.rpartition(".")[2]
                tensors |= {f"hydra_mlp.{head}.{first + step * i}.linear.{part}": tensors[name] for i in range(1, layers - 1)}
            notes.append(f"config.json states {layers} blocks a head and the file holds two, of which the code repeats the second")
        else:
            layers = stored
        outputs = [f"hydra_lm_head.{k}.{'1.' if prefix else ''}{part}" for k in range(depth) for part in ("weight", "bias")]
        tensors, size, of_vocabulary = with_vocabulary(tensors, outputs, backbone.vocab, path)
        arguments = {"depth": depth, "layers": layers, "prefix_attention": prefix, "draft_vocab_size": size}
        return [Imported("hydra", arguments, tensors, notes=(*notes, *of_vocabulary))]
