"""The rules of each method: the values that hold for every model, and those that follow from the model. docs/recipe.md has them as a table.

Sources are the papers named in ``paper`` and the code that their authors or the trainers SpecForge and speculators publish:

    EAGLE-3      7 passes of training-time test, lr 1e-4, cosine, warm-up 0.015, clip 0.5: SpecForge's scripts (ttt-length 7)
    block        5 layers (3, 5 and 8 were compared in 2602.06036), or 2 of models as wide as 8,192, so that they fit;
                 blocks of 7 and rank 256 as DSpark, lr 6e-4, warm-up 0.04 as SpecForge
    Medusa       lr 1e-3, cosine, warm-up 0.1, 2 passes, 128 sequences a step: the authors' script
    Medusa-2     heads alone first, then jointly, LoRA of rank 32 and alpha 16: the paper; held to the backbone by its KL divergence
    Hydra++      lr 5e-4, final rate a third, weight decay 0.1, 32 sequences a step: the authors' script
    EAGLE        lr 3e-5, features 1.0 and cross-entropy 0.1, clip 0.5: the authors' script; 16 sequences a step, as for EAGLE-3
    MLP          lr 1e-3: the paper. Tied embeddings for large vocabularies, since each depth would have two tables
    MTP          as EAGLE-3, which it resembles: one module for all depths
    draft model  lr 2e-5, as DistillSpec distils

    draft vocabulary   32,000 of more than 64,000 tokens: EAGLE-3's and SpecForge's size; on a CPU 8,192 of more than 16,384
    depth on a CPU     4 of EAGLE-3's 7: with 8,192 tokens a step of SmolLM2-135M takes a fifth of the time (docs/train.md)
    length             2,048 as EAGLE-3 and SpecForge; 4,096 for models that write their thoughts, whose answers are longer
    learning rate      as published at a width of 4,096 or more, below in inverse proportion to the width (2203.03466), and below 1,024
                       auto, which was fitted to small backbones (docs/defaults.md)
    batch              32,768 tokens: 16 rows of 2,048
    data               UltraChat for chat models, as EAGLE-3 and SpecForge; text for others
    steps              two passes over the data: EAGLE-3's acceptance still grew at eight times EAGLE's data (2503.01840, figure 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.heads.methods import find_drafter
from headstart.support.errors import UserError
from headstart.training.recipe.drafter import VOCABULARY_KEY
from headstart.training.rules.model import ModelFacts

Tree = dict[str, Any]
DRAFT_VOCAB = 32_000
BATCH_TOKENS = 32_768
RATE_WIDTH, AUTO_WIDTH = 4096, 1024
WIDE = 8192
"""Width from which block heads have 2 layers: each takes 14 GB while it is trained, its optimizer state and gradients included."""
LENGTH, LONG = 2048, 4096
PASSES = 2
CPU_KINDS, CPU_VOCABULARY, CPU_DEPTH = ("eagle", "eagle3"), 8192, 4
"""On a CPU, heads that pass through one layer for each depth draft of fewer tokens and depths."""


@dataclass(frozen=True)
class Method:
    kind: str
    title: str
    paper: str
    """Name and number of the paper, as they stand in the header."""
    shared: Tree
    """Values for every model."""
    rows: int | None = None
    """Sequences of a step, where the method has a number of its own."""
    own: Callable[[ModelFacts], Tree] = lambda facts: {}
    """The drafter's arguments that follow from the model."""

    @property
    def trains_backbone(self) -> bool:
        """Whether an adapter on the backbone is trained too."""
        return "lora" in self.shared.get("backbone", {})


