"""Muon combined with AdamW: torch's two optimizers on the right parameters."""

import copy

import pytest
import torch
from families import backbone, tiny
from torch import nn

from headstart import Backbone, Drafter
from headstart.heads.methods import build_drafter, methods
from headstart.training.recipe.recipe import Train
from headstart.training.run.optimizer import Muon, MuonAdamW, build_optimizer, learning_rate, orthogonal

MUON = Train(steps=9, optimizer="muon", lr=1e-2, weight_decay=0.1)


def pull(drafter: Drafter, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Take steps along gradients that depend on the weights and a seed."""
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


def test_it_is_torchs_own_but_for_rounding() -> None:
    """torch's Muon rounds to bf16 internally; ours does not on a CPU."""
    ours = build_drafter("eagle3", backbone("llama"), {"depth": 2, "fc_norm": True})
    start, reference = dict(copy.deepcopy(ours).named_parameters()), copy.deepcopy(ours)
    optimizer = build_optimizer(ours, MUON)
    names = {id(p): name for name, p in ours.named_parameters()}
    muon, adamw = ([reference.get_parameter(names[id(p)]) for p in group["params"]] for group in optimizer.param_groups)
    parts = (
        torch.optim.Muon(muon, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    )
    pull(ours, optimizer, 3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter in reference.parameters():
            parameter.grad = parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=draw)
        for part in parts:
            part.step()
    by_adamw = {names[id(p)] for p in optimizer.param_groups[1]["params"]}
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b) if name in by_adamw else (a - b).norm() < 0.02 * (b - start[name]).norm(), name
    assert by_adamw and len(by_adamw) < len(names)


@pytest.mark.parametrize("shape", [(48, 128), (128, 48), (12, 12), (1, 5)])
def test_orthogonal_by_the_gram_matrix_is_the_iteration(shape: tuple[int, int]) -> None:
    """Also where most singular values are small."""
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)
    small = torch.logspace(0, -4, shape[1], dtype=torch.float64)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * small
    expected = matrix / matrix.norm()
    for _ in range(5):
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    assert (orthogonal(matrix.float(), coefficients, 5, 1e-7) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_fusion_of_the_taps_steps_as_if_they_had_unit_size(kind: str) -> None:
    model = Backbone(tiny("llama"))
    with torch.no_grad():
        model.model.get_input_embeddings().weight *= 4096
    drafter = build_drafter(kind, model, {"depth": 2, "taps": [1, 2, 4]})
    weight = drafter.fc.weight  # type: ignore[attr-defined]
    [(name, sizes)] = drafter.input_sizes().items()
    assert name == "fc.weight" and len(sizes) == 3 and min(sizes) > 16 and {*sizes} <= {2.0**n for n in range(30)}
    train = Train(steps=9, optimizer="muon", lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(drafter, train)
    sizes_N = torch.tensor(sizes).repeat_interleave(model.dim)
    of_unit_size = nn.Parameter(weight.detach() * sizes_N)
    alone = Muon([of_unit_size], lr=train.peak_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        of_unit_size.grad = weight.grad / sizes_N
        optimizer.step()
        alone.step()
    assert torch.equal(weight, of_unit_size / sizes_N)


def test_only_what_reads_taps_of_a_frozen_backbone_has_input_sizes() -> None:
    model = Backbone(tiny("llama"))
    assert build_drafter("eagle3", model, {"depth": 2, "fc_norm": True}).input_sizes() == {}, "normed taps have unit size"
    drafter = build_drafter("eagle3", model, {"depth": 2})
    model.trainable = {"": nn.Parameter(torch.zeros(()))}
    assert {*drafter.input_sizes()["fc.weight"]} == {1.0}, "the taps of a backbone that is trained change"


def test_wsd_is_constant_and_then_decays() -> None:
    wanted = Train(lr=2.0, warmup_ratio=0.1, schedule="wsd", decay_ratio=0.3, min_lr_ratio=0.1)
    rates = [learning_rate(step, 1000, wanted) / 2.0 for step in range(1, 1001)]
    assert rates[49] == pytest.approx(0.5) and set(rates[99:701]) == {1.0}  # step 701 is the first to decay
    assert rates[850] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1 + 0.9 / 300)
    assert all(before > after for before, after in zip(rates[700:], rates[701:], strict=False))
    assert learning_rate(1, 1, Train(lr=2.0, schedule="wsd", warmup_ratio=0.0)) == 2.0  # too short for a decay
