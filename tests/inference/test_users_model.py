"""The model stays the user's: as it was after loading, decoding, an error and an interrupt; and what is done to it counts from then on."""

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from errors import refuses
from families import ROW, ROWS, Noted, in_training, prompts, random_drafter, say, state, tiny
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import headstart
from headstart import Backbone, SpeculativeModel
from headstart.support.errors import UserError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """EAGLE-3 heads of `in_training`'s model."""
    random_drafter("eagle3", Backbone(tiny("gpt2"))).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


class Raising(BaseStreamer, LogitsProcessor, StoppingCriteria):
    """Raises an error at its third call, as a streamer, a processor or a criterion."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise self.error

    def end(self) -> None:
        """Not reached."""

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        self.put(input_ids)
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"do_sample": True, "seed": 1}, "plain": {"speculate": False},
    "scores": {"return_dict_in_generate": True, "output_scores": True}, "beams": {"num_beams": 2},
}  # fmt: skip


def test_loading_and_calls_leave_the_model_as_it_was(saved: Path) -> None:
    model = in_training()
    before = state(model)
    heads = headstart.load(saved, backbone=model)
    assert state(model) == before
    for options in CALLS.values():
        say(heads, ROWS, max_new_tokens=6, **options)
        assert state(model) == before
    refuses("num_beam_groups|penalty_alpha", say, heads, ROW, max_new_tokens=4, penalty_alpha=0.6, top_k=4)
    assert state(model) == before


@pytest.mark.matrix
@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyboardInterrupt(), SystemExit(3)], ids=["error", "interrupt", "exit"])
@pytest.mark.parametrize("role", ["streamer", "logits_processor", "stopping_criteria", "layer"])
def test_an_error_half_way_leaves_it_as_it_was(saved: Path, role: str, error: BaseException) -> None:
    model = in_training()
    heads = headstart.load(saved, backbone=model, capture="off")
    raising = Raising(error)
    lists = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
    options = {role: lists[role]([raising]) if role in lists else raising} if role != "layer" else {}
    handle = model.transformer.h[3].register_forward_hook(lambda *_: raising.put(None)) if role == "layer" else None
    before = state(model)
    with pytest.raises(type(error)):
        say(heads, ROW, max_new_tokens=12, **options)
    assert raising.calls == 3 and state(model) == before
    if handle is not None:
        handle.remove()
    assert torch.equal(say(heads, ROW, max_new_tokens=8), tiny("gpt2").generate(**ROW, max_new_tokens=8))


def test_a_load_that_fails_leaves_it_as_it_was(saved: Path) -> None:
    model, other = in_training("llama"), in_training("gpt2", seed=3)
    for one in (model, other):
        before = state(one)
        with pytest.raises(UserError):
            headstart.load(saved, backbone=one)
        assert state(one) == before


class Watching(BaseStreamer):
    """Notes the model's modes while tokens are written."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.modes = model, set[tuple[bool, ...]]()

    def put(self, value: Tensor) -> None:
        training = any(part.training for part in self.model.modules())
        if len(value.shape) == 1:  # the first call has the prompt, before ours begins
            self.modes.add((training, torch.is_grad_enabled(), any(weight.requires_grad for weight in self.model.parameters())))

    def end(self) -> None:
        """Nothing is held back."""


def test_a_call_runs_in_evaluation_mode_without_gradients() -> None:
    """GPT-2 has dropout, so its text in training mode would be another at each call."""
    model, truth = in_training(), tiny("gpt2").generate(**ROW, max_new_tokens=20)
    heads, watching = headstart.load(None, backbone=model, capture="trace"), Watching(model)
    assert torch.equal(say(heads, ROW, max_new_tokens=20, streamer=watching), truth)
    assert watching.modes == {(False, False, False)}
    assert heads.engine(False).reader.read.captures_made, "weights that are trained are captured all the same"
    assert not torch.equal(model.generate(**ROW, max_new_tokens=20), truth), "in training mode, as the model still is"


