"""Heads that attend to the first few and the last positions alone, and store only those: same output, bounded memory.

Shape suffixes: B batch, T positions, N tree nodes, S slots, K depth.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, refuses
from families import VOCAB, backbone, left_padded, prompts, random_drafter, read, say, texts
from test_contract import CLOSE
from torch import Tensor
from transformers import LlamaConfig

from headstart import Features, SpeculativeModel, TreeShape, load_backbone
from headstart.cli.main import main
from headstart.heads.eagle3 import Eagle3
from headstart.heads.layers import draft_cache as node_slots
from headstart.heads.layers.cached_layers import CachedLayer
from headstart.heads.layers.decoder_layer import DecoderLayer, Rotary
from headstart.heads.layers.draft_cache import DraftCache, NodeSlots, past_mask
from headstart.heads.layers.rows import STEP
from headstart.inference.contract import chain, part, ragged

LIMITS = [(8, 4), (3, 1), (5, 0), (1, 2)]
each_limit = pytest.mark.parametrize("window,sink", LIMITS)


def made(window: int | None = None, sink: int = 4, **arguments: Any) -> Eagle3:
    drafter = random_drafter("eagle3", backbone("shallow"), **arguments)
    assert isinstance(drafter, Eagle3)
    drafter.limit(window, sink)
    return drafter


def masked(monkeypatch: pytest.MonkeyPatch, window: int, sink: int) -> Eagle3:
    """The reference: stores everything, and masks all positions outside the window."""

    def see(cache: DraftCache) -> Tensor:
        place_S = torch.arange(cache.slots)
        return past_mask(cache) & ((place_S < sink) | (place_S >= cache.lengths_B[:, None] - window))

    monkeypatch.setattr(node_slots, "past_mask", see)
    return made()


def both(monkeypatch: pytest.MonkeyPatch, window: int, sink: int, drafting: Any) -> None:
    """``drafting`` gives the same with a window as with the reference."""
    actual = drafting(made(window, sink))
    with monkeypatch.context() as patched:
        expected = drafting(masked(patched, window, sink))
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@each_limit
@pytest.mark.matrix
@pytest.mark.parametrize("cuts", [[], [9], [12, 13, 30], list(range(1, 40)), list(range(3, 40, 3)), [2, 38]], ids=str)
def test_a_window_is_a_mask(window: int, sink: int, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences in any pieces, longer and shorter than the ring, with drafting in between: true positions, the right keys and values."""

    def drafting(drafter: Eagle3) -> list[Tensor]:
        features, state, out = read(backbone("shallow"), texts(2, 40), drafter), None, []
        for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
            state = drafter.begin(part(features, start, end), drafter.reserve(state, end + 20) if state is not None else None)
            state = drafter.reserve(state, end + 20)
            out += chain(drafter, state, texts(2, drafter.depth, seed=end))
        return out

    both(monkeypatch, window, sink, drafting)


