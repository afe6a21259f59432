"""Build a recipe's backbone and drafters on fake tensors, from the configuration alone; nothing is loaded or computed. `MemoryCounter`
counts the peak of the bytes that a step allocates, on fake tensors and on real ones.

All tensors are torch `FakeTensor`s (meta tensors that represent tensors on the CPU). A forward or backward runs the training code
with the right shapes, dtypes and lifetimes in milliseconds, for a model of any size. Where code branches on values, `FakeValues`
supplies them.

Shape suffixes: B batch, T positions, V vocabulary, D width, H heads.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.backbone.model_config import attention_kernel, auto_model
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import read_metadata
from headstart.heads.warm_start import require_kind
from headstart.support.errors import UserError, cause
from headstart.support.hub import resolve
from headstart.training.features.source import dtype_in_training, opens_head_only, read_config, taps_of
from headstart.training.recipe import sections
from headstart.training.recipe.recipe import Recipe, split_drafter
from headstart.training.run.trainer import build

Parts = dict[str, int]
"""Name of a part -> bytes."""


class _Kernel(torch.autograd.Function):
    """Allocates a kernel's output, as wide as the last input, and keeps what the kernel keeps for its gradients: the inputs and, if
    ``keeps_output``, the output.
    """

    @staticmethod
    def forward(ctx: Any, keeps_output: bool, *inputs: Tensor) -> Tensor:
        output = inputs[0].new_empty(*inputs[0].shape[:-1], inputs[-1].shape[-1])
        ctx.save_for_backward(*inputs, *[output] * keeps_output)
        return output

    @staticmethod
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(torch.empty_like(x) if due else None for x, due in zip(ctx.saved_tensors, needed, strict=False))


class FakeValues(TorchFunctionMode):
    """Supplies the few values that a training step reads from tensors.

    `scaled_dot_product_attention` allocates its output only, since fused kernels keep no scores; on fake tensors it would otherwise use
    the unfused form, with scores ``[B, H, T, T]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed = False
        """Truth value of tensors: whether a row holds several documents."""
        self.label_tokens = 0
        """Number of True entries of a mask."""
        self.longest = 0
        """Integer value of tensors: the last position of the longest document."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _Kernel.apply(True, *(*args, *kwargs.values())[:3])
        if func is torch._grouped_mm:  # whose fake kernel knows bf16 alone
            return _Kernel.apply(False, *args[:2])
        if func is torch.Tensor.detach:
            func(*args)  # the mode refers to an operation's first result, and a module could then not be moved, as PEFT does
        if func is torch._is_all_true:  # of distributions, whose parameters are checked: Gemma-3n takes a threshold from one
            return True
        if func is torch.Tensor.item:
            return 0.0 if args[0].is_floating_point() else 0
        if func is torch.Tensor.__int__:
            return self.longest
        if func is torch.Tensor.__bool__:
            return self.packed
        if func is torch.Tensor.nonzero:
            count = min(self.label_tokens, args[0].numel())
            indices = tuple(args[0].new_empty(count, dtype=torch.int64) for _ in args[0].shape)
            return indices if kwargs.get("as_tuple") else torch.stack(indices, -1)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class FakeModels:
    """The models of a run on fake tensors; use them inside `fake_mode`."""

    backbone: Backbone
    drafters: dict[str, Drafter]
    """Drafters by name; the name is empty if there is only one."""
    values: FakeValues
    mode: FakeTensorMode

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps of all drafters, which share the backbone's forward pass."""
        return taps_of(list(self.drafters.values()))

    @contextmanager
    def fake_mode(self) -> Iterator[None]:
        """Make all new tensors fake inside the context."""
        with self.mode, self.values:
            yield


def make_fake_models(recipe: Recipe, accelerator: bool) -> FakeModels:
    """Build a recipe's models in the dtypes of training on an accelerator or a CPU. Raises UserError where that cannot be done."""
    config, settings = read_config(recipe.backbone), recipe.backbone
    dtype = dtype_in_training(settings, config, torch.device("cuda" if accelerator else "cpu"))
    values, mode = FakeValues(), FakeTensorMode()
    kinds = ", ".join(single.drafter["kind"] for single in recipe.per_drafter().values())
    try:
        with mode, values:
            backbone = _backbone(config, settings, dtype, opens_head_only(recipe))
            if settings.adapter is not None:
                backbone.attach(settings.adapter, weights=False)
            if (lora := settings.lora) is not None:
                backbone.add_lora(lora.rank, lora.alpha, lora.dropout, lora.target_modules, lora.use_dora)
            _pass_empty_mask(backbone)
            drafters = {name: _drafter(single, backbone) for name, single in recipe.per_drafter().items()}
    except UserError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        fault = f"backbone {settings.path!r} with {kinds} cannot be built from its configuration alone: {cause(error)}"
        raise UserError(f"{fault}; check its config.json and the drafter's arguments") from None
    return FakeModels(backbone, drafters, values, mode)


