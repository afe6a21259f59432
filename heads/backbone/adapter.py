"""Attach, save, load and identify PEFT adapters of a backbone. No other module uses PEFT.

PEFT replaces layers of the model in place, so the model's own forward and ``generate`` then use the adapter too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headstart.support.errors import UserError, cause
from headstart.support.hub import find_folder

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

ADAPTER = "adapter"
"""The folder of the backbone's adapter in a heads checkpoint."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SUPPORTED = "supported: adapters that change the layers alike for every token, such as LoRA and DoRA"
SHARED = "the adapter changes the embedding or the output layer, which heads share; adapt the decoder layers alone"
UNLIKE = ("POLY", "SHADOW", "XLORA")
SCALING = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
"""Settings that determine an adapter's output together with its weights."""
BASE_LAYER = ".base_layer."
"""Infix that PEFT adds to the parameter names of the layers it wraps."""


class Adapter:
    """The active adapter of a PEFT model, of a kind that changes the model's layers, such as LoRA."""

    def __init__(self, peft: PeftModel) -> None:
        self.peft = peft
        self.model: PreTrainedModel = peft.get_base_model()
        require_alike(self.model, peft)
        self.loaded_here = False
        """True if it was put on a model by `load_adapter`, not by the caller."""
        own = (peft.base_model.prefix, ".modules_to_save.")
        self.parameters = {name: weight for name, weight in self.model.named_parameters() if any(part in name for part in own)}
        self.dropouts = [module for name, module in self.model.named_modules() if f"{peft.base_model.prefix}dropout" in name]
        if changes_tables(self.model):
            raise UserError(SHARED)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Activate the adapter's dropout; the model's own modules stay in evaluation mode."""
        for module in self.dropouts:
            module.train()
        try:
            yield
        finally:
            for module in self.dropouts:
                module.eval()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute as it does without the adapter."""
        trained = [weight.requires_grad for weight in self.parameters.values()]  # PEFT changes this too
        self.peft.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self.peft.base_model.enable_adapter_layers()
            for weight, was in zip(self.parameters.values(), trained, strict=True):
                weight.requires_grad_(was)

    def digest(self) -> str:
        """Hash the adapter's weights and scaling; saving and loading do not change the hash."""
        config = self.peft.peft_config[self.peft.active_adapter].to_dict()
        digest = hashlib.sha256(json.dumps({key: config.get(key) for key in SCALING}, sort_keys=True, default=str).encode())
        for name, weight in sorted(self.parameters.items()):
            digest.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's standard format."""
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / ADAPTER_WEIGHTS).chmod((folder / ADAPTER_CONFIG).stat().st_mode)  # safetensors creates it with mode 600


def unwrap(model: PreTrainedModel | PeftModel) -> tuple[PreTrainedModel, Adapter | None]:
    """Return the underlying model and its adapter, if it has one that is identified and trained. Raises UserError as `require_alike`, and
    for what is no model."""
    if not isinstance(model, nn.Module):
        raise UserError(f"a backbone is a loaded model, as AutoModelForCausalLM.from_pretrained returns it; got {model!r}")
    if "peft" not in sys.modules:  # no PeftModel can exist
        return model, None
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.adaption_prompt import AdaptionPromptModel

    if isinstance(model, PeftModel) and not isinstance(model.base_model, AdaptionPromptModel):
        adapter = Adapter(model)
        return adapter.model, adapter
    inner = model.base_model.model if isinstance(model, (PeftModel, PeftMixedModel)) else model
    require_alike(inner, model)
    return inner, None


def require_alike(model: PreTrainedModel, given: nn.Module | None = None) -> None:
    """Raise UserError if adapters do not change the model's layers alike for every token.

    ``given``: the model, or the `PeftModel` around it, when it is loaded. None: in a call of ``generate``, whose hooks by PEFT are then
    taken off, which an error leaves on.
    """
    if "peft" not in sys.modules:
        return
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    owner = given or getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)  # PEFT's, during a call
    config = owner.active_peft_config if isinstance(owner, PeftModel) else None
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer) and not module.disable_adapters]
    active, stated = {name for layer in layers for name in layer.active_adapters}, vars(model).get("peft_config") or {}
    unlike = [settings.peft_type.value for settings in stated.values() if layers and settings.peft_type.value in UNLIKE]
    tables = [module._forward_pre_hooks for module in model.modules()]
    hooks = [(table, number) for table in tables for number, hook in table.items() if _by_row(hook)]
    if config is not None and config.is_prompt_learning:
        reason = f"{config.peft_type.value} adapters change the prompt, not the layers"
    elif unlike:
        reason = f"{unlike[0]} adapters change the layers by the task of a row or by a pass before"
    elif any(stated[name].to_dict().get("alora_invocation_tokens") for name in active if name in stated):
        reason = "the adapter is switched on by tokens of the prompt (aLoRA)"
    elif hooks:
        reason = "each row has an adapter of its own (adapter_names)"
    else:
        return
    for table, number in hooks if given is None else []:
        del table[number]
    raise UserError(f"{reason}; {SUPPORTED}")


