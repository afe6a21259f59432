"""DSpark's confidence head (`drafter.confidence`): what it learns and leaves alone, what engines are told, and heads of others with one.

Shape suffixes: B batch, T positions, D width, M drafts.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
import torch.nn.functional as F
from errors import refusal
from exported import make_home
from families import backbone, random_drafter
from foreign import write
from guess import batch, small_backbone
from small_run import make_recipe, train_once

from headstart import Backbone, load, load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.methods import build_drafter
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import read_files
from headstart.serving.reading import build, layout_of
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.objective import Sums, objective
from headstart.training.recipe.recipe import Objective, Train
from headstart.training.run.optimizer import build_optimizer

WANTED = Objective(terms={"kl": 1.0}, depth_weights="geometric", depth_decay=0.7, chunk_size=5)


@pytest.fixture(scope="module")
def small() -> Backbone:
    return small_backbone()


def drafted(on: Backbone, confidence: bool) -> tuple[Any, Any, list[torch.Tensor], Sums]:
    """A drafter with random corrections, a batch, its hidden states and the sums of its loss, whose gradients are there."""
    torch.manual_seed(3)
    arguments = {"depth": 3, "correction_rank": 4, "layers": 1}
    plain: Any = build_drafter("block", on, arguments).double()
    torch.nn.init.normal_(plain.markov_head.markov_w2.weight)
    drafter: Any = build_drafter("block", on, {**arguments, "confidence": confidence}).double()
    drafter.load_state_dict(plain.state_dict(), strict=False)
    if confidence:
        torch.nn.init.normal_(drafter.confidence_head.proj.weight)
    tokens = batch(on)
    features = replace(on.read(tokens.tokens_BT, taps=drafter.taps), loss_mask_BT=tokens.loss_mask_BT, document_BT=tokens.document_BT)
    hidden = drafter(features)
    sums = objective(FusedLoss(WANTED, drafter), features, hidden)
    sums.loss.backward()
    return drafter, features, hidden, sums


def test_it_learns_acceptance_and_changes_nothing_else(small: Backbone) -> None:
    """The loss has the cross-entropy with the acceptance rates besides; other weights have the gradients that they have without."""
    plain, _, _, without = drafted(small, False)
    drafter, features, hidden, sums = drafted(small, True)
    right = torch.zeros((), dtype=torch.float64)
    layer = drafter.confidence_head.proj
    weight, bias = (parameter.detach().clone().requires_grad_() for parameter in (layer.weight, layer.bias))
    for k, hidden_BTD in enumerate(hidden):
        for b, t in [(b, t) for b in range(len(hidden_BTD)) for t in range(hidden_BTD.shape[1])]:
            to, document = t + 2 + k, features.document_BT[b]
            if not features.loss_mask_BT[b, to] or not document[t] == document[to] != -1:
                continue
            parent = features.tokens_BT[b, to - 1]
            q = drafter.readout(hidden_BTD[b, t][None], k, parent[None])[0].softmax(-1)
            alpha = torch.minimum(drafter.backbone.readout(features.hidden_BTD[b, to - 1]).softmax(-1), q).sum().detach()
            read = torch.cat([hidden_BTD[b, t], drafter.markov_head.markov_w1.weight[parent]]).detach()
            right = right + WANTED.depth_decay**k * F.binary_cross_entropy_with_logits(weight[0] @ read + bias[0], alpha)
    right.backward()
    torch.testing.assert_close(sums.loss - without.loss, right)
    torch.testing.assert_close([layer.weight.grad, layer.bias.grad], [weight.grad, bias.grad])
    others = {name: parameter.grad for name, parameter in drafter.named_parameters() if not name.startswith("confidence_head.")}
    torch.testing.assert_close(others, {name: parameter.grad for name, parameter in plain.named_parameters()})


def test_it_learns_which_drafts_are_accepted(small: Backbone) -> None:
    """Alone on one batch, it comes to estimate the acceptance rates better than any one number."""
    drafter, features, _, _ = drafted(small, True)
    optimizer = torch.optim.Adam(drafter.confidence_head.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        objective(FusedLoss(WANTED, drafter), features, drafter(features)).loss.backward()
        optimizer.step()
    learned_BT = (
        features.loss_mask_BT[:, 2:] & (features.document_BT[:, 2:] == features.document_BT[:, :-2]) & (features.document_BT[:, 2:] >= 0)
    )
    with torch.no_grad():
        hidden_MD, parents_M = drafter(features)[0][learned_BT], features.tokens_BT[:, 1:-1][learned_BT]
        p = drafter.backbone.readout(features.hidden_BTD[:, 1:-1][learned_BT]).softmax(-1)
        alpha_M = torch.minimum(p, drafter.readout(hidden_MD, 0, parents_M).softmax(-1)).sum(-1)
        missed_M = alpha_M - drafter.confidence(hidden_MD, parents_M).sigmoid()
    assert missed_M.square().mean() < 0.8 * alpha_M.var()


def test_a_run_trains_it(tmp_path: Path) -> None:
    drafter = {"kind": "block", "depth": 3, "layers": 1, "correction_rank": 8, "confidence": True}
    folder = train_once(make_recipe(tmp_path, drafter=drafter))
    found: Any = load_drafter(folder / "out", load_backbone(str(folder / "backbone"), device="cpu"))
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["enable_confidence_head"] is config["confidence_head_with_markov"] is True
    assert found.confidence_head.proj.weight.any() and found.confidence_head.proj.bias.any()


def test_heads_without_one_get_it_by_further_training(tmp_path: Path) -> None:
    old = random_drafter("block", backbone("llama"), depth=3, layers=1, correction_rank=4)
    old.save_pretrained(tmp_path / "old")
    new = build_drafter("block", backbone("llama"), {"depth": 3, "layers": 1, "correction_rank": 4, "confidence": True})
    assert {name for name in new.tensors() if name not in old.tensors()} == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert all(name.startswith(type(new).added) for name in new.tensors().keys() - old.tensors().keys())  # type: ignore[attr-defined]
    assert not any(tensor.any() for name, tensor in new.tensors().items() if name.startswith("confidence_head."))
    matrices = build_optimizer(new, Train(steps=9, optimizer="muon", lr=1e-2)).param_groups[0]["params"]
    assert not any(len(matrix) == 1 for matrix in matrices), "one row is no matrix to orthogonalise"


@pytest.mark.parametrize("to", ["sglang", "speculators"])
def test_engines_are_told(tmp_path: Path, to: str) -> None:
    on = backbone("llama")
    on.model.save_pretrained(tmp_path / "backbone")
    on = load_backbone(str(tmp_path / "backbone"))
    random_drafter("block", on, depth=3, layers=1, correction_rank=4, confidence=True).save_pretrained(tmp_path / "heads")
    export(Request(str(tmp_path / "heads"), to, tmp_path / "out"))
    files = read_files(str(tmp_path / "out"))
    assert files.config["enable_confidence_head"] is files.config["confidence_head_with_markov"] is True
    assert files.shapes["confidence_head.proj.weight"] == (1, on.dim + 4) and files.shapes["confidence_head.proj.bias"] == (1,)
    read, heads = layout_of(files).parse(files, on).readings()[0], load(tmp_path / "heads", on).drafter
    assert heads is not None and read.arguments["confidence"] is True
    assert all(torch.equal(tensor, heads.tensors()[name]) for name, tensor in build(read, on, "out").tensors().items())


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A backbone of the sizes of foreign heads."""
    return load_backbone(str(make_home(tmp_path_factory.mktemp("home"), kinds=()) / "backbone"))


