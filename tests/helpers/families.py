"""Test helpers: tiny random backbones of the families we ship recipes for, drafters with random weights, and scripted drafters.

Shape suffixes: B batch, T positions, N tree nodes.
"""

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from headstart import Backbone, Features, SpeculativeModel
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.methods import build_drafter, methods
from headstart.inference.capture.capture import BackendName

DRAFTERS = methods()
"""Every method of heads/, discovered by its file, so a new one is tested automatically."""
STRANGERS = ["tests.helpers.block_head"]
"""Drafters as a user of the project would write them."""
VOCAB, LAYERS = 61, 6
SILENT = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"max_position_embeddings": 256}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 96, "resid_pdrop": 0.1}),
    "gemma3": (
        "Gemma3Text",
        SIZES
        | {
            "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 3.0, "max_position_embeddings": 256, "query_pre_attn_scalar": 8, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
FAMILIES = list(CONFIGS)
CONFIGS["shallow"] = ("Llama", SIZES | {"max_position_embeddings": 256, "num_hidden_layers": 2})
"""For tests of what does not depend on the number of layers, which take most of the time."""
MODELS = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Qwen3_5Text": "Qwen3_5ForCausalLM"}


def build(name: str, settings: dict[str, Any], seed: int = 0, loud: float = 2.2) -> PreTrainedModel:
    """A model of the transformers classes ``<name>Config`` and ``<name>ForCausalLM``, with weights that make its output varied."""
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": VOCAB} | SILENT | settings)
    torch.manual_seed(seed)
    model = getattr(transformers, MODELS.get(name, f"{name}ForCausalLM"))(config).eval().requires_grad_(False)
    shake(model, loud)
    model.generation_config = transformers.GenerationConfig(**SILENT)
    return model


@torch.no_grad()
def shake(module: torch.nn.Module, loud: float = 1.0) -> None:
    """Set random weights of about unit gain, with biases and norms off their neutral values."""
    for weight in module.parameters():
        if weight.dim() >= 2:
            weight.normal_(std=loud * weight.shape[-1] ** -0.5)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)


def tiny(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    name, settings = CONFIGS[family]
    return build(name, settings | changes, seed)


@functools.cache
def backbone(family: str) -> Backbone:
    """The session's shared backbone of that family; tests must not modify it."""
    return Backbone(tiny(family))


def random_drafter(kind: str, on: Backbone, seed: int = 1, **arguments: Any) -> Drafter:
    """A drafter of that kind with every weight random."""
    drafter = build_drafter(kind, on, arguments)
    torch.manual_seed(seed)
    shake(drafter)
    return drafter.eval().requires_grad_(False)


@functools.cache
def heads(family: str, kind: str, capture: BackendName = "auto") -> SpeculativeModel:
    """Captures take about as long as 30 passes each: a test of something else does without."""
    return SpeculativeModel(backbone(family), random_drafter(kind, backbone(family)), capture=capture)


def texts(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids without the padding token."""
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def prompts(lengths: Sequence[int] = (9, 1, 14, 4, 7), seed: int = 0) -> list[Tensor]:
    return [texts(1, length, seed * 100 + i)[0] for i, length in enumerate(lengths)]


def left_padded(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


ROW, ROWS = {"input_ids": prompts((9,))[0][None]}, left_padded(prompts((9, 4, 6)))
"""A prompt, and a batch of three."""


def read(on: Backbone, tokens_BT: Tensor, drafter: Drafter) -> Features:
    return on.read(tokens_BT, taps=drafter.taps)


class Scripted(Drafter):
    """A drafter that knows the backbone's continuations.

    ``manner``: "oracle" drafts the truth, "adversary" anything else, "nearly" the truth at seven of ten positions. Off the
    true path it drafts as if it were on it.
    """

    def __init__(self, on: Backbone, truths: Sequence[Sequence[int]], manner: str, depth: int = 4) -> None:
        super().__init__(on, DrafterConfig(depth=depth))
        self.truths = [list(map(int, truth)) for truth in truths]
        self.manner = manner

    def begin(self, features: Features, state: list[list[int]] | None = None) -> list[list[int]]:
        counts = features.lengths_B.tolist()
        before = state if state is not None else [[] for _ in counts]
        return [old + row[:count] for old, row, count in zip(before, features.tokens_BT.tolist(), counts, strict=True)]

    def select(self, state: list[list[int]], rows_B: Tensor) -> list[list[int]]:
        return [state[row] for row in rows_B.tolist()]

    def join(self, state: list[list[int]], other: list[list[int]]) -> list[list[int]]:
        return state + other

    def step(self, state: list[list[int]], tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, list[list[int]]]:
        logits = torch.stack([self.guess(text, depth) for text in state])
        return logits[:, None].expand(-1, tokens_BN.shape[1], -1), state

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return hidden

    def guess(self, text: list[int], depth: int) -> Tensor:
        place = len(text) + 1 + depth
        truth = next((t for t in self.truths if t[: len(text)] == text), None)
        noise = torch.Generator().manual_seed(zlib.crc32(bytes(f"{text} {depth}", "ascii")))
        logits = torch.randn(self.backbone.vocab, generator=noise)
        if truth is None or place >= len(truth):
            return logits
        if self.manner == "adversary":
            logits[truth[place]] = -1e4
        elif self.manner == "oracle" or torch.rand((), generator=noise) < 0.7:
            logits[truth[place]] = 1e4
        return logits


def unpadded(sequences: Tensor, rows: dict[str, Tensor]) -> list[list[int]]:
    """Sequences returned by generate for a left-padded batch, without the left padding."""
    pads = (rows["attention_mask"] == 0).sum(1).tolist()
    return [text[pad:] for text, pad in zip(sequences.tolist(), pads, strict=True)]


def say(of: SpeculativeModel, rows: dict[str, Tensor], **options: Any) -> Any:
    """Call transformers' ``generate`` with these heads."""
    return of.backbone.model.generate(**rows, custom_generate=of.generate, **options)


class Noted:
    """A streamer that keeps everything it receives."""

    def __init__(self) -> None:
        self.got: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.got.append(value.clone())

    def end(self) -> None:
        self.ended += 1


# A model that someone is training, and everything of it that heads must leave as it was.


def in_training(family: str = "gpt2", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model in training mode but for its first layer, trained but for its embedding."""
    model = tiny(family, seed, **changes).requires_grad_(True).train()
    model.base_model.get_submodule("h.0" if family == "gpt2" else "layers.0").eval()
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def state(model: PreTrainedModel) -> dict[str, Any]:
    """What heads must leave as it was; modules and functions by identity."""
    return {
        "attributes": {name: _attributes(part) for name, part in model.named_modules()},
        "modules": {name: (type(part), id(part), part.training, vars(part).get("forward")) for name, part in model.named_modules()},
        "weights": {name: (id(weight), weight.requires_grad, weight._version, weight.grad) for name, weight in model.named_parameters()},
        "methods": [getattr(model, name) for name in ("generate", "forward", "_extract_generation_mode_kwargs", "_sample")],
        "random": torch.get_rng_state().tolist(),
    }


def _attributes(module: torch.nn.Module) -> dict[str, str]:
    apart = ("_parameters", "_buffers", "_modules", "training")
    return {name: repr(value) for name, value in vars(module).items() if name not in apart}


# The arguments with which tests of every head build each kind.

ARGUMENTS: dict[str, dict[str, Any]] = {"eagle": {"feature_noise": 0}, "block": {"correction": "selector", "convolution": True}}
"""Kind -> its arguments beside the depth; noise is drawn anew for every batch, so it depends on how a step is split."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {"draft_vocab_size": 2048}), ("eagle3", {"layers": 2}), ("mtp", {"shared": False}),
    ("block", {"correction": "markov", "convolution": False}), ("block", {"correction": "recurrent", "convolution": False}),
    ("block", {"correction": "selector", "convolution": False}), ("draft_model", {"parallel": True}),
    ("peagle", {"own_embedding": True, "draft_vocab_size": 2048}), ("hydra", {"prefix_attention": False}),
]  # fmt: skip
"""Further argument sets whose drafts are computed in another way."""


def every_head(depth: int) -> list[tuple[str, dict[str, Any]]]:
    """Every kind of heads/ with its arguments, trained and drafting at that depth."""
    return [(kind, {"depth": depth, "draft_depth": depth, **ARGUMENTS.get(kind, {})}) for kind in methods()]


def following(depth: int) -> list[tuple[str, dict[str, Any]]]:
    """Of these, the heads whose drafts depend on their own drafts."""
    return [(kind, arguments) for kind, arguments in every_head(depth) if build_drafter(kind, backbone("llama"), arguments).sequential]
