"""Write the shipped recipes by the rules of ``headstart new-recipe``, from the published configurations in tests/helpers/configurations.

    python recipes/write.py                          # all of them
    python recipes/write.py qwen3-8b gpt2/medusa     # those of one model, and one more
    python recipes/write.py --plan [NAME ...]        # make them fit first, half a minute each

recipes/models.yaml lists the models. A recipe is for one GPU of 80 GB, or for eight where the backbone takes more than half of one. What is
costly to compute is kept in recipes/figures.json: what the rules look at in each model, and what makes a recipe fit.
"""

import argparse
import functools
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError
from headstart.support.files import write_json, write_text
from headstart.training.plan.plan import Machine, find_machine
from headstart.training.recipe.yaml_text import merged, parse_yaml
from headstart.training.rules import ModelFacts, Proposal, fit, fits_one, propose, read_facts

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
CONFIGURATIONS = HERE.parent / "tests" / "helpers" / "configurations"
MEMORY = 80
"""Of one GPU, in GB."""
Tree = dict[str, Any]


@functools.cache
def entries() -> dict[str, Tree]:
    """Return the entries of recipes/models.yaml by the folder of their recipes."""
    listed = parse_yaml((HERE / "models.yaml").read_text("utf-8"), "models.yaml")
    return {folder_of(entry["model"]): entry for entry in listed}


def folder_of(model: str) -> str:
    """Return the name of a model's folder."""
    return model.rsplit("/", 1)[-1].lower()


def text_of(name: str, method: str, kept: Tree) -> str:
    """Return the text of a recipe; ``kept`` is what recipes/figures.json holds."""
    proposal = proposal_of(entries()[name], method, ModelFacts(**kept["models"][name])).changed(kept["plans"].get(f"{name}/{method}", {}))
    return f"# yaml-language-server: $schema=../schema.json\n{proposal.text('../shared')}"


def proposal_of(entry: Tree, method: str, facts: ModelFacts) -> Proposal:
    """Return a recipe's values, for one GPU or for eight."""
    proposal = propose(facts, method, machine_of(facts), entry.get("data"))
    extended = replace(proposal, extends=(*proposal.extends, *entry.get("extends", [])))
    return extended.changed(entry.get("values", {}).get(method, {}))


def machine_of(facts: ModelFacts) -> Machine:
    """Return one GPU or eight."""
    return find_machine(1 if fits_one(facts, MEMORY * 1e9) else 8, MEMORY)


def facts_of(name: str) -> Tree:
    """Return what the rules look at in a model, from its published configuration and recipes/models.yaml."""
    entry = entries()[name]
    with tempfile.TemporaryDirectory() as folder:
        facts = read_facts(str(_configuration(entry["model"], Path(folder))))
    said = {"path": entry["model"], "chat": entry.get("chat", True), "thinks": entry.get("thinks", False)}
    return asdict(replace(facts, **said))


def plan_of(name: str, method: str, facts: ModelFacts) -> Tree:
    """Return the changes that make a recipe fit its hardware. Raises UserError if nothing does."""
    entry = entries()[name]
    proposal = proposal_of(entry, method, facts)
    with tempfile.TemporaryDirectory() as folder:
        smaller = proposal.own["drafter"].get("path")
        local = {"drafter": {"path": str(_configuration(smaller, Path(folder)))}} if smaller else {}
        config = _configuration(entry["model"], Path(folder))
        tree = merged(proposal.tree, local)
        return fit(tree, machine_of(facts), str(config))[0]


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
    parser.add_argument("--plan", action="store_true", help="make them fit, and look at their models again")
    args = parser.parse_args()
    every = {f"{name}/{method}": (name, method) for name, entry in entries().items() for method in entry["methods"]}
    wanted = [key for key in every if not args.names or key in args.names or every[key][0] in args.names]
    if unknown := set(args.names) - set(every) - set(entries()):
        print(f"error: no {', '.join(sorted(unknown))} in recipes/models.yaml; models are {', '.join(entries())}", file=sys.stderr)
        return 2
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
