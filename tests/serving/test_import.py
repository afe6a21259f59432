"""`headstart import`: heads in the layouts of other trainers draft here what a plain reading of their files drafts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from engines_alone import headstart_drafts
from families import VOCAB, shake, texts, tiny
from foreign import DV, D, Tensors, near_one, write
from image_models import image_backbone
from plain.base import Target
from plain.drafts import headstart_logits, reference_drafts
from plain.folders import read_heads
from plain.layer import under
from torch import Tensor

from headstart import Backbone, Drafter, load, load_backbone
from headstart.serving import reading as importer
from headstart.serving.layouts.files import PROVENANCE, read_files
from headstart.serving.reading import build, layout_of
from headstart.serving.verify.drafts import EngineSettings

SECOND = {"correction": "selector", "correction_rank": 6, "selector_candidates": 4, "convolution": True}


def jetspec(stated: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
    config, tensors = foreign.block("dflash")
    return config | stated, tensors


LAYOUTS: dict[str, tuple[Callable[[], tuple[dict[str, Any], Tensors]], str, dict[str, Any]]] = {
    "eagle1": (foreign.safeailab_eagle1, "eagle", {"bias": True}),
    "eagle3": (foreign.safeailab_eagle3, "eagle3", {"taps": [1, 4, 6], "draft_vocab_size": DV, "norm_before_residual": False}),
    "speculators": (foreign.speculators_eagle3, "eagle3", {"norm_before_residual": True, "qk_norm": True, "depth": 4}),
    "peagle": (foreign.vllm_peagle, "peagle", {"mask_token": 60, "layers": 1, "own_embedding": False, "draft_vocab_size": DV}),
    "speculators-peagle": (foreign.speculators_peagle, "peagle", {"depth": 4, "mask_token": 59, "layers": 2, "own_embedding": True}),
    "medusa": (foreign.medusa, "medusa", {"depth": 3, "layers": 1}),
    "accelerator": (lambda: foreign.accelerator(False), "mlp", {"depth": 3, "inner_dim": 20}),
    "accelerator-tied": (lambda: foreign.accelerator(True), "mlp", {"tie_weights": True}),
    "dflash": (lambda: foreign.block("dflash"), "block", {"taps": [2, 5], "depth": 3, "correction": "none", "mask_token": 60}),
    "jetspec": (lambda: foreign.block("dflash", causal=True), "block", {"taps": [2, 5], "correction": "none", "causal": True}),
    "jetspec-class": (lambda: jetspec({"architectures": ["JetSpecDraftModel"]}), "block", {"correction": "none", "causal": True}),
    "jetspec-head": (lambda: foreign.block("dflash", causal_head=True), "block", {"correction": "none", "causal": True}),
    "dflash2": (lambda: foreign.block("dflash2"), "block", {"depth": 3, "causal": False, **SECOND}),
    "speculators-dflash2": (lambda: foreign.speculators_block("dflash2"), "block", {"depth": 3, "causal": True, **SECOND}),
    "speculators-dflash": (lambda: foreign.speculators_block("dflash"), "block", {"causal": True, "taps": [2, 5], "depth": 3}),
    "speculators-dspark": (lambda: foreign.speculators_block("dspark"), "block", {"causal": True, "correction": "markov", "depth": 4}),
    "dspark": (lambda: foreign.block("dspark"), "block", {"taps": [2, 5], "depth": 4, "correction": "markov", "correction_rank": 6}),
    "domino": (lambda: foreign.block("domino"), "block", {"depth": 4, "correction": "recurrent", "correction_rank": 6}),
}


def readings(folder: Path, on: Backbone, counting: Any = None) -> list[tuple[Any, Drafter]]:
    found = read_files(str(folder))
    return [(one, build(one, on, str(folder))) for one in layout_of(found).parse(found, on, counting).readings()]


def only(folder: Path, on: Backbone) -> tuple[Any, Drafter]:
    (found,) = readings(folder, on)
    return found


def imported(folder: Path, on: Backbone, out: Path, **wishes: Any) -> dict[str, Any]:
    return importer.import_heads(str(folder), on.name, out, lambda: on, importer.Wishes(new_tokens=6, **wishes))


@pytest.mark.matrix(cells=5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_imported_heads_draft_what_their_files_say(on: Backbone, tmp_path: Path, name: str) -> None:
    make, kind, arguments = LAYOUTS[name]
    torch.manual_seed(1)
    folder = write(tmp_path / "theirs", *make())
    report = imported(folder, on, tmp_path / "ours")
    assert report["kind"] == kind and {key: report["arguments"][key] for key in arguments} == arguments
    heads = load(tmp_path / "ours", on, capture="off")
    assert heads.drafter is not None
    target, settings = Target(on.model), EngineSettings(min(3, heads.drafter.max_depth or 3), 10)
    prompts = [texts(1, 7, seed)[0].tolist() for seed in range(3)]
    reading = read_heads(read_files(folder), on)
    assert name == "eagle1" or not reading.faults  # its qkv_bias is a key of SafeAILab's alone
    theirs = reference_drafts(reading, target, prompts, settings)
    assert headstart_drafts(heads, prompts, settings) == theirs and sum(len(one.rounds) for one in theirs) > 10


def hydra_logits(config: dict[str, Any], tensors: Tensors, on: Backbone, hidden_TD: Tensor, tokens: list[int]) -> Tensor:
    """The logits of the last head, of the hidden state of the last position and these tokens since."""
    k, silu = len(tokens) - 1, torch.nn.functional.silu
    prefix = config["hydra_head_arch"] == "prefix-mlp"
    first, second, output = (1, 3, "1.") if prefix else (0, 1, "")
    if prefix:
        from transformers import LlamaModel

        model = LlamaModel(type(on.config)(**{**on.config.to_dict(), "num_hidden_layers": 1})).eval()
        model.load_state_dict(under(tensors, "prefix_embeding_layer."), strict=False)
        hidden_TD = model(inputs_embeds=hidden_TD[None]).last_hidden_state[0]
    x = torch.cat([hidden_TD[-1], *(on.embed.weight[token] for token in tokens)])

    def linear(name: str, x: Tensor) -> Tensor:
        return tensors[f"hydra_mlp.{k}.{name}.weight"] @ x + tensors[f"hydra_mlp.{k}.{name}.bias"]

    x = linear(f"{first}.res_connection", x) + silu(linear(f"{first}.linear", x))
    x = x + silu(linear(f"{second}.linear", x))
    return tensors[f"hydra_lm_head.{k}.{output}weight"] @ x + tensors[f"hydra_lm_head.{k}.{output}bias"]


@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_hydra_is_computed_as_in_the_papers_code(on: Backbone, tmp_path: Path, prefix: bool) -> None:
    """No engine loads Hydra heads: the logits of both depths against the formula. The file is a pickle of tensors."""
    torch.manual_seed(2)
    config, tensors = foreign.hydra(prefix)
    _, drafter = only(write(tmp_path, config, tensors, "hydra_lm_head.pt"), on)
    tokens_1T = texts(1, 8)
    text, drafts = tokens_1T[0].tolist(), [5, 9]
    hidden_TD = on.read(tokens_1T[:, :-1]).hidden_BTD[0]
    found = headstart_logits(drafter, text, drafts)
    for k, row_V in enumerate(found):
        expected = hydra_logits(config, tensors, on, hidden_TD, [text[-1], *drafts][: k + 1])
        torch.testing.assert_close(row_V, expected, atol=3e-5, rtol=1e-4)


def test_medusa_in_all_its_files(on: Backbone, tmp_path: Path) -> None:
    """Heads are counted in the file; version 2 has no output layers; a repeated block is stored once or as often as it is used."""
    config, tensors = foreign.medusa()
    reading, drafter = only(write(tmp_path / "pt", config, tensors, "medusa_lm_head.pt"), on)
    assert all(torch.equal(drafter.tensors()[name], tensor) for name, tensor in tensors.items())
    assert "config.json states 2 heads, the file holds 3" in reading.remarks[0]

    native = {f"blocks.{k}.layers.0.{part}": tensors[f"{k}.0.linear.{part}"] for k in range(3) for part in ("weight", "bias")}
    native |= {f"lm_heads.{k}.weight": tensors[f"{k}.1.weight"] for k in range(3)}
    stated = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": D, "vocab_size": VOCAB}
    _, drafter = only(write(tmp_path / "vllm", stated, native), on)
    assert all(torch.equal(drafter.tensors()[name], tensor) for name, tensor in tensors.items())

    config, tensors = foreign.medusa(layers=2, own_output=False)
    reading, drafter = only(write(tmp_path / "v2", config, tensors), on)
    assert torch.equal(drafter.tensors()["1.2.weight"], on.unembed.weight) and "version 2" in reading.notes[-1]

    config, tensors = foreign.medusa()
    once = {name.replace(".1.weight", ".3.weight"): tensor for name, tensor in tensors.items()}
    _, drafter = only(write(tmp_path / "shared", {**config, "medusa_num_layers": 3}, once), on)
    assert torch.equal(drafter.tensors()["2.2.linear.weight"], tensors["2.0.linear.weight"])
    assert torch.equal(drafter.tensors()["2.3.weight"], tensors["2.1.weight"]) and drafter.arguments["layers"] == 3


def test_draft_vocabularies(on: Backbone, tmp_path: Path) -> None:
    """Tokens instead of offsets are recognised, tokens in another order sorted with their rows, a missing d2t made from t2d."""
    config, tensors = foreign.safeailab_eagle3()
    tokens = tensors["d2t"] + torch.arange(DV)
    expected = only(write(tmp_path / "a", config, tensors), on)[1].tensors()
    shuffled = torch.randperm(DV, generator=torch.Generator().manual_seed(1))
    for i, changes in enumerate((
        {"d2t": tokens},
        {"d2t": tensors["d2t"].int()},
        {"d2t": (tokens[shuffled] - torch.arange(DV)), "lm_head.weight": tensors["lm_head.weight"][shuffled]},
        {"d2t": None},
        {"t2d": None},
    )):  # fmt: skip
        changed = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        reading, drafter = only(write(tmp_path / str(i), config, changed), on)
        assert drafter.tensors().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in drafter.tensors().items())
        assert i != 0 or "d2t holds tokens instead of offsets" in reading.remarks[-1]


def test_shards_half_precision_and_our_own_folders(on: Backbone, tmp_path: Path) -> None:
    """Weights keep their dtype; a copy of the backbone's embedding is left out; an imported folder imports again."""
    config, tensors = foreign.safeailab_eagle3()
    tensors = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    tensors["embed_tokens.weight"] = on.embed.weight.detach().bfloat16()
    shards = {f"model-0000{i}-of-00002.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)}
    for name, shard in shards.items():
        write(tmp_path / "shards", config, shard, name)
    index = {"weight_map": {key: name for name, shard in shards.items() for key in shard}}
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    report = imported(tmp_path / "shards", on, tmp_path / "ours")
    assert "embed_tokens.weight is a copy of the backbone's and left out" in report["notes"] and report["files"].keys() == shards.keys()
    again = imported(tmp_path / "ours", on, tmp_path / "again", depth=2)
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    heads = load(tmp_path / "again", on)
    assert heads.drafter is not None and heads.drafter.depth == 2 and again["layout"] == "Headstart"
    assert read_files(str(tmp_path / "ours")).read(["fc.weight"])["fc.weight"].equal(tensors["fc.weight"])


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A backbone that repeats its last token: layers write nothing to the residual stream, but for the fourth, which writes much."""
    model = tiny("llama")
    shake(model)
    with torch.no_grad():
        for i, decoder in enumerate(model.model.layers):
            decoder.self_attn.o_proj.weight.zero_()
            decoder.mlp.down_proj.weight.mul_(30 if i == 3 else 0)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.copy_(model.model(torch.arange(VOCAB)[:, None]).last_hidden_state[:, 0])
    folder = tmp_path_factory.mktemp("repeating")
    model.save_pretrained(folder)
    return load_backbone(str(folder))


def repeater(on: Backbone, after: bool) -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3 that drafts its own token from the stream before or after the fourth layer; hidden_norm would spoil it."""
    config = {**foreign.LAYER, "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [3]}
    silent = ("o_proj.weight", "down_proj.weight")
    layer = {name: tensor * (not name.endswith(silent)) for name, tensor in foreign.layer("midlayer.", 2 * D).items()}
    tensors = {
        "fc.weight": torch.eye(D), **layer, "midlayer.hidden_norm.weight": torch.ones(D).index_fill(0, torch.arange(0, D, 2), -1.0),
        "midlayer.input_layernorm.weight": near_one(D), "norm.weight": torch.ones(D),
        "lm_head.weight": torch.nn.functional.normalize((on.unembed if after else on.embed).weight.detach()),
    }  # fmt: skip
    return config, tensors


@pytest.mark.parametrize("after", [False, True])
def test_measured_acceptance_decides_how_layers_are_counted(repeating: Backbone, tmp_path: Path, after: bool) -> None:
    """The id 3 at the top level is state 3 to vLLM and the output of layer 3, state 4, in files for SGLang."""
    folder = write(tmp_path / "theirs", *repeater(repeating, after))
    report = imported(folder, repeating, tmp_path / "ours")
    assert report["arguments"]["taps"] == [4 if after else 3] and len(report["readings"]) == 2
    first, second = report["readings"]
    assert first["tau"] > 2.5 > 1.5 > second["tau"]
    assert f"counted as {'layer: taps [4]' if after else 'hs: taps [3]'}" in first["choice"]
    assert report["verdict"][1] == f"read as: {first['choice']}" and "otherwise tau 1." in report["verdict"][2]
    forced = imported(folder, repeating, tmp_path / "forced", counting="layer")
    assert forced["arguments"]["taps"] == [4] and len(forced["readings"]) == 1


@pytest.mark.parametrize("specforge", [True, False])
def test_measured_acceptance_decides_which_state_is_fed_back(repeating: Backbone, tmp_path: Path, specforge: bool) -> None:
    """norm_output true: SpecForge feeds back the state before the norm, whose weight would here turn it once more at every depth."""
    config, tensors = repeater(repeating, after=False)
    turned = torch.ones(D).index_fill(0, torch.arange(0, D, 3), -1.0 if specforge else 1.0)
    tensors |= {"norm.weight": turned, "lm_head.weight": tensors["lm_head.weight"] * turned}
    folder = write(tmp_path / "theirs", config | {"norm_output": True}, tensors)
    report = imported(folder, repeating, tmp_path / "ours", counting="hs")
    assert report["arguments"]["norm_output"] is not specforge and len(report["readings"]) == 2
    assert ("norm_output, as of SpecForge, is of the output layer's input alone" in report["verdict"][1]) == specforge
    first, second = (one["tau"] for one in report["readings"])
    assert first > second + 0.5 if specforge else first == second
    assert len(imported(folder, repeating, tmp_path / "stated", counting="stated")["readings"]) == 1
    (folder / PROVENANCE).write_text("{}")  # what Headstart has exported is read as engines do
    exported = imported(folder, repeating, tmp_path / "again", counting="hs")
    assert exported["arguments"]["norm_output"] and len(exported["readings"]) == 1


def test_measured_acceptance_decides_about_the_residual(repeating: Backbone, tmp_path: Path) -> None:
    """speculators' files without norm_before_residual: vLLM assumes true, but these were trained without."""
    config, tensors = repeater(repeating, after=False)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    stated = {"speculators_model_type": "eagle3", "transformer_layer_config": config, "eagle_aux_hidden_state_layer_ids": [3]}
    report = imported(write(tmp_path / "theirs", stated, tensors), repeating, tmp_path / "ours")
    assert not report["arguments"]["norm_before_residual"] and report["arguments"]["taps"] == [3]
    assert [one["choice"] for one in report["readings"]] == ["norm_before_residual false", "norm_before_residual true"]
    assert report["readings"][0]["tau"] > 2.5 > 1.5 > report["readings"][1]["tau"]


def test_a_second_layers_norm_may_have_either_name(on: Backbone, tmp_path: Path) -> None:
    config, tensors = foreign.safeailab_eagle3()
    tensors |= foreign.layer("layers.1.")
    one, other = near_one(D), near_one(D)
    norms = {"layers.1.input_layernorm.weight": one, "layers.1.hidden_norm.weight": other}
    found = readings(write(tmp_path / "both", {**config, "num_hidden_layers": 2}, tensors | norms), on)
    assert [drafter.tensors()["layers.1.input_layernorm.weight"].tolist() for _, drafter in found] == [one.tolist(), other.tolist()]
    assert "hidden_norm.weight is the second layer's input norm" in found[1][0].choice
    tensors["layers.1.hidden_norm.weight"] = other
    ((reading, drafter),) = readings(write(tmp_path / "one", {**config, "num_hidden_layers": 2}, tensors), on)
    assert torch.equal(drafter.tensors()["layers.1.input_layernorm.weight"], other) and not reading.choice


def test_a_model_that_reads_images_writes_prompts_of_text() -> None:
    """Its configuration of text names no first token, and some of its tokens stand for images."""
    on = image_backbone("qwen3-vl")
    assert not hasattr(on.config, "bos_token_id") and on.placeholders
    rows = importer.written(on)
    assert len(rows) > 2 and not {*on.placeholders.values()} & {int(token) for row in rows for token in row}


def test_the_prompts_that_were_measured_are_counted(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "import os and sys"}\n' * 3)
    found, said = importer.prompts_for(load_backbone("embedded"), importer.Wishes(prompts=str(tmp_path / "few.jsonl")))
    assert len(found) == 3 and said == "3 prompts of few.jsonl"
