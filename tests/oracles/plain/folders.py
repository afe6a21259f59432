"""What an engine reads in a folder of heads: the tensors under one name each, the layers tapped, and the shapes that it expects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.weight_files import LAYOUTS, SHARED
from headstart.serving.layouts.files import Files
from headstart.serving.reading import recognise
from plain.base import Reading, Shapes
from plain.block import BlockReader
from plain.eagle import Eagle3Reader, EagleReader, MtpReader, PeagleReader
from plain.heads import DraftModelReader, MedusaReader, MlpReader
from plain.layer import layer_shapes, read_shape

IDS = "eagle_aux_hidden_state_layer_ids"
BIAS = "fc.bias"
PREFIX = "speculator."
BLOCK_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass(frozen=True)
class Sizes:
    width: int
    vocab: int
    layers: int
    positions: int

    def vocabularies(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """The sizes of the whole vocabulary and of the drafted one, by a configuration or of the backbone."""
        whole = config.get("vocab_size") or self.vocab
        return whole, config.get("draft_vocab_size") or whole


def vocabulary_shapes(draft_vocab: int, vocab: int) -> Shapes:
    return {"d2t": (draft_vocab,), "t2d": (vocab,)} if draft_vocab < vocab else {}


def taps_of(config: Mapping[str, Any], on: Sizes) -> tuple[int, ...]:
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    if top is not None:
        return tuple(sorted(top))
    return (2, on.layers // 2, on.layers - 3) if nested is None else tuple(sorted(tap + 1 for tap in nested))


def eagle3(files: Files, on: Sizes) -> Reading:
    return eagle3_of(files, files.config, taps_of(files.config, on))


def eagle3_of(files: Files, config: Mapping[str, Any], taps: tuple[int, ...]) -> Reading:
    nested = config.get("eagle_config") or {}
    options = {key: bool(config.get(key) or nested.get(key)) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    options["norm_before_residual"] = bool(config.get("norm_before_residual"))
    options["qk_norm"] = any(name.endswith("self_attn.q_norm.weight") for name in files.shapes)
    tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in files.read().items()}
    for name in [name for name in tensors if name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")]:
        tensors.setdefault(name.replace("hidden_norm", "input_layernorm"), tensors.pop(name))
    if "mask_hidden" not in tensors:
        return Reading(Eagle3Reader, config, tensors, taps, options)
    mask = next(config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id") if key in config)
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)  # of any shape in vLLM
    return Reading(PeagleReader, config, tensors, taps, options | {"mask": mask})


def eagle3_shapes(reading: Reading, on: Sizes) -> Reading:
    config, options, layer = reading.config, reading.options, read_shape(reading.config)
    (V, DV), D = on.vocabularies(config), layer.hidden
    taps, width = config.get("num_aux_hidden_states") or len(reading.taps), config.get("target_hidden_size") or on.width
    shapes: Shapes = {"fc.weight": (D, taps * width), "norm.weight": (D,), "lm_head.weight": (DV, D), "embed_tokens.weight": (V, D)}
    shapes |= vocabulary_shapes(DV, V) | {"layers.0.hidden_norm.weight": (D,)}
    for i in range(layer.layers):
        own = layer_shapes(layer, D if i else 2 * D, options["qk_norm"]) | {"input_layernorm.weight": (D,)}
        shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
    shapes |= {"input_norm.weight": (taps * width,)} if options["norm_before_fc"] else {}
    shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(taps)} if options["fc_norm"] else {}
    shapes |= {"mask_hidden": (1, 1, taps * width)} if "mask" in options else {}
    optional = {"embed_tokens.weight", "t2d"} | ({"lm_head.weight"} if DV == V else set())
    return replace(reading, layer=layer, shapes=shapes, optional=frozenset(optional))


def eagle(files: Files, on: Sizes) -> Reading:
    return Reading(EagleReader, files.config, files.read())


def eagle_shapes(reading: Reading, on: Sizes) -> Reading:
    layer, (V, _) = read_shape(reading.config), on.vocabularies(reading.config)
    D = layer.hidden
    shapes: Shapes = {"fc.weight": (D, 2 * D), BIAS: (D,), "embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    for i in range(layer.layers):
        own = layer_shapes(layer, D) | ({"input_layernorm.weight": (D,)} if i else {})
        shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
    return replace(reading, layer=layer, shapes=shapes, optional=frozenset({"embed_tokens.weight", "lm_head.weight", BIAS}))


def medusa(files: Files, on: Sizes) -> Reading:
    """By FasterDecoding's names: k.i.linear.weight and k.n.weight."""
    config, tensors = files.config, files.read()
    found = 1 + max(int(name.split(".")[0]) for name in tensors if name[0].isdigit())
    return Reading(MedusaReader, config, tensors, (), {"heads": found, "blocks": config["medusa_num_layers"]})


