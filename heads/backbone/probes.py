"""Checks of a model: where its layers are and what they may attend to, and test passes that show whether it follows tree masks and how it
makes its logits; later, that it is still the same."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from operator import mul, truediv
from typing import Any, cast

import torch
import transformers
from accelerate.hooks import CpuOffload
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from headstart.heads.backbone.adapter import SHARED, changes_tables, require_alike
from headstart.heads.backbone.chain_cache import chain_fault
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.hooks import computes, is_foreign
from headstart.heads.backbone.model_config import CACHE
from headstart.heads.backbone.recurrent import KIND, Branch, Recurrent, find_recurrent
from headstart.support.errors import UserError, cause


def width_of(model: PreTrainedModel) -> int:
    """Return the width of the model's layers. Raises UserError if embeddings or output layer have another (OPT-350m), or are not one."""
    parts, name = {"embeddings": model.get_input_embeddings(), "an output layer": model.get_output_embeddings()}, type(model).__name__
    width: Any = getattr(model.config.get_text_config(), "hidden_size", None)
    for part, module in parts.items():
        if module is None or isinstance(module, nn.ModuleList):
            raise UserError(f"{name} does not name {part} for text, or several; heads need a model with one, perhaps that within it")
    for part, module in parts.items():
        if not isinstance(module.weight, Tensor):
            raise UserError(f"{name} has {part} without a matrix ({type(module)}), which heads share; quantize the other layers alone")
        if (own := module.weight.shape[-1]) != width:
            raise UserError(f"{name} has {part} of width {own} and layers of width {width}; heads need a model of one width")
    return int(width)


def layer_kinds(model: PreTrainedModel, layers: nn.ModuleList) -> tuple[dict[str, int | None], Recurrent | None, str | None]:
    """Return the windows of the model's attention layers by kind, its recurrent layers, and why trees of them cannot be verified, if so.

    This follows from the model's configuration and code alone.
    """
    stated = model.config.get_text_config().to_dict()
    try:
        return attention_windows(stated, model), find_recurrent(type(model).__name__, layers, stated.get("layer_types") or []), None
    except UserError as error:
        return {}, None, str(error)


