"""Models that accelerate offloads: refused in one line, at the load or at the call, or decoded with the text of generate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from families import prompts, say, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

import headstart
from headstart.support.errors import UserError

ROW = {"input_ids": prompts((9,))[0][None].repeat(1, 3)}
HOW: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
PARTS = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")


def on_disk(*parts: str) -> dict[str, str]:
    """A map with these parts on disk."""
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
        with pytest.raises(
            UserError, match=f"^LlamaForCausalLM is offloaded by accelerate .*{which}.*; load it without .*quantized"
        ) as caught:
            run()
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="offloaded by accelerate"):
        headstart.load(None, backbone=tiny("llama"), draft_model=model)
    if kind in ("cpu_offload", "cpu_offload_with_hook"):  # in memory again, heads go on
        remove_hook_from_submodules(model)
        assert torch.equal(say(heads, ROW, **HOW), plain)


def test_a_tied_output_layer_on_disk(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    heads = headstart.load(None, backbone=model, proposers="suffix", capture="off")
    dispatched("lm_head", "model.embed_tokens")(model, tmp_path)
    with pytest.raises(UserError, match="offloaded by accelerate"):
        say(heads, ROW, **HOW)


def test_a_map_without_offloading_decodes(tmp_path: Path) -> None:
    plain = tiny("llama").generate(**ROW, **HOW)
    tiny("llama").save_pretrained(tmp_path)
    for given in ({"device_map": on_disk()}, {"device_map": "auto", "max_memory": {"cpu": "1GB"}}):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **given).eval()
        assert torch.equal(say(headstart.load(None, backbone=model, proposers="suffix"), ROW, **HOW), plain)
