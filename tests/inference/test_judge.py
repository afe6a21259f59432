"""The judge: a text of decoding is right up to rounding, a changed token falls short by what its logit lacks, rounding is no guess."""

import pytest
import torch
from families import backbone, prompts, random_drafter, texts, tiny
from image_models import LAST, Picture, image_backbone, prompt_of
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.inference.bench.judging import Judging
from headstart.inference.bench.systems import AR, HeadstartSystem, SystemResult
from headstart.inference.engine import judge as judging
from headstart.inference.engine.judge import Judge, Rounding, Text
from headstart.inference.engine.noise import gumbel
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.reader import Reader
from headstart.inference.measure import Settings, continue_text

PROMPT_T = prompts((11,))[0]


def written(on: Backbone, temperature: float = 0.0, count: int = 20) -> tuple[Tensor, Tensor]:
    """The ids of a text and the logits by which its tokens were chosen."""
    heads = SpeculativeModel(on, random_drafter("medusa", on, depth=3).to(on.dtype))
    output = continue_text(heads, PROMPT_T, Settings(count, temperature, tree=TreeShape(8, 3)), 5, output_logits=True)
    return output.sequences[0], torch.stack(output.logits, 1)[0]


def text(ids_T: Tensor, temperature: float = 0.0, pads: int = 0) -> Text:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature else [])
    seed_1 = torch.tensor([5]) if temperature else None
    ids_T = torch.cat([ids_T.new_zeros(pads), ids_T])
    return Text(ids_T, len(ids_T) - pads - len(PROMPT_T), seed_1, Processing(warpers, 1), pads)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_decoding_writes_is_right(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MOST_LOGITS", 7 * 61)  # in pieces of seven tokens
    judge = Judge(backbone(family))
    ids_T, logits_TV = written(judge.backbone, temperature)
    found = judge.judge(text(ids_T, temperature, pads=4), logits_TV)
    assert found.tokens == len(found.differences) == 20 and not found.faults(judge.rounding.tolerance)
    assert max(found.differences) <= judge.rounding.tolerance < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_changed_token_falls_short_by_what_its_logit_lacks(temperature: float) -> None:
    judge = Judge(backbone("shallow"))
    ids_T, logits_TV = written(judge.backbone, temperature)
    ids_T[-1] = other = (ids_T[-1] + 1) % judge.backbone.vocab
    scores_V = logits_TV[-1]
    if temperature:
        scores_V = scores_V + temperature * gumbel(torch.tensor([5]), torch.tensor([[len(ids_T) - 1]]), judge.backbone.vocab)[0, 0]
    found = judge.judge(text(ids_T, temperature))
    assert found.faults(judge.rounding.tolerance) == [19] == [found.worst[1]]
    assert found.shortfalls[19] == pytest.approx(float(scores_V.max() - scores_V[other]), abs=1e-4)


def test_a_token_that_no_logit_would_make_the_pick() -> None:
    judge = Judge(backbone("shallow"))
    ids_T, _ = written(judge.backbone)
    only = Processing(LogitsProcessorList([lambda ids, scores: scores.masked_fill(torch.arange(61) != 3, -torch.inf)]), 1)  # type: ignore[list-item]
    found = judge.judge(Text(torch.cat([PROMPT_T, torch.tensor([3, 4])]), 2, None, only))
    assert found.shortfalls == {1: float("inf")} and found.worst == (float("inf"), 1)


def test_a_filter_near_its_edge_is_a_near_tie() -> None:
    """Of two tokens of nearly equal logits, top-k keeps one; the other is right up to rounding."""
    on = Backbone(tiny("shallow"))
    with torch.no_grad():
        on.unembed.weight[7] = on.unembed.weight[9] * (1 + 1e-6)
    logits_V = on.readout(on.read(PROMPT_T[None]).hidden_BTD[0, -1])
    if logits_V[7] < 0:
        with torch.no_grad():
            on.unembed.weight[[7, 9]] *= -1
    with torch.no_grad():
        on.unembed.weight[[7, 9]] *= 20 / logits_V[7].abs()
    one = Processing(LogitsProcessorList([TopKLogitsWarper(1)]), 1)
    judge = Judge(on)
    tokens = [judge.judge(Text(torch.cat([PROMPT_T, torch.tensor([token])]), 1, torch.tensor([5]), one)).shortfalls for token in (7, 9)]
    assert sorted(map(len, tokens)) == [0, 1] and max(size for found in tokens for size in found.values()) < 1e-3


def test_rounding_is_measured_once_a_text_exceeds_it_and_in_few_texts() -> None:
    judge = Judge(backbone("shallow"))
    ids_T, logits_TV = written(judge.backbone)
    judge.judge(text(ids_T))
    assert judge.rounding.texts == 0, "every token is the pick"
    for _ in range(9):
        judge.judge(text(ids_T), logits_TV + 1)
    assert judge.rounding.texts == judging.MOST_MEASURED
    assert 1e-7 < judge.rounding.size < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_pass_over_trees_is_no_rounding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    on = Backbone(tiny("qwen3").to(dtype))
    ids_T, _ = written(on)
    right, wrong = Rounding(on), Rounding(on)
    right.measure(ids_T, len(PROMPT_T))
    tree = Reader.tree

    def off(self: Reader, *given: object) -> object:
        features, logits_BNV, added = tree(self, *given)  # type: ignore[arg-type]
        return features, logits_BNV + 1000, added

    monkeypatch.setattr(Reader, "tree", off)
    wrong.measure(ids_T, len(PROMPT_T))
    assert 0 < right.size <= wrong.size < 2, "no more than a unit in the last place in every layer makes of it"


def test_logits_that_are_no_numbers_are_no_rounding() -> None:
    judge = Judge(backbone("shallow"))
    ids_T, logits_TV = written(judge.backbone)
    logits_TV[3, 4] = float("nan")
    found = judge.judge(text(ids_T), logits_TV)
    assert found.worst == (float("inf"), 3) and judge.rounding.tolerance < 1e-3


@pytest.mark.parametrize("length", [1, 2, 80])
def test_texts_of_every_length(length: int) -> None:
    judge = Judge(backbone("shallow"))
    ids_T = torch.cat([PROMPT_T[:1], torch.arange(length) % 61])
    judge.judge(Text(ids_T, length, None, Processing(LogitsProcessorList(), 1)))
    assert judge.rounding.texts == 1 and judge.rounding.tolerance > 0


def test_processors_that_may_be_called_again() -> None:
    def processing(*given: object) -> Processing:
        return Processing(LogitsProcessorList(given), 1)  # type: ignore[arg-type]

    assert processing(TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)).repeatable
    assert not processing(lambda ids, scores: scores).repeatable, "it may count its calls"


def test_texts_of_the_same_tokens_are_judged_with_their_own_images() -> None:
    on, prompts = image_backbone("smolvlm"), [prompt_of("smolvlm", [3, Picture(seed), 4], 1) for seed in range(2)]
    ids = [prompt["input_ids"][0] for prompt in prompts]
    given = {id(ids_T): {name: one for name, one in prompt.items() if "pixel" in name} for ids_T, prompt in zip(ids, prompts, strict=True)}
    measured = SystemResult(HeadstartSystem(AR, SpeculativeModel(on, capture="off")))
    measured.prompts = {i: [ids_T] for i, ids_T in enumerate(ids)}
    measured.sequences = dict.fromkeys(range(2), [texts(1, 5)[0].clamp(max=LAST)])
    entry = Judging(on, lambda ids_T, _: given[id(ids_T)]).add({"temperature": 0.0}, measured, 0)
    assert torch.equal(*ids) and entry.texts[0].shortfalls != entry.texts[1].shortfalls
