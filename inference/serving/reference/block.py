"""Parallel block heads: DFlash (2602.06036), DSpark (2607.05147) and Domino (2605.29707), in the engines', speculators' and transformers'
layouts.

Element i of a block is at the position i after the root, which is element 0; the others are mask tokens. All attend to one another and
to keys and values of the context, ``hidden_norm(fc(taps))``, at the positions read. With ``anchored`` element i drafts depth i, otherwise
element i + 1. ``target_layer_ids`` are layers from 0, whose output is the stream after one layer more.

Shape suffixes: T positions, N elements, D width, V vocabulary, G size of the GRU's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.inference.serving.reference.files import DamagedError, Files
from headstart.inference.serving.reference.layer import (
    KeysValues,
    attend,
    finish,
    join,
    keys_values,
    layer_shapes,
    linear,
    norm,
    queries,
    read_shape,
    under,
)  # fmt: skip
from headstart.inference.serving.reference.reading import Drafting, NextToken, Reading, load, vocabulary_shapes, whole_number
from headstart.inference.serving.reference.target import Target, Text
from headstart.support.errors import UserError

RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""transformers' names."""
UNUSED = ("confidence_head.",)
"""Tensors that do not change the drafts of a chain of fixed length."""
IDS = "eagle_aux_hidden_state_layer_ids"


