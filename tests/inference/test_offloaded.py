"""Models that accelerate offloads: refused in one line, at the load or at the call, or decoded with the text of generate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from errors import refuses
from families import prompts, say, state, tiny
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import headstart
from headstart.inference.capture.capture import BackendName
from headstart.inference.generate import SpeculativeModel

ROW = {"input_ids": prompts((9,))[0][None].repeat(1, 3)}
HOW: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
PARTS = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")


def on_disk(*parts: str) -> dict[str, str]:
    everything = [*PARTS, *(f"model.layers.{i}" for i in range(1, tiny("llama").config.num_hidden_layers))]
    return {part: "disk" if part in parts else "cpu" for part in everything}


def dispatched(*parts: str) -> Callable[[PreTrainedModel, Path], object]:
    return lambda model, folder: dispatch_model(model, on_disk(*parts), offload_dir=str(folder), main_device="cpu", force_hooks=True)


OFFLOADED: dict[str, tuple[str, Callable[[PreTrainedModel, Path], object]]] = {
    "a layer on disk": ("model.layers.1.", dispatched("model.layers.1")),
    "embeddings on disk": ("model.embed_tokens.weight", dispatched("model.embed_tokens")),
    "output layer on disk": ("lm_head.weight", dispatched("lm_head")),
    "disk_offload": ("model.embed_tokens.weight", lambda model, folder: disk_offload(model, str(folder), execution_device="cpu")),
    "cpu_offload": ("model.embed_tokens.weight", lambda model, folder: cpu_offload(model, execution_device="cpu")),
    "cpu_offload of the embeddings": ("model.embed_tokens.weight", lambda model, _: cpu_offload(model.model.embed_tokens, "cpu")),
    "cpu_offload_with_hook": ("the whole model", lambda model, _: cpu_offload_with_hook(model, execution_device="cpu")),
}


@pytest.mark.parametrize("kind", OFFLOADED)
def test_refused_in_one_line_when_loaded_and_when_called(kind: str, tmp_path: Path) -> None:
    which, offload = OFFLOADED[kind]
    model = tiny("llama")
    plain = model.generate(**ROW, **HOW)
    heads = headstart.load(None, backbone=model, proposers="suffix", capture="off")
    offload(model, tmp_path)
    assert torch.equal(model.generate(**ROW, **HOW), plain), "accelerate's own"
    for run in (lambda: say(heads, ROW, **HOW), lambda: headstart.load(None, backbone=model)):
        refuses(f"^LlamaForCausalLM is offloaded by accelerate .*{which}.*; load it without .*quantized", run)
    refuses("offloaded by accelerate", headstart.load, None, backbone=tiny("llama"), draft_model=model)
    if kind in ("cpu_offload", "cpu_offload_with_hook"):  # in memory again, heads go on
        remove_hook_from_submodules(model)
        assert torch.equal(say(heads, ROW, **HOW), plain)


def test_a_tied_output_layer_on_disk(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    heads = headstart.load(None, backbone=model, proposers="suffix", capture="off")
    dispatched("lm_head", "model.embed_tokens")(model, tmp_path)
    refuses("offloaded by accelerate", say, heads, ROW, **HOW)


def test_a_map_without_offloading_decodes(tmp_path: Path) -> None:
    plain = tiny("llama").generate(**ROW, **HOW)
    tiny("llama").save_pretrained(tmp_path)
    for given in ({"device_map": on_disk()}, {"device_map": "auto", "max_memory": {"cpu": "1GB"}}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **given).eval()
        assert torch.equal(say(headstart.load(None, backbone=model, proposers="suffix"), ROW, **HOW), plain)


# Adapters put on, switched or trained after heads were loaded: the text is PEFT's own, or one line says why not, as at loading.

SWITCH = [5, 6, 7]
ROWS = torch.cat([prompts((9, 9, 9))[row][None].repeat(1, 3) for row in range(3)])
ROWS = torch.cat([ROWS, torch.tensor([SWITCH] * 3)], 1)
ASKED: dict[str, Any] = {"input_ids": ROWS, "attention_mask": torch.ones_like(ROWS), "max_new_tokens": 16, "do_sample": False}
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
PROMPT = CAUSAL | {"num_virtual_tokens": 4}
CPT = {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | CAUSAL | changes
    )


def switched_on() -> peft.LoraConfig:
    """Activated LoRA: its update begins at these tokens."""
    return lora(alora_invocation_tokens=SWITCH)


def loaded(capture: BackendName = "off") -> tuple[PreTrainedModel, SpeculativeModel]:
    """A model with heads on it, before any adapter is."""
    model = tiny("shallow")
    return model, headstart.load(None, backbone=model, proposers=("suffix", "recycling"), capture=capture)


def adapted(model: PreTrainedModel, config: Any, **options: Any) -> Any:
    """The PeftModel, with weights that show."""
    torch.manual_seed(2)
    wrapped = peft.get_peft_model(model, config, **options).eval()
    train(wrapped)
    return wrapped


@torch.no_grad()
def train(wrapped: Any) -> None:
    for weight in wrapped.parameters():
        weight.add_(torch.randn_like(weight) * 0.3 if weight.requires_grad else 0)


def is_peft_s_own(model: Any, heads: SpeculativeModel, **options: Any) -> Tensor:
    """Hold the text to that of ``model.generate`` alone; return it."""
    plain: Tensor = model.generate(**ASKED, **options)
    assert torch.equal(model.generate(**ASKED, **options, custom_generate=heads.generate), plain)
    return plain


def hooked(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def refused(model: Any, heads: SpeculativeModel, said: str, **options: Any) -> None:
    """A call is refused in one line, and PEFT's hooks are off the model afterwards."""
    refuses(said, model.generate, **ASKED, **options, custom_generate=heads.generate)


