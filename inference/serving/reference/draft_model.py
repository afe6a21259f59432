"""A draft model: an ordinary causal language model with the backbone's vocabulary (2211.17192), or a parallel one (PARD, 2504.18583).

A parallel model reads the text, the root and mask tokens (``pard_token``) in one pass: the logits at the k-th mask draft depth k.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.inference.serving.reference.files import DamagedError, Files
from headstart.inference.serving.reference.reading import Drafting, NextToken, Reading
from headstart.inference.serving.reference.target import Target
from headstart.support.errors import UserError

MASKS = ("pard_token", "ptd_token_id")
"""Keys of the mask token of a parallel model."""


class DraftModelDrafting(Drafting):
    """``reading.options``: the model, and the mask token of a parallel one."""

    method = "draft-model"

    @classmethod
    def recognises(cls, files: Files) -> bool:
        architectures = files.config.get("architectures") or []
        return any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures) and "fc.weight" not in files.names

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                str(files.folder), dtype=torch.float32, use_safetensors=not files.pickled, output_loading_info=True
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{files.folder} is no model that transformers loads: {' '.join(str(error).split())[:200]}") from None
        if report["missing_keys"]:
            lacking = sorted(report["missing_keys"])[0]
            raise DamagedError(f"{files.folder} lacks {lacking}: a tensor is missing (half-written); export it again")
        remarks = []
        vocab = model.get_output_embeddings().weight.shape[0]
        if vocab != target.vocab:
            remarks.append(f"another vocabulary: the draft model has {vocab} tokens, the backbone {target.vocab}")
        mask = next((files.config[key] for key in MASKS if files.config.get(key) is not None), None)
        tensors = dict(model.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return Reading(cls.method, tensors, shapes, options={"model": model.eval(), "mask": mask}, remarks=tuple(remarks))

    def after(self, position: int) -> NextToken:
        model, mask = self.reading.options["model"], self.reading.options["mask"]
        tokens, depth = self.text.tokens_T[: position - 1].tolist(), -1

        def next_token(token: int) -> Tensor:
            nonlocal depth
            depth += 1
            if mask is None:
                tokens.append(token)
            else:
                tokens.append(mask if depth else token)
            return self._fitting(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])

        return next_token

    def _fitting(self, logits_V: Tensor) -> Tensor:
        """Logits over the backbone's vocabulary."""
        whole_V = logits_V.new_full((self.target.vocab,), -torch.inf)
        count = min(len(logits_V), self.target.vocab)
        whole_V[:count] = logits_V[:count]
        return whole_V
