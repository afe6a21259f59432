"""A recipe's backbone and drafters as shapes without numbers: from the configuration alone, nothing loaded, nothing computed.

Every tensor is torch's `FakeTensor` (a tensor of the meta device that stands in for one of the CPU), so a forward or a backward runs
the code that training runs and gives the right shapes, dtypes and lifetimes in milliseconds, for a model of any size. What code
asks of numbers that are not there is answered by `Answers`.

Shape suffixes: B batch, T positions, M learned positions, V vocabulary, C head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from headstart.heads.backbone.backbone import Backbone, resolve
from headstart.heads.base import Drafter
from headstart.heads.methods import construct_drafter
from headstart.support.dtypes import torch_dtype
from headstart.support.errors import UserError
from headstart.training.features.source import taps_of
from headstart.training.recipe.recipe import Recipe


class Answers(TorchFunctionMode):
    """Stands in for numbers: a check passes, a number is 0, ``learned`` places of a mask are true.

    Attention by torch's own function is answered by its output alone, since its kernels keep no scores; in a sketch it would
    otherwise take the form for machines without such kernels, with scores ``[B, H, T, T]``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.yes = False
        """What a tensor is as a condition."""
        self.learned = 0
        self.longest = 0
        """What a tensor is as a whole number: how long a document may be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, _, value = (*args, *kwargs.values())[:3]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        if func in (torch.Tensor.item, torch.Tensor.__float__):
            return 0.0 if args[0].is_floating_point() else 0
        if func is torch.Tensor.__int__:
            return self.longest
        if func is torch.Tensor.__bool__:
            return self.yes
        if func is torch.Tensor.unique:
            return args[0]
        if func is torch.Tensor.nonzero:
            places = tuple(args[0].new_empty(self.learned, dtype=torch.int64) for _ in args[0].shape)
            return places if kwargs.get("as_tuple") else torch.stack(places, -1)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0].flatten(0, args[1].ndim - 1).clone()   # at most all of it
        return func(*args, **kwargs)


@dataclass(frozen=True)
class FakeModels:
    """What a run is made of, without numbers. Work with it inside of `drawn`."""

    backbone: Backbone
    drafters: dict[str, Drafter]
    """By the names of the recipe's heads; of the only one the name is empty."""
    answers: Answers
    mode: FakeTensorMode

    @property
    def taps(self) -> tuple[int, ...]:
        """Of all drafters, which learn from one reading."""
        return taps_of(list(self.drafters.values()))

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """While it is entered, tensors have no numbers."""
        with self.mode, self.answers:
            yield


def read_config(recipe: Recipe) -> PretrainedConfig:
    """The backbone's configuration: of a hub id that file alone is fetched. Raises UserError where there is none."""
    path, trust = recipe.backbone.path, recipe.backbone.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(resolve(path), trust_remote_code=trust)
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        cause = " ".join(str(error).split())[:200]
        allowed = "a folder with config.json, a hub id, or 'embedded'"
        raise UserError(f"no configuration of backbone {path!r}: {cause} (allowed: {allowed})") from None
    if config.is_encoder_decoder:
        raise UserError(f"backbone {path!r} is an encoder-decoder ({config.model_type}); give a causal language model")
    return config


def draw(recipe: Recipe, accelerator: bool) -> FakeModels:
    """The recipe's backbone and drafters, in the dtypes they have in training on an accelerator or on a CPU.

    Raises UserError for whatever building the real ones would refuse, and for a model that cannot be built without numbers.
    """
    config, where = read_config(recipe), recipe.backbone
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    dtype = torch_dtype(where.dtype) or (own if accelerator else torch.float32)
    answers, mode = Answers(), FakeTensorMode()
    kinds = ", ".join(alone.drafter["kind"] for alone in recipe.per_drafter().values())
    try:
        with mode, answers:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=where.attention, trust_remote_code=where.trust_remote_code
                )
            model.tie_weights()
            model.config.name_or_path = resolve(where.path)
            backbone = Backbone(model)
            _mask_nothing(backbone)
            return FakeModels(backbone, {name: _drafter(alone, backbone) for name, alone in recipe.per_drafter().items()}, answers, mode)
    except UserError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, StrictDataclassError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"backbone {where.path!r} with {kinds} cannot be built from its configuration alone: {cause}") from None


def _drafter(recipe: Recipe, backbone: Backbone) -> Drafter:
    arguments = {name: value for name, value in recipe.drafter.items() if name != "kind"}
    drafter = construct_drafter(recipe.drafter["kind"], backbone, arguments).train()
    if recipe.train.gradient_checkpointing:
        drafter.recompute()
    return drafter


def _mask_nothing(backbone: Backbone) -> None:
    """Give the model a mask that takes no memory where it is given none.

    Told none, it makes one here, since it cannot look at numbers to see that none is needed; in training it sees that and makes none.
    """

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("attention_mask") is None and backbone.recurrent is None:
            B, T = kwargs["input_ids"].shape
            mask = torch.zeros((), dtype=backbone.dtype).expand(B, 1, T, T)
            kwargs["attention_mask"] = dict.fromkeys(backbone.windows, mask) if len(backbone.windows) > 1 else mask
        return args, kwargs

    backbone.base.register_forward_pre_hook(give, with_kwargs=True)
