"""Shortlists of drafters' output layers: what is exact, which subspace is found, files, and the same text with them.

Shape suffixes: M states, D width, V tokens, R rank.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import output_of, refuses
from families import backbone, random_drafter, read, texts
from small_run import make_recipe, train_once
from torch import Tensor, nn

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.heads.methods import build_drafter, find_drafter, methods
from headstart.heads.own_readout import SHORTLIST, OwnReadoutDrafter, Shortlist, find_subspace

KINDS = [kind for kind in methods() if issubclass(find_drafter(kind), OwnReadoutDrafter)]


def made(kind: str, **arguments: Any) -> OwnReadoutDrafter:
    drafter = random_drafter(kind, backbone("llama"), **arguments)
    assert isinstance(drafter, OwnReadoutDrafter)
    return drafter


def test_the_subspace_is_that_of_the_states() -> None:
    """States of few dimensions, which are small in the weights, are scored well; the largest directions of the weights miss them."""
    D, V, R, generator = 32, 500, 6, torch.Generator().manual_seed(0)
    sizes_D = torch.linspace(3, 0.1, D)
    weight_VD = torch.randn(V, D, generator=generator) * sizes_D + 5
    states_MD = torch.zeros(400, D)
    states_MD[:, -R:] = torch.randn(400, R, generator=generator)

    def missed(down_RD: Tensor, basis_DR: Tensor) -> float:
        logits_MV, low_MV = states_MD @ weight_VD.T, states_MD @ down_RD.T @ basis_DR.T @ (weight_VD - weight_VD.mean(0)).T
        rest_MV = (logits_MV - low_MV) - (logits_MV - low_MV).mean(1, keepdim=True)
        return float(rest_MV.norm() / (logits_MV - logits_MV.mean(1, keepdim=True)).norm())

    own_DR = torch.linalg.svd(weight_VD - weight_VD.mean(0), full_matrices=False).Vh[:R].T
    assert missed(*find_subspace(weight_VD, states_MD.T @ states_MD, R)) < 0.01 < 0.9 < missed(own_DR.T, own_DR)


def test_the_best_tokens_logits_are_exact() -> None:
    layer, states_MD = nn.Linear(16, 300), torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    shortlist = Shortlist(layer, *find_subspace(layer.weight.detach(), states_MD.T @ states_MD, 3), 10)
    with torch.no_grad():
        exact_MV, found_MV = layer(states_MD), shortlist(states_MD, layer)
    close_MV = torch.isclose(exact_MV, found_MV, atol=1e-5)
    assert (close_MV.sum(1) >= 10).all() and close_MV.sum(1).float().mean() < 30
    low_MV = states_MD @ shortlist.down_SD.T @ shortlist.up_VS.T + layer.bias
    assert close_MV.gather(1, low_MV.topk(10).indices).all()


@pytest.mark.parametrize("kind", KINDS)
def test_of_full_rank_it_is_the_readout(kind: str) -> None:
    """Every kind with output layers of its own, at every depth."""
    drafter = made(kind, depth=2, shortlist={"rank": backbone("llama").dim, "candidates": 1})
    drafter.fit_shortlists(read(drafter.backbone, texts(2, 40, seed), drafter) for seed in range(4))
    assert len(drafter.shortlists) == len(drafter.readouts())
    features = read(drafter.backbone, texts(2, 30, 9), drafter)
    with torch.no_grad():
        for depth, hidden_BTD in enumerate(drafter.forward(features)):
            exact = drafter.readout(hidden_BTD, depth)
            assert not torch.equal(drafter.draft_logits(hidden_BTD, depth), exact)
            torch.testing.assert_close(drafter.draft_logits(hidden_BTD, depth), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_texts_without_labels_give_none() -> None:
    drafter = made("medusa", shortlist={"rank": 4, "candidates": 8})
    drafter.fit_shortlists(iter(()))
    assert not drafter.shortlists and list(np.load(io.BytesIO(drafter.engine_files()[SHORTLIST])).files) == []


@pytest.mark.parametrize("given,said", [
    ({"rank": 10_000}, r"drafter.shortlist.rank is at most \d+, the width of the backbone; got 10000: lower it"),
    ({"rank": 4, "candidates": 10_000}, r"drafter.shortlist.candidates is at most \d+, the draft vocabulary; got 10000: lower it"),
])  # fmt: skip
def test_sizes_that_do_not_fit(given: dict[str, int], said: str) -> None:
    refuses(said, build_drafter, "medusa", backbone("llama"), {"shortlist": given})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a shortlist, which was saved at half of its steps too."""
    drafter = {"kind": "eagle3", "depth": 2, "draft_vocab_size": 64, "shortlist": {"rank": 8, "candidates": 8}}
    train = {"steps": 12, "batch_size": 4, "lr": 3e-3, "schedule": "constant"}
    return train_once(make_recipe(tmp_path_factory.mktemp("shortlist"), drafter=drafter, train=train))


def test_a_run_ends_with_a_shortlist(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is beside the weights, which engines load as ever, and a resumed run ends with the same one; it changes no text."""
    out = trained / "out"
    on = load_backbone(str(trained / "backbone"), device="cpu")
    drafter = load_drafter(out, on)
    assert isinstance(drafter, OwnReadoutDrafter) and drafter.shortlists[0].up_VS.shape == (64, 9)  # type: ignore[union-attr]
    assert not [name for name in drafter.tensors() if "shortlist" in name]
    for steps in (6, 12):
        assert main(["train", str(trained / "recipe.yaml"), f"save.dir={tmp_path}/parts", f"train.steps={steps}"]) == 0
    assert (tmp_path / "parts" / SHORTLIST).read_bytes() == (out / SHORTLIST).read_bytes()
    drafter.shortlists = nn.ModuleList()  # as in the middle of a training
    drafter.save_pretrained(tmp_path / "parts")
    again = load_drafter(tmp_path / "parts", on)
    assert isinstance(again, OwnReadoutDrafter) and not again.shortlists, "the subspace of earlier weights is gone"
    command = ["generate", "the cat", "--raw", "--heads", str(out), "--backbone", str(trained / "backbone"), "--max-new-tokens", "24"]
    texts_of = []
    for more in ([], ["--no-draft"], ["--temperature", "1", "--seed", "3"], ["--temperature", "1", "--seed", "3", "--no-draft"]):
        capsys.readouterr()
        texts_of.append(output_of(capsys, *command, *more))
    assert texts_of[0] == texts_of[1] != texts_of[2] == texts_of[3]


def test_a_damaged_file_is_one_line(trained: Path, tmp_path: Path) -> None:
    on, out = load_backbone(str(trained / "backbone"), device="cpu"), trained / "out"
    whole = (out / SHORTLIST).read_bytes()
    np.savez(other := io.BytesIO(), down_RD_0=np.zeros((3, 16)), basis_DR_0=np.zeros((16, 3)))
    try:
        for damaged in (whole[:100], b"", other.getvalue()):
            (out / SHORTLIST).write_bytes(damaged)
            refuses(f"{SHORTLIST} is damaged: it does not hold a subspace of rank 8 .* delete it, or train again", load_drafter, out, on)
        (out / SHORTLIST).unlink()
        exact = load_drafter(out, on)
        assert isinstance(exact, OwnReadoutDrafter) and not exact.shortlists, "without the file all logits are exact"
    finally:
        (out / SHORTLIST).write_bytes(whole)