ALIKE: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(**CAUSAL),
    "road": lambda: peft.RoadConfig(target_modules=["q_proj"], group_size=4, **CAUSAL),
    "norms": lambda: peft.LNTuningConfig(**CAUSAL),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **CAUSAL),
}


@pytest.mark.matrix(cells=4)
@pytest.mark.parametrize("kind", ALIKE)
def test_what_changes_the_layers_alike_counts_from_the_next_call(kind: str) -> None:
    model, heads = loaded("trace" if kind == "lora" else "off")
    bare = is_peft_s_own(model, heads)
    wrapped = adapted(model, ALIKE[kind]())
    first = is_peft_s_own(wrapped, heads)
    assert not torch.equal(first, bare)
    with wrapped.disable_adapter():
        assert torch.equal(is_peft_s_own(wrapped, heads), bare)
    train(wrapped)
    assert not torch.equal(is_peft_s_own(wrapped, heads), first)
    is_peft_s_own(wrapped, headstart.load(None, backbone=wrapped, proposers="suffix", capture="off"))


UNLIKE: dict[str, tuple[Callable[[], Any], str]] = {
    "prefix": (lambda: peft.PrefixTuningConfig(**PROMPT), "^PREFIX_TUNING adapters change the prompt, not the layers; supported: .* DoRA$"),
    "prompt": (lambda: peft.PromptTuningConfig(**PROMPT), "^PROMPT_TUNING adapters change the prompt, not the layers"),
    "p-tuning": (lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=16), "^P_TUNING adapters change the prompt"),
    "cpt": (lambda: peft.CPTConfig(**CPT, **CAUSAL), "^CPT adapters change the prompt, not the layers"),
    "alora": (switched_on, r"^the adapter is switched on by tokens of the prompt \(aLoRA\); supported: .* LoRA and DoRA$"),
    "poly": (lambda: peft.PolyConfig(target_modules=["q_proj"], n_tasks=2, **CAUSAL), "^POLY adapters change the layers by the task"),
    "shadow": (lambda: peft.ShadowConfig(**CAUSAL), "^SHADOW adapters change the layers by the task of a row or by a pass before"),
    "output layer": (lambda: lora(target_modules=["lm_head"]), "^the adapter changes the embedding or the output layer, which heads share"),
    "embeddings": (lambda: lora(modules_to_save=["embed_tokens"]), "^the adapter changes the embedding or the output layer"),
    "some tokens": (lambda: lora(trainable_token_indices=[1, 2]), "^the adapter changes the embedding or the output layer"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_does_not_is_refused_at_the_call_as_when_loaded(kind: str) -> None:
    (config, said), (model, heads) = UNLIKE[kind], loaded()
    wrapped = adapted(model, config())
    before, hooks = state(model)["weights"], hooked(model)
    refused(wrapped, heads, said, **({"task_ids": torch.tensor([0, 1, 0])} if kind == "poly" else {}))
    assert hooked(model) == hooks and state(model)["weights"] == before
    refuses(said, headstart.load, None, backbone=wrapped)
    if "prompt" in said and kind != "alora":
        is_peft_s_own(model, heads)  # without the prompt, which is around the model
        with wrapped.disable_adapter():
            is_peft_s_own(wrapped, heads)


def test_a_mixture_of_experts_by_a_pass_before(tmp_path: Path) -> None:
    peft.get_peft_model(tiny("shallow"), lora()).save_pretrained(str(tmp_path))
    model, heads = loaded()
    model.config.use_cache = False
    wrapped = peft.get_peft_model(model, peft.XLoraConfig(hidden_size=32, adapters={"0": str(tmp_path), "1": str(tmp_path)}, **CAUSAL))
    refused(wrapped.eval(), heads, "^XLORA adapters change the layers by the task of a row or by a pass before")
    refuses("^XLORA adapters", headstart.load, None, backbone=wrapped)


def test_adapters_are_switched_added_up_and_taken_off() -> None:
    model, heads = loaded()
    wrapped = adapted(model, lora())
    wrapped.add_adapter("other", lora())
    wrapped.add_adapter("switched", switched_on())
    texts = [is_peft_s_own(wrapped, heads)]
    wrapped.set_adapter("switched")
    for model_called in (wrapped, model):
        refused(model_called, heads, "switched on by tokens of the prompt")
    wrapped.set_adapter("other")
    texts.append(is_peft_s_own(wrapped, heads))
    wrapped.base_model.set_adapter(["default", "switched"])
    refused(wrapped, heads, "switched on by tokens of the prompt")
    wrapped.base_model.set_adapter(["default", "other"])
    texts.append(is_peft_s_own(wrapped, heads))
    wrapped.add_weighted_adapter(["default", "other"], [1.0, -2.0], "sum", combination_type="linear")
    wrapped.set_adapter("sum")
    texts.append(is_peft_s_own(wrapped, heads))
    wrapped.merge_adapter()
    is_peft_s_own(wrapped, heads)
    wrapped.unmerge_adapter()
    is_peft_s_own(wrapped, heads)
    texts.append(is_peft_s_own(wrapped.unload(), heads))
    assert len({tuple(text.flatten().tolist()) for text in texts}) == 5


def test_rows_with_adapters_of_their_own() -> None:
    """Decoding begins, repeats and ends rows by themselves. An error in a call leaves PEFT's hooks on the layers, but not this one."""
    model, heads = loaded()
    wrapped = adapted(model, lora())
    wrapped.add_adapter("other", lora())
    said = r"^each row has an adapter of its own \(adapter_names\); supported: adapters that change the layers alike"
    refused(wrapped, heads, said, adapter_names=["default", "other", "__base__"])
    assert hooked(model) == 0
    is_peft_s_own(wrapped, heads)


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24") and Version(peft.__version__) < Version("0.22"),
    reason="transformers 5.24 takes no adapter of a PEFT before 0.22",
)
def test_transformers_own_adapters() -> None:
    model, heads = loaded()
    bare = is_peft_s_own(model, heads)
    model.add_adapter(lora(), "one")
    assert not torch.equal(is_peft_s_own(model, heads), bare)
    model.disable_adapters()
    assert torch.equal(is_peft_s_own(model, heads), bare)
    model.enable_adapters()
    model.add_adapter(switched_on(), "switched")
    model.set_adapter("switched")
    refused(model, heads, "switched on by tokens of the prompt")
    refuses("switched on by tokens of the prompt", headstart.load, None, backbone=model)
    model.set_adapter("one")
    is_peft_s_own(model, heads)


def test_adapters_of_several_kinds_in_one_model() -> None:
    model, heads = loaded()
    wrapped = adapted(model, lora(task_type=None), adapter_name="one", mixed=True)
    wrapped.add_adapter("two", peft.LoHaConfig(r=4, alpha=4, target_modules=["k_proj"], init_weights=False))
    for active in ("one", ["one", "two"]):
        wrapped.set_adapter(active)
        is_peft_s_own(wrapped, heads)
        is_peft_s_own(wrapped, headstart.load(None, backbone=wrapped, proposers="suffix", capture="off"))
