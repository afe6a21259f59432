"""Random models of published sizes with two layers, and a tokenizer of as many tokens, on disk.

Widths, heads, vocabulary and rotary settings are as published; there are as many layers as it takes to have each kind, at least two, and
few experts. `released_sizes` says which models.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
from released_sizes import SIZES, SMALLEST
from shrink import DROPPED, IMAGES, depth, published
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

MODELS = tuple(dict.fromkeys(SMALLEST.values()))
LAYERS, EXPERTS = 2, {"num_experts": 3, "num_local_experts": 3, "n_routed_experts": 3, "num_experts_per_tok": 2, "experts_per_token": 2}
WORDS = 256 + 26 + 2 * 676
"""The first token of the vocabulary that is a whole word."""
POOL = 4_194_301
"""A prime, so that no two rows of a matrix are filled with the same part of the pool."""
LOUD, TIED = 2.2, 0.02
"""Gain of a matrix, which makes texts varied; root mean square of tied embeddings, with which no token follows itself."""


def configuration(model: str) -> PretrainedConfig:
    """The configuration of the released model with fewer layers and experts, and without special tokens."""
    fields = SIZES.get(model) or published(model)
    fields = {key: value for key, value in fields.items() if key not in DROPPED}
    if "vision_config" in fields:
        fields["text_config"] = _text(fields["text_config"])
        tower = {key: size for key, size in IMAGES.items() if key in fields["vision_config"]} | {"num_hidden_layers": LAYERS}
        fields |= {"mm_tokens_per_image": 4, "vision_config": fields["vision_config"] | tower}
    else:
        fields = _text(fields)
    return AutoConfig.for_model(**fields)


def _text(fields: dict[str, Any]) -> dict[str, Any]:
    whole = AutoConfig.for_model(**fields)
    kinds = list(dict.fromkeys(whole.to_dict().get("layer_types") or []))
    count = max(LAYERS, len(kinds))
    small = fields | {key: size for key, size in EXPERTS.items() if fields.get(key)}
    small |= {key: value[:count] for key, value in small.items() if isinstance(value, list) and len(value) == depth(fields)}
    small |= {"no_rope_layers": [1, 0]} if "no_rope_layers" in small else {}
    small |= {"layer_types": (kinds * count)[:count]} if kinds else {}
    small |= {key: None for key in small if key.endswith("_token_id")} | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return small | {"n_layer" if "n_layer" in fields else "num_hidden_layers": count}


@contextmanager
def unfilled() -> Iterator[None]:
    """Within this context matrices keep the memory they get: drawing normal numbers for a vocabulary takes longer than a test may."""
    drawing = ("normal_", "uniform_", "trunc_normal_")
    own = {name: getattr(Tensor, name) for name in drawing if hasattr(Tensor, name)}

    def skipping(draw: Any) -> Any:
        return lambda tensor, *args, **kwargs: tensor if tensor.dim() >= 2 else draw(tensor, *args, **kwargs)

    try:
        for name, draw in own.items():
            setattr(Tensor, name, skipping(draw))
        yield
    finally:
        for name, draw in own.items():
            setattr(Tensor, name, draw)


@torch.no_grad()
def build(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model with random weights of about unit gain, which the seed 0 determines."""
    torch.manual_seed(0)
    with unfilled():
        made = AutoModelForCausalLM.from_config(configuration(model), dtype=dtype).eval()
    pool, place = torch.randn(POOL).to(dtype), 0
    for weight in made.parameters():
        if weight.dim() >= 2:
            place = _fill(weight, pool, place)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)
    table = made.get_input_embeddings()
    if table.weight is made.get_output_embeddings().weight:
        some = table(torch.arange(1000)).float() * made.config.to_dict().get("embedding_multiplier", 1.0)
        table.weight.mul_(min(1.0, TIED / some.square().mean().sqrt().item()))
    made.generation_config = GenerationConfig(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return made


def _fill(weight: Tensor, pool: Tensor, place: int) -> int:
    """Fill a matrix from the pool, from ``place`` on and again from its start; returns the place behind."""
    flat, gain, done = weight.view(-1), LOUD / math.sqrt(weight.shape[-1]), 0
    while done < len(flat):
        part = pool[place : place + len(flat) - done]
        torch.mul(part, gain, out=flat[done : done + len(part)])
        done, place = done + len(part), (place + len(part)) % len(pool)
    return place


def write(model: str, dtype: torch.dtype, folder: Path) -> int:
    """Save model and tokenizer in ``folder``; returns the size of the vocabulary."""
    made = build(model, dtype)
    made.save_pretrained(folder)
    vocab = made.get_output_embeddings().weight.shape[0]
    letters, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), _merges(vocab - 256)
    places = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=places, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return vocab


def _merges(count: int) -> list[tuple[str, str]]:
    """So many merges of byte-level BPE: of a space and a capital, of a capital and a small letter, and of two such pairs."""
    pairs = [capital + small for capital in ascii_uppercase for small in ascii_lowercase]
    first = [("\u0120", capital) for capital in ascii_uppercase] + [("\u0120" + pair[0], pair[1]) for pair in pairs]
    first += [(pair[0], pair[1]) for pair in pairs]
    return [*first, *(("\u0120" + one, two) for one, two in islice(product(pairs, pairs), count - len(first)))]


def text(tokens: Sequence[int]) -> str:
    """A text of these tokens, which are words of two pairs: ``256 + 26 + 2 * 676`` or above."""
    words = (divmod(token - WORDS, 676) for token in tokens)
    return "".join(" " + "".join(ascii_uppercase[half // 26] + ascii_lowercase[half % 26] for half in word) for word in words)
