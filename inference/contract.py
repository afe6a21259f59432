"""The contract of a drafter, checked: training and decoding compute the same, whatever pieces, rows and trees they come in.

A check takes a drafter with random weights and raises `Broken`, which says what differs and which method is to be looked at.

Shape suffixes: B batch, T positions, D width, N tree nodes, V vocabulary, K depth.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features, join_features
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import load_drafter
from headstart.heads.methods import build_drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.support.pytree import map_tensors

Module = TypeVar("Module", bound=nn.Module)
TOLERANCE = {torch.float32: (3e-5, 1e-4), torch.float64: (1e-10, 1e-10)}
"""Absolute and relative difference that rounding may bring about."""


class Broken(AssertionError):
    """A drafter breaks the contract."""


def small_drafter(kind: str, **arguments: Any) -> Drafter:
    """A drafter with random weights on a random Llama of six layers of 32, both in fp64. Raises UserError as `build_drafter` does."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=61, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
    backbone = Backbone(shaken(model, 2.2))
    return shaken(build_drafter(kind, backbone, arguments).double()).eval().requires_grad_(False)


@torch.no_grad()
def shaken(module: Module, loud: float = 1.0) -> Module:
    """The module with random weights of about unit gain, biases and norms off their neutral values."""
    for weight in module.parameters():
        if weight.dim() >= 2:
            weight.normal_(std=loud * weight.shape[-1] ** -0.5)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)
    return module


