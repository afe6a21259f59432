"""The tensors that engines expect for a configuration: names and shapes, from ``config.json`` alone.

Engines skip tensors of unknown names and leave missing ones at random values, most of them without a word, so an export is held against
these. Shapes that follow from the configuration are all that is used here, not the code of heads/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headstart.support.errors import UserError

Shapes = dict[str, list[int]]
Config = Mapping[str, Any]


def require_shapes(tensors: Mapping[str, Tensor], expected: Shapes, optional: Shapes, source: str) -> None:
    """Raise UserError naming the first tensor that is missing, unexpected or of another shape than the configuration says."""
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{source} lacks tensor {name} {shape}, which config.json calls for: it is damaged; train or fetch it again")
    known = expected | optional
    for name, shape in found.items():
        if name not in known:
            raise UserError(f"{source} holds tensor {name}, for which config.json has no place: it is damaged; train or fetch it again")
        if shape != known[name]:
            raise UserError(f"tensor {name} of {source} is {shape}, config.json says {known[name]}: it is damaged; train or fetch it again")


def layer_shapes(config: Config, prefix: str, inputs: int = 1, qk_norm: bool = False) -> Shapes:
    """Return the tensors of a decoder layer whose attention reads ``inputs`` times the width; no input norm."""
    D, FF, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    biases = {"q": q, "k": kv, "v": kv} if config.get("attention_bias") else {}
    shapes = {
        "self_attn.q_proj": [q, inputs * D],
        "self_attn.k_proj": [kv, inputs * D],
        "self_attn.v_proj": [kv, inputs * D],
        "self_attn.o_proj": [D, q],
        "mlp.gate_proj": [FF, D],
        "mlp.up_proj": [FF, D],
        "mlp.down_proj": [D, FF],
        "post_attention_layernorm": [D],
    }
    shapes |= {"self_attn.q_norm": [hd], "self_attn.k_norm": [hd]} if qk_norm else {}
    named = {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
    return named | {f"{prefix}self_attn.{name}_proj.bias": [width] for name, width in biases.items()}


def eagle3_shapes(config: Config, first: str = "midlayer.") -> Shapes:
    """Return the tensors of an EAGLE-3 head, ``first`` being the prefix of its first layer."""
    D, V, A = config["hidden_size"], config["vocab_size"], config["num_aux_hidden_states"]
    DV, normed = config.get("draft_vocab_size") or V, has_qk_norm(config)
    shapes: Shapes = {"fc.weight": [D, A * D], "norm.weight": [D], "lm_head.weight": [DV, D]}
    shapes |= layer_shapes(config, first, 2, normed) | {f"{first}{name}.weight": [D] for name in ("input_layernorm", "hidden_norm")}
    for i in range(1, config["num_hidden_layers"]):
        names = ("input_layernorm",) if first.startswith("layers.") else ("input_layernorm", "hidden_norm")
        shapes |= layer_shapes(config, f"layers.{i}.", 1, normed) | {f"layers.{i}.{name}.weight": [D] for name in names}
    shapes |= {f"fc_norm.{i}.weight": [D] for i in range(A)} if config.get("fc_norm") else {}
    shapes |= {"input_norm.weight": [A * D]} if config.get("norm_before_fc") else {}
    return shapes | ({"d2t": [DV], "t2d": [V]} if DV < V else {})


def has_qk_norm(config: Config) -> bool:
    """Return whether an EAGLE-3 head norms queries and keys, which its architecture says."""
    return "Eagle3Qwen3ForCausalLM" in config["architectures"]


def eagle_shapes(config: Config) -> Shapes:
    """Return the tensors of an EAGLE-1 head; the bias of ``fc`` is there for SGLang."""
    D = config["hidden_size"]
    return {"fc.weight": [D, 2 * D], "fc.bias": [D]} | layer_shapes(config, "layers.0.")


def block_shapes(config: Config) -> Shapes:
    """Return the tensors of a DFlash, DSpark or Domino head."""
    D, V = config["hidden_size"], config["vocab_size"]
    dflash = config["dflash_config"]
    shapes: Shapes = {"fc.weight": [D, len(dflash["target_layer_ids"]) * D], "hidden_norm.weight": [D], "norm.weight": [D]}
    for i in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{i}.", qk_norm=True) | {f"layers.{i}.input_layernorm.weight": [D]}
    if rank := config.get("markov_rank"):
        shapes |= {f"markov_head.markov_{name}.weight": [V, rank] for name in ("w1", "w2")}
    if dflash.get("projector_type") == "domino":
        rank, G = dflash["emb_dim"], dflash["gru_hidden_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": [3 * G, D], "prefix_gru.weight_hh_l0": [3 * G, G]}
        shapes |= {"embed_proj.0.weight": [rank, D + G], "embed_proj.2.weight": [V, rank]}
    return shapes


def medusa_shapes(config: Config) -> Shapes:
    """Return the tensors of Medusa heads under FasterDecoding's names."""
    D, V, layers = config["hidden_size"], config["vocab_size"], config["medusa_num_layers"]
    shapes: Shapes = {}
    for k in range(config["medusa_num_heads"]):
        shapes |= {f"{k}.{i}.linear.weight": [D, D] for i in range(layers)} | {f"{k}.{i}.linear.bias": [D] for i in range(layers)}
        shapes[f"{k}.{layers}.weight"] = [V, D]
    return shapes


def mlp_shapes(config: Config) -> Shapes:
    """Return the tensors of an MLP speculator."""
    K, D, inner, V, tied = (config[key] for key in ("n_predict", "emb_dim", "inner_dim", "vocab_size", "tie_weights"))
    sets = 1 if tied else K
    shapes: Shapes = {}
    for i in range(sets):
        shapes |= {f"emb.{i}.weight": [V, inner], f"head.{i}.weight": [V, inner], f"ln.{i}.weight": [inner], f"ln.{i}.bias": [inner]}
    shapes |= {f"proj.{i}.weight": [inner, inner if i else D] for i in range(2 if tied else K)}
    return {f"speculator.{name}": shape for name, shape in shapes.items()}


SHAPES: dict[str, Callable[[Config], Shapes]] = {
    "eagle3": eagle3_shapes,
    "eagle": eagle_shapes,
    "dflash": block_shapes,
    "dspark": block_shapes,
    "domino": block_shapes,
    "medusa": medusa_shapes,
    "mlp": mlp_shapes,
}
"""Method -> the tensors of its own layout. Draft models are those of their architecture, MTP modules those of the backbone's."""
