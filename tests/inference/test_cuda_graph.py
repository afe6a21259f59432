"""The parts of replays at fixed addresses: memory, recording, and what `torch.cuda` is asked for. test_graph_decoding.py decodes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from recorded import Recorded
from torch import Tensor

from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.heads.layers.rows import AHEAD, STEP, FixedMemory, octave_up, padded_rows, rounded_up
from headstart.inference.capture import cuda_graph
from headstart.inference.capture.capture import BACKENDS, Capturer, CaptureReport, choose
from headstart.inference.capture.captured import PATIENCE, Captured, Stopwatch
from headstart.inference.capture.cuda_graph import AtFixedAddresses, CudaGraph, Writes
from headstart.inference.engine.tree import graph_size


def captured_by_graph(function: Callable[..., Any]) -> tuple[Captured, FixedMemory]:
    capturer = Capturer("cuda-graph", torch.device("cpu"))
    return capturer.capture(function, "the function"), capturer.memory


def test_a_store_of_given_sizes_is_the_same_memory_whatever_was_placed_between() -> None:
    memory, store = FixedMemory(), torch.randn(2, 3, 64, 4)
    (first,) = memory.place("a", [store])
    assert torch.equal(first, store) and memory.holds(first) and not memory.holds(store)
    for shape in ((1, 3, 64, 4), (2, 3, 128, 4), (2, 3, 1024, 4), (1, 3, 64, 4)):
        other = torch.randn(shape)
        assert torch.equal(memory.place("a", [other])[0], other)
    (again,) = memory.place("a", [store])
    assert (again.data_ptr(), again.stride()) == (first.data_ptr(), first.stride()) and torch.equal(again, store)
    assert memory.place("a", [again])[0].data_ptr() == again.data_ptr() and torch.equal(again, store), "in place: not copied"
    (grown,) = memory.place("a", [torch.ones(4, 3, 64, 4)])
    assert grown.stride() == first.stride() and torch.equal(grown, torch.ones(4, 3, 64, 4))


def test_stores_that_lie_where_others_belong_are_copied_aside() -> None:
    memory = FixedMemory()
    left, right = memory.place("a", [torch.zeros(3), torch.ones(3)])
    assert [one.tolist() for one in memory.place("a", [right, left])] == [[1, 1, 1], [0, 0, 0]]
    other, _ = memory.place("b", [torch.full((3,), 7.0), torch.zeros(3)])
    assert other.tolist() == [7, 7, 7] and memory.place("a", [left, right])[0].tolist() == [1, 1, 1], "holders have homes of their own"


def test_homes_have_room_ahead_but_not_without_bounds() -> None:
    memory = FixedMemory()
    memory.positions = 5000
    (one,) = memory.place("a", [torch.zeros(1, 1, 64, 2)])
    (many,) = memory.place("b", [torch.zeros(64, 1, 64, 2)])
    assert one.stride()[1] == 8192 * 2 and many.stride()[1] == AHEAD // 64 * 2
    (state,) = memory.place("c", [torch.zeros(3, 1, 8, 2)], slots=False)
    assert state.is_contiguous(), "what has no slots"


@pytest.mark.parametrize("lengths", [[120], [120, 33, 7]])
def test_a_cache_in_fixed_memory_holds_its_keys_when_trees_grow_and_shrink(lengths: list[int]) -> None:
    """A single step after a large tree must not have the stores laid out anew."""
    rows = len(lengths)
    layers = [(torch.randn(rows, 2, 120, 4), torch.randn(rows, 2, 120, 4)) for _ in range(3)]
    cache, keys = RaggedCache(layers, torch.tensor(lengths), memory=FixedMemory()), torch.stack([key for key, _ in layers])
    places = set()
    for nodes in (4, 32, 1, 32, 4, 8):
        (seen,), _ = cache.stores(nodes)
        places.add((seen.data_ptr(), seen.stride()))
        held = torch.stack([cache.layer(i)[0] for i in range(3)])
        assert torch.equal(seen[:, :rows, :, :120], keys) and torch.equal(held[..., :120, :], keys)
        assert seen.shape[1] == padded_rows(rows) and seen.shape[3] >= 120 + nodes
    assert len(places) == 1 and seen.shape[3] == 256, "slots never shrink"


def test_what_a_function_writes_into_reaches_the_caller_wherever_it_is(graphs: type[Recorded]) -> None:
    def write(held: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        held[0].index_copy_(0, torch.arange(2), held[0][:2] + x)
        return held[0], held[0].sum() + held[1].sum()

    captured, memory = captured_by_graph(write)
    store, placed, read = torch.zeros(4), memory.place("a", [torch.zeros(4)])[0], torch.ones(3)
    for held in (store, placed):
        for times in (1.0, 2.0, 3.0):
            kept, total = captured((held, read), torch.ones(2))
            assert kept is held and held.tolist() == [times, times, 0, 0] and total == 2 * times + 3
    assert captured.captures_made == 2
    (grown,) = memory.place("a", [torch.cat([placed, placed])])
    assert captured((grown, read), torch.ones(2))[0].tolist()[:2] == [4, 4] and captured.captures_made == 3
    assert captured((memory.place("a", [placed.clone()])[0], read), torch.ones(2))[0].tolist()[:2] == [4, 4]
    assert captured.captures_made == 4 and len(captured._captures) == 2, "those recorded where the store was are gone"


def test_new_sizes_are_recorded_once_and_their_time_is_void(graphs: type[Recorded]) -> None:
    captured, _ = captured_by_graph(lambda held, x: held * x)
    for size, valid in ((2, False), (2, True), (5, False), (2, True), (5, True)):
        with Stopwatch() as watch:
            assert captured(torch.ones(size), torch.full((1,), 3.0)).tolist() == [3.0] * size
        assert watch.valid == valid, size


def test_results_are_not_lost_when_another_graph_uses_the_pool(graphs: type[Recorded]) -> None:
    captured, _ = captured_by_graph(lambda held, x: x * 2)
    one, other = captured(None, torch.ones(2)), captured(None, torch.ones(3))
    assert one.tolist() == [2, 2] and other.tolist() == [2, 2, 2] and captured(None, torch.ones(2)).tolist() == [2, 2]


def test_tensors_in_host_memory_are_a_reason_not_to_capture(graphs: type[Recorded]) -> None:
    captured, _ = captured_by_graph(lambda held, x: x)
    assert captured(torch.ones(2, device="meta"), torch.ones(2)).tolist() == [1, 1]
    assert captured.fallback == "not capturable by cuda-graph: RuntimeError: its tensors are on several devices"


def test_writes_are_undone() -> None:
    one, other, third = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    with Writes([one, other, third]) as writes:
        one[1:].add_(other[1:] + 1)
        torch.add(other, 1, out=third)
        one.mul_(2)
    assert writes.into(one) and not writes.into(other) and writes.into(third) and one.tolist() == [0, 2, 2]
    writes.undo()
    assert not one.any() and not third.any()


def test_a_gpu_captures_by_name_alone_and_its_first_calls_are_not_timed() -> None:
    """Until CUDA graphs have run on a GPU with the texts that were wrong there."""
    backend, reason = choose("auto", torch.device("cuda"))
    assert backend is None and str(reason).startswith("auto captures nothing on cuda until") and "choose a backend by name" in str(reason)
    assert choose("cuda-graph", torch.device("cuda")) == (CudaGraph, None) and CudaGraph.fixed
    captured = Capturer("off", torch.device("cuda")).capture(lambda held, x: x * 2, "the function")  # loads kernels at new shapes
    for size, valid in ((2, False), (2, True), (3, False), (2, True)):
        with Stopwatch() as watch:
            captured(None, torch.ones(size))
        assert watch.valid == valid
    captured = Capturer("off", torch.device("cpu")).capture(lambda held, x: x * 2, "the function")
    with Stopwatch() as watch:
        captured(None, torch.ones(2))
    assert watch.valid and PATIENCE > 1


def test_few_sizes_occur_on_an_accelerator() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [rounded_up(slots, cuda) for slots in (1, 65, 500, 1024, 1025, 5000)] == [64, 128, 512, 1024, 2048, 5120]
    assert [rounded_up(slots, cpu) for slots in (1, 65, 500)] == [STEP, 2 * STEP, 8 * STEP]
    assert {octave_up(slots) for slots in range(1, 9000)} == {64 << i for i in range(9)}
    assert {graph_size(nodes) for nodes in range(1, 65)} == {1, 4, 8, 16, 32, 64}
    assert {padded_rows(rows) for rows in range(1, 257)} == {1, 2, 4, 8, 16, 32, 64, 128, 192, 256}


class OnTheCpu(CudaGraph):
    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None


class FakeCuda:
    """What recording asks of `torch.cuda`: streams by thread, graphs in pools that end with their last graph. ``fail``: where it fails."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.local, self.fail, self.recording, self.made, self.pools = threading.local(), "", 0, 0, {}  # type: ignore[var-annotated]
        outer = self

        class Graph:
            def pool(self) -> Any:
                return self.handle

            def replay(self) -> None:
                """There is nothing to compute with."""

        @contextmanager
        def graph(graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local" and not outer.recording, "one at a time; other threads go on"
            alive = outer.pools.get(pool)
            if pool is not None and not alive:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            outer.recording += 1
            outer.local.stream = stream
            try:
                if outer.fail == "begin":
                    raise RuntimeError("capture_begin")
                yield
                if outer.fail == "end":
                    raise RuntimeError("capture_end")
            finally:
                outer.recording -= 1
            outer.made += 1
            graph.handle = pool if pool is not None else f"pool {outer.made}"  # type: ignore[attr-defined]
            outer.pools.setdefault(graph.handle, WeakSet()).add(graph)  # type: ignore[attr-defined]
            outer.local.stream = "default"  # as it is only when all went well

        @contextmanager
        def within(stream: Any) -> Iterator[None]:
            before, outer.local.stream = self.current(), stream
            yield
            outer.local.stream = before

        names = {"Stream": lambda: SimpleNamespace(wait_stream=lambda other: None), "CUDAGraph": Graph, "graph": graph, "stream": within}
        names |= {"current_stream": self.current, "set_stream": lambda stream: setattr(outer.local, "stream", stream)}
        names["device"] = lambda device: within(self.current())
        patch.setattr(cuda_graph.torch, "cuda", SimpleNamespace(**names))
        patch.setitem(BACKENDS, "cuda-graph", lambda: OnTheCpu)

    def current(self) -> Any:
        return getattr(self.local, "stream", None) or SimpleNamespace(wait_stream=lambda other: None)

    def alive(self) -> dict[str, int]:
        return {name: len(graphs) for name, graphs in self.pools.items()}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_each_capturer_has_a_pool_which_begins_anew_after_its_last_graph(cuda: FakeCuda) -> None:
    one, _ = captured_by_graph(lambda held, x: x + 1)
    other, _ = captured_by_graph(lambda held, x: x + 1)
    for captured in (one, other):
        for size in (2, 3):
            captured(None, torch.ones(size))
    assert cuda.alive() == {"pool 1": 2, "pool 3": 2}
    one._captures, one._known = {}, {}
    one(None, torch.ones(4))
    assert cuda.alive() == {"pool 1": 0, "pool 3": 2, "pool 5": 1} and not one.fallback


@pytest.mark.parametrize("fail", ["begin", "work", "end"])
def test_a_failed_recording_leaves_the_thread_on_its_stream_and_later_ones_work(fail: str, cuda: FakeCuda) -> None:
    capturer = Capturer("cuda-graph", torch.device("cpu"))

    def work(held: None, x: Tensor) -> Tensor:
        if cuda.recording and cuda.fail == "work":
            raise RuntimeError("work")
        return x + 1

    bad, good = capturer.capture(work, "bad"), capturer.capture(work, "good")
    cuda.local.stream = before = SimpleNamespace(wait_stream=lambda other: None)
    cuda.fail = fail
    assert bad(None, torch.ones(2)).tolist() == [2, 2] and bad.fallback and cuda.current() is before
    cuda.fail = ""
    good(None, torch.ones(2))
    assert good.captures_made == 1 and not good.fallback and capturer.report() == CaptureReport("cuda-graph", f"bad: {bad.fallback}")


def test_a_graph_that_gives_other_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cuda-graph", lambda: Deaf)
    captured, held = Capturer("cuda-graph", torch.device("cpu")).capture(lambda held, x: held.add_(x), "adding"), torch.ones(2)
    for count in (1, 2):
        assert captured(held, torch.ones(2)).tolist() == [1 + count] * 2 and held.tolist() == [1 + count] * 2
    assert captured.fallback == "not capturable by cuda-graph: RuntimeError: a replay gives other results"


class Deaf(AtFixedAddresses):
    """Replays do nothing."""

    name, unavailable = "cuda-graph", OnTheCpu.unavailable

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        return work(), lambda: None


def test_threads_record_one_after_another(cuda: FakeCuda) -> None:
    def record(captured: Captured) -> None:
        for size in range(1, 20):
            captured(None, torch.ones(size))

    functions = [captured_by_graph(lambda held, x: x + 1)[0] for _ in range(2)]
    threads = [threading.Thread(target=record, args=(one,)) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.captures_made for one in functions] == [19, 19] and not any(one.fallback for one in functions)
    assert sorted(cuda.alive().values()) == [19, 19]