def changes_tables(model: PreTrainedModel) -> bool:
    """True if PEFT has replaced the embedding or the output layer."""
    return any(type(part).__module__.startswith("peft.") for part in (model.get_input_embeddings(), model.get_output_embeddings()))


def _by_row(hook: Any) -> bool:
    """True for a hook with which PEFT tells a layer the adapters of the rows, or where they begin."""
    return isinstance(hook, partial) and hook.func.__module__.startswith("peft.")


def new_adapter(
    model: PreTrainedModel, rank: int, alpha: float, dropout: float, target_modules: str | Sequence[str], use_dora: bool
) -> Adapter:
    """Attach a new LoRA (2106.09685) or DoRA (2402.09353) adapter; it starts as the identity.

    ``target_modules`` as in PEFT: "all-linear" (all but the output layer), a regular expression, or a list of module name suffixes.
    Raises UserError if PEFT is not installed or the model has no such modules.
    """
    peft = require_peft()
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, use_dora=use_dora, task_type="CAUSAL_LM"
    )
    try:
        return Adapter(_added(peft, model, config))
    except ValueError as error:
        raise UserError(f"no adapter fits {type(model).__name__}: {cause(error)}") from None


def load_adapter(model: PreTrainedModel, path: str | Path, weights: bool = True) -> Adapter:
    """Attach the adapter saved in a folder or on the hub; without ``weights`` only its shapes, with values of no meaning.

    Raises UserError if PEFT is not installed, or if the adapter is missing or does not fit the model.
    """
    peft, folder = require_peft(), find_adapter(path)
    wrapped: Any = None
    try:
        config: PeftConfig = peft.PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise UserError(f"the adapter in {folder} is {config.peft_type.value}, which changes the prompt, not the layers; {SUPPORTED}")
        config.inference_mode = True
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):  # PEFT draws weights, which are replaced
            wrapped = _added(peft, model, config)
        if weights:
            report = peft.set_peft_model_state_dict(wrapped, load_file(folder / ADAPTER_WEIGHTS))
            missing = [name for name in report.missing_keys if wrapped.base_model.prefix in name]
            if missing or report.unexpected_keys:
                raise ValueError(f"{len(missing)} of its weights are missing and {len(report.unexpected_keys)} unknown")
        adapter = Adapter(wrapped)
        adapter.loaded_here = True
        return adapter
    except BaseException as error:
        if wrapped is not None:
            remove(wrapped)
        if isinstance(error, UserError) or not isinstance(error, (ValueError, TypeError, KeyError, RuntimeError, SafetensorError)):
            raise
        name = type(model).__name__
        raise UserError(f"the adapter in {folder} does not fit {name} ({cause(error, 200)}); load the backbone it was trained on") from None


def _added(peft: Any, model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Put an adapter on the model and leave the rest as it is, which PEFT freezes; the new layers have the model's mode."""
    modules, learned = set(model.modules()), [weight for weight in model.parameters() if weight.requires_grad]
    try:
        wrapped: PeftModel = peft.get_peft_model(model, config)
    except BaseException:
        vars(model).pop("peft_config", None)
        raise
    finally:
        for weight in learned:
            weight.requires_grad_(True)
    for module in set(model.modules()) - modules:
        module.training = model.training
    return wrapped


def remove(wrapped: PeftModel) -> None:
    """Take the adapter off the model, whose own layers are put back in their places."""
    wrapped.base_model.unload()


def tuner_state(model: nn.Module) -> tuple[Any, ...]:
    """Return what the adapters of a model add to its layers besides their weights: which are active, merged and how they are scaled."""
    if "peft" not in sys.modules:
        return ()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    scales = (vars(layer).get("scaling", {}).items() for layer in layers)
    states = ((*layer.active_adapters, layer.disable_adapters, *layer.merged_adapters) for layer in layers)
    return (*states, *map(tuple, scales))


def find_adapter(path: str | Path) -> Path:
    """Return the local folder of an adapter, downloaded if ``path`` is a hub id. Raises UserError if there is none."""
    folder = find_folder(path, "adapter", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    lacking = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        raise UserError(f"{path} lacks {lacking[0]}, so it is no PEFT adapter; give a folder that PEFT saved, or fetch it again")
    return folder


def base_parameters(module: nn.Module, adapter: Adapter | None) -> dict[str, Tensor]:
    """Return a module's parameters without the adapter's, under the names they have without an adapter."""
    added = set() if adapter is None else {id(weight) for weight in adapter.parameters.values()}
    return {name.replace(BASE_LAYER, "."): weight for name, weight in module.named_parameters() if id(weight) not in added}


def require_peft() -> Any:
    """Import PEFT. Raises UserError if it is not installed."""
    if find_spec("peft") is None:
        raise UserError("adapters need peft, which is not installed: pip install 'headstart[peft]'")
    import peft

    return peft


def plain_weight(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor: gathered if sharded, dequantized if quantized."""
    weight = weight.detach()
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight if type(weight) is Tensor else weight.dequantize()
