"""Parts of block heads: their layers, corrections of the logits by the parent token, and convolutions within a block.

DSpark (2607.05147) adds a table of low rank. DFlash2 scores the likeliest tokens of each depth by the parent and the hidden state, and
mixes each element with the one before it, around attention and the feed-forward part. Names and sizes are those of the published files.

Shape suffixes: M blocks, N elements of a block or tree nodes, D width, V vocabulary, K candidates, R rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.block_attention import BlockLayout, attend_blocks
from headstart.heads.layers.decoder_layer import NormedLayer, Rotation
from headstart.support.errors import UserError

TAPS, GROUP = 2, 16
"""Elements that a convolution mixes, and neighbouring channels that share what is added to its kernel."""


class MarkovHead(nn.Module):
    """A table of logits by the parent token, of low rank."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def start(self) -> None:
        """Initialise it without effect."""
        self.markov_w2.weight.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.markov_w2(self.markov_w1(tokens))


class ConfidenceHead(nn.Module):
    """Log-odds that a draft is accepted if those before it are, by its hidden state and the table's row of the parent token (DSpark).

    It learns without changing either, so drafts do not depend on it.
    """

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim + rank, 1)

    def start(self) -> None:
        """Initialise it as even odds."""
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden_D: Tensor, parent_R: Tensor) -> Tensor:
        return self.proj(torch.cat([hidden_D.detach(), parent_R.detach()], -1))[..., 0]


class CandidateSelector(nn.Module):
    """Scores of a depth's likeliest tokens: the logit, plus sum_r predecessor[parent, r] * projection(hidden)[r] * successor[candidate, r].

    Other tokens keep their logits, but never above the lowest score, so that the likeliest drafts are candidates, as in engines. The
    ordinary loss trains the logits and the scores at once. That of speculators is two: one of the logits alone, and the cross-entropy of
    the candidates' scores alone, with the label put in place of the last candidate where it is none.
    """

    def __init__(self, vocab: int, dim: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(dim, rank, bias=False)
        self.candidates = min(candidates, vocab)

    def start(self) -> None:
        """Initialise it without effect."""
        nn.init.normal_(self.predecessor_codebook)
        self.successor_codebook.zero_()

    def forward(self, logits_V: Tensor, hidden_D: Tensor, parents: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` after the parent tokens ``[...]``, from those before the correction; shapes are broadcast."""
        top_K, tokens_K = logits_V.topk(self.candidates, sorted=False)
        wanted_R = F.embedding(parents, self.predecessor_codebook) * self.hidden_projection(hidden_D)
        scores_K = top_K + (F.embedding(tokens_K, self.successor_codebook) @ wanted_R[..., None])[..., 0]
        capped_V = logits_V - (logits_V - scores_K.amin(-1, keepdim=True)).clamp(min=0).detach()  # with the gradient of the logits
        return capped_V.to(scores_K.dtype).scatter(-1, tokens_K.expand_as(scores_K), scores_K)


class BlockConvolution(nn.Module):
    """Causal convolutions within a block before and after a sublayer: the kernel of each is learnt, plus a part by the sublayer's input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, TAPS, dim))
        self.kernel_projection = nn.Linear(dim, 2 * TAPS * dim // GROUP, bias=False)

    def start(self) -> None:
        """Initialise it as the identity."""
        self.base_kernel.zero_()[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def forward(self, x_MND: Tensor, normed_MND: Tensor, side: int) -> Tensor:
        """Mix the sublayer's input (side 0) or output (side 1); ``normed_MND`` is that input before it is mixed."""
        change = self.kernel_projection(normed_MND).unflatten(-1, (2, TAPS, -1))[..., side, :, :]
        parts = []
        for tap, base_D in enumerate(self.base_kernel[side]):
            kernel_MND = base_D + change[..., tap, :].repeat_interleave(GROUP, -1)
            parts.append(kernel_MND * F.pad(x_MND, (0, 0, tap, 0))[..., : x_MND.shape[-2], :])
        return torch.stack(parts).sum(0)


class BlockLayer(NormedLayer):
    """A layer over the elements of blocks."""

    def forward_blocks(self, block_MND: Tensor, context_BTD: Tensor, rotations: tuple[Rotation, Rotation], layout: BlockLayout) -> Tensor:
        """Return the output at the elements of blocks, for training. They attend to keys and values of ``context_BTD``, which are projected
        from it as from the blocks, and to their block; ``rotations``: at the context's positions and at the elements'.
        """
        x_MND, (of_context, of_blocks) = self.inputs(block_MND), rotations
        query, own = self.self_attn.queries(x_MND, of_blocks), self.keys_values(x_MND, of_blocks)
        return self.finish(block_MND, attend_blocks(query, own, self.keys_values(context_BTD, of_context), layout), x_MND)


class ConvolvedLayer(BlockLayer):
    """A layer whose attention and feed-forward part are each between two convolutions; the context's keys and values are not mixed."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = (BlockConvolution(config.hidden_size) for _ in range(2))

    def inputs(self, *streams: Tensor) -> Tensor:
        normed_MND = super().inputs(*streams)
        return self.attention_conv(normed_MND, normed_MND, 0)

    def finish(self, state: Tensor, mixed_BHTC: Tensor, x: Tensor) -> Tensor:
        state = state + self.attention_conv(self.self_attn.output(mixed_BHTC, x), super().inputs(state), 1)
        normed_MND = self.post_attention_layernorm(state)
        return state + self.mlp_conv(self.mlp(self.mlp_conv(normed_MND, normed_MND, 0)), normed_MND, 1)


def block_taps(taps: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers that a block head reads, by default up to five, evenly spaced. Raises UserError."""
    if taps is None:
        first, last = min(2, max(num_layers - 1, 1)), max(num_layers - 2, 1)
        return tuple(sorted({round(first + i * (max(last, first) - first) / 4) for i in range(5)}))
    chosen = tuple(sorted(set(taps)))
    if not chosen or any(not 1 <= tap <= num_layers for tap in chosen):
        raise UserError(f"drafter.taps are layer counts from 1 to {num_layers}; got {taps!r}")
    return chosen


def mask_token(token: int | None, backbone: Backbone) -> int:
    """Return the token that stands for those to draft, by default the one that ends texts. Raises UserError."""
    if token is None:
        end = getattr(backbone.config, "eos_token_id", None)
        token = end[0] if isinstance(end, list) else backbone.vocab - 1 if end is None else end
    if token >= backbone.vocab:
        raise UserError(f"drafter.mask_token is a token of the backbone's vocabulary of {backbone.vocab}; got {token}")
    return token
