"""Export, import: the same heads, in every layout that both know; and what imported heads are good for."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_alone import headstart_drafts, plain_reader_agrees
from errors import refuses
from exported import KINDS
from families import backbone, random_drafter, texts, tiny
from foreign import write

from headstart import Backbone, Drafter, load
from headstart.cli.main import main
from headstart.heads.methods import build_drafter
from headstart.heads.warm_start import read_warm_start
from headstart.serving import reading as importer
from headstart.serving.export import Request, export
from headstart.serving.layouts.files import PROVENANCE, read_files
from headstart.serving.layouts.layout import read_checkpoint
from headstart.serving.reading import build, layout_of, layouts_of, require_fit
from headstart.serving.verify.drafts import EngineSettings
from headstart.serving.verify.verify import Check, recorded, verify
from headstart.support.errors import UserError
from headstart.training.recipe.recipe import load_recipe, split_drafter

UNSAID = {"depth", "draft_depth", "feature_noise", "anchor_share", "path", "layers", "native", "architecture", "choose", "tie_weights"}
"""Arguments of training, which layouts for engines do not hold, and how a draft model came about."""


def imported(folder: Path, on: Backbone) -> Drafter:
    """The heads that the files of a folder stand for."""
    foreign = read_files(str(folder))
    source = layout_of(foreign)
    require_fit(foreign, source, on.name, False)
    reading = source.parse(foreign, on).readings()[0]
    assert source.title != "Headstart"
    return build(reading, on, "out")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "hydra"])
def test_in_every_layout_they_are_the_same_heads(home: Path, on: Backbone, tmp_path: Path, name: str) -> None:
    """By the drafts that the export stored, by those of the heads, by the plain reader, and imported; hydra has no layout."""
    heads, before = home / name, load(home / name, on).drafter
    layouts = {layout.name for layout in layouts_of(read_checkpoint(str(heads), None).method)} - {"llama.cpp", "openvino", "eagle4"}
    assert before is not None and layouts
    for layout in layouts:
        out = tmp_path / layout
        export(Request(str(heads), layout, out))
        stored = recorded(out)
        assert stored[:2] == (str(heads), on.name)
        for check in (Check(out, on, None, "reference", [], 5, stored=stored[2]), Check(out, on, str(heads), "reference", [], 5)):
            verdict = verify(check)
            assert verdict.equal and verdict.reference is not None and verdict.reference.drafts > 2, list(verdict.lines())
        assert plain_reader_agrees(out, str(heads), on)
        if name in ("medusa-small", "mlp-small"):  # written over the whole vocabulary: test_export.py
            continue
        drafter = imported(out, on)
        assert drafter.tensors().keys() == before.tensors().keys()
        assert all(torch.equal(tensor, before.tensors()[name]) for name, tensor in drafter.tensors().items())
        ours, theirs = ({key: value for key, value in one.arguments.items() if key not in UNSAID} for one in (drafter, before))
        assert ours == theirs and drafter.taps == before.taps
        assert name in ("draft_model", "pard") or drafter.arguments.get("layers") == before.arguments.get("layers")


def test_imported_heads_are_heads(home: Path, on: Backbone, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command; the same drafts before and after; the backbone writes the prompts; fine-tuning goes on from them."""
    heads, out = home / "eagle3-small", tmp_path / "imported"
    export(Request(str(heads), "speculators", tmp_path / "theirs"))
    arguments = ["import", str(tmp_path / "theirs"), "--backbone", str(home / "backbone"), "--out", str(out), "--max-new-tokens", "4"]
    assert main([*arguments, "--json", str(tmp_path / "report.json")]) == 0
    printed = capsys.readouterr()
    assert "speculators, as eagle3 heads of" in printed.out and "measured on 8 texts that the backbone wrote itself: tau 1." in printed.out
    assert "writing prompts with the backbone: 100%" in printed.err and "measuring the heads: 100%" in printed.err
    assert f"headstart generate --heads {out}" in printed.err and (tmp_path / "report.json").is_file()
    prompts, settings = [texts(1, 7, seed)[0].tolist() for seed in range(3)], EngineSettings(3, 8)
    before, after = (headstart_drafts(load(path, on, capture="off"), prompts, settings) for path in (heads, out))
    assert before == after
    start = read_warm_start(str(out), "eagle3", on)
    overrides = shlex.split(printed.err.splitlines()[-1].partition(" RECIPE ")[2])
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/quickstart/eagle3.yaml", overrides)
    options, further = split_drafter(recipe.drafter)
    assert options.init == str(out) and "drafter.fc_norm=true" in overrides
    start.require_fits(build_drafter("eagle3", on, further))
    with pytest.raises(UserError, match=r"computes with drafter\.sliding_window null, this drafter 8: set drafter\.sliding_window=null"):
        start.require_fits(build_drafter("eagle3", on, {"draft_vocab_size": 23, "layers": 2, "fc_norm": True, "sliding_window": 8}))
    start.require_fits(un_normed := build_drafter("eagle3", on, {"layers": 2, "fc_norm": True, "norm_output": False}))
    assert "drafter.norm_output is True there and False here" in start.apply(un_normed)


