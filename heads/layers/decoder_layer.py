"""Llama-like decoder layers for heads, over the residual stream or over pairs (embedding, state), and their rotary embedding.

Shape suffixes: B batch, T positions, M blocks, N nodes or elements of a block, S keys, D width, H heads, C head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from headstart.heads.backbone.tree_attention import attend
from headstart.heads.layers.causal_attention import Blocks, attend_past, join

OTHER_STREAM_SCALE = 0.1
"""Scale of the random columns for the embedding in a layer initialised from the backbone's, so that they perturb it little."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, ``[B, 1, T, C]``; as a table ``[positions, C]``. Sines are negated in the first half of C, as `rotate` takes them."""


@dataclass(frozen=True)
class Frequencies:
    """Rotary frequencies, to compute the rotation of any position where a table would grow with the sequence."""

    per_C: Tensor
    """Radians per position, negated in the first half."""
    scale_1: Tensor
    """Factor applied to cosines and sines."""


class Rotary(nn.Module):
    """Rotary embedding of whole heads: positions -> cosines and sines."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        whole = LlamaConfig.from_dict(config.to_dict())  # transformers' scaled kinds would rotate the share that the backbone rotates
        whole.rope_parameters = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
        self.compute = [LlamaRotaryEmbedding(whole)]  # not a submodule: .to(bfloat16) would round its frequencies

    def table(self, positions: int, device: torch.device) -> Rotation:
        """Return cosines and sines ``[positions, C]`` of positions 0 to ``positions - 1``."""
        positions_1T = torch.arange(positions)[None]
        cos, sin = (part[0] for part in self.compute[0](positions_1T.float(), positions_1T))
        return cos.to(device), (sin * _signs(sin.shape[-1])).to(device)

    def frequencies(self, device: torch.device) -> Frequencies:
        """Return the frequencies for sequences within the original context length."""
        per_C = self.compute[0].original_inv_freq.float().repeat(2)
        per_C = per_C * _signs(len(per_C))  # so that the sines are negated; cosines stay
        return Frequencies(per_C.to(device), torch.full((1,), float(self.compute[0].attention_scaling), device=device))

    def forward(self, first: int, count: int, device: torch.device) -> Rotation:
        """Return the rotation of ``count`` positions from ``first``: ``[1, 1, count, C]``."""
        cos, sin = self.table(first + count, device)
        return cos[None, None, first:], sin[None, None, first:]


def rotary_at(rotation: Rotation | Frequencies, positions_BT: Tensor) -> Rotation:
    """Return the rotation of each position, ``[B, 1, T, C]``, from a table or from frequencies."""
    if isinstance(rotation, Frequencies):
        angles_B1TC = positions_BT[:, None, :, None].float() * rotation.per_C
        return angles_B1TC.cos() * rotation.scale_1, angles_B1TC.sin() * rotation.scale_1
    return rotation[0][positions_BT][:, None], rotation[1][positions_BT][:, None]


class Norm(nn.RMSNorm):
    """RMSNorm computed in the dtype of its weight, even under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _signs(width: int) -> Tensor:
    return torch.ones(width).index_fill_(0, torch.arange(width // 2), -1.0)


def rotate(x_BHTC: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first dimensions of each head, as many as the rotation has."""
    (cos, sin), rest = rotation, None
    if cos.shape[-1] < x_BHTC.shape[-1]:
        x_BHTC, rest = x_BHTC.split([cos.shape[-1], x_BHTC.shape[-1] - cos.shape[-1]], -1)
    rotated = (x_BHTC * cos + x_BHTC.roll(x_BHTC.shape[-1] // 2, -1) * sin).to(x_BHTC.dtype)
    return rotated if rest is None else torch.cat([rotated, rest], -1)


class Attention(nn.Module):
    """Grouped-query attention over inputs of any width; with ``attention_bias``, projections to queries, keys and values have a bias."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        C, D, bias = config.head_dim, config.hidden_size, config.attention_bias
        self.num_heads, self.num_kv, self.head_dim = config.num_attention_heads, config.num_key_value_heads, C
        self.q_proj = nn.Linear(width, self.num_heads * C, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv * C, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv * C, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * C, D, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def split_queries(self, x: Tensor) -> Tensor:
        """Return the queries before norm and rotation, ``[B, H, T, C]``."""
        return self.split(self.q_proj(x), self.num_heads)

    def norm_queries(self, query: Tensor) -> Tensor:
        return query

    def norm_keys(self, keys: Tensor) -> Tensor:
        return keys

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        query = self.split_queries(x)
        return rotate(self.norm_queries(query), rotation).to(query.dtype)  # under autocast a norm's dtype is wider

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        keys, values = self.split(self.k_proj(x), self.num_kv), self.split(self.v_proj(x), self.num_kv)
        return rotate(self.norm_keys(keys), rotation).to(keys.dtype), values

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the same positions, as `queries` and `keys_values` do; both are rotated at once."""
        query, keys, values = self.split_queries(x), self.split(self.k_proj(x), self.num_kv), self.split(self.v_proj(x), self.num_kv)
        both = rotate(torch.cat([self.norm_queries(query), self.norm_keys(keys)], 1), rotation).to(query.dtype)
        query, keys = both.split([self.num_heads, self.num_kv], 1)
        return query, keys, values

    def output(self, mixed_BHTC: Tensor, x: Tensor) -> Tensor:
        """Project the mixed values; ``x`` is the attention's input, for kinds that gate them by it."""
        return self.o_proj(mixed_BHTC.transpose(1, 2).flatten(2))


class NormedAttention(Attention):
    """Attention whose queries and keys are normed per head before they are rotated, as in Qwen3."""

    norm: type[Norm] = Norm

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__(config, width)
        self.q_norm, self.k_norm = (self.norm(config.head_dim, eps=config.rms_norm_eps) for _ in range(2))

    def norm_queries(self, query: Tensor) -> Tensor:
        normed: Tensor = self.q_norm(query)
        return normed

    def norm_keys(self, keys: Tensor) -> Tensor:
        normed: Tensor = self.k_norm(keys)
        return normed


class DecoderLayer(nn.Module):
    """A Llama layer: attention over `inputs`, then the feed-forward part, each added to the residual stream."""

    state_norm = "input_layernorm"
    """Name of the norm of the residual stream before attention."""
    attention: type[Attention] = Attention

    def __init__(self, config: LlamaConfig, width: int | None = None) -> None:
        """``width`` is that of the attention's input; None: that of the residual stream."""
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(D, eps=eps)
        self.post_attention_layernorm = Norm(D, eps=eps)
        self.self_attn = self.attention(config, width or D)
        self.mlp = LlamaMLP(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.self_attn.o_proj.weight.dtype

    def inputs(self, *streams: Tensor) -> Tensor:
        """Return the attention's input; the last of ``streams`` is the residual stream."""
        (state_BTD,) = streams
        return self.input_layernorm(state_BTD)

    @torch.no_grad()
    def start_as(self, layer: Mapping[str, Tensor]) -> bool:
        """Copy the weights of a decoder layer, by Llama's names; if a shape differs, copy nothing and return False.

        Columns for streams other than the residual one keep their random values, scaled by `OTHER_STREAM_SCALE`.
        """
        weights = {name: self.get_parameter(name.replace("input_layernorm", self.state_norm)) for name in layer}
        parts = {name: weight[..., -layer[name].shape[-1] :] for name, weight in weights.items()}
        if any(part.shape != layer[name].shape for name, part in parts.items()):
            return False
        for name, part in parts.items():
            part.copy_(layer[name])
            weights[name][..., : -part.shape[-1]] *= OTHER_STREAM_SCALE
        return True

    @torch.no_grad()
    def scale_outputs(self, factor: float) -> None:
        """Scale what the layer adds to the residual stream, for a stream of another size than it was trained on."""
        for projection in (self.self_attn.o_proj, self.mlp.down_proj):
            projection.weight *= factor

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return self.self_attn.keys_values(x, rotation)

    def finish(self, state: Tensor, mixed_BHTC: Tensor, x: Tensor) -> Tensor:
        """Return the residual stream after the attention output and the feed-forward part are added."""
        state = state + self.self_attn.output(mixed_BHTC, x)
        return state + self.mlp(self.post_attention_layernorm(state))

    def attend(self, query: Tensor, state: Tensor, x: Tensor, past: tuple[Tensor, Tensor], mask_BNS: Tensor) -> Tensor:
        """Return the output at N positions that attend to the keys and values ``past``; the mask is boolean or added to the scores.

        ``x``: the attention's input, of which the queries are.
        """
        return self.finish(state, attend(query, *past, mask_BNS[:, None]), x)

    def forward_train(
        self, streams: Sequence[Tensor], passes: Sequence[tuple[Tensor, Tensor]], rotary: Rotary, blocks: Blocks
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute pass ``len(passes)`` at the positions of ``blocks``, for training; returns the output and this pass's keys and values.

        Pass 0 is causal attention at all positions. In pass k, position t is rotated as t + k and attends to pass 0 up to t and to passes
        1 to k at t. A window of ``blocks`` counts positions as rotated, and has to reach back to pass 0: it is larger than k.
        """
        k, state = len(passes), streams[-1]
        T, places_BT = state.shape[1], blocks.places_BT
        if places_BT is None:
            rotation = rotary(k, T, state.device)
        else:
            rotation = rotary_at(rotary.table(passes[0][0].shape[2] + k, state.device), places_BT + k)
        x = self.inputs(*streams)
        query, keys_values = self.self_attn.queries(x, rotation), self.keys_values(x, rotation)
        first, *later = (*passes, keys_values)
        mixed, logsum = attend_past(query, *first, blocks.at_pass(k))
        later = [(keys[:, :, :T], values[:, :, :T]) for keys, values in later]
        return self.finish(state, join(query, mixed, logsum, later) if later else mixed, x), keys_values


class NormedLayer(DecoderLayer):
    """A layer with normed queries and keys, as in Qwen3."""

    attention = NormedAttention


class NoInputNormLayer(DecoderLayer):
    """A layer without a norm before attention, as EAGLE's (2401.15077): attention reads the residual stream as it is."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.input_layernorm = nn.Identity()  # type: ignore[assignment]

    @torch.no_grad()
    def start_as(self, layer: Mapping[str, Tensor]) -> bool:
        """Copy the weights of a decoder layer; that of its input norm is multiplied into the projections that read the normed stream."""
        scale_D = layer["input_layernorm.weight"]
        reading = {f"self_attn.{name}_proj.weight" for name in "qkv"}
        weights = {name: weight * scale_D if name in reading else weight for name, weight in layer.items()}
        return super().start_as({name: weight for name, weight in weights.items() if name != "input_layernorm.weight"})


class PairLayer(DecoderLayer):
    """A layer whose attention input is norm(embedding) concatenated with norm(state) (2503.01840).

    With ``norm_before_residual`` the residual stream is the normed state as well, and `inputs` takes it as `residual` returns it.
    """

    state_norm = "hidden_norm"

    def __init__(self, config: LlamaConfig, norm_before_residual: bool = False) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def residual(self, state_BTD: Tensor) -> Tensor:
        """Return the residual stream that a state enters as."""
        return self.hidden_norm(state_BTD) if self.norm_before_residual else state_BTD

    def inputs(self, *streams: Tensor) -> Tensor:
        """Concatenate the normed embedding and state: ``[B, T, 2D]``."""
        embedded_BTD, state_BTD = streams
        normed_BTD = state_BTD if self.norm_before_residual else self.hidden_norm(state_BTD)
        return torch.cat([self.input_layernorm(embedded_BTD.to(state_BTD.dtype)), normed_BTD], -1)


class NormedPairLayer(PairLayer):
    """A layer over pairs with normed queries and keys, as in Qwen3."""

    attention = NormedAttention
