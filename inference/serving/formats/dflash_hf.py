"""A DFlash head as an assistant model of transformers, for ``generate(assistant_model=..., speculation_type="dflash")``.

transformers has one class of DFlash models, named after the first checkpoint it was made for; any head of this kind fits it. It reads the
hidden states that `output_hidden_states` gives, the last of which is after the final norm, so that layer cannot be tapped.
"""

from __future__ import annotations

from torch import Tensor

from headstart.inference.serving.formats.format import Format
from headstart.inference.serving.layout import Layout
from headstart.inference.serving.trained import Dtype, Trained
from headstart.support.errors import UserError

NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id", "block_size",
    "dtype",
)  # fmt: skip


class DflashHfFormat(Format):
    """Loaded by ``AutoModel``."""

    methods = ("dflash",)
    engines = ("transformers",)

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        config, tensors = trained.cast(dtype)
        layers = trained.card["contract"]["num_hidden_layers"]
        if layers in config["eagle_aux_hidden_state_layer_ids"]:
            fault = f"{trained.path} reads layer {layers}, the last, before the final norm; transformers gives it after the norm"
            raise UserError(f"{fault}: train with drafter.taps below {layers}, or export --to dflash")
        if config["dflash_config"].get("causal"):
            raise UserError(f"{trained.path} is causal inside a block (drafter.causal), as transformers never is: export --to speculators")
        stated = {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "sliding_window": config["max_position_embeddings"],   # of layers of another type
            **config["dflash_config"],
        }
        return Layout({key: config[key] for key in KEPT if key in config} | stated, _renamed(tensors), "model.safetensors")

    def notes(self, trained: Trained) -> list[str]:
        return [f"tensors are renamed: {', '.join(f'{old} to {new}' for old, new in NAMES.items())}"]


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {NAMES.get(name, name): tensor for name, tensor in tensors.items()}