class BlockDrafting(Drafting):
    """One pass over a block; ``reading.options``: elements, mask, anchored, and the kind of the correction of logits."""

    method = "block"

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        super().__init__(reading, target, text)
        assert reading.layer is not None
        self.shape = reading.layer
        self.layers = [under(self.tensors, f"layers.{i}.") for i in range(self.shape.layers)]
        context_TD = norm(self.tensors, "hidden_norm", linear(self.tensors, "fc", text.concatenated(reading.taps)), self.shape.eps)
        positions_T = torch.arange(len(context_TD))
        self.known: list[KeysValues] = [keys_values(layer, context_TD, self.shape, positions_T) for layer in self.layers]

    @classmethod
    def recognises(cls, files: Files) -> bool:
        blocks = "block_size" in files.config and any(key in files.config for key in ("dflash_config", "target_layer_ids", "mask_token_id"))
        return blocks or files.config.get("speculators_model_type") in ("dflash", "dspark")

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        config = _flat(files.config)
        remarks: list[str] = []
        notes: list[str] = []
        window, kinds = config.get("sliding_window") or 0, set(config.get("layer_types") or [])
        sliding = bool(config.get("use_swa")) or "sliding_attention" in kinds
        if sliding and ("speculators_model_type" not in config or len(kinds) > 1 or window < (target.max_positions or 1 << 31)):
            raise UserError(f"{files.folder} holds a block head with sliding windows, which the reference engine does not read")
        causal = bool(config.get("causal")) or (sliding and not config.get("sliding_window_non_causal"))
        shape = read_shape(config)
        shape = replace(shape, windows=(None,) * shape.layers)   # those that remain are as long as the context
        names = {RENAMED.get(name, name): name for name in files.names if not name.startswith(UNUSED)}
        taps, mask = _taps(config, target.num_layers, remarks), config.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < target.vocab:
            raise UserError(f"config.json states mask_token_id {mask!r}; it is a token of the backbone's vocabulary, below {target.vocab}")
        kind = "markov" if config.get("markov_rank") else "recurrent" if config.get("projector_type") == "domino" else "none"
        anchored = bool(config.get("sample_from_anchor", kind == "markov") or config.get("shift_label"))
        if anchored and "speculators_model_type" in files.config:
            notes.append("sample_from_anchor is true, which vLLM's reader of this format ignores: it drops the first draft")
        options = {"elements": whole_number(config, "block_size"), "mask": mask, "anchored": anchored, "correction": kind, "causal": causal}
        vocab = config.get("vocab_size") or target.vocab
        draft_vocab = config.get("draft_vocab_size") or vocab
        shapes = {
            "fc.weight": (shape.hidden, len(taps) * (config.get("target_hidden_size") or target.dim)),
            "hidden_norm.weight": (shape.hidden,),
            "norm.weight": (shape.hidden,),
            "embed_tokens.weight": (vocab, shape.hidden),
            "lm_head.weight": (draft_vocab, shape.hidden),
            **vocabulary_shapes(draft_vocab, vocab),
            **_correction_shapes(config, kind, shape.hidden, vocab, draft_vocab),
        }
        for i in range(shape.layers):
            own = layer_shapes(shape, shape.hidden, head_norms=True) | {"input_layernorm.weight": (shape.hidden,)}
            shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
        optional = frozenset({"embed_tokens.weight", "lm_head.weight", "t2d"} - ({"lm_head.weight"} if draft_vocab < vocab else set()))
        return Reading(cls.method, load(files, names), shapes, taps, shape, options, optional, tuple(remarks), tuple(notes))

    @property
    def max_depth(self) -> int:
        options = self.reading.options
        return int(options["elements"]) - (0 if options["anchored"] else 1)

    def after(self, position: int) -> NextToken:
        options = self.reading.options
        drafted_ND = self._block(position)[0 if options["anchored"] else 1 :]
        depth, path_G = -1, None

        def next_token(token: int) -> Tensor:
            nonlocal depth, path_G
            depth += 1
            logits = self.shared_logits(drafted_ND[depth])
            if options["correction"] == "markov":
                logits = logits + linear(self.tensors, "markov_head.markov_w2", self.tensors["markov_head.markov_w1.weight"][token])
            elif options["correction"] == "recurrent":
                path_G = self._advance(token, path_G)
                if depth:   # depth 0 is drafted without a correction
                    mixed = F.silu(linear(self.tensors, "embed_proj.0", torch.cat([drafted_ND[depth], path_G])))
                    logits = logits + linear(self.tensors, "embed_proj.2", mixed)
            return self.reading.widened(logits, self.target.vocab)

        return next_token

    def _block(self, position: int) -> Tensor:
        """The normed hidden states ``[N, D]`` of the block after that many tokens."""
        first, N, shape = position - 1, self.reading.options["elements"], self.shape
        root = int(self.text.tokens_T[first])
        block_ND = self.embed(torch.tensor([root] + [self.reading.options["mask"]] * (N - 1)))
        positions_N = torch.arange(first, first + N)
        seen_NS = torch.ones(N, first + N, dtype=torch.bool)
        if self.reading.options["causal"]:
            seen_NS = seen_NS.tril(first)
        for layer, (keys, values) in zip(self.layers, self.known, strict=True):
            x_ND = norm(layer, "input_layernorm", block_ND, shape.eps)
            both = join((keys[:first], values[:first]), keys_values(layer, x_ND, shape, positions_N))
            block_ND = finish(layer, block_ND, attend(queries(layer, x_ND, shape, positions_N), *both, seen_NS), shape.eps)
        return norm(self.tensors, "norm", block_ND, shape.eps)

    def _advance(self, token: int, path_G: Tensor | None) -> Tensor:
        """The GRU's state after a token; its weights hold the reset gate, the update gate and the new state, in that order."""
        weight_hidden = self.tensors["prefix_gru.weight_hh_l0"]
        before_G = weight_hidden.new_zeros(weight_hidden.shape[1]) if path_G is None else path_G
        by_token = F.linear(self.embed(torch.tensor([token]))[0], self.tensors["prefix_gru.weight_ih_l0"]).chunk(3)
        by_path = F.linear(before_G, weight_hidden).chunk(3)
        reset, update = torch.sigmoid(by_token[0] + by_path[0]), torch.sigmoid(by_token[1] + by_path[1])
        return (1 - update) * torch.tanh(by_token[2] + reset * by_path[2]) + update * before_G


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its nested parts at the top level."""
    stated = {name: value for name, value in config.items() if value is not None}
    nested = (config.get(name) or {} for name in ("transformer_layer_config", "dflash_config", "dspark_config"))
    layer, dflash, dspark = nested
    if "speculators_model_type" in config:
        ids = config.get("aux_hidden_state_layer_ids")
        anchored = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
        stated |= {"sample_from_anchor": bool(anchored)} | ({IDS: ids} if ids else {})
    return layer | stated | {name: value for name, value in (dflash | dspark).items() if name not in config}


def _taps(config: Mapping[str, Any], num_layers: int, remarks: list[str]) -> tuple[int, ...]:
    outputs, passed = config.get("target_layer_ids"), config.get(IDS)
    chosen = passed or [layer + 1 for layer in outputs or []]
    if passed and outputs and sorted(passed) != sorted(layer + 1 for layer in outputs):
        remarks.append(
            f"layer ids disagree: {IDS} {passed} counts layers passed, target_layer_ids {outputs} names layers from 0, so it should be "
            f"{[tap - 1 for tap in passed]}; vLLM reads the former, SGLang and transformers the latter"
        )
    if not chosen or any(not isinstance(tap, int) or not 0 <= tap <= num_layers for tap in chosen):
        fault = f"config.json reads the backbone after the layers {chosen}, but it has {num_layers}"
        raise DamagedError(f"{fault}: shifted layer ids, or another backbone")
    return tuple(sorted(set(chosen)))


def _correction_shapes(config: Mapping[str, Any], kind: str, D: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    if kind == "markov":
        rank = whole_number(config, "markov_rank")
        return {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (draft_vocab, rank)}
    if kind == "recurrent":
        G, rank = whole_number(config, "gru_hidden_dim"), whole_number(config, "emb_dim")
        gru: dict[str, tuple[int, ...]] = {"prefix_gru.weight_ih_l0": (3 * G, D), "prefix_gru.weight_hh_l0": (3 * G, G)}
        return gru | {"embed_proj.0.weight": (rank, D + G), "embed_proj.2.weight": (vocab, rank)}
    return {}
