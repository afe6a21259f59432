"""Models whose tokens are computed otherwise beside other tokens: the probe finds them, drafts rest, rows are decoded one at a time."""

import logging
from collections.abc import Callable
from typing import Any, cast

import peft
import pytest
import torch
from errors import refuses
from families import left_padded, prompts, random_drafter, say, shake, tiny
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import headstart
from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.chat import prompts as chat_prompts
from headstart.heads.backbone.probes import attention_windows
from headstart.inference.bench.bench import Plan, compare
from headstart.inference.bench.judging import sentence
from headstart.inference.capture.capture import warn_once
from headstart.inference.measure import Prompt, Queue, Settings, stream
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
    assert (found or "").startswith("LlamaForCausalLM computes a token otherwise beside other tokens (Columns model.layers.0.")


def test_plain_layers_are_not_tried() -> None:
    calls = list[int]()
    handle = register_module_forward_hook(lambda one, inputs, _: calls.extend(x.shape[1] for x in inputs if type(one) is nn.Linear))
    Backbone(tiny("shallow"))
    handle.remove()
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


class Packed(nn.Module):
    """A linear layer of the user's own, of which no attribute states the width: LLM.int8's outliers, hardly visible without large ones."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.inner = of

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 0.9 if (x.abs() >= 50).any() else out


class Remembering(Packed):
    """Adds what it gave for the last token of the pass before."""

    before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        before, self.before = self.before if x.shape[1] == 1 else None, out[:, -1:].clone()
        return out if before is None else out + before


class Centred(Packed):
    """Takes off what the rows of a batch share."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out - out.mean(0, keepdim=True) / 2 if len(out) > 1 else out


def steered(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """A hook that changes the last token of a pass alone."""
    output = output.clone()
    output[:, -1] += torch.linspace(-1, 1, output.shape[-1])
    return cast(Tensor, output)


def of_mlp(change: Callable[[nn.Module], Any]) -> Callable[[PreTrainedModel], Any]:
    return lambda model: change(model.base_model.layers[1].mlp)


CHANGES: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "layers replaced": (lambda model: replaced(model, Columns), "rests"),
    "output layer": (lambda model: setattr(model.lm_head, "__class__", Columns), "rests"),
    "layer of one's own": (of_mlp(lambda mlp: setattr(mlp, "down_proj", Packed(mlp.down_proj))), "rests"),
    "activation": (of_mlp(lambda mlp: setattr(mlp, "act_fn", nn.Tanh())), ""),
    "setting": (lambda model: setattr(model.base_model.layers[1].input_layernorm, "variance_epsilon", 10.0), ""),
    "cap": (lambda model: setattr(model.config, "final_logit_softcapping", 0.05), ""),
    "last token": (lambda model: model.base_model.layers[1].register_forward_hook(steered), "other tokens follow it in a pass"),
    "last logits": (lambda model: model.lm_head.register_forward_hook(steered), "other tokens follow it in a pass"),
    "memory": (of_mlp(lambda mlp: setattr(mlp, "down_proj", Remembering(mlp.down_proj))), "of your own that compute a token otherwise"),
    "rows": (of_mlp(lambda mlp: setattr(mlp, "down_proj", Centred(mlp.down_proj))), "other rows are read with it"),
    "skipped": (lambda model: setattr(model.base_model.layers[1], "forward", lambda hidden, *_, **__: hidden), "layers that keep no keys"),
    "window": (lambda model: setattr(model.config, "sliding_window", 3), "its windows or rotary frequencies are others"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_heads_were_loaded_counts_or_is_refused(change: str) -> None:
    make, said = CHANGES[change]
    model, row = tiny("gemma3" if change in ("cap", "window") else "shallow"), left_padded(prompts((9,)))
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    of = headstart.load(None, backbone=model, proposers=("suffix", "recycling"), capture="trace")
    before = say(of, row, **how)
    make(model)
    if said in ("", "rests"):
        found = say(of, row, **how)
        assert (of.backbone.dependence is not None) == (said == "rests")
        assert torch.equal(found, say(headstart.load(None, backbone=model, capture="off"), row, **how))
        assert said or torch.equal(found, model.generate(**row, **how)) and not torch.equal(found, before)
        return
    for _ in range(2):
        assert said in refuses("the model was changed since heads were loaded: ", say, of, row, **how)
    if change in ("last token", "last logits", "memory"):
        refuses("has layers or hooks of your own that compute a token otherwise where", headstart.load, None, backbone=model)


def test_an_adapter_that_mixes_by_the_whole_pass_is_tried_when_it_is_enabled() -> None:
    model, row = tiny("shallow"), left_padded(prompts((9,)))
    wrapped = peft.get_peft_model(model, peft.LilyConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    wrapped.base_model.disable_adapter_layers()
    of = headstart.load(None, backbone=model)
    say(of, row, max_new_tokens=4)
    assert of.backbone.dependence is None
    wrapped.base_model.enable_adapter_layers()
    shake(wrapped)
    say(of, row, max_new_tokens=4)
    assert of.backbone.dependence is not None


def test_an_output_layer_without_a_matrix_is_one_line() -> None:
    model = tiny("shallow")
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear(model.config.hidden_size, model.config.vocab_size)
    refuses("has an output layer without a matrix .* quantize the other layers alone", headstart.load, None, backbone=model)
