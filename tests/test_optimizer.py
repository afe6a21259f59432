"""Muon beside AdamW is torch's own two optimizers on the right parameters, and goes on from a saved state as if never stopped."""

import copy

import pytest
import torch
from families import backbone

from headstart.heads.base import Drafter, build_drafter, methods
from headstart.training.checkpoint import pack, unpack_drafter, unpack_optimizer
from headstart.training.optimizer import MuonAdamW, build_optimizer
from headstart.training.recipe import Train

MUON = Train(steps=9, optimizer="muon", lr=1e-2, weight_decay=0.1)


def pull(drafter: Drafter, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Steps along gradients that depend on the weights and a seed."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in drafter.parameters():
            parameter.grad = parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=draw)
        optimizer.step()


@pytest.mark.parametrize("kind", methods())
def test_vocabulary_tables_and_vectors_stay_with_adamw(kind: str) -> None:
    drafter = build_drafter(kind, backbone("llama"), {"depth": 2})
    optimizer = build_optimizer(drafter, MUON)
    assert isinstance(optimizer, MuonAdamW)
    by_muon = {id(p) for p in optimizer.param_groups[0]["params"]}
    vocab = backbone("llama").vocab
    for name, parameter in drafter.named_parameters():
        assert (id(parameter) in by_muon) == (parameter.ndim == 2 and vocab not in parameter.shape), name


def test_it_is_torchs_own() -> None:
    ours = build_drafter("eagle3", backbone("llama"), {"depth": 2})
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, MUON)
    names = {id(p): name for name, p in ours.named_parameters()}
    muon, adamw = ([theirs.get_parameter(names[id(p)]) for p in group["params"]] for group in optimizer.param_groups)
    parts = (
        torch.optim.Muon(muon, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    )
    pull(ours, optimizer, 3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter in theirs.parameters():
            parameter.grad = parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=draw)
        for part in parts:
            part.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_saved_state_goes_on_bit_for_bit(optimizer: str) -> None:
    train = Train(steps=9, optimizer=optimizer, lr=1e-2)
    straight = build_drafter("eagle3", backbone("llama"), {"depth": 2})
    stopped = copy.deepcopy(straight)
    whole, first = build_optimizer(straight, train), build_optimizer(stopped, train)
    pull(straight, whole, 3)
    pull(straight, whole, 3, seed=1)
    pull(stopped, first, 3)
    saved = pack(stopped, first)
    resumed = build_drafter("eagle3", backbone("llama"), {"depth": 2})
    second = build_optimizer(resumed, train)
    unpack_drafter(resumed, saved)
    unpack_optimizer(resumed, second, saved)
    pull(resumed, second, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), straight.parameters(), strict=True))
