"""Optimizers and schedules: AdamW for all weights, or Muon for hidden matrices and AdamW for the rest.

Exponential moving average of the trained weights (``train.ema_decay``), used for evaluation and for the saved heads.

After step t the average moves towards the weights by ``1 - min(ema_decay, (1 + t) / (10 + t))``; early steps are large, so that the
initial weights are soon forgotten. It has the weights' dtype and is part of the saved state.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headstart.heads.base import Drafter
from headstart.heads.own_readout import OwnReadoutDrafter
from headstart.training.recipe.recipe import Train
from headstart.training.recipe.sections import Lora
from headstart.training.run.processes import distribute_like, gather_like, to_local


class Average:
    """Average of the named parameters ``trained``, which must stay the same objects during training."""

    def __init__(self, trained: Mapping[str, nn.Parameter], decay: float) -> None:
        self.trained, self.decay = {name: weight for name, weight in trained.items() if weight.requires_grad}, decay
        self.weights = {name: weight.detach().clone() for name, weight in self.trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimiser step ``step``, counted from 1."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, average in self.weights.items():
            to_local(average).lerp_(to_local(self.trained[name]), share)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load averaged weights; names must match exactly."""
        assert weights.keys() == self.weights.keys()
        for name, average in self.weights.items():
            average.copy_(distribute_like(weights[name], average))


@contextmanager
def in_place_of_weights(average: Average | None) -> Iterator[None]:
    """Swap the averaged weights into the parameters inside the context; without an average, do nothing."""
    _exchange(average)
    try:
        yield
    finally:
        _exchange(average)


def _exchange(average: Average | None) -> None:
    if average is not None:
        for name, values in average.weights.items():
            weight = average.trained[name]
            average.weights[name], weight.data = weight.data, values


def learning_rate(step: int, steps: int, train: Train) -> float:
    """Return the learning rate of optimiser step ``step`` (from 1): linear warm-up, then the schedule down to ``min_lr_ratio * lr``."""
    warmup = round(train.warmup_ratio * steps)
    if step <= warmup:
        return train.peak_lr * step / warmup
    if train.schedule == "constant":
        return train.peak_lr
    falling = round(train.decay_ratio * steps) if train.schedule == "wsd" else steps - warmup
    done = max(step - 1 - (steps - falling), 0) / max(falling, 1)  # from 0, so that the last step's rate is above the minimum
    left = (1 + math.cos(math.pi * min(done, 1.0))) / 2 if train.schedule == "cosine" else 1 - done
    return train.peak_lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * max(left, 0.0))


def adapter_rise(step: int, steps: int, lora: Lora) -> float:
    """Return the factor of the adapter's learning rate and of the heads' loss at step ``step`` (from 1) of joint training.

    0 while the heads are trained alone, then a quarter sine wave up to 1 (Medusa-2, 2401.10774 section 2.2.2).
    """
    warmup, ramp = round(lora.warmup_ratio * steps), round(lora.ramp_ratio * steps)
    if step <= warmup:
        return 0.0
    return math.sin(math.pi / 2 * min((step - warmup) / (ramp + 1), 1.0))


