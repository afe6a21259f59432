"""What benchmarks/heads.py compares: kinds of heads with their recipes, changed so that all share data and sizes."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from headstart.training.recipe.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parent.parent / "recipes" / "quickstart"
CHAIN = 5
"""Drafts of a chain."""
DEEP = f"drafter.depth={CHAIN}"
FULL = "drafter.draft_vocab_size=null"
UNNORMED = "drafter.norm_output=false"
"""Not all heads can have a draft vocabulary, so here none has."""


@dataclass(frozen=True)
class Entry:
    """A kind of head with some of its arguments."""

    kind: str
    changes: tuple[str, ...] = ()
    recipe: str | None = None
    """File in recipes/quickstart, if not that of the kind."""


ENTRIES = {
    "medusa": Entry("medusa", (DEEP,)),
    "medusa-2": Entry("medusa", (DEEP,), "medusa2"),
    "hydra": Entry("hydra", (DEEP, FULL, "drafter.layers=1", "drafter.prefix_attention=false")),
    "hydra++": Entry("hydra", (DEEP, FULL)),
    "mlp": Entry("mlp", (DEEP, FULL)),
    "eagle": Entry("eagle", (f"drafter.draft_depth={CHAIN}",)),
    "eagle3": Entry("eagle3", (DEEP, FULL, UNNORMED)),
    "eagle3-2-layers": Entry("eagle3", (DEEP, FULL, UNNORMED, "drafter.layers=2")),
    "eagle3-normed": Entry("eagle3", (DEEP, FULL)),
    "eagle3.1": Entry("eagle3", (DEEP, FULL, "drafter.fc_norm=true")),
    "eagle3-shortlist": Entry("eagle3", (DEEP, FULL, "drafter.shortlist.rank=64")),
    "peagle": Entry("peagle", (DEEP,)),
    "block": Entry("block", (DEEP, "drafter.correction=none")),
    "block-causal": Entry("block", (DEEP, "drafter.correction=none", "drafter.causal=true")),
    "block-markov": Entry("block", (DEEP, "drafter.correction=markov")),
    "block-recurrent": Entry("block", (DEEP, "drafter.correction=recurrent")),
    "block-selector": Entry("block", (DEEP, "drafter.correction=selector")),
    "block-selector-convolution": Entry("block", (DEEP, "drafter.correction=selector", "drafter.convolution=true")),
    "mtp": Entry("mtp", (DEEP, "drafter.shared=false")),
    "mtp-shared": Entry("mtp", (DEEP, "drafter.shared=true")),
    "draft-model": Entry("draft_model", (f"drafter.draft_depth={CHAIN}",)),
    "draft-model-parallel": Entry("draft_model", (DEEP, "drafter.parallel=true")),
}


def recipe_of(name: str, args: argparse.Namespace, *more: str) -> Recipe:
    """An entry's recipe, with the data and sizes that all entries share."""
    entry = ENTRIES[name]
    shared = [f"train.batch_size={args.batch_size}", "eval.every=0", "save.every=0", "log.every=1"]
    shared += [f"eval.prompts={args.prompts}", f"eval.max_new_tokens={args.new_tokens}"]
    if args.backbone is not None:
        shared += [f"backbone.path={args.backbone}", f"data.train={args.train}", f"data.eval={args.eval}"]
    return load_recipe(RECIPES / f"{entry.recipe or entry.kind}.yaml", [*entry.changes, *shared, *args.overrides, *more])
