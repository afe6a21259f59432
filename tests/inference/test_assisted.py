"""Heads as candidate generator of transformers' own assisted decoding.

Shape suffixes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_head import every_head
from families import VOCAB, Noted, backbone, heads, left_padded, prompts, random_drafter, tiny
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.utils import _speculative_sampling

import headstart
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.versions import CACHE
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.proposers.suffix import SuffixProposer
from headstart.inference.serving.assisted import HeadCandidates, Limits, Outputs
from headstart.support.errors import UserError

DEPTH, LENGTH = 3, 14
ROW = {"input_ids": prompts((9,))[0][None]}
MODEL = backbone("llama").model
SMALL = Backbone(tiny("llama", vocab_size=5))
"""A vocabulary so small that random heads are right now and then."""


def plain(model: PreTrainedModel = MODEL, **options: Any) -> Tensor:
    return model.generate(**{**ROW, "max_new_tokens": LENGTH, "do_sample": False} | options)


@pytest.mark.matrix(cells=4)
@pytest.mark.parametrize(("kind", "arguments"), every_head(DEPTH))
def test_greedy_text_and_rounds_are_those_of_a_chain(kind: str, arguments: dict[str, Any]) -> None:
    of = SpeculativeModel(SMALL, random_drafter(kind, SMALL, **arguments), capture="off")
    model, row = SMALL.model, {"input_ids": ROW["input_ids"] % 4 + 1, "max_new_tokens": 32}
    text = plain(model, custom_generate=headstart.assisted(of), streamer=(noted := Noted()), **row)
    chain = plain(model, custom_generate=of.generate, tree=TreeShape(DEPTH + 1, 1, DEPTH), return_dict_in_generate=True, **row)
    assert torch.equal(text, plain(model, **row)) and torch.equal(text, chain.sequences)
    assert [part.numel() for part in noted.got] == [9, 1, *chain.accept_lengths[0]] and chain.tau > 1
    assert "_get_candidate_generator" not in vars(model) and not model.base_model._forward_hooks
    sampled = plain(model, custom_generate=headstart.assisted(of), do_sample=True, top_k=1, **row)  # rejection sampling of one token
    assert torch.equal(sampled, text)


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_other_families_padding_ends_and_streamers(family: str) -> None:
    of, model = heads(family, "eagle3"), backbone(family).model
    text = plain(model)
    assisted = headstart.assisted(of, depth=1)
    assert torch.equal(plain(model, custom_generate=assisted, streamer=(noted := Noted())), text)
    assert torch.equal(torch.cat([part.flatten() for part in noted.got]), text[0]) and noted.ended == 1
    eos = int(text[0, 13])
    assert torch.equal(plain(model, custom_generate=assisted, eos_token_id=eos), plain(model, eos_token_id=eos))
    padded = left_padded([prompts((12,))[0], ROW["input_ids"][0]])
    second = {name: rows[1:] for name, rows in padded.items()}
    assert torch.equal(plain(model, custom_generate=assisted, **second)[0, 3:], text[0])
    out = plain(model, custom_generate=assisted, return_dict_in_generate=True, output_hidden_states=True, output_scores=True)
    assert torch.equal(out.sequences, text) and len(out.scores) == len(out.hidden_states) == LENGTH


@torch.no_grad()
def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    """Drafts are drawn from the returned logits, whatever the draft vocabulary, so transformers' rejection sampling keeps the law."""
    drafter = random_drafter("medusa", backbone("llama"), depth=2, draft_vocab_size=30)
    drafter.use_vocabulary(torch.arange(0, 60, 2))
    text_1T, warp = torch.cat([ROW["input_ids"], plain()[:, 9:10]], 1), TopKLogitsWarper(30)
    outputs = Outputs({})
    handle = MODEL.base_model.register_forward_hook(outputs.keep)
    MODEL(text_1T[:, :-1])
    handle.remove()
    processing = Processing(LogitsProcessorList([TemperatureLogitsWarper(3.0), TopKLogitsWarper(10)]), 1)
    candidates = HeadCandidates(drafter, outputs, Limits(1, 99, frozenset()), processing, 0)
    probs_V = warp(text_1T, MODEL(text_1T).logits[:, -1] / 3.0).softmax(-1)[0]
    counts_V, accepted, draws = torch.zeros(VOCAB), 0, 1500
    torch.manual_seed(0)
    for _ in range(draws):
        drafted, logits_1KV = candidates._chain(text_1T, 1) if candidates.state is not None else candidates.get_candidates(text_1T)
        assert logits_1KV is not None and logits_1KV.isfinite().sum() == 10
        scores_1KV = probs_V.log().expand(1, 2, -1)
        tokens, matches = _speculative_sampling(drafted, logits_1KV, 1, scores_1KV)
        counts_V[tokens[0, 0]] += 1
        accepted += int(matches)
    seen = probs_V > 0
    chi = ((counts_V - draws * probs_V)[seen] ** 2 / (draws * probs_V[seen])).sum()
    assert not counts_V[~seen].any() and 0.02 < accepted / draws < 0.9
    assert chi < 58  # 29 degrees of freedom: exceeded with a probability of 0.001


def test_what_could_change_the_text_is_refused() -> None:
    of = heads("llama", "eagle3")
    assisted = headstart.assisted(of)

    class Own(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
            return torch.zeros(len(input_ids), dtype=torch.bool)

    past = DynamicCache()
    MODEL(ROW["input_ids"][:, :5], past_key_values=past)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("one row", left_padded(prompts((9, 4)))),
        ("one row", {"num_beams": 2}),
        ("greedy or sampled", {"prompt_lookup_num_tokens": 3}),
        ("Own once per round", {"stopping_criteria": StoppingCriteriaList([Own()])}),
        ("assistant_ensemble_weight", {"assistant_ensemble_weight": 0.5}),
        (f"{CACHE} already holds tokens", {CACHE: past}),
        ("left end", {"attention_mask": torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1]])}),
        ("guidance_scale", {"guidance_scale": 2.0}),
        ("both draft", {"assistant_model": tiny("llama", num_hidden_layers=1)}),
    ]
    for message, options in cases:
        with pytest.raises(UserError, match=message) as caught:
            plain(custom_generate=assisted, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="another model object"):
        plain(tiny("llama"), custom_generate=assisted)
    with pytest.raises(UserError, match="there are none"):
        headstart.assisted(SpeculativeModel(Backbone(tiny("llama")), proposers=[SuffixProposer()]))
    with pytest.raises(UserError, match="cannot draft deeper"):
        headstart.assisted(heads("llama", "medusa"), depth=99)
