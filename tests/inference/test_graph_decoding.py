"""Decoding by recorded operations, as by CUDA graphs: the texts and logits of uncaptured decoding, in trees of random sizes.

The stand-in of tests/helpers/recorded.py does what a graph does; sizes, kernels and calls are those of an accelerator.
"""

import random
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from architectures import Architecture, served
from families import VARIANTS, Scripted, backbone, every_head, left_padded, prompts, random_drafter, say, tiny
from recorded import Recorded, cpu_as_accelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headstart import Backbone, Drafter, SpeculativeModel
from headstart.inference.capture.capture import CaptureReport
from headstart.inference.capture.captured import Captured
from headstart.inference.decode import Decoder
from headstart.inference.engine.tree import CandidateTree, TreeShape
from headstart.inference.policy import Draft, Policy

SMALLER = {"draft_vocab_size": 20}
"""The variants' draft vocabulary is larger than these backbones' vocabulary."""
HEADS = [*every_head(3), *((kind, more | {"depth": 3} | (SMALLER if "draft_vocab_size" in more else {})) for kind, more in VARIANTS)]
WINDOWED = [("eagle3", {"depth": 2, "layers": 2, "sliding_window": 16}), ("eagle3", {"depth": 2, "sliding_window": 5})]
SIZES = (1, 1, 2, 4, 7, 16, 32)
SWIFT = ("gemma-3-1b-it",)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has trees of random sizes verified, with single steps among them; called with a seed before each text."""
    chance = random.Random()

    def choose(self: Policy, draft: Draft) -> CandidateTree:
        nodes = chance.choice(SIZES)
        ranked = [sorted(node for _, node in pool.ranked()[: nodes - 1]) for pool in draft.pools]
        return CandidateTree.of(draft.pools, [[0, *row] for row in ranked])

    monkeypatch.setattr(Policy, "choose", choose)
    return chance.seed


def pair(on: Backbone, drafter: Drafter | None, proposers: Any = ()) -> tuple[SpeculativeModel, SpeculativeModel]:
    """The same heads, uncaptured and recorded."""
    plain, recorded = (SpeculativeModel(on, drafter, proposers=proposers, capture=name) for name in ("off", "cuda-graph"))
    return plain, recorded


def functions(of: SpeculativeModel, speculate: bool = True) -> list[Captured]:
    return [one for one in of.engine(speculate).capturer.functions if one.calls]


def require_equal(one: Any, other: Any) -> None:
    """Equal texts, passes and logits, the latter up to the rounding of other widths."""
    assert torch.equal(one.sequences, other.sequences) and one.nodes == other.nodes and one.accept_lengths == other.accept_lengths
    for ours, theirs in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.matrix(cells=3)
@pytest.mark.parametrize(("kind", "arguments"), [*WINDOWED, *HEADS])
@pytest.mark.parametrize(("sample", "shape"), [(False, TreeShape(32, 6)), (True, TreeShape(16, 3))])
@pytest.mark.parametrize(("rows", "batch"), [((50,), 1), ((57, 9, 20, 1), 3)])
def test_every_head_drafts_and_writes_the_same(
    kind: str, arguments: Any, sample: bool, shape: TreeShape, rows: Any, batch: int, graphs: type[Recorded], sizes: Any
) -> None:
    """Rows of different lengths that end, wait and join, past the first 64 slots; the second call finds the memory of the first."""
    plain, recorded = pair(backbone("shallow"), random_drafter(kind, backbone("shallow"), **arguments))
    options: dict[str, Any] = {"do_sample": sample, "seed": 3, "max_new_tokens": 18, "tree": shape, "batch_size": batch}
    for seed in range(2):
        outs = []
        for of in (plain, recorded):
            sizes(seed)
            outs.append(say(of, left_padded(prompts(rows, seed)), return_dict_in_generate=True, output_logits=True, **options))
        require_equal(*outs)
    assert all(one.captures_made and not one.fallback for one in functions(recorded))
    assert all(one.captures_made == len(one._captures) for one in functions(recorded)), "nothing was recorded twice"


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=() if one.name in SWIFT else pytest.mark.slow, id=one.name) for one in served()]
)
def test_every_family_writes_the_same(architecture: Architecture, graphs: type[Recorded], sizes: Any) -> None:
    """In trees of random sizes, of which whole paths are accepted, in a batch and alone."""
    on = Backbone(architecture.model())
    for rows in (left_padded(prompts((9, 1, 14))), left_padded(prompts((5,)))):
        truth = say(SpeculativeModel(on, capture="off"), rows, max_new_tokens=12, do_sample=False)
        pads = (rows["attention_mask"] == 0).sum(1).tolist()
        knowing = Scripted(on, [text[pad:] for text, pad in zip(truth.tolist(), pads, strict=True)], "nearly")
        of = SpeculativeModel(on, random_drafter("eagle3", on, depth=3), proposers=[knowing], capture="cuda-graph")
        sizes(3)
        assert torch.equal(say(of, rows, max_new_tokens=12, do_sample=False), truth)
    fallbacks = [one.fallback for one in functions(of) if one.fallback and "Scripted" not in one.fallback]
    assert all("not permitted when stream is capturing" in fallback for fallback in fallbacks), fallbacks
    assert not fallbacks or architecture.name not in SWIFT


def count(of: SpeculativeModel, speculate: bool = True) -> dict[str, int]:
    return {one.name: one.captures_made for one in functions(of, speculate)}


def test_few_graphs_are_recorded_each_once(graphs: type[Recorded], sizes: Any) -> None:
    """A text over four octaves of length in trees of random sizes: at most a graph for each padded size and octave."""
    on = backbone("shallow")
    _, recorded = pair(on, random_drafter("eagle3", on, depth=4))
    sizes(1)
    options: dict[str, Any] = {"do_sample": False, "tree": TreeShape(32, 8), "return_dict_in_generate": True}
    out = say(recorded, left_padded(prompts((9,))), max_new_tokens=230, **options)
    assert out.passes > 120
    octaves, padded = 4, 5  # 64 to 512 slots; 1, 4, 8, 16, 32 nodes
    made = count(recorded)
    assert made["verification"] <= octaves * padded
    assert made["drafter prefill"] <= octaves * 2, "four or eight new positions"
    assert made["drafts"] <= octaves * 3, "1, 2 or 4 depths, fewer than four at the end alone"
    assert all(one.captures_made == len(one._captures) for one in functions(recorded)), "each once"
    sizes(2)
    for length in (5, 60):
        say(recorded, left_padded(prompts((length,))), max_new_tokens=24, **options)
    assert sum(count(recorded).values()) <= octaves * (padded + 2 + 3), "further texts bring none"
    assert all(one.captures_made == len(one._captures) for one in functions(recorded))


def test_models_of_several_threads_share_nothing(graphs: type[Recorded]) -> None:
    """Each has memory and a pool of its own, so that no replay overwrites another's results."""
    backbones = [Backbone(tiny("llama", num_hidden_layers=1)) for _ in range(2)]
    models = [SpeculativeModel(on, random_drafter("eagle3", on, depth=2), capture="cuda-graph") for on in backbones]
    rows = [left_padded(prompts((9,), seed)) for seed in (1, 2)]
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "tree": TreeShape(8, 3)}
    alone = [say(SpeculativeModel(of.backbone, capture="off"), row, **options) for of, row in zip(models, rows, strict=True)]

    def text(of: SpeculativeModel, row: Any) -> torch.Tensor:
        with cpu_as_accelerator():
            return say(of, row, **options)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            assert all(map(torch.equal, pool.map(text, models, rows), alone))
    assert all(of.engine(True).capturer.report() == CaptureReport("cuda-graph", None) for of in models)