def test_it_is_copied_pickled_and_saved_as_before(saved: Path, tmp_path: Path) -> None:
    model, untouched = in_training(), in_training()
    heads = headstart.load(saved, backbone=model)
    say(heads, ROWS, max_new_tokens=6)
    assert state(pickle.loads(pickle.dumps(model)))["attributes"] == state(pickle.loads(pickle.dumps(untouched)))["attributes"]
    twin = copy.deepcopy(model)
    assert vars(twin).keys() == vars(untouched).keys() and all(w.requires_grad for w in twin.transformer.h.parameters())
    assert torch.equal(say(headstart.load(None, backbone=twin), ROW, max_new_tokens=6), say(heads, ROW, max_new_tokens=6))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=False).state_dict().keys() == untouched.state_dict().keys()
    model.save_pretrained(tmp_path / "one")
    untouched.save_pretrained(tmp_path / "other")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def trained(model: PreTrainedModel, folder: Path, steps: int) -> None:
    rows = [{"input_ids": prompt_T, "labels": prompt_T} for prompt_T in prompts((9, 9, 9, 9))]
    settings = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=0.02, report_to=[], save_strategy="no", seed=1,
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model, settings, train_dataset=rows).train()


def test_training_goes_on_as_without_heads_and_is_noticed(saved: Path, tmp_path: Path) -> None:
    model, untouched = in_training(), in_training()
    heads = headstart.load(saved, backbone=model, capture="trace")
    before = say(heads, ROW, max_new_tokens=16)
    for one in (model, untouched):
        trained(one, tmp_path, steps=2)
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), untouched.parameters(), strict=True))
    after = say(heads, ROW, max_new_tokens=16)
    assert torch.equal(after, copy.deepcopy(untouched).eval().generate(**ROW, max_new_tokens=16)) and not torch.equal(before, after)


@pytest.mark.parametrize("how", ["sgd", pytest.param("adamw", marks=pytest.mark.slow), "fused", "data", "inference", "moved"])
def test_weights_changed_in_any_way_are_captured_anew(how: str) -> None:
    model = tiny("llama", num_hidden_layers=2).requires_grad_(True)
    heads = headstart.load(None, backbone=model, capture="trace")
    first = say(heads, ROW, max_new_tokens=8)
    if how == "data":
        for weight in model.parameters():
            weight.data.copy_(weight.data.flip(0))
    elif how == "moved":
        for weight in model.parameters():
            weight.data = weight.data.flip(0).clone()
    elif how == "inference":
        with torch.inference_mode():
            for weight in model.parameters():
                weight.mul_(-1)
    else:
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "fused": torch.optim.AdamW}
        optimizer = kinds[how](model.parameters(), lr=0.5, **({"fused": True} if how == "fused" else {}))
        model(ROW["input_ids"], labels=ROW["input_ids"]).loss.backward()
        optimizer.step()
    second = say(heads, ROW, max_new_tokens=8)
    assert torch.equal(second, model.generate(**ROW, max_new_tokens=8)) and not torch.equal(first, second)


def test_hooks_of_the_users_own_act_as_they_do_without_heads() -> None:
    model = tiny("llama", num_hidden_layers=2)
    heads = headstart.load(None, backbone=model, capture="trace")
    first, strength = say(heads, ROW, max_new_tokens=16), [1.0]
    handle = model.model.layers[0].register_forward_hook(lambda layer, args, output: output + strength[0])
    for strength[0] in (1.0, -3.0):
        steered = say(heads, ROW, max_new_tokens=16)
        assert torch.equal(steered, model.generate(**ROW, max_new_tokens=16)) and not torch.equal(first, steered)
    handle.remove()
    assert torch.equal(say(heads, ROW, max_new_tokens=16), first)
    handle = model.register_forward_hook(lambda model, args, output: output)
    refuses("hooks on the model as a whole", say, heads, ROW, max_new_tokens=4)
    handle.remove()
    model.forward = lambda *args, own=model.forward, **options: own(*args, **options)  # as accelerate wraps it
    assert torch.equal(say(heads, ROW, max_new_tokens=16), first)


