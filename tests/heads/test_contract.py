"""The contract of every drafter on every family: training and decoding compute the same.

Shape suffixes: B batch, K depth.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DRAFTERS, FAMILIES, LAYERS, STRANGERS, VOCAB, backbone, random_drafter, read, texts, tiny
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart import Backbone, Drafter
from headstart.heads.checkpoint import load_drafter
from headstart.heads.methods import build_drafter
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.inference import contract
from headstart.inference.contract import chain, part

CLOSE = {"atol": 3e-5, "rtol": 1e-4}
OTHER_LAYER = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-2, "attention_bias": True}
VARIANTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in DRAFTERS + STRANGERS] + [
    ("eagle3", {"draft_vocab_size": 23}),
    ("eagle3", {"taps": [0, 1, 4, LAYERS], "depth": 3, "intermediate_size": 20}),
    ("eagle3", {"taps": [5], "norm_before_fc": True}),
    ("block", {"depth": 3, "layers": 2, "correction": "none"}),
    ("block", {"depth": 3, "layers": 2, "causal": True}),
    ("block", {"depth": 3, "layers": 2, "sliding_window": 6}),
    ("block", {"depth": 3, "layers": 1, "correction": "recurrent", "correction_rank": 6, "anchor_share": 1.0}),
    ("block", {"depth": 3, "layers": 2, "correction": "selector", "correction_rank": 6, "selector_candidates": 5}),
    ("block", {"depth": 3, "layers": 2, "correction": "selector", "convolution": True, "sliding_window": 6}),
    ("block", {"depth": 3, "layers": 2, "correction": "none", "convolution": True, "causal": True}),
    ("hydra", {"prefix_attention": False, "layers": 1, "draft_vocab_size": 23}),
    ("eagle3", {"layers": 2}),
    ("eagle3", {"norm_before_residual": True, "qk_norm": True, "layer": OTHER_LAYER}),
    ("eagle3", {"layers": 2, "sliding_window": 5}),
    ("eagle3", {"fc_norm": True, "norm_output": True, "sliding_window": 6}),
    ("eagle", {"depth": 3}),
    ("medusa", {"layers": 3, "depth": 2}),
    ("mtp", {"shared": False}),
    ("medusa", {"draft_vocab_size": 23}),
    ("mlp", {"tie_weights": True, "inner_dim": 20, "scale_input": False, "draft_vocab_size": 23}),
    ("draft_model", {"parallel": True, "depth": 4}),
    ("peagle", {"layers": 2, "depth": 3, "sliding_window": 6, "norm_before_fc": True, "draft_vocab_size": 23}),
    ("peagle", {"layers": 1, "depth": 4, "own_embedding": True, "norm_before_residual": True, "qk_norm": True, "layer": OTHER_LAYER}),
]
NAMES = [kind.rpartition(".")[2] + "".join(f"-{name}" for name in arguments) for kind, arguments in VARIANTS]
each_drafter = pytest.mark.parametrize("kind,arguments", VARIANTS, ids=NAMES)


def each_drafter_on_each_family(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.matrix(pytest.mark.parametrize("family", FAMILIES)(each_drafter(test)))


@functools.cache
def backbone_in_fp64(family: str) -> Backbone:
    return Backbone(tiny(family).double())


def made(family: str, kind: str, arguments: dict[str, Any], on_which: Callable[[str], Backbone] = backbone) -> tuple[Backbone, Drafter]:
    on = on_which(family)
    drafter = random_drafter(kind, on, **arguments).to(on.dtype)
    if drafter.vocabulary is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[: len(drafter.vocabulary)]
        assert isinstance(drafter, OwnReadoutDrafter)
        weights = [layer.weight.clone() for layer in drafter.output_layers()]
        drafter.use_vocabulary(ids)
        assert torch.equal(drafter.vocabulary, ids.sort().values)
        for layer, weight in zip(drafter.output_layers(), weights, strict=True):
            assert torch.equal(layer.weight, on.unembed.weight[drafter.vocabulary])
            layer.weight.copy_(weight)
    return on, drafter


@each_drafter_on_each_family
@pytest.mark.parametrize(
    "check", [contract.forward_is_begin_and_steps, contract.any_pieces, contract.independent_rows, contract.packed_documents]
)
def test_on_every_family(family: str, kind: str, arguments: dict[str, Any], check: Callable[[Drafter], None]) -> None:
    check(made(family, kind, arguments)[1])


@each_drafter_on_each_family
def test_a_tree_is_its_paths(family: str, kind: str, arguments: dict[str, Any]) -> None:
    """In fp64, since some heads amplify rounding: EAGLE-1 on Gemma-3 by up to 1e-4 in fp32."""
    contract.trees_are_paths(made(family, kind, arguments, backbone_in_fp64)[1])


@each_drafter
@pytest.mark.parametrize("check", [contract.short_texts, contract.every_weight_learns])
def test_on_one_family(kind: str, arguments: dict[str, Any], check: Callable[[Drafter], None]) -> None:
    check(made("llama", kind, arguments)[1])


RECOMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("draft_model", {"layers": 2}), ("eagle3", {"layers": 2}), ("hydra", {"depth": 2}), ("mtp", {}), ("mtp", {"shared": False}),
    ("peagle", {"layers": 2}),
]  # fmt: skip


@pytest.mark.parametrize("kind,arguments", RECOMPUTED, ids=str)
def test_recomputed_activations_give_the_same_gradients(kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made("llama", kind, arguments)
    drafter.requires_grad_(True).train()
    features, gradients = read(on, texts(2, 9), drafter), []
    for _ in range(2):
        drafter.zero_grad()
        sum(x.square().sum() for x in drafter(features)).backward()
        gradients.append({name: weight.grad for name, weight in drafter.named_parameters() if weight.grad is not None})
        drafter.recompute()
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 4
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.matrix("kind", cells=len(DRAFTERS))
@each_drafter
def test_drafting_far_past_the_first_buffers(kind: str, arguments: dict[str, Any]) -> None:
    on, drafter = made("llama", kind, arguments)
    features, next_BK = read(on, texts(1, 200), drafter), texts(1, drafter.depth, seed=5)
    state = drafter.begin(part(features, 0, 61))
    for end in range(62, 201, 3):
        chain(drafter, state, next_BK)
        state = drafter.begin(part(features, end - 1 if end == 62 else end - 3, end), drafter.reserve(state, end + 20))
    for one, other in zip(chain(drafter, state, next_BK), chain(drafter, drafter.begin(part(features, 0, 200)), next_BK), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@each_drafter_on_each_family
def test_saved_and_loaded_it_drafts_the_same(family: str, kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    on, drafter = made(family, kind, arguments)
    drafter.save_pretrained(tmp_path / "heads", {"note": "kept"})
    loaded = load_drafter(tmp_path / "heads", on)
    features, next_BK = read(on, texts(2, 9), drafter), texts(2, drafter.depth, seed=5)
    assert type(loaded) is type(drafter) and loaded.depth == drafter.depth
    assert (loaded.taps, loaded.arguments) == (drafter.taps, drafter.arguments)
    for one, other in zip(chain(drafter, drafter.begin(features), next_BK), chain(loaded, loaded.begin(features), next_BK), strict=True):
        assert torch.equal(one, other)
    assert not loaded.training and not any(weight.requires_grad for weight in loaded.parameters())
    if drafter.vocabulary is not None:
        assert loaded.vocabulary is not None and torch.equal(loaded.vocabulary, drafter.vocabulary)


# Heads compute on the backbone's device alone: without a GPU, the backbone's tensors are on the meta device, which computes shapes.

COPIES = ("copy_", "_to_copy", "slice_scatter")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices, as CUDA does; numbers and copies may come from anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1 and func._schema.name.removeprefix("aten::") not in COPIES:
            raise AssertionError(f"{func} on {', '.join(sorted(devices))}")
        return func(*args, **(kwargs or {}))


class Values(TorchFunctionMode):
    """Gives the values that are read from tensors, which the meta device does not have."""

    GIVEN: dict[Any, Callable[[Tensor], Any]] = {
        Tensor.item: lambda tensor: 1.0,
        Tensor.__bool__: lambda tensor: False,
        Tensor.tolist: lambda tensor: [0] * tensor.numel(),
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.GIVEN[func](*args) if func in self.GIVEN else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "draft_model"])  # a model of its own, loaded as backbones are
def test_heads_start_and_draft_there(kind: str) -> None:
    on = Backbone(tiny("shallow"))
    on.model.to("meta")
    with Values(), OneDevice(), torch.no_grad():
        drafter = build_drafter(kind, on, {})
        assert {weight.device.type for weight in drafter.state_dict().values()} == {"meta"}
        tokens_BT = torch.zeros(2, 9, dtype=torch.int64, device="meta")
        features = on.read(tokens_BT, taps=drafter.taps)
        if drafter.anchor_share == drafter.deeper_share == 1:
            drafter(features)
        state = drafter.begin(features, drafter.reserve(drafter.begin(features), 64))
        hidden, _ = drafter.step(state, tokens_BT[:, :1], tokens_BT[:, :1], 0)
        drafter.readout(hidden[:, :1], 0, tokens_BT[:, :1])


def test_what_mixes_devices_is_found() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="add_.* on cpu, meta"):
        torch.zeros(2, device="meta").add_(torch.ones(2))
    assert backbone("shallow").device.type == "cpu", "the shared backbone stays where it is"
