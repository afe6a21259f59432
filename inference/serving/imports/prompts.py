"""Prompts to measure imported heads on: a file's, those that ship with the embedded backbone, or texts that the backbone writes itself.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone, load_tokenizer
from headstart.heads.backbone.embedded import EMBEDDED, resolve
from headstart.heads.backbone.end_tokens import end_tokens
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_texts
from headstart.support.chat.prompts import Prompter, read_prompts
from headstart.support.chat.template import ChatSettings
from headstart.support.devices import spread
from headstart.support.errors import UserError
from headstart.support.terminal import progress

PROMPTS, WRITTEN = 8, 24
"""Number of prompts, and how long those are that the backbone writes."""


def prompts_for(
    backbone: Backbone, file: str | None, trust_remote_code: bool = False, variables: Mapping[str, Any] | None = None
) -> tuple[list[Tensor], str]:
    """Return prompts (int64 ``[T]``) and a description of where they are from; ``variables``: of the chat template. Raises UserError."""
    if file is None and backbone.name == EMBEDDED:
        file = str(Path(resolve(EMBEDDED)).parent / "prompts.jsonl")
    if file is not None:
        settings = ChatSettings(variables=variables or {}, ends=end_tokens(backbone.model.generation_config))
        prompter = Prompter(load_tokenizer(backbone.name, trust_remote_code=trust_remote_code), settings=settings)
        return [prompt.ids_T for prompt in read_prompts(file, prompter, PROMPTS)], f"{PROMPTS} prompts of {Path(file).name}"
    return written(backbone), f"{PROMPTS} texts that the backbone wrote itself"


def written(backbone: Backbone) -> list[Tensor]:
    """Return the beginnings of texts that the backbone samples from its first token, or from different tokens if it has none."""
    first = backbone.config.bos_token_id
    starts = [first] * PROMPTS if isinstance(first, int) else spread(1, backbone.vocab - 1, PROMPTS)
    prompts = [torch.tensor([start]) for start in starts]
    with progress("writing prompts with the backbone", "prompt", PROMPTS) as bar:
        output = continue_texts(
            SpeculativeModel(backbone), prompts, Settings(WRITTEN, temperature=1.0), list(range(PROMPTS)), speculate=False
        )
        bar.update(PROMPTS)
    assert output.accept_lengths is not None
    found = [row_T[: 2 + sum(lengths)].cpu() for row_T, lengths in zip(output.sequences, output.accept_lengths, strict=True)]
    ends = end_tokens(backbone.model.generation_config)
    usable = [row_T for row_T in found if int(row_T[-1]) not in ends]
    if not usable:
        raise UserError(f"{backbone.name or 'the backbone'} ends every text that it begins itself; give prompts with --prompts FILE")
    return usable
