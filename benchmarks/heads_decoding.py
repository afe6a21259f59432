"""How benchmarks/heads.py decodes with trained heads: all prompts at once for acceptance, one by one for speed."""

from pathlib import Path
from typing import Any

from heads_entries import CHAIN
from torch import Tensor

from headstart.chat.prompts import Prompt
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.base import Drafter
from headstart.inference.bench.bench import Race
from headstart.inference.bench.systems import AR, HeadstartSystem, SystemResult
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings
from headstart.training.recipe.recipe import Recipe

TEMPERATURES = (0.0, 1.0)
TREE = TreeShape(24, 8)
"""The fixed tree."""
Numbers = dict[str, Any]


def chain_of(drafter: Drafter) -> TreeShape:
    """A chain of 5 drafts, of fewer for heads that draft fewer."""
    depth = min(CHAIN, drafter.max_depth or CHAIN)
    return TreeShape(1 + depth, 1, depth)


class Acceptance:
    """Decodes the same prompts with one head after another; without drafts only once, since the tokens are the same."""

    def __init__(self, prompts: list[Tensor]) -> None:
        self.prompts = dict(enumerate(prompts))
        self.plain: dict[float, SystemResult] = {}

    def measure(self, folder: Path, recipe: Recipe) -> Numbers:
        """tau and acceptance per depth in a chain and in fixed trees, and the prompts whose tokens differ from decoding without drafts."""
        heads = load(folder, load_backbone(recipe.backbone.path, dtype=recipe.backbone.dtype), capture="off")
        drafter = heads.drafter
        assert isinstance(drafter, Drafter)
        chain, alone = chain_of(drafter), SpeculativeModel(heads.backbone, drafter, capture="off")
        found: Numbers = {"chain": chain.depth, "depth": drafter.depth}
        for temperature in TEMPERATURES:
            settings = Settings(recipe.eval.max_new_tokens, temperature)
            plain = self._plain(heads, settings, recipe.backbone.lora is None)
            for name, shape in (("chain", chain), ("tree", TREE)):
                one = self._decoded(HeadstartSystem(name, alone, (shape, shape)), settings)
                key = f"{name}_{temperature:g}"
                found |= {f"tau_{key}": one.total.tau, f"acceptance_{key}": one.total.acceptance_per_depth}
                found[f"prompts_differing_{key}"] = one.differing(plain)
        return found

    def _plain(self, heads: SpeculativeModel, settings: Settings, shared: bool) -> SystemResult:
        """The prompts continued without drafts; ``shared`` between heads unless these come with an adapter on the backbone."""
        known = self.plain.get(settings.temperature) if shared else None
        if known is None:
            known = self._decoded(HeadstartSystem(AR, SpeculativeModel(heads.backbone, capture="off")), settings)
            if shared:
                self.plain[settings.temperature] = known
        return known

    def _decoded(self, system: HeadstartSystem, settings: Settings) -> SystemResult:
        result = SystemResult(system)
        result.measure("", self.prompts, settings, 0)
        return result


def timed(folder: Path, recipe: Recipe, prompts: list[Tensor], capture: str) -> Numbers:
    """Speed relative to decoding without drafts and milliseconds of drafting, in a chain and in adaptive trees, interleaved."""
    heads = load(folder, load_backbone(recipe.backbone.path, dtype=recipe.backbone.dtype), capture=capture)
    drafter = heads.drafter
    assert isinstance(drafter, Drafter)
    shape = chain_of(drafter)
    plain = HeadstartSystem(AR, SpeculativeModel(heads.backbone, capture=capture))
    chain = HeadstartSystem("chain", SpeculativeModel(heads.backbone, drafter, capture=capture), (shape, shape))
    adaptive = HeadstartSystem("adaptive", heads)
    found: Numbers = {}
    for temperature in TEMPERATURES:
        settings = Settings(recipe.eval.max_new_tokens, temperature)
        race = Race(plain, [plain, chain, adaptive], [Prompt(prompt_T) for prompt_T in prompts], settings, 1, 0)
        race.run(None)
        ar = race.leader.total
        found[f"ar_tokens_per_second_{temperature:g}"] = ar.tokens_per_second
        for one in race.results[1:]:
            key, tally = f"{one.system.name}_{temperature:g}", one.total
            found[f"speedup_{key}"] = tally.tokens_per_second / ar.tokens_per_second
            found[f"draft_ms_{key}"] = tally.milliseconds()["draft_ms"]
        found[f"tau_adaptive_{temperature:g}"] = race.results[-1].total.tau
    return found