def test_a_window_of_heads_bounds_their_graphs(graphs: type[Recorded], sizes: Any) -> None:
    """With attention sinks and a ring of slots, the recordings end once the ring is full."""
    on = backbone("shallow")
    plain, recorded = pair(on, random_drafter("eagle3", on, depth=3))
    options: dict[str, Any] = {"do_sample": False, "tree": TreeShape(16, 4), "return_dict_in_generate": True}
    outs = []
    for of in (plain, recorded):
        of.limit(window=20, sink=2)
        sizes(1)
        outs.append(say(of, left_padded(prompts((9,))), max_new_tokens=60, **options))
    assert torch.equal(outs[0].sequences, outs[1].sequences) and outs[0].nodes == outs[1].nodes
    assert count(recorded)["drafts"] <= 2 * 3


# What the host reads from the device while decoding: each read waits for all that was launched before it.

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"}
"""Functions of tensors that wait for the device; so does indexing by a mask."""
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}


class HostReads(TorchFunctionMode):
    """Collects where tensors are read."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        masked = func is Tensor.__getitem__ and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if masked or getattr(func, "__name__", "") in READS:
            frame = traceback.extract_stack(limit=3)[0]
            self.places.append(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.line}")
        return func(*args, **(kwargs or {}))


def reads_by_step(of: SpeculativeModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[str]]:
    """The reads of each decoding step of a batch of two."""
    steps: list[list[str]] = []
    step = Decoder.step

    def watched(self: Decoder, *args: Any) -> Any:
        with HostReads() as reads:
            result = step(self, *args)
        steps.append(reads.places)
        return result

    monkeypatch.setattr(Decoder, "step", watched)
    say(of, left_padded(prompts((9, 6))), max_new_tokens=24, **options)
    return steps


@pytest.mark.matrix(cells=8)
@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kind", "arguments"), HEADS)
def test_a_step_with_trained_heads_reads_twice(kind: str, arguments: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the drafts, once the picks, however deep the tree. (The first step also reads the prompts into the drafter.)"""
    of = SpeculativeModel(backbone("shallow"), random_drafter(kind, backbone("shallow"), **arguments), capture="off")
    steps = reads_by_step(of, monkeypatch, tree=TreeShape(8, 3), seed=1, **options)
    assert len(steps) > 4
    assert all(len(places) <= 2 for places in steps[1:]), max(steps[1:], key=len)


def test_adaptive_trees_read_twice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    of = SpeculativeModel(backbone("shallow"), random_drafter("eagle3", backbone("shallow"), depth=4), capture="off")
    found = reads_by_step(of, monkeypatch, seed=1, do_sample=False)
    steps = [[place for place in places if "join_features" not in place] for places in found]  # after steps without drafts
    assert any(len(places) == 2 for places in steps)
    assert all(len(places) <= 2 for places in steps), max(steps, key=len)