def test_a_buffer_that_is_replaced_counts() -> None:
    model = tiny("llama", num_hidden_layers=2)
    heads = headstart.load(None, backbone=model, proposers="suffix", capture="trace")
    before = say(heads, ROW, max_new_tokens=16)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 4
    for speculate in (True, False):
        found = say(heads, ROW, max_new_tokens=16, speculate=speculate)
        assert torch.equal(found, model.generate(**ROW, max_new_tokens=16)) and not torch.equal(found, before)


def test_inputs_prepared_by_code_of_the_users_own_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama", num_hidden_layers=2)
    heads = headstart.load(None, backbone=model)
    say(heads, ROW, max_new_tokens=4)
    assert "prepare_inputs" not in caplog.text
    model.prepare_inputs_for_generation = functools.wraps(own := model.prepare_inputs_for_generation)(
        lambda *args, **more: own(*args, **more)
    )
    say(heads, ROW, max_new_tokens=4)
    assert "has a prepare_inputs_for_generation of its own, which is not asked here" in caplog.text


def test_a_model_that_torch_compiles_is_the_one_within() -> None:
    compiled: Any = torch.compile(tiny("shallow"), backend="eager")
    heads = headstart.load(None, backbone=compiled, proposers="suffix")
    found = compiled.generate(**ROW, custom_generate=heads.generate, max_new_tokens=16, do_sample=False)
    assert torch.equal(found, tiny("shallow").generate(**ROW, max_new_tokens=16, do_sample=False))


def test_what_was_replaced_is_noticed() -> None:
    model = tiny("shallow")
    heads = headstart.load(None, backbone=model)
    model.resize_token_embeddings(80)
    refuses("replaced or resized since heads were loaded; load them anew", say, heads, ROW, max_new_tokens=4)
    say(headstart.load(None, backbone=model), ROW, max_new_tokens=4)


def test_calls_inside_inference_mode_and_outside() -> None:
    model, truth = tiny("shallow"), tiny("shallow").generate(**ROW, max_new_tokens=20)
    on = Backbone(model)
    heads = SpeculativeModel(on, random_drafter("eagle3", on), proposers=[], capture="trace")
    for inside in (True, False, True, False):
        with torch.inference_mode(inside):
            assert torch.equal(say(heads, ROW, max_new_tokens=20), truth)


def test_unloading(saved: Path) -> None:
    model = in_training()
    before = state(model)
    with headstart.load(saved, backbone=model) as heads:
        text = say(heads, ROW, max_new_tokens=8, streamer=(noted := Noted()))
        assert len(noted.got) == 9
    assert state(model) == before and heads.drafter is None
    refuses("these heads were unloaded; load them again", say, heads, ROW, max_new_tokens=8)
    with pytest.raises(ZeroDivisionError), headstart.load(saved, backbone=model) as heads:
        assert torch.equal(say(heads, ROW, max_new_tokens=8), text)
        say(heads, ROW, max_new_tokens=8 // 0)
    assert state(model) == before


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: switched(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
}


@contextmanager
def switched(switch: Callable[[Any], None], inside: Any, after: Any) -> Iterator[None]:
    switch(inside)
    try:
        yield
    finally:
        switch(after)


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_change_no_text(saved: Path, name: str) -> None:
    """Loaded and called inside them or outside, with captures made outside or inside."""
    calls = [{}, {"do_sample": True, "seed": 4, "top_p": 0.9}, {"num_beams": 3}]
    plain, model = headstart.load(saved, backbone=tiny("gpt2")), tiny("gpt2")
    texts = [say(plain, ROWS, max_new_tokens=10, **options) for options in calls]
    with SETTINGS[name]():
        loaded = headstart.load(saved, backbone=model, capture="trace")
        for heads in (plain, loaded):
            assert all(torch.equal(say(heads, ROWS, max_new_tokens=10, **how), text) for how, text in zip(calls, texts, strict=True))
    assert all(torch.equal(say(loaded, ROWS, max_new_tokens=10, **how), text) for how, text in zip(calls, texts, strict=True))
