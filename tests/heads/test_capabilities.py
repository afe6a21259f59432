"""Each capability that a drafter declares as a class attribute matches its behaviour.

Shape suffixes: B batch, T positions, K depth, D width, M anchors.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from errors import refuses
from families import VOCAB, backbone, left_padded, prompts, random_drafter, read, say, texts
from test_contract import CLOSE, each_drafter, made
from torch.utils._python_dispatch import TorchDispatchMode

from headstart import Backbone, Drafter, SpeculativeModel, TreeShape
from headstart.heads.backbone.features import Anchors, at_all_positions
from headstart.heads.methods import build_drafter, construct_drafter
from headstart.inference.contract import chain, part
from headstart.inference.early_exit import EarlyExit
from headstart.support.errors import UserError


def made_for(kind: str, arguments: dict[str, Any]) -> tuple[Backbone, Drafter]:
    return made("llama" if "taps" in arguments else "shallow", kind, arguments)


def sequential(kind: str, arguments: dict[str, Any]) -> None:
    """Changing one drafted token leaves the drafts before it, and changes its child's or none. (Deeper ones may depend on it or not.)"""
    on, drafter = made_for(kind, arguments)
    state, tokens_BK = drafter.begin(read(on, texts(2, 9), drafter)), texts(2, drafter.depth, seed=5)
    one = chain(drafter, state, tokens_BK)
    assert drafter.depth > 1
    for k in range(1, drafter.depth):  # the token at k is the parent of the draft of depth k
        changed_BK = tokens_BK.clone()
        changed_BK[:, k] = (changed_BK[:, k] + 1) % VOCAB
        other = chain(drafter, state, changed_BK)
        assert all(map(torch.equal, one[:k], other[:k])) and (not torch.equal(one[k], other[k])) == drafter.sequential, k
        assert drafter.sequential or all(map(torch.equal, one, other))


