"""Drafting changes the speed of decoding, never its tokens: token identity with AR decoding and with transformers."""

import itertools
from typing import Any

import pytest
import torch
from families import DRAFTERS, FAMILIES, VOCAB, Scripted, backbone, heads, left_padded, prompts, random_drafter, say, tiny, unpadded
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import headstart
from headstart import Backbone, SpeculativeModel, TreeShape

LENGTH = 16
TREES = {"one node": TreeShape(1), "chain": TreeShape(9, 1), "wide": TreeShape(24, 23, 1), "usual": TreeShape(), "huge": TreeShape(150, 40)}
MANNERS = [*DRAFTERS, "adversary", "oracle", "nearly"]
SEEDS = [5, 77, -3, 2**63 + 11, 0]


@headstart.stateless
class Superstition(LogitsProcessor):
    """A user-defined processor that depends on the whole history, padding included, and masks many tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        total = input_ids.sum(-1, keepdim=True)
        unlucky = (torch.arange(scores.shape[-1]) + total) % 3 == 0
        return scores.masked_fill(unlucky, -float("inf")) + input_ids.shape[1] % 5 * torch.linspace(0, 1, scores.shape[-1])


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [15, 22], [1, 2, 3]]},
    "min new": {"min_new_tokens": 7, "eos_token_id": [4, 5, 15, 20, 22, 33, 39, 49]},
    "bias": {"sequence_bias": {(3,): 2.5, (15, 15): -9.0, (22, 9): 4.0}},
    "own": {"logits_processor": LogitsProcessorList([Superstition()])},
    "all": {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [15, 22]], "suppress_tokens": [8],
        "logits_processor": LogitsProcessorList([Superstition()]),
    },
}  # fmt: skip
WARPERS: dict[str, dict[str, Any]] = {
    "none": {},
    "usual": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "min p": {"temperature": 1.4, "min_p": 0.05},
    "typical": {"typical_p": 0.8, "renormalize_logits": True},
}


def drafting(manner: str, family: str, truths: list[list[int]], depth: int = 4, captured: bool = True) -> SpeculativeModel:
    """Captures for one kind on one family only; test_capture.py compares captured and uncaptured decoding for the others."""
    if manner in DRAFTERS:
        return heads(family, manner, "trace" if captured and (family, manner) == ("llama", "eagle3") else "off")
    return SpeculativeModel(backbone(family), Scripted(backbone(family), truths, manner, depth), capture="off")


def batch() -> dict[str, Tensor]:
    """The prompts, padded by their own first tokens: the repetition penalty of transformers 5.20 is for padding too."""
    rows = left_padded(prompts())
    first_B1 = torch.stack([row[:1] for row in prompts()])
    return rows | {"input_ids": torch.where(rows["attention_mask"] == 1, rows["input_ids"], first_B1)}


def alone(family: str, **options: Any) -> list[list[int]]:
    """transformers' own generate, row by row; a processor of the user's own sees the padding of a batch."""
    model = backbone(family).model
    if "logits_processor" in options:
        rows = left_padded(prompts())
        return unpadded(model.generate(**rows, **options), rows)
    return [model.generate(row[None], attention_mask=torch.ones_like(row)[None], **options)[0].tolist() for row in prompts()]


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("processors", PROCESSORS)
def test_greedy_text_is_transformers_own(family: str, processors: str) -> None:
    options = PROCESSORS[processors] | {"max_new_tokens": LENGTH, "do_sample": False}
    truths, rows = alone(family, **options), batch() if processors == "repetition" else left_padded(prompts())
    assert len({token for truth in truths for token in truth[-LENGTH:]}) > 6, "a dull text shows nothing"
    first = len(TREES) * (list(PROCESSORS).index(processors) + 3 * FAMILIES.index(family))  # every manner has its turns
    for (name, tree), manner in zip(TREES.items(), itertools.islice(itertools.cycle(MANNERS), first, None), strict=False):
        output = unpadded(say(drafting(manner, family, truths), rows, tree=tree, **options), rows)
        without_padding = [text[: len(truth)] for text, truth in zip(output, truths, strict=True)]
        assert without_padding == truths, (name, manner)


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("sample", [False, True])
def test_every_drafter_in_every_tree(family: str, manner: str, sample: bool) -> None:
    """A batch of five, and one row alone with its seed; a processor that depends on the history. Captured if greedy."""
    seeds: dict[str, Any] = {"seed": SEEDS} if sample else {}
    options = {"max_new_tokens": LENGTH, "do_sample": sample, "repetition_penalty": 1.2} | seeds
    rows = batch()
    plain = unpadded(say(SpeculativeModel(backbone(family)), rows, **options), rows)
    of = drafting(manner, family, plain, captured=not sample)
    for tree in list(TREES.values())[sample::2]:  # greedy: one node, wide, huge; sampled: chain, usual
        assert unpadded(say(of, rows, tree=tree, **options), rows) == plain
    for row in (0, 3):
        mine = {"input_ids": prompts()[row][None]} | options | ({"seed": SEEDS[row]} if sample else {})
        assert of.backbone.model.generate(custom_generate=of.generate, tree=TreeShape(12, 4), **mine)[0].tolist() == plain[row]


@pytest.mark.matrix
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("processors", PROCESSORS)
def test_sampled_text_is_that_of_autoregressive_decoding(warpers: str, processors: str) -> None:
    options = PROCESSORS[processors] | WARPERS[warpers] | {"max_new_tokens": LENGTH, "do_sample": True, "seed": 11}
    rows, texts, half = left_padded(prompts((9, 1, 4))), set(), (list(PROCESSORS).index(processors) + list(WARPERS).index(warpers)) % 2
    for family, manner in list(zip(FAMILIES, ("nearly", "eagle3", "medusa", "nearly"), strict=True))[half::2]:
        plain = say(SpeculativeModel(backbone(family)), rows, **options)
        output = say(drafting(manner, family, unpadded(plain, rows)), rows, tree=TreeShape(20, 6), **options)
        assert torch.equal(output, plain), (family, manner)
        texts.add(str(plain))
    assert len(texts) == 2


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sample", [False, True])
def test_an_oracle_is_accepted_and_an_adversary_is_not(family: str, sample: bool) -> None:
    """A drafter of depth 5 yields at best 6 tokens per pass, at worst 1."""
    rows = left_padded(prompts())
    options: dict[str, Any] = {"max_new_tokens": 1 + 4 * 6, "do_sample": sample, "seed": 3, "return_dict_in_generate": True}
    plain = say(SpeculativeModel(backbone(family)), rows, **options)
    assert (plain.tau, plain.passes, plain.acceptance_per_depth) == (1.0, 24, [])
    truths = unpadded(plain.sequences, rows)
    for tree in (TreeShape(6, 1), TreeShape(30, 7)):
        best = say(drafting("oracle", family, truths, 5), rows, tree=tree, **options)
        worst = say(drafting("adversary", family, truths, 5), rows, tree=tree, **options)
        assert torch.equal(best.sequences, plain.sequences) and torch.equal(worst.sequences, plain.sequences)
        assert (best.tau, best.passes, best.acceptance_per_depth) == (6.0, 4, [1.0] * 5)
        assert (worst.tau, worst.passes, worst.acceptance_per_depth) == (1.0, 24, [0.0] * 5)


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_can_be_continued_from_any_position(family: str) -> None:
    """The token at a position depends only on the preceding tokens, the seed and the position."""
    options: dict[str, Any] = {"do_sample": True, "seed": 5, "temperature": 0.9}
    whole = say(heads(family, "eagle3"), {"input_ids": prompts()[0][None]}, max_new_tokens=LENGTH, **options)
    for kept in range(10, 9 + LENGTH, 3):
        for of in (heads(family, "medusa"), SpeculativeModel(backbone(family))):
            assert torch.equal(say(of, {"input_ids": whole[:, :kept]}, max_length=9 + LENGTH, **options), whole)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_drafter_changes_nothing(wrong: float) -> None:
    """Diverged heads write the same sequence, even if some or all of their logits are NaN or infinite."""
    on, rows = backbone("llama"), left_padded(prompts())
    drafter = Scripted(on, [], "nearly")
    guess = drafter.guess
    drafter.guess = lambda text, depth: guess(text, depth).masked_fill(torch.arange(VOCAB) % 2 == len(text) % 2, wrong)
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
        plain = say(SpeculativeModel(on), rows, max_new_tokens=LENGTH, **options)
        assert torch.equal(say(SpeculativeModel(on, drafter), rows, max_new_tokens=LENGTH, **options), plain)
    drafter.guess = lambda text, depth: torch.full((VOCAB,), wrong)
    assert torch.equal(say(SpeculativeModel(on, drafter), rows, max_new_tokens=LENGTH, **options), plain)


def test_constraints_know_the_text() -> None:
    """prefix_allowed_tokens_fn: after token t, in row b, only t+1+b to t+9+b."""
    rows = left_padded(prompts((6, 3)))

    @headstart.stateless
    def allowed(batch: int, ids: Tensor) -> list[int]:
        return [int(ids[-1] + batch + step) % VOCAB for step in range(1, 10)]

    options: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    expected = backbone("llama").model.generate(**rows, **options)
    for manner in ("oracle", "eagle3"):
        out = say(drafting(manner, "llama", unpadded(expected, rows)), rows, tree=TreeShape(8, 2), return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, expected) and (out.tau > 2 or manner != "oracle")


def test_a_constraint_is_not_asked_about_texts_that_it_has_ruled_out() -> None:
    """As one by a trie, which knows no others; nor about what follows the end of a text."""
    row, options = left_padded(prompts((6,))), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 12}
    texts = [[first, first + 1, 12] for first in (20, 30, 40)] + [[first, *range(2, 11)] for first in (25, 35)]

    @headstart.stateless
    def allowed(batch: int, ids: Tensor) -> list[int]:
        written = ids[6:].tolist()
        found = [text[len(written)] for text in texts if text[: len(written)] == written and len(text) > len(written)]
        assert found, "a text that was ruled out"
        return found

    on = backbone("llama")
    expected = on.model.generate(**row, **options, prefix_allowed_tokens_fn=allowed)
    for drafter in (random_drafter("eagle3", on), Scripted(on, unpadded(expected, row), "nearly")):
        found = say(SpeculativeModel(on, drafter), row, tree=TreeShape(16, 4), prefix_allowed_tokens_fn=allowed, **options)
        assert torch.equal(found, expected)


def test_bf16_tokens_are_near_the_argmax() -> None:
    """Where a tree pass rounds differently from a single-token pass, a token misses the argmax by no more than bf16 misses fp32."""
    on = Backbone(tiny("llama").to(torch.bfloat16))
    of = SpeculativeModel(on, random_drafter("eagle3", on).to(torch.bfloat16))
    row = prompts((9,))[0][None]
    text = say(of, {"input_ids": row}, max_new_tokens=60, do_sample=False)
    logits = on.model(text).logits[0, 8:-1].float()
    rounding = (logits - tiny("llama")(text).logits[0, 8:-1]).abs().max()
    gap = logits.max(-1).values - logits.gather(-1, text[0, 9:, None])[:, 0]
    assert gap.max() <= rounding < logits.std() and (gap == 0).float().mean() >= 0.9