@pytest.mark.parametrize("inputs", ["hidden", "hidden and parent", "other"])
def test_heads_of_others(on: Backbone, tmp_path: Path, inputs: str) -> None:
    """One that reads the hidden state alone has zeros for the parent's row; another form is left out with a note."""
    config, tensors = foreign.block("dspark")
    rank, D = tensors["markov_head.markov_w1.weight"].shape[-1], on.dim
    width = {"hidden": D, "hidden and parent": D + rank, "other": D + 1}[inputs]
    weight_1N = torch.randn(1, width)
    files = read_files(str(write(tmp_path / "theirs", config, tensors | {"confidence_head.proj.weight": weight_1N})))
    (heads,) = layout_of(files).parse(files, on).readings()
    drafter: Any = build(heads, on, "theirs")
    assert drafter.config.confidence is (inputs != "other")
    assert [note for note in heads.notes if "the confidence head is left out" in note] == [*heads.notes][: inputs == "other"]
    if inputs != "other":
        hidden_MD, tokens_M = torch.randn(5, D), torch.arange(5)
        read_MN = torch.cat([hidden_MD, tensors["markov_head.markov_w1.weight"][tokens_M]], 1)[:, :width]
        expected_M = read_MN @ weight_1N[0] + tensors["confidence_head.proj.bias"]
        torch.testing.assert_close(drafter.confidence(hidden_MD, tokens_M), expected_M)


@pytest.mark.parametrize("correction", ["none", "selector", "recurrent"])
def test_other_corrections_have_none(correction: str) -> None:
    words = refusal(build_drafter, "block", backbone("llama"), {"correction": correction, "confidence": True})
    assert f"drafter.confidence=true is of drafter.correction=markov; got {correction}" in words
