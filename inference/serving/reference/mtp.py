"""Multi-token prediction modules (DeepSeek-V3, 2412.19437) with dense layers, under the names of three families.

``norm(layer(eh_proj([enorm(embedding); hnorm(hidden)])))`` drafts a token and is the next depth's hidden state. One module drafts all
depths as pairs do; with several, module k runs over all positions, with the outputs of module k - 1 and the tokens k + 1 later.

Shape suffixes: T rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.inference.serving.reference.files import Files
from headstart.inference.serving.reference.gated import gated_layer, zero_centred_norm
from headstart.inference.serving.reference.layer import KeysValues, LayerShape, causal_layer, layer_shapes, linear, norm, read_shape, under
from headstart.inference.serving.reference.pairs import PairDrafting
from headstart.inference.serving.reference.reading import NextToken, Reading, load
from headstart.inference.serving.reference.target import Target, Text
from headstart.support.errors import UserError

SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the backbone's embedding and output layer."""


@dataclass(frozen=True)
class Family:
    """Names and arithmetic of one family."""

    name: str
    layer: str
    """Prefix of module i's decoder layer, ``{i}``; ``{n}`` is i plus the number of the backbone's layers."""
    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    hidden_first: bool = False
    """The projection reads the hidden state, then the embedding."""
    zero_first: bool = True
    """The embedding at position 0 is zero."""
    gated: bool = False
    """Gated attention with zero-centred norms, rotated in part (Qwen3-Next, Qwen3.5)."""

    def names(self, i: int, num_layers: int, present: frozenset[str]) -> dict[str, str]:
        """Map the names of module i used here to those in the file."""
        layer = self.layer.format(i=i, n=num_layers + i)
        own = {part: getattr(self, part).format(i=i, n=num_layers + i) + ".weight" for part in ("enorm", "hnorm", "eh_proj", "norm")}
        names = {f"{i}.{part}.weight": name for part, name in own.items()}
        inside = [name for name in present if name.startswith(layer) and name not in own.values() and not name.endswith(SHARED)]
        return names | {f"{i}.layer.{name.removeprefix(layer)}": name for name in inside}


FAMILIES = (
    Family(
        "deepseek", "model.layers.{n}.", "model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.eh_proj",
        "model.layers.{n}.shared_head.norm",
    ),
    Family(
        "mimo", "model.mtp_layers.{i}.", "model.mtp_layers.{i}.token_layernorm", "model.mtp_layers.{i}.hidden_layernorm",
        "model.mtp_layers.{i}.input_proj", "model.mtp_layers.{i}.final_layernorm", hidden_first=True,
    ),
    Family(
        "qwen3_5", "mtp.layers.{i}.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm",
        zero_first=False, gated=True,
    ),
)  # fmt: skip


def _family(files: Files) -> Family | None:
    ends = {"deepseek": ".eh_proj.weight", "mimo": "model.mtp_layers.0.input_proj.weight", "qwen3_5": "mtp.fc.weight"}
    return next((one for one in FAMILIES if any(name.endswith(ends[one.name]) for name in files.names)), None)


