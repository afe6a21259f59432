"""PEFT adapters on a backbone: attached, saved, loaded, identified. The only module that knows PEFT.

PEFT replaces layers of the model in place, so from then on the model's own forward and ``generate`` compute with the adapter.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.support.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

FOLDER = "adapter"
"""The adapter's folder in a checkpoint of heads."""
WEIGHTS = "adapter_model.safetensors"
SCALING = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
"""Settings of an adapter that its output depends on beside its weights."""
BASE_LAYER = ".base_layer."
"""What PEFT puts into the names of the layers it wraps."""


class Adapter:
    """The active adapter of a PEFT model that injects its weights into the model's own layers, as LoRA does."""

    def __init__(self, peft: PeftModel) -> None:
        from peft.tuners.tuners_utils import BaseTuner

        self.peft = peft
        if not isinstance(peft.base_model, BaseTuner):
            raise UserError(f"{peft.peft_type} adapters change the prompt, not the layers; supported: adapters such as LoRA")
        self.model: PreTrainedModel = peft.get_base_model().eval()   # PEFT's new layers are in training mode
        self.parameters = _adapter_parameters(self.model, peft.base_model.prefix)
        self.dropouts = [module for name, module in self.model.named_modules() if f"{peft.base_model.prefix}dropout" in name]
        tables = [module for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()) if module is not None]
        if any(weight is table_weight for weight in self.parameters.values() for table in tables for table_weight in table.parameters()):
            raise UserError("the adapter changes the embedding or the output layer, which heads share; adapt the decoder layers alone")

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside the context the adapter's dropout is active; the model's own modules stay in evaluation mode."""
        for module in self.dropouts:
            module.train()
        try:
            yield
        finally:
            for module in self.dropouts:
                module.eval()

    def digest(self) -> str:
        """A hash of the adapter's weights and scaling: the same for the adapter in memory and loaded from its folder."""
        config = self.peft.peft_config[self.peft.active_adapter].to_dict()
        digest = hashlib.sha256(json.dumps({key: config.get(key) for key in SCALING}, sort_keys=True, default=str).encode())
        for name, weight in sorted(self.parameters.items()):
            digest.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write a standard PEFT adapter."""
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / WEIGHTS).chmod((folder / "adapter_config.json").stat().st_mode)   # safetensors makes it private


def unwrap(model: PreTrainedModel | PeftModel) -> tuple[PreTrainedModel, Adapter | None]:
    """The model itself and the adapter on it, if there is one."""
    if "peft" not in sys.modules:   # then it cannot be one of its models
        return model, None
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return model, None
    adapter = Adapter(model)
    return adapter.model, adapter


def new_adapter(model: PreTrainedModel, rank: int, alpha: float, dropout: float, target_modules: str | Sequence[str]) -> Adapter:
    """Attach a fresh LoRA adapter (2106.09685), which at first changes nothing.

    ``target_modules`` as PEFT has it: "all-linear" (but the output layer), a regular expression, or the ends of module names.
    Raises UserError without PEFT, or if the model has no such modules.
    """
    peft = _peft()
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")
    try:
        return Adapter(peft.get_peft_model(model, config))
    except ValueError as error:
        raise UserError(f"no adapter fits {type(model).__name__}: {' '.join(str(error).split())[:300]}") from None


def load_adapter(model: PreTrainedModel, folder: Path) -> Adapter:
    """Attach the adapter saved in ``folder``. Raises UserError without PEFT, or if its weights are missing or do not fit the model."""
    peft = _peft()
    if not (folder / WEIGHTS).is_file() or not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} lacks adapter_config.json or {WEIGHTS}; train or fetch the heads again")
    wrapped: Any = None
    try:
        config: PeftConfig = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        wrapped = peft.get_peft_model(model, config)
        report = peft.set_peft_model_state_dict(wrapped, load_file(folder / WEIGHTS))
        missing = [name for name in report.missing_keys if wrapped.base_model.prefix in name]
        if missing or report.unexpected_keys:
            raise ValueError(f"{len(missing)} of its weights are missing and {len(report.unexpected_keys)} unknown")
        return Adapter(wrapped)
    except (ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        if wrapped is not None:
            wrapped.unload()
        cause = " ".join(str(error).split())[:200]
        name = type(model).__name__
        raise UserError(f"the adapter in {folder} does not fit {name} ({cause}); load the backbone it was trained on") from None


def base_parameters(module: nn.Module, adapter: Adapter | None) -> dict[str, Tensor]:
    """A module's own parameters under their names without an adapter."""
    added = set() if adapter is None else {id(weight) for weight in adapter.parameters.values()}
    return {name.replace(BASE_LAYER, "."): weight for name, weight in module.named_parameters() if id(weight) not in added}


def _adapter_parameters(model: nn.Module, prefix: str) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if prefix in name or ".modules_to_save." in name}


def _peft() -> Any:
    if find_spec("peft") is None:
        raise UserError("an adapter on the backbone needs peft, which is not installed: pip install 'headstart[peft]'")
    import peft

    return peft
