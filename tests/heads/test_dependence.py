"""Models whose tokens are computed otherwise beside other tokens: the probe finds them, drafts rest, rows are decoded one at a time."""

import logging

import pytest
import torch
from families import left_padded, prompts, random_drafter, say, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headstart.chat import prompts as chat_prompts
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.probes import attention_windows
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.judging import sentence
from headstart.inference.capture.capture import warn_once
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings
from headstart.inference.stream import Prompt, Queue, stream
from headstart.support.errors import UserError

SHAPE = TreeShape(12, 3, 4)
BENCHED = [chat_prompts.Prompt(ids_T) for ids_T in prompts((9, 14, 11))]


def dependent() -> Backbone:
    return Backbone(replaced(tiny("shallow"), Columns))


def heads_on(on: Backbone) -> SpeculativeModel:
    return SpeculativeModel(on, random_drafter("medusa", on, depth=4), capture="off")


def test_the_probe_tells_layers_that_look_at_other_rows() -> None:
    assert Backbone(tiny("shallow")).dependence is None and Backbone(replaced(tiny("shallow"), Apart)).dependence is None
    found = dependent().dependence
    assert found is not None and found.startswith(
        "LlamaForCausalLM computes a token otherwise beside other tokens (Columns model.layers.0."
    )


def test_plain_layers_are_not_tried() -> None:
    model, calls = tiny("shallow"), list[int]()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, _: calls.append(inputs[0].shape[1]))
    Backbone(model)
    assert calls and 8 not in calls


@pytest.mark.parametrize("sample", [False, True])
def test_texts_are_those_without_drafts_and_of_each_row_alone(sample: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        of = heads_on(dependent())
    assert [line for line in caplog.messages if line.endswith("drafts rest, and rows are decoded one at a time")] == caplog.messages
    each = prompts((9, 14, 5, 11))
    how = {"max_new_tokens": 24, "do_sample": sample, "tree": SHAPE}
    alone = [say(of, left_padded([ids_T]), speculate=False, seed=[3 + i], **how)[0, len(ids_T) :] for i, ids_T in enumerate(each)]
    together = say(of, left_padded(each), seed=[3, 4, 5, 6], **how)[:, max(map(len, each)) :]
    assert torch.equal(together, torch.stack(alone))
    of.backbone.dependence = None
    other = say(of, left_padded(each), seed=[3, 4, 5, 6], **how)[:, max(map(len, each)) :]
    assert not torch.equal(other, together), "with drafts and batches the texts would differ"


def test_a_queue_is_decoded_row_by_row() -> None:
    of, each = heads_on(dependent()), prompts((9, 14, 5, 11))
    waiting = iter([Prompt(ids_T, i, i) for i, ids_T in enumerate(each)])
    steps = list(stream(of, lambda: next(waiting, None), Queue(Settings(16, tree=SHAPE), 4)))
    assert max(len(step.forward.written) for step in steps if step.forward is not None) == 1
    texts = {ended.prompt.key: ended.tokens for step in steps for ended in step.ended}
    for i, ids_T in enumerate(each):
        plain = say(of, left_padded([ids_T]), speculate=False, max_new_tokens=16, do_sample=False)
        assert texts[i] == plain[0, len(ids_T) :].tolist()


def test_beams_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^beams share passes, where LlamaForCausalLM computes .* allowed: num_beams=1$"):
        say(heads_on(dependent()), left_padded(prompts((9,))), max_new_tokens=4, num_beams=2, do_sample=False)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_bench_finds_a_dependence_that_the_probe_has_missed(temperature: float) -> None:
    on = dependent()
    plan = Plan(16, (temperature,), tree=SHAPE)
    resting = compare([("m", heads_on(on))], BENCHED[:1], plan)
    assert resting["verdict"] == resting["results"][0]["verdict"] == "identical" and resting["results"][0]["tau"] == 1
    on.dependence = None
    found = compare([("m", heads_on(on))], BENCHED[:2], plan)
    assert found["results"][0]["tau"] >= 1 and found["results"][0]["identical"] is False
    assert found["verdict"] == found["results"][0]["verdict"] == "fault" and found["rounding"]["beside"] > found["rounding"]["tolerance"]
    assert "with the tokens beside it in a pass, so drafts change the text" in sentence(found)


def test_layers_that_look_at_no_other_row_are_no_fault() -> None:
    report = compare([("m", heads_on(Backbone(replaced(tiny("shallow"), Apart))))], BENCHED[:1], Plan(12, (0.0,), tree=SHAPE))
    assert report["verdict"] in {"identical", "near-tie"} and report["rounding"]["beside"] == 0


def test_attention_by_rank_among_all_keys_is_refused() -> None:
    model = tiny("shallow")
    ranking = [kind for kind in CONFIG_MAPPING.values() if "index_topk" in kind.__annotations__]
    assert len(ranking) >= 3
    for kind in ranking:
        with pytest.raises(UserError, match="they choose what they attend to in a way that the masks of a tree do not govern"):
            attention_windows(kind().get_text_config().to_dict(), model)


# A quantized linear layer that decides over all rows of a pass: a column that is large in one leaves low precision in all of them.

LARGE, STEPS = 2.0, 7
"""From where on a value is large, and the steps on each side of zero that the others are rounded to."""


class Columns(nn.Linear):
    """As LLM.int8 (2208.07339) on a CPU and a GPU, in fewer steps, so that texts change within a few tokens."""

    together = True
    """False: a column leaves in the rows alone in which it is large."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.abs() >= LARGE
        leaves = large.flatten(0, -2).any(0) if self.together else large
        scale = x.masked_fill(large, 0).abs().amax(-1, keepdim=True).clamp(min=1e-9) / STEPS
        return super().forward(torch.where(leaves, x, (x / scale).round() * scale))


class Apart(Columns):
    together = False


def replaced(model: PreTrainedModel, kind: type[Columns]) -> PreTrainedModel:
    """The model with this kind of layer in place of those of its decoder layers."""
    for layer in model.base_model.layers:
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = kind
    return model
