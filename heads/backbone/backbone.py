"""Wrap an unmodified causal language model of `transformers` in the interface that drafters and the decoder use.

All handling of model classes is here. Shape suffixes: B batch, T positions, S slots (keys), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from headstart.heads.backbone import model_config, probes
from headstart.heads.backbone.adapter import base_parameters, load_adapter, new_adapter, remove, unwrap
from headstart.heads.backbone.features import Features, Images, placeholders
from headstart.heads.backbone.fingerprint import Match, fingerprint, match
from headstart.heads.backbone.gguf_file import GgufFile, find_gguf, quick_reader
from headstart.heads.backbone.hooks import Evaluation, find_dependence, recomputed_layers, structure, tapped
from headstart.heads.backbone.model_config import cache_argument, say_untested
from headstart.heads.backbone.tree_attention import EXACT_FROM, additive_mask, repeated_tokens, tree_attention
from headstart.support.devices import find_accelerator
from headstart.support.errors import UserError, waiting
from headstart.support.hub import EMBEDDED, resolve

if TYPE_CHECKING:
    from peft import PeftModel


class Backbone:
    """A frozen causal language model with `embed`, `readout` and `read`, which leave it as it was. ``trainable``: its adapter is."""

    whole = True
    """The layers are in memory."""
    dependence: str | None = None
    """Why a token's result depends on the others of a pass, so that drafts rest and rows are decoded one at a time; None if it does not."""

    def __init__(self, model: PreTrainedModel | PeftModel, trainable: bool = False, trees: bool = True) -> None:
        """Raises UserError for a model that verifies neither trees nor chains; without ``trees``, `refusal` then says why."""
        say_untested()
        model, self.adapter = unwrap(getattr(model, "_orig_mod", model))  # of torch.compile, whose generate is that of the model within
        self.trainable: dict[str, nn.Parameter] = {}
        """The adapter's weights by name if they are trained; empty for a frozen backbone."""
        self.recomputing = False
        """Recompute each layer's activations in the backward (gradient checkpointing), if trainable."""
        self._heads_without_adapter: str | None = None
        self.gguf: GgufFile | None = None
        """The GGUF file that the weights were read from, if any."""
        self.model, self.evaluation, self.config = model, Evaluation(model), model.config.get_text_config()
        if model.config.is_encoder_decoder:
            raise UserError(f"{type(model).__name__} is an encoder-decoder; a backbone is a causal (decoder-only) language model")
        self.base: nn.Module = probes.base_of(model)
        self._cache = cache_argument(self.base)
        self.embed: Any = model.get_input_embeddings()
        self.unembed: Any = model.get_output_embeddings()
        self.dim: int = probes.width_of(model)
        self.vocab: int = self.unembed.weight.shape[0]
        self.num_layers: int = self.config.num_hidden_layers
        self.max_positions: int | None = (stated := self.config.to_dict()).get("max_position_embeddings") or stated.get("n_positions")
        self.placeholders = placeholders(model.config)
        self.layers = probes.decoder_layers(model, self.num_layers)
        with self.evaluation():
            self._probe()
        self._loaded, self.changes = (self.windows, self.no_trees, self.rope_limit), 0
        """How often what the model computes by has changed since heads were loaded."""
        if trees and self.refusal is not None:
            raise UserError(self.refusal)
        if trainable:
            self._unfreeze()

    def _probe(self) -> None:
        """Find out how the model makes its logits, and whether it follows masks."""
        probes.require_weights(self.model)
        self.rope_limit, self.rope_switches_once = model_config.rope_switch(self.config)
        """Sequence length beyond which the rotary frequencies change (None: never), and whether they change only once."""
        self.windows, self.recurrent, self.no_trees = probes.layer_kinds(self.model, self.layers)
        """Windows of attention layers by kind; layers with a recurrent state (None: there are none); why no trees are verified, if so."""
        self.postprocess = probes.find_postprocessing(self.model)
        tokens_1N = probes.trial_tokens(self.model)[:, : self.max_positions].to(self.device) % self.vocab
        self.dependence = find_dependence(self.model)
        if self.no_trees is None:
            self.no_trees = probes.mask_refusal(self.model, self.read, tokens_1N, self.windows, self.recurrent, self.dependence is None)
        self.refusal = probes.chain_refusal(self.model, self.read, tokens_1N, self.no_trees)
        """Why chains cannot be verified either; None if they can."""
        self.structure = structure(self.model)

    def require_same(self, model: PreTrainedModel) -> None:
        """Raise UserError unless ``model``, whose ``generate`` was called, is this one and, where it has changed, reads what it read."""
        if model is not self.model:
            raise UserError(f"these heads are on another model object ({self.name}); load them with backbone=this model")
        probes.require_same_parts(model, (self.base, self.embed, self.unembed), self.vocab)
        if structure(model) == self.structure:
            return
        self.changes += 1
        with self.evaluation():
            self._probe()
        if self.refusal is not None or self._loaded != (self.windows, self.no_trees, self.rope_limit):
            self.structure, reason = [], self.refusal or self.no_trees or "its windows or rotary frequencies are others"
            raise UserError(f"the model was changed since heads were loaded: {reason}; undo it, or load heads anew")

    def _unfreeze(self) -> None:
        if self.adapter is None:
            raise UserError(f"{type(self.model).__name__} has no adapter to train; give a PeftModel, or set backbone.lora in the recipe")
        self.model.requires_grad_(False)
        self.trainable = self.adapter.parameters
        for weight in self.trainable.values():
            weight.requires_grad_(True)

    def add_lora(
        self, rank: int, alpha: float, dropout: float, target_modules: str | Sequence[str] = "all-linear", use_dora: bool = False
    ) -> None:
        """Attach a new, trainable LoRA or DoRA adapter to the model."""
        assert self.adapter is None
        self.adapter = new_adapter(self.model, rank, alpha, dropout, target_modules, use_dora)
        self._unfreeze()

    def attach(self, path: str, weights: bool = True) -> None:
        """Attach a saved adapter, frozen: a folder or hub id; without ``weights`` only its shapes. Raises UserError if it does not fit."""
        assert self.adapter is None
        self.adapter = load_adapter(self.model, path, weights)

    def detach(self) -> None:
        """Take off the adapter that `attach` put on."""
        if self.adapter is not None and self.adapter.loaded_here:
            remove(self.adapter.peft)
            self.adapter = None

    def require_adapter(self, checkpoint: str, folder: Path, digest: str | None, allow_other: bool = False) -> None:
        """Attach the adapter that heads were trained with, unless it is attached already. ``digest`` None: trained without one.

        Raises UserError if the backbone has another adapter (unless ``allow_other``), or if this one is damaged or missing.
        """
        if digest is None:
            self._heads_without_adapter = checkpoint
        elif self.adapter is None:
            if (others := self._heads_without_adapter) is not None:
                raise UserError(f"{checkpoint} brings an adapter, {others} on the same backbone has none: load one of them")
            self.attach(str(folder))
            if self.adapter_digest != digest:
                raise UserError(f"the adapter in {folder} is changed (its hash is not the one in headstart.json); fetch the heads again")
        if (present := self.adapter_digest) != digest and not allow_other:
            trained = "without an adapter on the backbone" if digest is None else f"with adapter {digest} on the backbone"
            raise UserError(f"{checkpoint} was trained {trained}; this one carries {present or 'none'}: load the backbone anew for them")

    @property
    def adapter_digest(self) -> str | None:
        """Hash of the adapter's weights and scaling; None without an adapter."""
        return None if self.adapter is None else self.adapter.digest()

    def without_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as it does without its adapter, if any."""
        return nullcontext() if self.adapter is None else self.adapter.disabled()

    @property
    def weights(self) -> list[Tensor]:
        """The weights and buffers that are in memory."""
        return [*self.model.parameters(), *self.model.buffers()]

    @property
    def name(self) -> str:
        """Folder, GGUF file or hub id the model was loaded from; ``embedded`` for the one that ships with the package."""
        name = str(self.model.config.name_or_path)
        return EMBEDDED if name == resolve(EMBEDDED) else name

    @property
    def precision(self) -> str:
        """Compute dtype, followed by the quantization scheme if the weights are quantized, or were in a GGUF file."""
        scheme = model_config.quantization(self.model) if self.gguf is None else f"gguf {self.gguf.type}"
        return f"{str(self.dtype).removeprefix('torch.')} {scheme}".strip()

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def exact(self) -> bool:
        """True if a token of a pass on a CPU gets the same bits among any number of tokens."""
        return self.device.type == "cpu" and (self.dtype != torch.float32 or self.dim >= EXACT_FROM)

    def readout(self, hidden: Tensor) -> Tensor:
        """Map final hidden states ``[..., D]`` to logits ``[..., V]``, soft-capped or scaled as in the model's own forward."""
        return self.postprocess(self.unembed(hidden))

    def read(
        self,
        tokens_BT: Tensor,
        cache: Any = None,
        positions_BT: Tensor | None = None,
        attention_mask: dict[str, Tensor] | None = None,
        taps: tuple[int, ...] = (),
        images: Images | None = None,
    ) -> Features:
        """Run a forward pass over the tokens, after those in ``cache`` if given, and return their features.

        Features carry gradients if the backbone is trainable and grad is enabled. ``attention_mask`` holds ``[B, T, S]`` for each key
        of `windows`, True where a position may attend; None: causal. Right padding needs no mask, since no position before it attends
        to it. Recurrent layers ignore masks: they follow the `Branch` of `Recurrent.along`, and their cache must be made for the
        model's configuration. ``images`` of one row's prompt, with which it begins; they have its positions.
        """
        masked = attention_mask is not None or (cache is not None and not cache.layers)
        if self.recurrent is not None and not self.recurrent.reading and masked:
            raise UserError(
                f"{type(self.model).__name__} has recurrent layers, which follow no mask and need a cache made for its configuration: "
                "no packing (data.packing=false), no beams (num_beams=1)"
            )
        masks = {kind: additive_mask(allowed, self.dtype) for kind, allowed in (attention_mask or {}).items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()), None)
        differentiable = bool(self.trainable) and torch.is_grad_enabled()
        mode = partial(self._mode, differentiable, attention_mask is not None)
        again = recomputed_layers(self.layers, mode) if self.recomputing and differentiable and cache is None else nullcontext()
        with torch.set_grad_enabled(differentiable), mode(), again, tapped(self.layers, taps, (*tokens_BT.shape, self.dim)) as kept:
            given = {"position_ids": positions_BT} if images is None else images.of_text(tokens_BT.shape[1])
            stated = self._cache == model_config.STATE and cache is not None
            given |= {self._cache: vars(cache).get(self._cache) if stated else cache, "use_cache": cache is not None}
            out = self.base(input_ids=tokens_BT, attention_mask=mask, **given)
            if stated:
                cache.state = out.state
        return Features(tokens_BT, out.last_hidden_state, {tap: kept[tap] for tap in taps} or None)

    @contextmanager
    def _mode(self, differentiable: bool, masked: bool) -> Iterator[None]:
        """The model's settings during a forward pass, and when its layers are computed again in the backward."""
        dropout = self.adapter.training() if differentiable and self.adapter is not None else nullcontext()
        repeated = repeated_tokens() if masked and self.exact and not differentiable else nullcontext()
        itself = differentiable and self.adapter is None  # a draft model in training keeps its mode
        with nullcontext() if itself else self.evaluation(), dropout, tree_attention(self.exact, masked), repeated:
            yield

    def layer(self, index: int, names: Iterable[str]) -> dict[str, Tensor] | None:
        """Return weights of a layer by their names in it; None if they cannot be had."""
        parameters = base_parameters(self.layers[index], self.adapter)
        return {name: parameters[name] for name in names}

    def fingerprint(self) -> list[float]:
        """Return 32 values each of the embedding and the output layer, in the current dtype (fingerprint.py)."""
        return fingerprint((self.embed.weight, self.unembed.weight))

    def match(self, contract: Mapping[str, Any]) -> Match:
        """Compare the weights with those that a checkpoint's contract states."""
        return match((self.embed.weight, self.unembed.weight), None if self.gguf is None else self.gguf.stored, contract)

    def contract(self) -> dict[str, Any]:
        """Return the properties that a drafter depends on; its checkpoint stores them, and loading compares them."""
        sizes = {"hidden_size": self.dim, "num_hidden_layers": self.num_layers, "vocab_size": self.vocab}
        return {"model_type": self.config.model_type, **sizes, "weights": self.fingerprint()}