class Muon(torch.optim.Muon):
    """torch's Muon, but in fp32 on a CPU, where bf16 products are slow, and with FSDP2: each process orthogonalises the whole matrix."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if any(parameter.device.type != "cpu" and not isinstance(parameter, DTensor) for parameter in parameters):
            return super().step()
        for group in self.param_groups:
            assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = to_local(state["momentum_buffer"]).lerp_(to_local(gradient), 1 - group["momentum"])
        ahead = gather_like(to_local(gradient).lerp(momentum, group["momentum"]), parameter)  # unsharded
        ahead = ahead if ahead.device.type == "cpu" else ahead.bfloat16()
        update = orthogonal(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"])
        size = 0.2 * max(parameter.shape) ** 0.5  # 0.2 is the typical RMS of AdamW's updates
        to_local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
        to_local(parameter).add_(to_local(distribute_like(update, parameter)), alpha=-group["lr"] * size)


def orthogonal(matrix_MN: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix (singular values 0.5 to 1.2) by Newton-Schulz iteration in the matrix's dtype.

    A step multiplies the matrix X by ``a I + b G + c G^2``, G = X X^T. Of a wide matrix in fp32 the steps are taken on G, which is smaller,
    and X is multiplied once by the product of their factors; in 16 bits G would lose the small singular values.
    """
    a, b, c = coefficients
    flat_MN = matrix_MN.T if matrix_MN.shape[0] > matrix_MN.shape[1] else matrix_MN
    flat_MN = flat_MN / flat_MN.norm().clamp(min=eps)
    if flat_MN.shape[0] < flat_MN.shape[1] and flat_MN.dtype == torch.float32:
        gram_MM, product_MM = flat_MN @ flat_MN.T, torch.eye(len(flat_MN), device=flat_MN.device)
        for step in range(steps):
            factor_MM = torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
            factor_MM.diagonal().add_(a)
            product_MM = factor_MM @ product_MM if step else factor_MM
            if step + 1 < steps:
                gram_MM = factor_MM @ (gram_MM @ factor_MM)
        flat_MN = product_MM @ flat_MN
    else:
        for _ in range(steps):
            gram_MM = flat_MN @ flat_MN.T
            flat_MN = torch.addmm(flat_MN, torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c), flat_MN, beta=a)
    return flat_MN.T if matrix_MN.shape[0] > matrix_MN.shape[1] else flat_MN


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer with common groups and state. ``input_sizes``: place of a matrix -> its `Drafter.input_sizes`."""

    def __init__(
        self, matrices: list[nn.Parameter], others: list[dict[str, Any]], train: Train, input_sizes: Mapping[int, list[float]]
    ) -> None:
        self.input_sizes = input_sizes
        muon = Muon(matrices, lr=train.peak_lr, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=train.peak_lr, betas=(train.betas[0], train.betas[1]), weight_decay=0.0)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.parts = (muon, adamw)
        self._share()

    def _share(self) -> None:
        muon, adamw = self.parts
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        self._rescale(1)
        for part in self.parts:
            part.step()
        self._rescale(-1)

    def _rescale(self, sign: int) -> None:
        """Multiply weights by the sizes of what they read, and divide their gradients by them, or back; exact, being powers of two."""
        for place, sizes in self.input_sizes.items():
            weight = self.param_groups[0]["params"][place]
            sizes_N = torch.tensor(sizes, device=weight.device).repeat_interleave(weight.shape[1] // len(sizes)) ** sign
            to_local(weight).mul_(sizes_N)
            if weight.grad is not None:
                to_local(weight.grad).div_(sizes_N)


def build_optimizer(drafter: Drafter, train: Train, adapter: Iterable[nn.Parameter] = (), lr_ratio: float = 1.0) -> torch.optim.Optimizer:
    """Build the optimizer named by ``train.optimizer``. Weight decay applies to matrices only, not to norms and biases.

    Groups with a learning rate of their own have it as ``lr_ratio``, a fraction of ``train.lr``: the output layers, and the backbone's
    ``adapter``, which always uses AdamW without weight decay (``lr_ratio``).
    """
    trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    muon = train.chosen_optimizer == "muon"
    layers = drafter.output_layers() if isinstance(drafter, OwnReadoutDrafter) and train.readout_ratio != 1.0 else []
    readouts = {id(layer.weight) for layer in layers}
    apart: list[dict[str, Any]] = [
        {"params": [trained.pop(name) for name in [*trained] if id(trained[name]) in readouts], "lr_ratio": train.readout_ratio,
         "weight_decay": 0.0 if muon else train.weight_decay},
        {"params": [*adapter], "lr_ratio": lr_ratio, "weight_decay": 0.0, "adapter": True},
    ]  # fmt: skip
    vocabularies = {drafter.backbone.vocab, drafter.backbone.vocab if drafter.vocabulary is None else len(drafter.vocabulary)}
    hidden = [name for name, parameter in trained.items() if parameter.ndim == 2 and not {1, *vocabularies} & {*parameter.shape}]
    if muon and hidden:
        others: list[dict[str, Any]] = [{"params": [p for name, p in trained.items() if name not in hidden]}, *apart]
        sizes = {hidden.index(name): sizes for name, sizes in drafter.input_sizes().items() if name in hidden}
        return MuonAdamW([trained[name] for name in hidden], [group for group in others if group["params"]], train, sizes)
    groups = [
        {"params": [p for p in trained.values() if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
        *apart,
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.peak_lr, betas=(train.betas[0], train.betas[1]))