def _backbone(config: PretrainedConfig, section: sections.Backbone, dtype: torch.dtype, head_only: bool) -> Backbone:
    with no_init_weights():
        kernel = attention_kernel(section.attention)
        model = auto_model(config).from_config(config, dtype=dtype, attn_implementation=kernel, trust_remote_code=section.trust_remote_code)
    model.tie_weights()
    model.config.name_or_path = resolve(section.path)
    model = model.eval().requires_grad_(False)
    for module in model.modules():
        if type(module).__name__.endswith("QSAIndexer"):  # Qwen4's asks in Python, token by token, which keys a token sees
            module.forward = lambda states_BTD, rotary, mask_B1TT, cache: mask_B1TT.to(torch.bool)
    if not head_only:
        return Backbone(model, trees=False)
    backbone = HeadOnlyBackbone(model)

    def read(tokens_BT: Tensor, taps: tuple[int, ...]) -> Features:
        """Return features of the right shapes, as a cache or a server would give them."""
        states_BTD = backbone.embed(tokens_BT)
        return Features(tokens_BT, states_BTD, dict.fromkeys(taps, states_BTD) or None)

    backbone.reader = read
    return backbone


def _drafter(recipe: Recipe, backbone: Backbone) -> Drafter:
    options = split_drafter(recipe.drafter)[0]
    if options.init is not None and Path(options.init).is_dir():  # nothing is downloaded
        require_kind(options.init, read_metadata(options.init)[1], options.kind)
    return build(recipe, backbone, fresh=False)


def _pass_empty_mask(backbone: Backbone) -> None:
    """Pass an attention mask without memory if there is none: from fake positions the model cannot see that none is needed."""

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("attention_mask") is None and backbone.recurrent is None:
            B, T = kwargs["input_ids"].shape
            mask = torch.zeros((), dtype=backbone.dtype).expand(B, 1, T, T)
            kwargs["attention_mask"] = dict.fromkeys(backbone.windows, mask) if len(backbone.windows) > 1 else mask
        return args, kwargs

    backbone.base.register_forward_pre_hook(give, with_kwargs=True)


class _Made(NamedTuple):
    number: int
    """Unique number; addresses are reused."""
    part: str
    size: int


class MemoryCounter(TorchDispatchMode):
    """Tracks the storages allocated since it was entered and not freed, and those live at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        """Part of new storages."""
        self.rows: int | None = None
        """B: if set, tensors with a head dimension (``[B, H, ...]``, ``[B H, ...]``) belong to the part *attention*."""
        self.live: dict[int, _Made] = {}
        self.at_peak: list[_Made] = []
        self.bytes = self.peak = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.live:
                    self.live[storage._cdata] = _Made(self.count, self._part(leaf), storage.nbytes())
                    self.count, self.bytes = self.count + 1, self.bytes + storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        if self.bytes > self.peak:
            self.peak, self.at_peak = self.bytes, list(self.live.values())
        return out

    def _part(self, made: Tensor) -> str:
        by_heads = self.rows is not None and (made.ndim > 3 or (made.ndim == 3 and made.shape[0] != self.rows))
        return "attention" if by_heads else self.part

    def _freed(self, key: int) -> None:
        self.bytes -= self.live.pop(key).size

    def reset_peak(self) -> None:
        """Restart the peak from the current state."""
        self.peak, self.at_peak = self.bytes, list(self.live.values())

    def rename(self, tensors: list[Tensor], part: str) -> None:
        for key in {tensor.untyped_storage()._cdata for tensor in tensors} & self.live.keys():
            self.live[key] = self.live[key]._replace(part=part)

    def parts(self, gradients: list[Tensor]) -> Parts:
        """Return the bytes by part at the peak; ``gradients``, which must be live, are a separate part."""
        keys = {tensor.untyped_storage()._cdata for tensor in gradients} & self.live.keys()
        numbers, bytes_of = {self.live[key].number for key in keys}, Counter[str]()
        for made in self.at_peak:
            bytes_of["gradients" if made.number in numbers else made.part] += made.size
        return dict(bytes_of)