def reads_hidden(kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made_for(kind, arguments)
    features = read(on, texts(2, 12), drafter)
    blind = replace(features, hidden_BTD=torch.full_like(features.hidden_BTD, torch.nan))
    drafted = [*drafter(blind), *chain(drafter, drafter.begin(blind), texts(2, drafter.depth, seed=5))]
    assert {bool(one.isnan().any()) for one in drafted} == {drafter.reads_hidden}


def own_readout(kind: str, arguments: dict[str, Any]) -> None:
    """A drafter without a readout of its own uses the backbone's output layer, without trainable weights."""
    on, drafter = made_for(kind, arguments)
    drafter.requires_grad_(True)
    hidden, tokens = torch.randn_like(drafter(read(on, texts(2, 5), drafter))[0]), texts(2, 3)
    logits = drafter.readout(hidden, 0, tokens)
    assert logits.requires_grad == drafter.own_readout
    if not drafter.own_readout:
        assert drafter.vocabulary is None
        torch.testing.assert_close(logits, on.readout(hidden))


def all_depths_at_once(kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made_for(kind, arguments)
    state = drafter.reserve(drafter.begin(read(on, texts(2, 9), drafter)), 64)
    hidden, _ = drafter.step(state, texts(2, 1), torch.zeros(2, 1, dtype=torch.int64), 0)
    assert hidden.shape[:2] == (2, drafter.trained_depth if drafter.all_depths_at_once else 1)


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        return func(*args, **(kwargs or {}))


def capturable(kind: str, arguments: dict[str, Any]) -> None:
    """`begin` from a state and `step` read nothing on the host."""
    on, drafter = made_for(kind, arguments)
    assert drafter.capturable
    features, tokens_B1 = read(on, texts(2, 12), drafter), texts(2, 1)
    state = drafter.reserve(drafter.begin(part(features, 0, 9)), 64)
    with NoHostReads():
        state = drafter.begin(part(features, 9, 12), state)
        hidden, state = drafter.step(state, tokens_B1, torch.zeros_like(tokens_B1), 0)
        drafter.readout(hidden[:, :1], 0, tokens_B1)


def anchors(kind: str, arguments: dict[str, Any]) -> None:
    """Anchors at all positions equal the dense forward pass, in packed rows too; anchors are independent of each other."""
    on, drafter = made_for(kind, arguments)
    T = 18
    document_BT = torch.tensor([[0] * T, [0] * 6 + [1] * 6 + [-1] * 6])
    features = replace(read(on, texts(2, T), drafter), document_BT=document_BT)
    dense, at_all = drafter(features), drafter(features, at_all_positions(features.tokens_BT))
    few = Anchors(torch.tensor([1, 0, 1]), torch.tensor([7, 2, 1]))
    at_few = drafter(features, few)
    assert len(dense) == len(at_all) == len(at_few) == drafter.trained_depth
    for k, (dense_BTD, all_MD, few_MD) in enumerate(zip(dense, at_all, at_few, strict=True)):
        assert all_MD.shape == (2 * T, dense_BTD.shape[-1])
        torch.testing.assert_close(all_MD.unflatten(0, (2, T))[:, : T - 2 - k], dense_BTD, **CLOSE)
        torch.testing.assert_close(few_MD, dense_BTD[few.row_M, few.position_M], **CLOSE)
    assert 0 < drafter.anchor_share <= 1


def depth_drafted_is_not_depth_trained(kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made_for(kind, arguments)
    features, trained = read(on, texts(2, 9), drafter), drafter.trained_depth
    if drafter.max_depth is not None:
        refuses(f"cannot draft deeper than the {drafter.max_depth} tokens", drafter.set_depth, drafter.max_depth + 1)
        return
    tokens_BK = texts(2, trained + 2, seed=5)
    drafter.set_depth(trained + 2)
    deep = chain(drafter, drafter.begin(features), tokens_BK)
    assert len(deep) == drafter.depth == trained + 2 and all(bool(one.isfinite().all()) for one in deep)
    drafter.set_depth(None)
    assert drafter.depth == drafter.default_depth >= trained == len(drafter(features)) and drafter.deepest == 2 * drafter.depth


def test_trees_deeper_than_trained() -> None:
    """A fixed tree depth or `set_depth` may exceed the trained depth; the output does not change."""
    on, rows = backbone("shallow"), left_padded(prompts((9, 4)))
    drafter = random_drafter("eagle3", on, depth=2)
    levels: list[int] = []
    step = drafter.step
    drafter.step = lambda *inputs: levels.append(inputs[-1]) or step(*inputs)  # type: ignore[method-assign, func-returns-value]
    heads, options = SpeculativeModel(on, drafter, capture="off"), {"max_new_tokens": 12, "do_sample": True, "seed": 3}
    plain = say(heads, rows, speculate=False, **options)
    for tree, depth, deepest in ((TreeShape(12, 2, 5), None, 5), (TreeShape(12, 2), 4, 4), (TreeShape(12, 2), None, 2)):
        drafter.set_depth(depth)
        levels.clear()
        assert torch.equal(say(heads, rows, tree=tree, **options), plain) and max(levels) + 1 == deepest
    medusa = SpeculativeModel(on, random_drafter("medusa", on, depth=2))
    with pytest.raises(UserError, match="Medusa cannot draft deeper than the 2 tokens it is trained for; got depth 3"):
        say(medusa, rows, tree=TreeShape(12, 2, 3), **options)


def test_the_recipe_says_how_deep_is_drafted() -> None:
    on = backbone("shallow")
    assert build_drafter("eagle3", on, {"depth": 2, "draft_depth": 4}).depth == 4
    assert build_drafter("eagle3", on, {"depth": 2}).arguments.get("draft_depth") is None


def no_weight_has_a_number_before_it_is_set(kind: str, arguments: dict[str, Any]) -> None:
    on, _ = made_for(kind, arguments)
    shapes = construct_drafter(kind, on, arguments).state_dict()
    assert all(bool(tensor.isnan().all()) for tensor in shapes.values() if tensor.is_floating_point())
    fresh = build_drafter(kind, on, arguments).state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in fresh.values() if tensor.is_floating_point())


def test_init_from_that_forgets_a_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.heads.medusa.Medusa.init_from", lambda self, backbone: None)
    refuses("init_from of drafter medusa leaves weight heads.0.0.linear.weight of Medusa", build_drafter, "medusa", backbone("shallow"), {})


def test_early_exit_declares_the_same() -> None:
    on = backbone("shallow")
    early = EarlyExit(on, layers=2, depth=3)
    assert early.sequential and not early.reads_hidden and early.max_depth is None and early.uses_backbone_cache
    early.set_depth(7)
    assert early.depth == 7
    refuses("drafts without training; train another method, such as eagle3 or medusa", early, read(on, texts(1, 5), early))


@each_drafter
def test_what_it_declares_is_so(kind: str, arguments: dict[str, Any]) -> None:
    for check in (
        sequential, reads_hidden, own_readout, all_depths_at_once, capturable, anchors, depth_drafted_is_not_depth_trained,
        no_weight_has_a_number_before_it_is_set,
    ):  # fmt: skip
        check(kind, arguments)