def _block(facts: ModelFacts) -> Tree:
    layers = 5 if facts.width < WIDE else 2
    return {"layers": max(1, min(layers, facts.layers // 2)), "correction_rank": min(256, facts.width)}


def _mlp(facts: ModelFacts) -> Tree:
    return {"tie_weights": True} if facts.vocab > 2 * DRAFT_VOCAB else {}


def _train(lr: float, warmup: float, **more: Any) -> Tree:
    return {"lr": lr, "warmup_ratio": warmup, **more}


MEDUSA_LORA = {"rank": 32, "alpha": 16, "warmup_ratio": 0.5, "ramp_ratio": 0.1, "kl_weight": 5.0, "lm_weight": 0.0}
METHODS: Mapping[str, Method] = {
    "eagle3": Method("eagle3", "EAGLE-3 heads", "2503.01840", {"drafter": {"depth": 7}, "train": _train(1e-4, 0.015, max_grad_norm=0.5)}),
    "block": Method(
        "block", "Block heads with a Markov correction (DSpark)", "2607.05147",
        {"drafter": {"depth": 7, "correction": "markov", "anchor_share": 0.25}, "train": _train(6e-4, 0.04)}, own=_block,
    ),
    "medusa": Method("medusa", "Medusa-1 heads", "2401.10774", {"drafter": {"depth": 4}, "train": _train(1e-3, 0.1)}, rows=128),
    "medusa2": Method(
        "medusa", "Medusa-2: Medusa heads and a LoRA adapter on the backbone, trained together", "2401.10774",
        {"backbone": {"lora": MEDUSA_LORA}, "drafter": {"depth": 4}, "train": _train(1e-3, 0.1)}, rows=128,
    ),
    "hydra": Method(
        "hydra", "Hydra++ heads", "2402.05109",
        {"drafter": {"depth": 4, "layers": 4}, "train": _train(5e-4, 0.01, min_lr_ratio=0.33, weight_decay=0.1)}, rows=32,
    ),
    "eagle": Method(
        "eagle", "EAGLE heads", "2401.15077",
        {"drafter": {"depth": 1}, "objective": {"terms": {"features": 1.0, "kl": 0.1}},
         "train": _train(3e-5, 0.03, max_grad_norm=0.5, schedule="linear")},
    ),
    "mlp": Method("mlp", "An MLP speculator", "2404.19124", {"drafter": {"depth": 4}, "train": _train(1e-3, 0.05)}, own=_mlp),
    "mtp": Method(
        "mtp", "A multi-token prediction module", "2412.19437", {"drafter": {"depth": 4}, "train": _train(1e-4, 0.015, max_grad_norm=0.5)}
    ),
    "draft_model": Method(
        "draft_model", "A distilled draft model", "2310.08461",
        {"train": _train(2e-5, 0.015)},
    ),
}  # fmt: skip
EVERY_METHOD: Tree = {"eval": {"every": 2000, "max_new_tokens": 128}, "save": {"every": 1000}}
"""Values of all methods."""


def find_method(name: str) -> Method:
    """Return the rules of a method. Raises UserError for an unknown one."""
    if name not in METHODS:
        raise UserError(f"--method {name} is unknown; methods are {', '.join(METHODS)}")
    return METHODS[name]


def length_for(facts: ModelFacts) -> int:
    """Return ``data.max_length``: never more than the context."""
    return min(LONG if facts.thinks else LENGTH, facts.context)


def rate_for(method: Method, facts: ModelFacts) -> float | str:
    """Return ``train.lr``, to two digits, or auto."""
    published: float = method.shared["train"]["lr"]
    return "auto" if facts.width < AUTO_WIDTH else float(f"{published * max(1, RATE_WIDTH / facts.width):.1e}")


def batch_for(method: Method, length: int) -> int:
    """Return ``train.batch_size``, a power of two, so that it can be cut evenly."""
    return method.rows or 1 << max(1, BATCH_TOKENS // length).bit_length() - 1


def values_on_cpu(method: Method, facts: ModelFacts) -> Tree:
    """Return the drafter's values that make a step short enough for a CPU, none for kinds that they would not make much shorter."""
    if method.kind not in CPU_KINDS:
        return {}
    depth = {"depth": CPU_DEPTH} if method.shared["drafter"]["depth"] > CPU_DEPTH else {}
    return depth | ({VOCABULARY_KEY: CPU_VOCABULARY} if facts.vocab > 2 * CPU_VOCABULARY else {})


def own_values(method: Method, facts: ModelFacts) -> Tree:
    """Return the values that follow from the model: drafter, length, sequences of a step and learning rate."""
    length = length_for(facts)
    drafter: Tree = {"kind": method.kind, **method.own(facts)}
    if facts.vocab > 2 * DRAFT_VOCAB and VOCABULARY_KEY in find_drafter(method.kind).Config.model_fields:
        drafter[VOCABULARY_KEY] = DRAFT_VOCAB
    train: Tree = {"batch_size": batch_for(method, length)}
    if (rate := rate_for(method, facts)) != method.shared["train"]["lr"]:
        train["lr"] = rate
    return {"drafter": drafter, "data": {"max_length": length}, "train": train}