class MtpDrafting(PairDrafting):
    """``reading.options``: the family and the number of modules."""

    method = "mtp"

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        self.family: Family = reading.options["family"]
        self.modules = [under(reading.tensors, f"{i}.") for i in range(reading.options["modules"])]
        if len(self.modules) == 1:
            super().__init__(reading, target, text)
            return
        assert reading.layer is not None
        super(PairDrafting, self).__init__(reading, target, text)
        self.shape = reading.layer

    @classmethod
    def recognises(cls, files: Files) -> bool:
        return _family(files) is not None

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        family = _family(files)
        assert family is not None
        config = files.config.get("text_config") or files.config
        shape = replace(read_shape(config, 1), bias=family.name == "mimo")
        names: dict[str, str] = {}
        modules = 0
        while (of_module := family.names(modules, target.num_layers, files.names))[f"{modules}.eh_proj.weight"] in files.names:
            names |= of_module
            modules += 1
            if "{" not in family.eh_proj:
                break
        if not modules:
            raise UserError(f"{files.folder} holds MTP modules, but none that follows the {target.num_layers} layers of this backbone")
        names = {ours: name for ours, name in names.items() if name in files.names}
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(modules):
            shapes |= {f"{i}.{name}": size for name, size in _module_shapes(shape, family).items()}
        return Reading(cls.method, load(files, names), shapes, (), shape, {"family": family, "modules": modules})

    @property
    def max_depth(self) -> int | None:
        return None if len(self.modules) == 1 else len(self.modules)

    # One module, applied to its own output.

    def states(self) -> Tensor:
        return self.text.hidden_TD

    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        mixed_TD = self._mix(self.modules[0], embedded_TD, state_TD, zero=first == 0)
        return self._norm(self.modules[0], "layer.input_layernorm", mixed_TD), mixed_TD

    def decoder_layers(self) -> list[dict[str, Tensor]]:
        return [under(self.modules[0], "layer.")]

    def layer(self, number: int, streams: tuple[Tensor, Tensor], past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        return self._layer(self.modules[0], streams, past)

    def next_state(self, output_TD: Tensor) -> Tensor:
        return self._norm(self.modules[0], "norm", output_TD)

    def logits(self, output_D: Tensor) -> Tensor:
        return self.target.logits(self._norm(self.modules[0], "norm", output_D))

    # Several modules.

    def after(self, position: int) -> NextToken:
        if len(self.modules) == 1:
            return super().after(position)
        hidden_TD, depth = self.text.hidden_TD[: position - 1], -1
        tokens = self.text.tokens_T[: position - 1].tolist()

        def next_token(token: int) -> Tensor:
            nonlocal hidden_TD, depth
            depth += 1
            tokens.append(token)
            hidden_TD = self._module(depth, torch.tensor(tokens[depth + 1 :]), hidden_TD)
            return self.target.logits(hidden_TD[-1])

        return next_token

    def _module(self, k: int, tokens_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """The outputs of module k at all rows, normed."""
        module = self.modules[k]
        mixed_TD = self._mix(module, self.embed(tokens_T), hidden_TD, zero=k == 0)
        x_TD = self._norm(module, "layer.input_layernorm", mixed_TD)
        return self._norm(module, "norm", self._layer(module, (x_TD, mixed_TD), None)[0])

    # Both.

    def _mix(self, module: Mapping[str, Tensor], embedded_TD: Tensor, hidden_TD: Tensor, zero: bool) -> Tensor:
        if zero and self.family.zero_first:
            embedded_TD = torch.cat([torch.zeros_like(embedded_TD[:1]), embedded_TD[1:]])
        both = [self._norm(module, "enorm", embedded_TD), self._norm(module, "hnorm", hidden_TD)]
        return linear(module, "eh_proj", torch.cat(both[::-1] if self.family.hidden_first else both, -1))

    def _layer(self, module: Mapping[str, Tensor], streams: tuple[Tensor, Tensor], past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        run = gated_layer if self.family.gated else causal_layer
        return run(under(module, "layer."), streams, self.shape, None, past)

    def _norm(self, module: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        return (zero_centred_norm if self.family.gated else norm)(module, name, x, self.shape.eps)


def _module_shapes(shape: LayerShape, family: Family) -> dict[str, tuple[int, ...]]:
    D, C = shape.hidden, shape.head_dim
    layer = layer_shapes(shape, D, head_norms=family.gated) | {"input_layernorm.weight": (D,)}
    if family.gated:
        layer["self_attn.q_proj.weight"] = (2 * shape.heads * C, D)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (D,) for name in ("enorm", "hnorm", "norm")}
    return shapes | {"eh_proj.weight": (D, 2 * D)} | {f"layer.{name}": size for name, size in layer.items()}
