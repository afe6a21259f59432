"""What is shown for every architecture: the columns of docs/families.md.

A check fails if the architecture does not do it. A `UserError` is a refusal, whose text the table gives.

Shape suffixes: B batch, T positions.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from architectures import Architecture
from engines_alone import plain_reader_agrees
from families import Scripted, left_padded, prompts, random_drafter, read, say, texts, unpadded
from safetensors.torch import load_file
from small_run import make_recipe, read_log
from test_contract import CLOSE
from torch import Tensor

from headstart import Backbone, Drafter, SpeculativeModel, TreeShape, load_backbone
from headstart.cli.train import main as train
from headstart.heads.checkpoint import load_drafter
from headstart.inference.contract import chain, part
from headstart.inference.engine.suffix import SuffixProposer
from headstart.serving.export import Request, export
from headstart.serving.verify.verify import Check, verify

LENGTH, LENGTHS, SEEDS = 12, (9, 1, 14, 4), [5, 77, -3, 0]
HEADS: list[tuple[str, dict[str, Any]]] = [("eagle3", {"depth": 3}), ("medusa", {"depth": 2})]
SAMPLED = {"do_sample": True, "seed": SEEDS}
BYTES = 256
"""The vocabulary of the tokenizer with which the small models train."""


class Subject:
    """A small model of an architecture, and a run of ten training steps on it in ``folder``."""

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.architecture, self.folder = architecture, folder

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone(self.architecture.model())

    def heads(self, kind: str = "eagle3") -> SpeculativeModel:
        return SpeculativeModel(self.backbone, random_drafter(kind, self.backbone, **dict(HEADS)[kind]), capture="off")

    def knowing(self, truths: list[list[int]]) -> SpeculativeModel:
        """Heads that are mostly right, so that whole paths of a tree are accepted."""
        return SpeculativeModel(self.backbone, Scripted(self.backbone, truths, "nearly"), capture="off")

    @cached_property
    def alone(self) -> list[list[int]]:
        """The texts of transformers' own greedy generate, each row by itself."""
        model, options = self.backbone.model, {"max_new_tokens": LENGTH, "do_sample": False}
        return [model.generate(row[None], attention_mask=torch.ones_like(row)[None], **options)[0].tolist() for row in prompts(LENGTHS)]

    @cached_property
    def run(self) -> Path:
        """The folder of trained heads."""
        sections = {"train": {"steps": 10, "batch_size": 4, "lr": 1e-2}, "eval": {"prompts": 1, "max_new_tokens": 8}}
        recipe = make_recipe(self.folder, drafter={"kind": "eagle3", "depth": 3}, **sections)  # type: ignore[arg-type]
        self.architecture.model(vocab=BYTES).save_pretrained(self.folder / "backbone")
        AcceleratorState._reset_state(True)
        assert train([str(recipe)]) == 0
        return self.folder / "out"

    @cached_property
    def saved(self) -> Backbone:
        return load_backbone(str(self.folder / "backbone"), device="cpu")


def contract(of: Subject) -> None:
    """What training computes on true tokens is what drafting computes, for EAGLE-3 and Medusa."""
    for kind, arguments in HEADS:
        drafter = random_drafter(kind, of.backbone, **arguments)
        features, K = read(of.backbone, texts(2, 16), drafter), drafter.trained_depth
        taught = drafter(features)
        for t in (0, 5, 9):
            drafted = chain(drafter, drafter.begin(part(features, 0, t + 1)), features.tokens_BT[:, t + 1 : t + 1 + K])
            for k in range(K):
                expected = drafter.readout(taught[k][:, t], k, features.tokens_BT[:, t + 1 + k])
                torch.testing.assert_close(expected, drafted[k], **CLOSE)


def greedy(of: Subject) -> None:
    """One row at a time, in trees: the text of transformers' own generate."""
    assert len({token for text in of.alone for token in text[-LENGTH:]}) > 3, "a dull text shows nothing"
    for heads in (of.knowing(of.alone), of.heads("eagle3"), of.heads("medusa")):
        for row, text in zip(prompts(LENGTHS), of.alone, strict=True):
            out = say(heads, {"input_ids": row[None]}, tree=TreeShape(16, 5), max_new_tokens=LENGTH, do_sample=False)
            assert out[0].tolist() == text