def test_causal_blocks_go_through_speculators_or_as_jetspec(home: Path, on: Backbone, tmp_path: Path) -> None:
    random_drafter("block", on, depth=4, causal=True, correction="none", taps=[1, 3]).save_pretrained(tmp_path / "heads")
    export(Request(str(tmp_path / "heads"), "speculators", tmp_path / "out"))
    found = imported(tmp_path / "out", on)
    assert found.arguments["causal"] and found.taps == (1, 3)
    for to in ("sglang", "dflash-hf", "llama.cpp"):
        refuses("causal", export, Request(str(tmp_path / "heads"), to, tmp_path / to))
    line = export(Request(str(tmp_path / "heads"), "vllm", tmp_path / "jetspec"))["launch"]["vllm"]["line"]
    stated = json.loads((tmp_path / "jetspec" / "config.json").read_text())
    assert stated["dflash_config"]["causal"] is True and stated["architectures"] == ["DFlashDraftModel"]
    assert '"method": "dflash"' in line and '"num_speculative_tokens": 4' in line
    random_drafter("block", on, depth=4, causal=True, layers=1).save_pretrained(tmp_path / "dspark")
    refuses("causal", export, Request(str(tmp_path / "dspark"), "vllm", tmp_path / "out-dspark"))
    random_drafter("block", on, depth=4, convolution=True, layers=1).save_pretrained(tmp_path / "mixed")
    for to in ("vllm", "sglang"):
        said = r"drafter\.convolution=true with drafter\.correction=selector, and either with the other alone"
        refuses(said, export, Request(str(tmp_path / "mixed"), to, tmp_path / "out-mixed"))


@pytest.mark.parametrize(
    ("to", "correction", "causal"),
    [("vllm", "none", False), ("sglang", "recurrent", False), ("vllm", "markov", False), ("speculators", "none", False),
     ("speculators", "markov", False), ("speculators", "none", True)],
)  # fmt: skip
def test_blocks_with_a_window_go_through_layouts_of_engines(to: str, correction: str, causal: bool, on: Backbone, tmp_path: Path) -> None:
    """The window, and whether blocks are causal, which engines take layers with a window for by default."""
    arguments = {"depth": 4, "correction": correction, "causal": causal, "taps": [1, 3], "sliding_window": 9}
    random_drafter("block", on, **arguments).save_pretrained(tmp_path / "heads")
    export(Request(str(tmp_path / "heads"), to, tmp_path / "out"))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    layer = stated.get("transformer_layer_config", stated)
    assert layer["layer_types"] == ["sliding_attention"] * 3 and layer["sliding_window"] == 9 and layer["use_sliding_window"] is True
    says = stated["is_causal"] if to != "speculators" else not stated["sliding_window_non_causal"]
    assert says is causal and stated.get("dflash_config", {}).get("causal", causal) is causal
    found = imported(tmp_path / "out", on).arguments
    assert found["sliding_window"] == 9 and found["causal"] is causal
    if correction == "none" and not causal:
        with pytest.raises(UserError, match=r"drafter.sliding_window.*which transformers counts to both sides"):
            export(Request(str(tmp_path / "heads"), "dflash-hf", tmp_path / "hf"))


def test_heads_of_another_model_are_draft_models(home: Path, on: Backbone, tmp_path: Path) -> None:
    small = tiny("llama", num_hidden_layers=1, hidden_size=16)
    small.save_pretrained(tmp_path / "small")
    report: dict[str, Any] = importer.import_heads(
        str(tmp_path / "small"), str(home / "backbone"), tmp_path / "out", lambda: on, importer.Wishes(new_tokens=4, depth=3)
    )
    drafter = load(tmp_path / "out", on).drafter
    assert drafter is not None and report["kind"] == "draft_model" and drafter.depth == 3
    assert torch.equal(drafter.tensors()["model.embed_tokens.weight"], small.model.embed_tokens.weight)
    assert report["files"].keys() == {"model.safetensors"} and not (tmp_path / "out" / PROVENANCE).exists()


def test_mtp_modules_of_speculators(tmp_path: Path) -> None:
    """speculators' names of Qwen3.5's module, and of a layer that mtp heads here do not have."""
    qwen = backbone("qwen3")
    drafter = random_drafter("mtp", qwen, layout="qwen3_5", depth=2)
    layer = {"model_type": "qwen3_5_text", "hidden_size": 32, "vocab_size": 61}
    stated = {"speculators_model_type": "mtp", "transformer_layer_config": layer,
              "speculators_config": {"proposal_methods": [{"speculative_tokens": 2}]}}  # fmt: skip
    theirs = {"fc": "input_proj", "norm": "final_layernorm"}
    theirs |= {"pre_fc_norm_hidden": "hidden_layernorm", "pre_fc_norm_embedding": "token_layernorm"}
    tensors = {}
    for name, tensor in drafter.tensors().items():
        bare = name.removeprefix("mtp.").removeprefix("layers.0.")
        module, _, part = bare.rpartition(".")
        tensors[f"mtp_layers.0.{theirs.get(module, module)}.{part}"] = tensor
    found = imported(write(tmp_path / "theirs", stated, tensors), qwen)
    assert found.trained_depth == 2 and all(torch.equal(tensor, drafter.tensors()[name]) for name, tensor in found.tensors().items())
    layer["model_type"] = "qwen3"
    with pytest.raises(UserError, match="holds an MTP layer of qwen3; mtp heads here have dense gated layers"):
        imported(write(tmp_path / "dense", stated, tensors), qwen)
