"""Models whose rotary frequencies change with the sequence length: exact on either side of the change, refused across it."""

from __future__ import annotations

import pytest
import torch
from families import SIZES, build, left_padded, prompts, random_drafter, say

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.generate import SpeculativeModel
from headstart.support.errors import UserError

TURN = 32


def heads(kind: str) -> SpeculativeModel:
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.4, 2.0, 3.0]}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TURN, **factors}
        model = build("Phi3", SIZES | {"max_position_embeddings": 128, "original_max_position_embeddings": TURN, "rope_parameters": rope})
    else:
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        model = build("Llama", SIZES | {"max_position_embeddings": TURN, "rope_parameters": rope})
    on = Backbone(model)
    return SpeculativeModel(on, random_drafter("medusa", on), capture="trace")


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind,lengths", [("longrope", (9, 14)), ("longrope", (33, 40)), ("dynamic", (9, 14))])
def test_on_one_side_the_text_is_the_models_own(kind: str, lengths: tuple[int, ...]) -> None:
    of = heads(kind)
    assert of.backbone.rope_limit == TURN
    for ids in prompts(lengths):
        row = {"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        want = of.backbone.model.generate(**row, max_new_tokens=18, do_sample=False)
        assert torch.equal(say(of, row, max_new_tokens=18, do_sample=False), want)


@pytest.mark.parametrize(
    "kind,lengths,allowed",
    [("longrope", (20,), "or prompts of more"), ("dynamic", (40,), "max_new"), ("longrope", (9, 40), "end before")],
)
def test_across_it_is_refused(kind: str, lengths: tuple[int, ...], allowed: str) -> None:
    with pytest.raises(UserError, match=f"rotary frequencies beyond {TURN} positions.*{allowed}"):
        say(heads(kind), left_padded(prompts(lengths)), max_new_tokens=18, do_sample=False)