def texts(drafter: Drafter, rows: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids ``[rows, length]`` without token 0."""
    return torch.randint(1, drafter.backbone.vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(drafter: Drafter, tokens_BT: Tensor) -> Features:
    return drafter.backbone.read(tokens_BT, taps=drafter.taps)


def part(features: Features, start: int, end: int) -> Features:
    """The features of these positions."""
    return map_tensors(lambda x_BT: x_BT[:, start:end], features)


def ragged(features: Features, lengths: list[int]) -> Features:
    """The first positions of each row; the rest is filled with garbage."""
    longest = max(lengths)
    there = torch.arange(longest) < torch.tensor(lengths)[:, None]

    def spoil(x_BTD: Tensor) -> Tensor:
        return torch.where(there[..., None], x_BTD[:, :longest], 7.0)

    taps = None if features.taps is None else {tap: spoil(x) for tap, x in features.taps.items()}
    tokens = torch.where(there, features.tokens_BT[:, :longest], 0)
    return Features(tokens, spoil(features.hidden_BTD), taps, document_BT=torch.where(there, 0, -1))


def draft(drafter: Drafter, state: Any, tokens: Sequence[Tensor], parents: Sequence[Tensor]) -> list[Tensor]:
    """Logits of each depth ``[B, N or 1, DV]``, drafted below the given nodes (the roots first)."""
    state, logits = drafter.reserve(state, 256), []
    for k, (tokens_BN, parents_BN) in enumerate(zip(tokens, parents, strict=True)):
        if not drafter.all_depths_at_once:
            hidden, state = drafter.step(state, tokens_BN, parents_BN, k)
        elif not k:
            hidden_BKD, state = drafter.step(state, tokens_BN, parents_BN, 0)
        logits.append(drafter.readout(hidden_BKD[:, k : k + 1] if drafter.all_depths_at_once else hidden, k, tokens_BN))
    return logits


def chain(drafter: Drafter, state: Any, tokens_BK: Tensor) -> list[Tensor]:
    """Logits of each depth, drafted along the given tokens (the root first)."""
    tokens = tokens_BK.split(1, 1)
    return [logits[:, 0] for logits in draft(drafter, state, tokens, [torch.zeros_like(tokens_BN) for tokens_BN in tokens])]


def require_close(found: Tensor, expected: Tensor, what: str, look_at: str, dtype: torch.dtype | None = None) -> None:
    """Raise `Broken` unless both are equal up to rounding; ``dtype``: what was rounded to, if not their own."""
    if found.shape != expected.shape:
        raise Broken(f"{what}: shape {list(found.shape)} in place of {list(expected.shape)}; look at {look_at}")
    absolute, relative = TOLERANCE.get(dtype or expected.dtype, TOLERANCE[torch.float32])
    if not torch.allclose(found, expected, atol=absolute, rtol=relative):
        most = float((found - expected).abs().nan_to_num(torch.inf).max())
        raise Broken(f"{what}: differs by up to {most:.2g} of {float(expected.abs().max()):.2g}; look at {look_at}")


# The checks.


def forward_is_begin_and_steps(drafter: Drafter) -> None:
    """What forward computes on true tokens is what begin and step compute while decoding."""
    T, K = 20, drafter.trained_depth
    features = read(drafter, texts(drafter, 2, T))
    taught = drafter(features)
    shapes, expected = [tuple(x.shape[:2]) for x in taught], [(2, T - 2 - k) for k in range(K)]
    if shapes != expected:
        raise Broken(f"forward of {T} positions gives sizes {shapes}; depth k has T-2-k positions: {expected}")
    width = drafter.backbone.vocab if drafter.vocabulary is None else len(drafter.vocabulary)
    for t in (0, 1, 7, T - 2 - K):
        drafted = chain(drafter, drafter.begin(part(features, 0, t + 1)), features.tokens_BT[:, t + 1 : t + 1 + K])
        for k in range(K):
            logits = drafter.readout(taught[k][:, t], k, features.tokens_BT[:, t + 1 + k])
            if drafted[k].shape != (2, width):
                raise Broken(f"readout gives {list(drafted[k].shape)} for 2 hidden states; the draft vocabulary has {width} tokens")
            require_close(drafted[k], logits, f"depth {k} drafted after {t + 1} tokens, beside forward", "begin and step, or forward_dense")


def short_texts(drafter: Drafter) -> None:
    """Texts of one to four tokens give the positions that they hold."""
    for length in (1, 2, 3, 4):
        sizes = [x.shape[1] for x in drafter(read(drafter, texts(drafter, 2, length)))]
        expected = [max(length - 2 - k, 0) for k in range(drafter.trained_depth)]
        if sizes != expected:
            raise Broken(f"forward of {length} tokens gives {sizes} positions by depth, not {expected}; look at forward_dense")


def any_pieces(drafter: Drafter) -> None:
    """A prefix in pieces is a prefix in one, and drafting in between leaves no trace."""
    features, next_BK = read(drafter, texts(drafter, 2, 15)), texts(drafter, 2, drafter.depth, seed=5)
    whole = chain(drafter, drafter.begin(features), next_BK)
    for cuts in ([9], [1], list(range(1, 15)), [4, 5, 14]):
        state = None
        for start, end in zip([0, *cuts], [*cuts, 15], strict=True):
            if state is not None:
                chain(drafter, state, texts(drafter, 2, drafter.depth, seed=end))
                state = drafter.reserve(state, 256)
            state = drafter.begin(part(features, start, end), state)
        for k, (found, expected) in enumerate(zip(chain(drafter, state, next_BK), whole, strict=True)):
            require_close(found, expected, f"depth {k} after pieces cut at {cuts}, beside one piece", "begin with a state")


def independent_rows(drafter: Drafter) -> None:
    """Rows of a batch are rows alone: ragged rows, in rounds that add no token to some rows and one to others."""
    features, next_BK = read(drafter, texts(drafter, 4, 22)), texts(drafter, 4, drafter.depth, seed=5)
    first, second, third = [9, 1, 14, 6], [3, 5, 0, 1], [0, 1, 2, 4]
    state = drafter.begin(ragged(features, first))
    chain(drafter, state, texts(drafter, 4, drafter.depth, seed=6))
    ends = torch.tensor(first)
    for brought in (second, third):
        place_BT = torch.arange(max(brought))
        new = features.gather((ends[:, None] + place_BT).clamp(max=21), place_BT < torch.tensor(brought)[:, None])
        state = drafter.begin(new, drafter.reserve(state, 256))
        ends += torch.tensor(brought)
    together = chain(drafter, state, next_BK)
    for row in range(4):
        mine = read(drafter, features.tokens_BT[row : row + 1, : int(ends[row])])
        for k, alone in enumerate(chain(drafter, drafter.begin(mine), next_BK[row : row + 1])):
            require_close(together[k][row], alone[0], f"depth {k} of row {row} of 4, beside it alone", "padding in begin (`lengths_B`)")


def trees_are_paths(drafter: Drafter) -> None:
    """Siblings, cousins and grandchildren drafted together are each path drafted alone, in ragged rows."""
    lengths, N, vocab = [9, 4], 5, drafter.backbone.vocab
    features, make = read(drafter, texts(drafter, 2, 9)), torch.Generator().manual_seed(3)
    tokens = [texts(drafter, 2, 1, seed=8)] + [torch.randint(vocab, (2, N), generator=make) for _ in range(drafter.depth - 1)]
    parents = [torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, N, dtype=torch.int64)]
    parents = (parents + [torch.randint(N, (2, N), generator=make) for _ in range(drafter.depth - 2)])[: drafter.depth]
    logits = draft(drafter, drafter.begin(ragged(features, lengths)), tokens, parents)
    logits = [logits_B1V.expand(-1, tokens_BN.shape[1], -1) for logits_B1V, tokens_BN in zip(logits, tokens, strict=True)]
    for row in range(2):
        mine = read(drafter, features.tokens_BT[row : row + 1, : lengths[row]])
        for leaf in range(tokens[-1].shape[1]):
            nodes = [leaf]
            for k in range(drafter.depth - 1, 0, -1):
                nodes.insert(0, int(parents[k][row, nodes[0]]))
            path = torch.stack([tokens[k][row, n] for k, n in enumerate(nodes)])[None]
            for k, alone in enumerate(chain(drafter, drafter.begin(mine), path)):
                require_close(logits[k][row, nodes[k]], alone[0], f"depth {k} of a tree, beside its path alone", "parents_BN in step")


def packed_documents(drafter: Drafter) -> None:
    """Documents packed in one row are what they are alone."""
    lengths = [7, 11, 3]
    parts = [read(drafter, texts(drafter, 1, length, seed=i)) for i, length in enumerate(lengths)]
    document = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)] + [torch.full((2,), -1)])[None]

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x[:, :2], 3)], 1)

    together, start = drafter(replace(map_tensors(padded, join_features(parts)), document_BT=document)), 0
    for features, length in zip(parts, lengths, strict=True):
        for k, alone in enumerate(drafter(features)):
            found = together[k][:, start : start + alone.shape[1]]
            what = f"depth {k} of a packed document, beside it alone"
            require_close(found, alone, what, "document_BT in forward_dense", torch.float32)  # rotations of other positions are in fp32
        start += length


def every_weight_learns(drafter: Drafter) -> None:
    """Every weight has a gradient, and none of the backbone's is the drafter's."""
    before = [weight.requires_grad for weight in drafter.parameters()]
    drafter.requires_grad_(True)
    features = read(drafter, texts(drafter, 2, 12))
    with torch.enable_grad():
        states = enumerate(drafter(features))
        total = sum(drafter.readout(x, k, features.tokens_BT[:, k + 1 : -1]).square().sum() for k, x in states)
        assert isinstance(total, Tensor)
        total.backward()
    idle = [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()]
    for weight, grad in zip(drafter.parameters(), before, strict=True):
        weight.grad = None
        weight.requires_grad_(grad)
    if idle:
        raise Broken(f"weight {idle[0]} has no gradient: nothing that forward and readout return depends on it")
    shared = {id(weight) for weight in drafter.backbone.model.parameters()}
    if own := [name for name, tensor in drafter.state_dict(keep_vars=True).items() if id(tensor) in shared]:
        raise Broken(f"weight {own[0]} is the backbone's own, which is not trained; copy it in init_from, or read it through self.backbone")


def saved_and_loaded(drafter: Drafter) -> None:
    """Saved and loaded it drafts the same."""
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(Path(folder) / "heads")
        loaded = load_drafter(Path(folder) / "heads", drafter.backbone)
    features, next_BK = read(drafter, texts(drafter, 2, 9)), texts(drafter, 2, drafter.depth, seed=5)
    if (loaded.arguments, loaded.depth, loaded.taps) != (drafter.arguments, drafter.depth, drafter.taps):
        raise Broken(f"loaded with arguments {loaded.arguments} in place of {drafter.arguments}; look at Config and __init__")
    for k, expected in enumerate(chain(drafter, drafter.begin(features), next_BK)):
        found = chain(loaded, loaded.begin(features), next_BK)[k]
        look_at = "tensors and load_tensors, or buffers that are not saved"
        require_close(found, expected, f"depth {k} of the saved heads", look_at, torch.float32)


def decodes_losslessly(drafter: Drafter) -> None:
    """Decoding writes the tokens of autoregressive decoding, greedy and sampled, captured too if it says that it can be."""
    rows = texts(drafter, 3, 9, seed=2)
    for capture in ("off", "trace") if drafter.capturable else ("off",):
        heads = SpeculativeModel(drafter.backbone, drafter, capture=capture)
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 1}):
            given = {"input_ids": rows, "custom_generate": heads.generate, "max_new_tokens": 40, "pad_token_id": 0, **options}
            plain = drafter.backbone.model.generate(**given, speculate=False)
            for tree in ("auto", TreeShape(9, 3)):
                if not torch.equal(drafter.backbone.model.generate(**given, tree=tree), plain):
                    how = "uncaptured" if capture == "off" else "captured"
                    raise Broken(f"{how} decoding with {options} writes other tokens than without heads; look at capturable and step")


CHECKS: tuple[Callable[[Drafter], None], ...] = (
    short_texts,
    forward_is_begin_and_steps,
    any_pieces,
    independent_rows,
    trees_are_paths,
    packed_documents,
    every_weight_learns,
    saved_and_loaded,
    decodes_losslessly,
)
"""In the order in which they help: the simplest first."""