def load_backbone(
    path: str,
    *,
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"] = "auto",
    trust_remote_code: bool = False,
    attention: model_config.Attention = "auto",
    device: str | torch.device | None = None,
    place: Callable[[PreTrainedModel, torch.device], PreTrainedModel] | None = None,
) -> Backbone:
    """Load a frozen backbone from a folder or hub id with safetensors, a GGUF file (see `find_gguf`) or ``embedded``.

    ``trust_remote_code`` allows code from the model's repository. ``dtype``: see `loaded_dtype`. ``attention``: see `Attention`. ``place``
    moves the model from the CPU to the device; by default it is moved whole. Raises UserError; for trees see `refusal`.
    """
    on = torch.device(device) if device is not None else find_accelerator() or torch.device("cpu")
    config, gguf = model_config.load_config(path, trust_remote_code=trust_remote_code), find_gguf(path)
    source = {"pretrained_model_name_or_path": resolve(path)} if gguf is None else {**gguf.arguments, "config": config}
    kind = model_config.loaded_dtype(dtype, config, on)
    reading = nullcontext() if gguf is None else model_config.from_gguf(gguf, kind, config)
    with model_config.loading("backbone", path), waiting(f"loading {path}"), reading:
        model, report = model_config.auto_model(config).from_pretrained(
            **source, dtype=kind, quantization_config=model_config.quantizing(dtype, gguf is not None), trust_remote_code=trust_remote_code,
            attn_implementation=model_config.attention_kernel(attention), use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    model_config.require_whole(path, report)
    if gguf is not None:
        gguf.describe_in(model, path)
    backbone = Backbone((model.to(on) if place is None else place(model, on)).requires_grad_(False), trees=False)
    backbone.gguf = gguf
    return backbone


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a backbone's tokenizer. Raises UserError if there is none."""
    with model_config.loading("tokenizer", path), waiting(f"loading the tokenizer of {path}"):
        if (gguf := find_gguf(path)) is not None:
            from headstart.heads.backbone.gguf_header import gguf_tokenizer  # here, since few backbones are such files

            with quick_reader():
                return gguf_tokenizer(gguf.path, gguf.architecture) or AutoTokenizer.from_pretrained(**gguf.arguments)
        tokenizer = AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of no files for some models
        raise UserError(f"no tokenizer in {path!r}: {model_config.NO_TOKENIZER}")
    return tokenizer