def medusa_shapes(reading: Reading, on: Sizes) -> Reading:
    heads, layers = reading.options["heads"], reading.options["blocks"]
    (V, DV), D = on.vocabularies(reading.config), reading.config.get("hidden_size") or on.width
    blocks = [f"{k}.{i}.linear." for k in range(heads) for i in range(layers)]
    shapes: Shapes = vocabulary_shapes(DV, V) | {f"{k}.{layers}.weight": (DV, D) for k in range(heads)}
    shapes |= {f"{block}weight": (D, D) for block in blocks} | {f"{block}bias": (D,) for block in blocks}
    return replace(reading, shapes=shapes, optional=frozenset({"t2d"}))


def mlp(files: Files, on: Sizes) -> Reading:
    config, tied = files.config, bool(files.config.get("tie_weights", False))
    tensors = files.read()
    if tied:  # files may hold the shared weights once or once for every depth
        last = {"proj": 1}
        shared = [name for name in tensors if name.startswith(PREFIX) and int(name.split(".")[2]) > last.get(name.split(".")[1], 0)]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in shared}
    inner = config.get("inner_dim") or config.get("emb_dim") or on.width
    scale = bool(config.get("scale_input", False))
    return Reading(
        MlpReader, config, tensors, options={"n_predict": config["n_predict"], "inner_dim": inner, "tied": tied, "scale_input": scale}
    )