def sampled(of: Subject) -> None:
    """One row at a time, in trees: the text of autoregressive sampling with the same seed."""
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    for row, seed in zip(prompts(LENGTHS), SEEDS, strict=True):
        plain = say(SpeculativeModel(of.backbone), {"input_ids": row[None]}, seed=seed, **options)
        for heads in (of.knowing(plain.tolist()), of.heads("eagle3")):
            assert torch.equal(say(heads, {"input_ids": row[None]}, tree=TreeShape(16, 5), seed=seed, **options), plain)


def batch(of: Subject) -> None:
    """Rows of different lengths together, two at a time and all at once: each as it is alone."""
    rows = left_padded(prompts(LENGTHS))
    plain = unpadded(say(SpeculativeModel(of.backbone), rows, max_new_tokens=LENGTH, **SAMPLED), rows)
    assert plain == [say_alone(of, row, seed) for row, seed in zip(prompts(LENGTHS), SEEDS, strict=True)]
    for size in (2, None):
        for truths, options in ((of.alone, {"do_sample": False}), (plain, SAMPLED)):
            for heads in (of.knowing(truths), of.heads("eagle3")):
                out = say(heads, rows, tree=TreeShape(12, 4), batch_size=size, max_new_tokens=LENGTH, **options)
                assert unpadded(out, rows) == truths


def say_alone(of: Subject, row: Tensor, seed: int) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": True, "seed": seed}
    return say(SpeculativeModel(of.backbone), {"input_ids": row[None]}, **options)[0].tolist()


def adaptive_trees(of: Subject) -> None:
    """Trees whose size follows from measured times, with a second source."""
    rows = left_padded(prompts(LENGTHS))
    for options in ({"do_sample": False}, SAMPLED):
        plain = say(SpeculativeModel(of.backbone), rows, max_new_tokens=LENGTH, **options)
        drafter = random_drafter("eagle3", of.backbone, depth=3)
        heads = SpeculativeModel(of.backbone, drafter, proposers=[SuffixProposer()], capture="off")
        assert torch.equal(say(heads, rows, tree="auto", max_new_tokens=LENGTH, **options), plain)


def trains(of: Subject) -> None:
    """Ten steps of the training command: the loss falls, the backbone's files do not change."""
    losses = [line["loss"] for line in read_log(of.run) if "loss" in line]
    assert len(losses) == 10 and sum(losses[-3:]) < sum(losses[:3])
    before, after = of.architecture.model(vocab=BYTES).state_dict(), of.saved.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def saves_and_loads(of: Subject) -> None:
    """Trained heads are loaded, saved and loaded again: the same weights and drafts, and the text of autoregressive decoding."""
    drafter = load_drafter(of.run, of.saved)
    drafter.save_pretrained(of.folder / "again")
    again = load_drafter(of.folder / "again", of.saved)
    assert weights(of.run).keys() == weights(of.folder / "again").keys()
    assert all(torch.equal(weight, weights(of.folder / "again")[name]) for name, weight in weights(of.run).items())
    assert all(map(torch.equal, drafts(drafter, of.saved), drafts(again, of.saved)))
    heads, rows = SpeculativeModel(of.saved, again, capture="off"), left_padded(prompts(LENGTHS))
    plain = say(heads, rows, speculate=False, max_new_tokens=LENGTH, do_sample=False)
    assert torch.equal(say(heads, rows, max_new_tokens=LENGTH, do_sample=False), plain)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def drafts(drafter: Drafter, on: Backbone) -> list[Tensor]:
    return chain(drafter, drafter.begin(read(on, texts(1, 9), drafter)), texts(1, drafter.depth, seed=5))


def exports(of: Subject) -> None:
    """In the layout of vLLM; the exported files, read back and by the plain reader, draft the same tokens."""
    folder = of.folder / "served"
    export(Request(str(of.run), "vllm", folder))
    verdict = verify(Check(folder, of.saved, str(of.run), "reference", [[5, 9, 33, 12, 7]], 5))
    assert verdict.equal, list(verdict.lines())
    assert plain_reader_agrees(folder, str(of.run), of.saved)


CHECKS: dict[str, Callable[[Subject], None]] = {
    "contract": contract, "greedy": greedy, "sampled": sampled, "batch": batch, "adaptive trees": adaptive_trees, "train": trains,
    "save, load": saves_and_loads, "export": exports,
}  # fmt: skip
"""Column of the table -> its check."""
