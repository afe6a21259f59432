"""transformers as an engine: its own assisted decoding with an exported block head (``speculation_type="dflash"``) or draft model.

The model writes past the end of a text by the length of a draft, without end tokens, so that the last rounds are whole; what is too much is
cut afterwards. This changes no draft, since each depends on the text before it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import __version__ as version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headstart.heads.backbone.backbone import load_backbone
from headstart.serving.verify.drafts import EngineSettings, Transcript, judged
from headstart.support.errors import UserError
from headstart.support.json_text import read_json
from headstart.support.terminal import watched

DFLASH = "muse_glimmer_assistant"
"""The ``model_type`` of DFlash heads in transformers, whose class of them is named after the first such checkpoint."""
Drafted = list[tuple[int, tuple[int, ...]]]
"""For each draft, the length of the text that it continues, and its tokens."""


def draft(folder: Path, backbone: str, prompts: list[list[int]], settings: EngineSettings) -> list[Transcript]:
    """See `Engine`."""
    config = read_json(folder / "config.json", "export the heads again")
    assistant, options = _assistant(folder, config, settings.depth)
    on = load_backbone(backbone, dtype="fp32", device="cpu")
    if assistant.config.get_text_config().to_dict().get("vocab_size", on.config.vocab_size) != on.config.vocab_size:
        raise UserError(f"{folder} drafts tokens of another vocabulary than {backbone}; give the backbone that it was trained on")
    model = on.model
    model.generation_config = GenerationConfig(do_sample=False)  # no padding token: where texts have it, assistants would mask it
    shown = watched(prompts, "drafting with transformers", "prompt")
    return [_transcript(model, assistant, options, prompt, settings) for prompt in shown]


def _assistant(folder: Path, config: dict[str, Any], depth: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the heads as transformers' assistant model, and return the further arguments of ``generate``."""
    architectures = config.get("architectures") or ["heads"]
    if config.get("model_type") == DFLASH:
        if depth >= (block := int(config.get("block_size") or 0)):
            raise UserError(f"{folder} drafts {block - 1} tokens, its block_size less the root; got depth {depth}: use at most {block - 1}")
        return _load(AutoModel, folder), {"speculation_type": "dflash"}
    if architectures[0] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or "pard_token" in config or "eagle_config" in config:
        raise UserError(
            f"transformers {version} drafts with DFlash heads (headstart export --to dflash-hf) and draft models, not with "
            f"{architectures[0]} of {folder}; use --engine reference or vllm, and decode in transformers by custom_generate"
        )
    assistant = _load(AutoModelForCausalLM, folder)
    assistant.generation_config = GenerationConfig(
        do_sample=False, num_assistant_tokens=depth, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return assistant, {}


def _load(auto: Any, folder: Path) -> PreTrainedModel:
    """Load a model in fp32. Raises UserError for a tensor that is missing, unexpected or misshapen, which transformers only warns of."""
    options = {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": True}
    try:
        model, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        cause = " ".join(str(error).split())[:250]
        raise UserError(f"transformers {version} does not load {folder}: {cause}; export the heads again") from None
    for fault in ("missing", "unexpected", "mismatched"):
        names = sorted(key if isinstance(key, str) else key[0] for key in report[f"{fault}_keys"])
        if names:
            raise UserError(f"transformers {version} finds {len(names)} {fault} tensors in {folder} ({names[0]}); export the heads again")
    return model.eval()


@torch.no_grad()
def _transcript(
    model: PreTrainedModel, assistant: PreTrainedModel, options: dict[str, Any], prompt: list[int], settings: EngineSettings
) -> Transcript:
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings") or 1 << 31
    most = min(settings.new_tokens + settings.depth, limit - len(prompt))
    ids_1T = torch.tensor([prompt])
    with _recorded(model, settings.depth) as drafted:
        text = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), assistant_model=assistant, max_new_tokens=most, **options)[
            0
        ].tolist()
    written = settings.ended(text[len(prompt) :])
    rounds = [judged(position, drafts, text) for position, drafts in drafted if position < len(prompt) + len(written)]
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))


@contextmanager
def _recorded(model: PreTrainedModel, depth: int) -> Iterator[Drafted]:
    """Record the drafts of assisted decoding, at most ``depth`` tokens each, from the root on: the pass over the prompt verifies none."""
    drafted: Drafted = []
    original = model._get_candidate_generator

    def recording(**arguments: Any) -> Any:
        generator = original(**arguments)
        own, prompt = generator.get_candidates, arguments["input_ids"].shape[1]

        def get_candidates(input_ids: Tensor, **outputs: Any) -> tuple[Tensor, None]:
            T = input_ids.shape[1]
            candidates_1T = own(input_ids, **outputs)[0][:, : T + (depth if T > prompt else 0)]
            if candidates_1T.shape[1] > T:
                drafted.append((T, tuple(candidates_1T[0, T:].tolist())))
            return candidates_1T, None

        generator.get_candidates = get_candidates
        return generator

    model._get_candidate_generator = recording  # an attribute of the object hides the method of its class
    try:
        yield drafted
    finally:
        del model._get_candidate_generator
