"""Write the shipped recipes by the rules of ``headstart new-recipe``, from the published configurations in tests/helpers/configurations.

    python recipes/write.py                          # all of them, and the parts that they share
    python recipes/write.py qwen3-8b gpt2/medusa     # those of one model, and one more
    python recipes/write.py --plan [NAME ...]        # plan them first: their memory, disk and hours, half a minute each

recipes/models.yaml lists the models. A recipe is for one GPU of 80 GB, or for eight where the backbone takes more than half of one. What is
costly to compute is kept in recipes/figures.json: what the rules look at in each model, and of each planned recipe what
makes it fit and what it takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError
from headstart.support.files import write_json, write_text
from headstart.training.plan.plan import find_machine
from headstart.training.recipe.yaml_text import dump_yaml, merged, parse_yaml
from headstart.training.rules.datasets import PRESETS
from headstart.training.rules.methods import EVERY_METHOD, METHODS
from headstart.training.rules.model import ModelFacts, read_facts
from headstart.training.rules.propose import Figures, Proposal, fit, fits_one, ordered, propose
from headstart.training.rules.text import recipe_text

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
CONFIGURATIONS = HERE.parent / "tests" / "helpers" / "configurations"
MEMORY, TFLOPS = 80, 989
"""Of one GPU, in GB and TFLOP/s: an H100."""
Tree = dict[str, Any]


def entries() -> dict[str, Tree]:
    """Return the entries of recipes/models.yaml by the folder of their recipes."""
    listed = parse_yaml((HERE / "models.yaml").read_text("utf-8"), "models.yaml")
    return {folder_of(entry["model"]): entry for entry in listed}


def folder_of(model: str) -> str:
    """Return the name of a model's folder."""
    return model.rsplit("/", 1)[-1].lower()


def shared_texts() -> dict[Path, str]:
    """Return the parts that recipes share, by file: one for each method, one for each data preset."""
    methods = {f"{name}.yaml": merged(EVERY_METHOD, method.shared) for name, method in METHODS.items()}
    presets = {f"{name}.yaml": {"data": preset.data} for name, preset in PRESETS.items()}
    about = "# A part that recipes extend, by headstart.training.rules; recipes/write.py writes it.\n"
    return {HERE / "shared" / name: about + dump_yaml(values) for name, values in (methods | presets).items()}


def text_of(name: str, method: str, kept: Tree) -> str:
    """Return the text of a recipe; ``kept`` is what recipes/figures.json holds."""
    entry = entries()[name]
    proposal = proposal_of(entry, method, ModelFacts(**kept["models"][name]))
    planned = kept["plans"].get(f"{name}/{method}")
    if planned is not None:
        own, figures = merged(proposal.own, planned["changes"]), Figures(**planned["figures"])
        proposal = replace(proposal, own=ordered(own), figures=figures)
    preset = entry.get("data") or ("ultrachat" if entry.get("chat", True) else "text")
    shared = [f"../shared/{part}.yaml" for part in (method, preset, *entry.get("extends", []))]
    expect = entry["methods"][method] or ""
    path = f"recipes/{name}/{method}.yaml"
    return recipe_text(proposal, path, values=proposal.own, extends=shared, expect=expect, schema="../schema.json")


def proposal_of(entry: Tree, method: str, facts: ModelFacts) -> Proposal:
    """Return a recipe's values, for one GPU or for eight."""
    machine = find_machine(1 if fits_one(facts, MEMORY * 1e9) else 8, MEMORY)
    proposal = propose(facts, method, machine, entry.get("data"), entry.get("values", {}).get(method))
    return replace(proposal, assumed=())


def facts_of(name: str) -> Tree:
    """Return what the rules look at in a model, from its published configuration and recipes/models.yaml."""
    entry = entries()[name]
    with tempfile.TemporaryDirectory() as folder:
        facts = read_facts(str(_configuration(entry["model"], Path(folder))))
    said = {"path": entry["model"], "chat": entry.get("chat", True), "thinks": entry.get("thinks", False), "assumed": ()}
    return asdict(replace(facts, **said))


def plan_of(name: str, method: str, facts: ModelFacts) -> Tree:
    """Return the changes that make a recipe fit its hardware, and what it takes then. Raises UserError if nothing makes it fit."""
    entry = entries()[name]
    proposal = proposal_of(entry, method, facts)
    with tempfile.TemporaryDirectory() as folder:
        smaller = proposal.own["drafter"].get("path")
        local = {"drafter": {"path": str(_configuration(smaller, Path(folder)))}} if smaller else {}
        config = _configuration(entry["model"], Path(folder))
        tree = merged(proposal.tree, local)
        changes, figures = fit(tree, proposal.machine, str(config), tflops=TFLOPS)
    return {"changes": changes, "figures": asdict(figures)}


def _configuration(model: str, folder: Path) -> Path:
    """Return a folder with the published configuration of a model."""
    place = folder / folder_of(model)
    place.mkdir(exist_ok=True)
    shutil.copy(CONFIGURATIONS / f"{folder_of(model)}.json", place / "config.json")
    return place


def read_figures() -> Tree:
    """Return what recipes/figures.json holds."""
    return json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {"models": {}, "plans": {}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL[/METHOD]", help="those to write (default: all)")
    parser.add_argument("--plan", action="store_true", help="plan them, and look at their models again")
    args = parser.parse_args()
    every = {f"{name}/{method}": (name, method) for name, entry in entries().items() for method in entry["methods"]}
    wanted = [key for key in every if not args.names or key in args.names or every[key][0] in args.names]
    if unknown := set(args.names) - set(every) - set(entries()):
        print(f"error: no {', '.join(sorted(unknown))} in recipes/models.yaml; models are {', '.join(entries())}", file=sys.stderr)
        return 2
    for path, text in shared_texts().items():
        write_text(path, text)
    kept, unfit = read_figures(), 0
    for key in wanted:
        name, method = every[key]
        if args.plan or name not in kept["models"]:
            kept["models"][name] = facts_of(name)
        try:
            if args.plan:
                kept["plans"][key] = plan_of(name, method, ModelFacts(**kept["models"][name]))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            unfit += 1
            continue
        write_json(FIGURES, {group: dict(sorted(values.items())) for group, values in kept.items()}, indent=1)
        write_text(HERE / f"{key}.yaml", text_of(name, method, kept))
        print(f"wrote recipes/{key}.yaml", flush=True)
    return 1 if unfit else 0


if __name__ == "__main__":
    sys.exit(main())
