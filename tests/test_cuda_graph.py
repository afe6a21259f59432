"""Replays at fixed addresses, as of CUDA graphs: the same drafts and sequences, captured once a shape, for every head.

There is no GPU here, so a backend stands in that replays by running the function again on the same memory and writes results where they
were at first: the addresses, copies and results are those of the real backend. `benchmarks/gpu.sh` runs the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import DRAFTERS, backbone, left_padded, prompts, random_drafter, say
from torch import Tensor

from headstart.heads.layers.ragged import STEP, rounded_up
from headstart.inference.capture import capture as capturing
from headstart.inference.capture.backend import Backend
from headstart.inference.capture.capture import PATIENCE, Captured, Capturer, choose
from headstart.inference.capture.cuda_graph import AtFixedAddresses, CudaGraph
from headstart.inference.capture.fixed_memory import FixedMemory, Writes, is_same_memory
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.tree import CandidateTree, TreeShape
from headstart.inference.generate import SpeculativeModel


class Again(AtFixedAddresses):
    """Runs the function again on the same memory, as a graph does, and overwrites the results of the time before."""

    name = "cuda-graph"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        results = [result.clone() if 0 in result.stride() else result for result in work()]   # what repeats cannot be written to

        def replay() -> None:
            for result, new in zip(results, work(), strict=True):
                if not is_same_memory(result, new):
                    result.copy_(new)

        return results, replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    monkeypatch.setitem(capturing.BACKENDS, "cuda-graph", Again)
    return Again


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[list[int]]]]:
    """The tokens of every candidate tree."""
    seen: list[list[list[int]]] = []
    of = CandidateTree.of

    def noted(*args: Any) -> CandidateTree:
        tree = of(*args)
        seen.append(tree.tokens)
        return tree

    monkeypatch.setattr(CandidateTree, "of", noted)
    yield seen


def captured_by_graph(function: Callable[..., Any]) -> Captured:
    return Capturer("cuda-graph", torch.device("cpu")).capture(function, "the function")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_replays_draft_the_same_trees(kind: str, graphs: type[Backend], trees: list[list[list[int]]]) -> None:
    """Rows of different lengths that end, join and pass the first 64 slots: every tree and every sequence as without a capture."""
    on = backbone("llama")
    drafter = random_drafter(kind, on)
    rows = left_padded(prompts((59, 9, 1)))
    for sample, shape in ((False, TreeShape(12, 4)), (True, TreeShape(6, 3))):
        options: dict[str, Any] = {"do_sample": sample, "seed": 3, "max_new_tokens": 9, "tree": shape, "batch_size": 2}
        plain, model = SpeculativeModel(on, drafter, capture="off"), SpeculativeModel(on, drafter, capture="cuda-graph")
        found = []
        for of in (plain, model, model):   # the second call finds the memory of the first
            trees.clear()
            found.append((say(of, rows, **options).tolist(), list(trees)))
        assert found[0] == found[1] == found[2]
        report = model.engine(True).capturer.report()
        assert report.backend == "cuda-graph" and report.fallback is None or not drafter.capturable


def test_memory_keeps_its_addresses_and_a_tensor_in_place_is_not_copied() -> None:
    memory = FixedMemory()
    one, other = torch.randn(2, 3), torch.arange(4)
    placed = memory.place([one, other])
    assert all(torch.equal(*pair) for pair in zip(placed, (one, other), strict=True)) and placed[0].data_ptr() != one.data_ptr()
    again = memory.place(placed)
    assert all(now is before for now, before in zip(again, placed, strict=True))
    smaller, _ = memory.place([torch.ones(1, 2), placed[1]])
    assert smaller.data_ptr() == placed[0].data_ptr() and torch.equal(smaller, torch.ones(1, 2))
    crossed = memory.place([torch.zeros(2, 3), torch.ones(4, dtype=torch.int64)])
    swapped = memory.place([torch.randn(2, 3), crossed[1] * 2])
    assert swapped[1].tolist() == [2, 2, 2, 2]
    floats = FixedMemory()
    left, right = floats.place([torch.zeros(3), torch.ones(3)])
    assert [one.tolist() for one in floats.place([right, left])] == [[1, 1, 1], [0, 0, 0]], "each lies where the other belongs"


def test_what_a_function_writes_into_reaches_the_caller_wherever_it_is(graphs: type[Backend]) -> None:
    def write(held: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        held[0].index_copy_(0, torch.arange(2), x)
        return held[0], held[0].sum() + held[1].sum()

    captured = captured_by_graph(write)
    store, read = torch.zeros(4), torch.ones(3)
    for value in (1.0, 2.0):
        kept, total = captured((store, read), torch.full((2,), value))
        assert store.tolist() == [value, value, 0, 0] and total == 2 * value + 3 and kept.tolist() == store.tolist()
    for value in (3.0, 4.0):   # from here on the caller uses the memory that the graph uses
        kept, _ = captured((kept, read), torch.full((2,), value))
        assert kept.tolist() == [value, value, 0, 0]
    assert store.tolist() == [2, 2, 0, 0] and captured.captures_made == 1
    settled = captured.settle((kept, read))
    assert settled[0].data_ptr() == kept.data_ptr() and torch.equal(settled[1], read)


def test_larger_tensors_are_recorded_again_and_their_time_is_void(graphs: type[Backend]) -> None:
    captured = captured_by_graph(lambda held, x: held * x)
    for size, valid in ((2, False), (2, True), (5, False), (2, False), (2, True), (5, True)):
        with Stopwatch() as watch:
            assert captured(torch.ones(size), torch.full((1,), 3.0)).tolist() == [3.0] * size
        assert watch.valid == valid, size


def test_tensors_in_host_memory_are_a_reason_not_to_capture(graphs: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_by_graph(lambda held, x: x + held.cpu())
    assert captured(torch.ones(2, device="meta").new_zeros(2, device="cpu"), torch.ones(2)).tolist() == [1, 1]
    elsewhere = captured_by_graph(lambda held, x: x)
    assert elsewhere(torch.ones(2, device="meta"), torch.ones(2)).tolist() == [1, 1]
    assert elsewhere.fallback == "not capturable by cuda-graph: RuntimeError: its tensors are on several devices"


def test_writes_are_noted() -> None:
    one, other, third = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    with Writes() as writes:
        one[1:].add_(other[1:])
        torch.add(other, 1, out=third)
    assert writes.into(one) and not writes.into(other) and writes.into(third)


def test_a_gpu_captures_by_default_and_its_first_calls_are_not_timed() -> None:
    assert choose("auto", torch.device("cuda")) == (CudaGraph, None)
    captured = Capturer("off", torch.device("cuda")).capture(lambda held, x: x * 2, "the function")   # loads kernels at new shapes
    for size, valid in ((2, False), (2, True), (3, False), (2, True)):
        with Stopwatch() as watch:
            captured(None, torch.ones(size))
        assert watch.valid == valid
    captured = Capturer("off", torch.device("cpu")).capture(lambda held, x: x * 2, "the function")
    with Stopwatch() as watch:
        captured(None, torch.ones(2))
    assert watch.valid and PATIENCE > 1


def test_few_numbers_of_slots_occur_on_an_accelerator() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [rounded_up(slots, cuda) for slots in (1, 65, 500, 1024, 1025, 5000)] == [64, 128, 512, 1024, 2048, 5120]
    assert [rounded_up(slots, cpu) for slots in (1, 65, 500)] == [STEP, 2 * STEP, 8 * STEP]