def mlp_shapes(reading: Reading, on: Sizes) -> Reading:
    config, K, inner, tied = reading.config, *(reading.options[key] for key in ("n_predict", "inner_dim", "tied"))
    (V, DV), D = on.vocabularies(config), config.get("emb_dim") or on.width
    shapes: Shapes = {}
    for i in range(1 if tied else K):
        shapes |= {f"emb.{i}.weight": (V, inner), f"head.{i}.weight": (DV, inner), f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    shapes |= {f"proj.{i}.weight": (inner, inner if i else D) for i in range(min(K, 2) if tied else K)}
    named = {PREFIX + name: size for name, size in shapes.items()}
    return replace(reading, shapes=named | vocabulary_shapes(DV, V), optional=frozenset({"t2d"}))


def block(files: Files, on: Sizes) -> Reading:
    config, nested = files.config, files.config.get("dflash_config") or {}
    ids, top = nested.get("target_layer_ids", config.get("target_layer_ids")), config.get(IDS)
    return block_of(files, {**config, **nested}, [i + 1 for i in ids] if top is None else top, on)


def block_of(files: Files, config: Mapping[str, Any], taps: list[int], on: Sizes) -> Reading:
    kinds = set(config.get("layer_types") or [])
    marks = {"markov_head.": "markov", "prefix_gru.": "recurrent", "candidate_selector.": "selector"}
    kind = next((kind for start, kind in marks.items() if files.names(start)), "none")
    foreign = config.get("model_type") == "muse_glimmer_assistant"
    jetspec = config.get("causal_head") or config.get("architectures") == ["JetSpecDraftModel"]
    causal = config.get("is_causal", config.get("causal", jetspec or kinds == {"sliding_attention"} and not foreign))
    options = {
        "elements": config["block_size"],
        "mask": config.get("mask_token_id"),
        "anchored": bool(config.get("sample_from_anchor", kind in ("markov", "recurrent"))),
        "candidates": config.get("selector_top_k"),
        "correction": kind,
        "causal": bool(causal),
    }
    names = [name for name in files.shapes if not name.startswith(("confidence_head.", "verifier_"))]
    tensors = {BLOCK_NAMES.get(name, name): tensor for name, tensor in files.read(names).items()}
    return Reading(BlockReader, config, tensors, tuple(taps), options)


def block_shapes(reading: Reading, on: Sizes) -> Reading:
    config, layer, kind = reading.config, read_shape(reading.config), reading.options["correction"]
    (V, DV), D = on.vocabularies(config), layer.hidden
    shapes: Shapes = {"fc.weight": (D, len(reading.taps) * (config.get("target_hidden_size") or on.width))}
    shapes |= {"hidden_norm.weight": (D,), "norm.weight": (D,), "embed_tokens.weight": (V, D), "lm_head.weight": (DV, D)}
    shapes |= vocabulary_shapes(DV, V)
    if kind == "markov":
        shapes |= {f"markov_head.markov_w{i}.weight": (size, config["markov_rank"]) for i, size in ((1, V), (2, DV))}
    if kind == "selector":
        rank = config["selector_rank"]
        shapes |= {f"candidate_selector.{name}_codebook": (V, rank) for name in ("predecessor", "successor")}
        shapes |= {"candidate_selector.hidden_projection.weight": (rank, D)}
    if kind == "recurrent":
        G, rank = config["gru_hidden_dim"], config["emb_dim"]
        shapes |= {"prefix_gru.weight_ih_l0": (3 * G, D), "prefix_gru.weight_hh_l0": (3 * G, G)}
        shapes |= {"embed_proj.0.weight": (rank, D + G), "embed_proj.2.weight": (V, rank)}
    for i in range(layer.layers):
        own = layer_shapes(layer, D, head_norms=True) | {"input_layernorm.weight": (D,)}
        if taps := config.get("conv_kernel_size"):
            for part in ("attention_conv", "mlp_conv"):
                rows = 2 * taps * D // config["conv_group_size"]
                own |= {f"{part}.base_kernel": (2, taps, D), f"{part}.kernel_projection.weight": (rows, D)}
        shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
    kinds = set(config.get("layer_types") or [])
    unbounded = "sliding_attention" not in kinds
    windows = tuple(None if unbounded or window is None or 0 < on.positions <= window else window for window in layer.windows)
    optional = {"embed_tokens.weight", "t2d"} | ({"lm_head.weight"} if DV == V else set())
    return replace(reading, layer=replace(layer, windows=windows), shapes=shapes, optional=frozenset(optional))


def mtp(files: Files, on: Sizes) -> Reading:
    names = next(one for one in LAYOUTS.values() if one.native("mtp.0.eh_proj.weight", on.layers) in files.shapes)
    wanted, modules, parts = dict[str, str](), 0, ("enorm", "hnorm", "eh_proj", "norm")
    while names.native(f"mtp.{modules}.eh_proj.weight", on.layers) in files.shapes and not (names.single and modules):
        own = {names.native(f"mtp.{modules}.{part}.weight", on.layers): f"mtp.{modules}.{part}.weight" for part in parts}
        start = names.native(f"mtp.{modules}.layer.", on.layers)
        inside = [name for name in files.names(start) if name not in own and not name.endswith(SHARED)]
        wanted |= own | {name: f"mtp.{modules}.layer.{name.removeprefix(start)}" for name in inside}
        modules += 1
    tensors = {wanted[name]: tensor for name, tensor in files.read(name for name in wanted if name in files.shapes).items()}
    config = files.config.get("text_config") or files.config
    return Reading(MtpReader, config, tensors, options={"family": names.name, "modules": modules})


def mtp_shapes(reading: Reading, on: Sizes) -> Reading:
    names = LAYOUTS[reading.options["family"]]
    layer = replace(read_shape(reading.config, 1), bias=names.attention_bias)
    D = layer.hidden
    own = layer_shapes(layer, D, head_norms=names.gated) | {"input_layernorm.weight": (D,)}
    if names.gated:
        own["self_attn.q_proj.weight"] = (2 * layer.heads * layer.head_dim, D)
    shapes: Shapes = {}
    for i in range(reading.options["modules"]):
        shapes |= {f"mtp.{i}.{part}.weight": (D, 2 * D) if part == "eh_proj" else (D,) for part in ("enorm", "hnorm", "eh_proj", "norm")}
        shapes |= {f"mtp.{i}.layer.{name}": size for name, size in own.items()}
    return replace(reading, layer=layer, shapes=shapes)


def draft_model(files: Files, on: Sizes) -> Reading:
    model, report = AutoModelForCausalLM.from_pretrained(str(files.folder), dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    tensors = dict(model.state_dict())
    options = {"model": model.eval(), "mask": files.config.get("pard_token", files.config.get("ptd_token_id"))}
    return Reading(DraftModelReader, files.config, tensors, (), options, shapes={name: tuple(x.shape) for name, x in tensors.items()})


def speculators(files: Files, on: Sizes) -> Reading:
    layer, kind = files.config["transformer_layer_config"], files.config["speculators_model_type"]
    stated = {key: value for key, value in files.config.items() if key != "transformer_layer_config" and value is not None}
    flat = {**layer, **stated}
    if kind in ("eagle3", "peagle"):
        flat.setdefault("norm_before_residual", kind == "eagle3")  # as vLLM has it
        return eagle3_of(files, flat, taps_of({IDS: flat.get(IDS)}, on))
    kinds = set(layer.get("layer_types") or [])
    flat["causal"] = "sliding_attention" in kinds and not flat.get("sliding_window_non_causal", False)
    flat["sample_from_anchor"] = bool(flat.get("sample_from_anchor", kind == "dspark"))
    return block_of(files, flat, list(taps_of({IDS: flat.get("aux_hidden_state_layer_ids")}, on)), on)


def same(reading: Reading, on: Sizes) -> Reading:
    return reading


READERS: dict[str, Callable[[Files, Sizes], Reading]] = {
    "EAGLE-3": eagle3, "P-EAGLE": eagle3, "EAGLE-1/2": eagle, "Medusa": medusa, "IBM accelerator (MLP speculator)": mlp, "MTP modules": mtp,
    "draft model": draft_model, "speculators": speculators, "DFlash, DFlash2, DSpark or Domino": block,
}  # fmt: skip
"""By the title of the layout."""
SHAPES: dict[type[Any] | None, Callable[[Reading, Sizes], Reading]] = {
    Eagle3Reader: eagle3_shapes, PeagleReader: eagle3_shapes, EagleReader: eagle_shapes,
    MedusaReader: medusa_shapes, MlpReader: mlp_shapes, MtpReader: mtp_shapes,
    BlockReader: block_shapes, DraftModelReader: same,
}  # fmt: skip


def read_heads(files: Files, on: Backbone) -> Reading:
    """Read heads as the engines do, in fp32, with the shapes that they expect."""
    layout = recognise(files)
    assert layout is not None
    sizes = Sizes(on.dim, on.vocab, on.num_layers, on.max_positions or 0)
    reading = READERS[layout.title](files, sizes)
    reading = SHAPES[reading.reader](reading, sizes)
    return replace(reading, tensors={name: x.float() if x.is_floating_point() else x for name, x in reading.tensors.items()})