def trial_tokens(model: PreTrainedModel) -> Tensor:
    """Return ``[1, N]`` tokens of a text to try a model with, without its padding token, for which some count no position."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    return torch.tensor([token for token in range(1, 26) if token != padding])[None, :24]


def mask_refusal(
    model: PreTrainedModel,
    read: Callable[..., Features],
    tokens_1N: Tensor,
    windows: dict[str, int | None],
    recurrent: Recurrent | None,
    alike: bool,
) -> str | None:
    """Return why trees cannot be verified by a model that fills no KV cache or does not follow 4-D masks and explicit positions.

    A token must have the same hidden state among masked siblings as without them, up to rounding, unless the model does not compute tokens
    ``alike`` beside others anyhow. Both are read with a mask: without one attention may take another kernel, whose rounding in 16 bits
    grows over the layers: in bf16 to 5 %, seven units in the last place, in SmolLM2. ``read`` is `Backbone.read`.
    """
    kept, before = DynamicCache(config=model.config.get_text_config()), tokens_1N[:, [0, 1, -1]]
    alone = read(before, kept).hidden_BTD[:, -1]
    if kept.get_seq_length() != 3:
        return (
            f"{type(model).__name__} leaves the KV cache empty, which transformers {transformers.__version__} calls {CACHE!r}: "
            "name that argument so in the forward functions of your own"
        )
    foreign = recurrent is None and any(map(is_foreign, model.modules()))  # Gemma 4's own layers share keys
    if foreign and any(layer.keys is None for layer in kept.layers if hasattr(layer, "keys")):
        return f"{type(model).__name__} has layers that keep no keys"
    found, masked = _under_masks(read, tokens_1N, windows, recurrent, alone)
    exact = found and off(*found) == 0 and alone.dtype == torch.float32  # of positions that are ignored, little may depend on their order

    def follows(share: float) -> bool:
        return bool(found) and off(found[0], masked) <= share and off(masked, alone) <= max(share, 32 * torch.finfo(alone.dtype).eps)

    if alike and not follows(1e-3 if exact else 0.05):
        after = tokens_1N[:, 2:-1]
        within, beside = (read(torch.cat([before, rest], 1)).hidden_BTD[:, 2] for rest in (after, before[:, :1].expand_as(after)))
        if off(within, beside) > 0.005:  # in passes of one width, which round alike
            fault = f"{type(model).__name__} computes other hidden states where more tokens follow in a pass, so trees change its tokens"
            return f"{fault}; heads need a model that attends to earlier ones only, and no quantization with one dynamic scale for a pass"
        if not follows(3 * off(within, alone)):
            return follows_no_mask(model)
    return pass_refusal(model, read, tokens_1N, windows, recurrent) if alike else None


def _under_masks(
    read: Callable[..., Features], tokens_1N: Tensor, windows: dict[str, int | None], recurrent: Recurrent | None, alone: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the last token's states as the second one's child, at its place and at another one, and without the tokens between them."""
    N, device, found = tokens_1N.shape[1], tokens_1N.device, list[Tensor]()
    seen = torch.ones(N, N, dtype=torch.bool, device=device).tril()
    seen[-1, 2:-1] = False
    place = torch.tensor([[*range(N - 1), 2]], device=device)
    along = nullcontext() if recurrent is None else recurrent.along(Branch(None, seen[None], place))
    with suppress(TypeError, ValueError, RuntimeError, AssertionError):
        with along:
            found = [read(tokens_1N, None, at, dict.fromkeys(windows, seen[None])).hidden_BTD[:, -1] for at in (place, place // 2)]
        if recurrent is None:
            mask = dict.fromkeys(windows, seen[None, :3, :3])
            return found, read(tokens_1N[:, [0, 1, -1]], None, place[:, :3], mask).hidden_BTD[:, -1]
    return found, alone


@torch.no_grad()
def pass_refusal(
    model: PreTrainedModel, read: Callable[..., Features], tokens_1N: Tensor, windows: dict[str, int | None], recurrent: Recurrent | None
) -> str | None:
    """Return why trees cannot be verified by a model whose foreign code computes a token by its place in a pass, by other rows or by the
    pass before: a hook that changes the last token alone, a layer that remembers. ``read`` is `Backbone.read`."""
    unembed = model.get_output_embeddings()
    if recurrent is not None or not any(map(is_foreign, model.modules())):  # recurrent layers follow no mask
        return None

    def read_on(tokens_BT: Tensor, kept: DynamicCache, seen_TS: Tensor) -> Tensor:
        place_BT, seen_BTS = seen_TS.sum(1).expand(tokens_BT.shape) - 1, seen_TS.bool().expand(len(tokens_BT), -1, -1)
        return cast(Tensor, unembed(read(tokens_BT, kept, place_BT, dict.fromkeys(windows, seen_BTS)).hidden_BTD)[:1])

    def first(count: int, rows: int = 1) -> Tensor:
        """Logits of a token that is read as the first of so many continuations of two others, in the first of so many rows."""
        begin_BT, after_BT = (torch.cat([part, part.flip(1)])[:rows] for part in (tokens_1N[:, :2], tokens_1N[:, 2 : 2 + count]))
        read_on(begin_BT, kept := DynamicCache(), seen_33[:2, :2])
        return read_on(after_BT, kept, torch.cat([seen_33.new_ones(count, 2), torch.eye(count).to(seen_33)], 1))[:, 0]

    seen_33 = torch.ones(3, 3, dtype=torch.int64, device=tokens_1N.device).tril()
    alone = first(1)
    ways = {"other tokens follow it in a pass": first(4), "other rows are read with it": first(4, 2)}
    ways["it follows others in a pass"] = read_on(tokens_1N[:, :3], DynamicCache(), seen_33)[:, 2]
    unlike = [way for way, found in ways.items() if not off(found, alone) <= max(1e-3, 32 * torch.finfo(alone.dtype).eps)]
    return f"{type(model).__name__} has layers or hooks of your own that compute a token otherwise where {unlike[0]}" if unlike else None


def off(states: Tensor, others: Tensor) -> float:
    """Return the largest difference, as a share of the largest of the latter; 0 of equal -inf, and of fake tensors, without values."""
    difference, largest = torch.where(states == others, 0, states - others).abs().max(), others.masked_fill(others.isinf(), 0).abs().max()
    return float(difference.item() / max(largest.item(), 1e-30))


TRAINABLE = "train and export only, engines decode with the heads"
"""What is left for a model that can verify neither trees nor chains here."""
UNTRIED = f"whether it decodes here, with chains of drafts, is tried when its weights are loaded; else {TRAINABLE}"


def chain_refusal(model: PreTrainedModel, read: Callable[..., Features], tokens_1N: Tensor, no_trees: str | None) -> str | None:
    """Return why a model that verifies no trees cannot verify chains either; None if it can. ``read`` is `Backbone.read`."""
    if no_trees is None or not computes(model.get_input_embeddings().weight):
        return None if no_trees is None else f"{no_trees}; {UNTRIED}"
    fault = chain_fault(model, read, tokens_1N)
    return None if fault is None else f"{no_trees}, {fault} (transformers {transformers.__version__}); {TRAINABLE}"


def _unscaled(logits: Tensor, value: float) -> Tensor:
    return logits


SCALES: dict[str, Callable[[Tensor, float], Tensor]] = {  # functions that pickle
    "none": _unscaled, "logit_scale": mul, "logits_scaling": truediv, "logits_scaling (multiplied)": mul,
    "lm_head_multiplier": mul, "logits_mup_width_multiplier": truediv, "output_multiplier": mul,
}  # fmt: skip
CAPS = ("none", "final_logit_softcapping", "logits_soft_cap")
"""Fields of configurations by which models scale their logits, and by which they then cap them."""


@torch.no_grad()
def find_postprocessing(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Find the scale of `SCALES` and the cap of `CAPS`, with their values in the configuration, that reproduce the model's own logits.

    Raises UserError if none do.
    """
    config, unembed, name = model.config.get_text_config(), model.get_output_embeddings(), type(model).__name__
    tokens = torch.arange(2, device=model.get_input_embeddings().weight.device)[None]
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} does not read text alone ({cause(error)}); heads need a model that does") from None
    raw = unembed(base_of(model)(input_ids=tokens, use_cache=False).last_hidden_state)
    if logits.shape != raw.shape:
        raise UserError(f"{name} gives logits of shape {list(logits.shape)}, its output layer {list(raw.shape)}; heads need all tokens'")
    rules = []
    for scale, cap in product(SCALES, CAPS):
        by, most = (float(getattr(config, rule.split(" ")[0], None) or 0) for rule in (scale, cap))
        if (by or scale == "none") and (most or cap == "none"):
            rules.append(partial(scaled, SCALES[scale], by, most))
    best = min(rules, key=lambda rule: off(rule(raw).float(), logits.float()))
    if off(best(raw).float(), logits.float()) > (1e-3 if raw.dtype == torch.float32 else 2e-2):
        known = ", ".join([*SCALES, *CAPS[1:]])
        raise UserError(f"{name} changes its logits in an unknown way (transformers {transformers.__version__}); known rules: {known}")
    return best


def scaled(scale: Callable[[Tensor, float], Tensor], by: float, most: float, logits: Tensor) -> Tensor:
    """Return logits scaled, and capped at ``most`` if that is not 0."""
    return torch.tanh(scale(logits, by) / most) * most if most else scale(logits, by)


def require_weights(model: PreTrainedModel) -> None:
    """Raise UserError if accelerate moves weights in for each pass of a module, or of the model, and out again."""
    away = [name for name, weight in model.named_parameters() if weight.is_meta]
    if away or isinstance(vars(model).get("_hf_hook"), CpuOffload):
        which = f"{len(away)} weights, {away[0]} first" if away else "the whole model"
        raise UserError(
            f"{type(model).__name__} is offloaded by accelerate ({which}), and heads read its weights between passes too; load it without "
            "(no 'cpu' or 'disk' beside a GPU in device_map, more max_memory), or quantized if it does not fit"
        )


def require_same_parts(model: PreTrainedModel, parts: tuple[nn.Module, ...], vocab: int) -> None:
    """Raise UserError unless the model has these parts, its decoder, embedding and output layer, as when it was loaded, and no hooks."""
    require_weights(model)
    require_alike(model)
    unembed = model.get_output_embeddings()
    if (base_of(model), model.get_input_embeddings(), unembed) != parts or unembed.weight.shape[0] != vocab:
        replaced = "the model's embedding, output layer or decoder was replaced or resized since heads were loaded; load them anew"
        raise UserError(SHARED if changes_tables(model) else replaced)
    if model._forward_hooks or model._forward_pre_hooks:
        raise UserError(
            "hooks on the model as a whole are not called: passes run its decoder and its output layer; put them on model.base_model, its "
            "layers or the output layer, or remove them"
        )


PREPARES, OURS = "prepare_inputs_for_generation", ("transformers", "peft", "accelerate")


def prepares_itself(model: PreTrainedModel) -> bool:
    """True if code of the user's own prepares what each pass of transformers' loop reads, which passes here do not ask."""
    own = vars(model).get(PREPARES)
    code = type(getattr(own, "__self__", own)) if own is not None else next(kind for kind in type(model).__mro__ if PREPARES in vars(kind))
    return code.__module__.partition(".")[0] not in OURS


def base_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its output layer; of one that is its own base, as Llama-4, the decoder."""
    return model.base_model if model.base_model is not model else decoder_of(model)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that holds the list of decoder layers."""
    layers = decoder_layers(model, model.config.get_text_config().num_hidden_layers)
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


def decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """Find the list of decoder layers of the language model, not of an image tower of as many. Raises UserError if it has none."""
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of its {count} decoder layers; such a model can't be tapped")
    return lists[0]


KINDS_OF_LAYER = ("full_attention", "sliding_attention")
ALIBI = ("bloom", "mpt")
"""Types of models that add the distance of positions to a mask of their own."""
REASONS = {
    "recurrent": "their state has read every drafted token, so that it cannot branch along a tree",
    "conv": "their window holds the last tokens read, so that it cannot branch along a tree",
    "chunked_attention": "they attend within chunks of the text, which the masks of a tree do not follow",
}
"""Why trees cannot be verified by layers of a kind; any other kind chooses its keys in a way that masks do not govern."""


def attention_windows(config: dict[str, Any], model: PreTrainedModel) -> dict[str, int | None]:
    """Map each kind of attention layer to its window size (None: unlimited). Raises UserError for layers of an unknown kind."""
    if config.get("model_type") in ALIBI or model.config._attn_implementation == "flex_attention" and model.device.type == "cpu":
        raise UserError(follows_no_mask(model))  # torch 2.13's flex kernel for CPUs overwrites memory under a tree's mask
    if config.get("cross_attention_layers"):
        raise UserError(f"{type(model).__name__} has layers of cross-attention to images, which keep no keys of a text")
    # Without layer_types all layers share one window (Mistral, Mixtral, Phi-3, StarCoder2); GPT-Neo has attention_layers instead.
    alike = "sliding_attention" if config.get("sliding_window") else "full_attention"
    kinds = sorted(set(config.get("layer_types") or config.get("attention_layers") or [alike]))
    unknown = [kind for kind in kinds if kind not in (*KINDS_OF_LAYER, KIND)]
    if unknown or (model._is_stateful and KIND not in kinds):
        kind = (unknown or ["recurrent"])[0]
        reason = REASONS.get(kind, "they choose what they attend to in a way that the masks of a tree do not govern")
        raise UserError(f"{type(model).__name__} has layers of kind {kind!r}: {reason}")
    return {kind: config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds if kind != KIND}


def follows_no_mask(model: PreTrainedModel) -> str:
    """Return what is wrong with a model that reads no trees."""
    return f"{type(model).__name__} does not follow a 4-D attention mask and explicit positions, so it can't read trees"