@each_limit
def test_ragged_rows(window: int, sink: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding overwrites nothing visible; some rows get nothing, or more than the ring holds."""

    def drafting(drafter: Eagle3) -> list[Tensor]:
        features, out = read(backbone("shallow"), texts(4, 60), drafter), []
        ends = torch.tensor([9, 1, 14, 30])
        state = drafter.begin(ragged(features, ends.tolist()))
        for brought in ([3, 5, 0, 1], [0, 1, 20, 2], [1, 1, 1, 1], [30, 0, 2, 5]):
            place_BT = torch.arange(max(brought))
            new = features.gather((ends[:, None] + place_BT).clamp(max=59), place_BT < torch.tensor(brought)[:, None])
            state = drafter.begin(new, drafter.reserve(state, 80))
            ends += torch.tensor(brought)
            out += chain(drafter, state, texts(4, drafter.depth, seed=5))
        return out

    both(monkeypatch, window, sink, drafting)


@each_limit
def test_trees_rows_that_leave_and_rows_that_join(window: int, sink: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def drafting(drafter: Eagle3) -> list[Tensor]:
        features = read(backbone("shallow"), texts(5, 33), drafter)
        first = drafter.select(drafter.begin(ragged(features.rows(torch.arange(3)), [21, 4, 12])), torch.tensor([2, 0]))
        state = drafter.join(first, drafter.begin(part(features.rows(torch.tensor([3, 4])), 0, 33)))
        state = drafter.reserve(state, 64)
        out, N, make = [], 6, torch.Generator().manual_seed(3)
        for k in range(drafter.depth):
            tokens_BN = torch.randint(VOCAB, (4, 1 if k == 0 else N), generator=make)
            parents_BN = torch.randint(N if k > 1 else 1, tokens_BN.shape, generator=make)
            hidden, state = drafter.step(state, tokens_BN, parents_BN, k)
            out.append(hidden)
        return out

    both(monkeypatch, window, sink, drafting)


def test_a_sliding_window_of_the_heads_own() -> None:
    """`limit` narrows it, and is undone by None."""
    drafter = made(layers=2, sliding_window=10)
    features = read(backbone("shallow"), texts(2, 200), drafter)
    next_BK, drafts = texts(2, drafter.depth, seed=5), []
    for window in (None, 20, 6, None):
        drafter.limit(window)
        state = drafter.begin(features)
        slots = [cache.ring.slots for cache in state.caches if cache.ring is not None]
        assert slots == [min(window or 10, 10)] * 2 and {cache.keys_BGSC.shape[2] for cache in state.caches} == {STEP}
        drafts.append(chain(drafter, state, next_BK))
    assert all(map(torch.equal, drafts[0], drafts[1])) and all(map(torch.equal, drafts[0], drafts[3]))
    assert not any(map(torch.equal, drafts[0], drafts[2]))


def test_what_lies_outside_the_window_is_never_computed() -> None:
    drafter = made(10, 4)
    features, next_BK = read(backbone("shallow"), texts(2, 200), drafter), texts(2, drafter.depth, seed=5)
    assert features.taps is not None
    gone = {tap: torch.cat([x[:, :4], torch.full_like(x[:, 4:-11], torch.nan), x[:, -11:]], 1) for tap, x in features.taps.items()}
    states = [drafter.begin(one) for one in (features, replace(features, taps=gone))]
    assert all(map(torch.equal, *(chain(drafter, state, next_BK) for state in states)))
    assert states[0].caches[0].keys_BGSC.shape[2] == STEP


@pytest.mark.parametrize(
    "kind,window,sink,arguments",
    [("eagle3", 3, 1, {}), ("eagle3", None, 4, {"layers": 2, "sliding_window": 6}), ("mtp", 6, 2, {}), ("mtp", 6, 2, {"shared": False})],
)
def test_rows_leave_and_join_in_the_loop(kind: str, window: int | None, sink: int, arguments: dict[str, Any]) -> None:
    """Of three rows two at a time, offloaded or not, in fixed and adaptive trees."""
    drafter, rows = random_drafter(kind, backbone("shallow"), **arguments), left_padded(prompts((9, 1, 34)))
    of = SpeculativeModel(backbone("shallow"), drafter, capture="off")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
    plain = say(of, rows, speculate=False, **options)
    for offload, tree in ((False, "auto"), (True, TreeShape(12, 4))):
        of.limit(window=window, sink=sink, offload=offload)
        assert torch.equal(say(of, rows, tree=tree, batch_size=2, **options), plain), tree


def test_slots_of_a_long_pause_are_freed() -> None:
    drafter = made(10, 2)
    features = read(backbone("shallow"), texts(1, 250), drafter)
    state = drafter.reserve(drafter.begin(part(features, 0, 5)), 260)  # 245 more positions, unknown to the store
    state = drafter.begin(part(features, 5, 250), state)
    assert drafter.reserve(state, 260).caches[0].keys_BGSC.shape[2] == STEP


def test_an_offloaded_store_drafts_on_a_copy() -> None:
    """The meta device stands for the device that drafts."""
    drafter = made(5)
    features = read(backbone("shallow"), texts(2, 9), drafter)
    store = drafter.begin(Features(features.tokens_BT, features.hidden_BTD, features.taps)).caches[0]
    elsewhere = replace(store, lengths_B=store.lengths_B.to("meta"))
    copy = elsewhere.on_device()
    assert copy.keys_BGSC.device.type == copy.values_BGSC.device.type == "meta" and copy.on_device() is copy
    assert copy.at_home().keys_BGSC is store.keys_BGSC and copy.at_home().values_BGSC is store.values_BGSC and copy.at_home().home is None
    assert store.on_device() is store


def test_what_cannot_be_limited_says_so() -> None:
    on = backbone("shallow")
    for of, arguments, named in (
        (SpeculativeModel(on, random_drafter("medusa", on)), {"window": 5}, "Medusa has no KV cache"),
        (SpeculativeModel(on), {"window": 5}, "there are none"),
        (SpeculativeModel(on, made()), {"window": 0}, "limit.window .* at least 1"),
        (SpeculativeModel(on, made()), {"window": 5, "sink": -1}, "limit.sink .* at least 0"),
    ):
        refuses(named, of.limit, **arguments)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = load_backbone("embedded")
    for kind in ("eagle3", "medusa"):
        random_drafter(kind, on, depth=2).save_pretrained(tmp_path / kind)
    limits = ["--draft-window", "4", "--num-sink-tokens", "1", "--offload-draft-kv"]
    (tmp_path / "prompts.jsonl").write_text('{"text": "def f(x):"}\n')
    bench = ["bench", "--heads", str(tmp_path / "eagle3"), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--json"]
    assert main([*bench, str(tmp_path / "report.json"), *limits]) == 0
    (row,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert row["draft_limits"] == {"window": 4, "sink": 1, "offload": True} and row["identical"]
    capsys.readouterr()
    for heads, more, said in (
        ("eagle3", limits[2:4], "--num-sink-tokens 1 needs --draft-window N"),
        ("medusa", limits[:2], "Medusa has no KV cache"),
    ):
        assert said in error_of(capsys, "generate", "--heads", tmp_path / heads, "def f(x):", *more)


LENGTHS = (6, 1, 9)
CONFIG = LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4)


def test_hidden_nodes_are_not_attended_to_from_below() -> None:
    one = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    cache = replace(DraftCache.empty(torch.zeros(len(LENGTHS)), (2, 24, 4), Rotary(CONFIG), None, False), lengths_B=torch.tensor(LENGTHS))
    hidden_B = torch.tensor([True, False, True])
    root = NodeSlots.below(cache, None, one, 0, None)
    child = NodeSlots.below(cache, root.hidden(hidden_B), one, 1, None)

    def sees(nodes: NodeSlots, slots_BN: Tensor) -> list[bool]:
        return (nodes.mask_BNS.gather(2, slots_BN[..., None]) == 0).flatten().tolist()

    assert sees(root, root.slots_BN) == [True] * 3 and sees(child, child.slots_BN) == [True] * 3
    assert sees(child, root.slots_BN) == [False, True, False]
    assert (child.mask_BNS == 0).sum(-1).flatten().tolist() == [6 + 1, 1 + 2, 9 + 1]


# A decoder layer with its cache gives, at new positions, what causal attention gives.


@pytest.fixture
def cached() -> CachedLayer:
    torch.manual_seed(0)
    return CachedLayer(DecoderLayer(CONFIG).requires_grad_(False), Rotary(CONFIG))


@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1,) * 9])
@pytest.mark.parametrize("window", [None, 8, 3])
def test_new_positions_attend_to_the_kept_ones_before_them(cached: CachedLayer, pieces: tuple[int, ...], window: int | None) -> None:
    """The outputs at new positions are the causal layer's; with a short window, over the positions that it keeps at the end of a piece."""
    cached.limit(window, sink=2)
    state_BTD, start = torch.randn(len(LENGTHS), max(LENGTHS), CONFIG.hidden_size), 0
    lengths_B = torch.tensor(LENGTHS)
    cache = cached.empty(torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)).reserve(max(LENGTHS) + 4)
    for count in pieces:
        counts_B = (lengths_B - start).clamp(min=0, max=count)
        offsets_BT = cached.kept_offsets(cache, count, counts_B)
        places_BT = start + offsets_BT
        piece_BTD = state_BTD[torch.arange(len(LENGTHS))[:, None], places_BT.clamp(max=max(LENGTHS) - 1)]
        x_BTX = cached.layer.inputs(piece_BTD)
        cache = cached.extend(cache, x_BTX, offsets_BT, counts_B)
        output_BTD = cached.attend_new(cache, x_BTX, piece_BTD, offsets_BT, counts_B)
        assert output_BTD.isfinite().all()
        for b, t in ((b, t) for b in range(len(LENGTHS)) for t in range(places_BT.shape[1]) if offsets_BT[b, t] < counts_B[b]):
            place, end = int(places_BT[b, t]), start + int(counts_B[b])
            kept = [p for p in range(place + 1) if window is None or p < 2 or p >= end - window]
            if place in kept:
                torch.testing.assert_close(output_BTD[b, t], alone(cached, state_BTD[b], kept))
        start += count


def alone(cached: CachedLayer, state_TD: Tensor, kept: list[int]) -> Tensor:
    """The output at the last of these positions of one sequence, attending to all of them."""
    cos, sin = cached.rotary.table(len(state_TD), state_TD.device)
    rotation = cos[kept][None, None], sin[kept][None, None]
    x_1TD = cached.layer.inputs(state_TD[None, kept])
    mask_1TT = torch.ones(1, len(kept), len(kept), dtype=torch.bool)
    query, *past = cached.layer.self_attn.project(x_1TD, rotation)
    return cached.layer.attend(query, state_TD[None, kept], x_1TD, tuple(past), mask_1TT)[0, -1]
