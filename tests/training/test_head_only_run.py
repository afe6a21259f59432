"""Training from a feature cache loads the backbone's embedding, final norm and output layer alone, and learns the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import Architecture, chained, refused, served
from errors import refuses
from safetensors.torch import load_file, save_file
from small_run import losses, make_recipe, memory_plan, prepared, read_log
from tiny_models import tiny_model
from torch import Tensor

from headstart import Backbone, load_backbone, load_recipe
from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.heads.backbone.head_only import HeadOnlyBackbone, final_norm, load_head_only
from headstart.heads.backbone.weight_files import E2M1
from headstart.heads.layers.start_values import layer_weights
from headstart.training import loop
from headstart.training.features import source as opening
from headstart.training.features.cached import SUPPLEMENT
from headstart.training.plan.memory import DRAFT_STEP, TARGET_FORWARD, MicroBatch
from headstart.training.setup import prepare

HEAD = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
LAYER = "model.layers.5."
DRAFTERS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "depth": 2},
    "eagle3": {"kind": "eagle3", "depth": 2},
    "block": {"kind": "block", "depth": 3, "layers": 1, "anchor_share": 0.5},
}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with a recipe and a cache, and the overrides that train from it."""
    folder = tmp_path_factory.mktemp("cached")
    recipe = make_recipe(folder, 6, drafter=DRAFTERS["eagle3"])
    options = [f"cache.dir={folder / 'cache'}", "drafter.taps=[1,3,5]"]
    assert main(["cache", str(recipe), *options]) == 0
    return folder, options


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_losses_are_those_beside_the_whole_backbone(kind: str, cached: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Bit for bit, start values included; and of the checkpoint only what is needed is read. A draft model is made of its layers."""
    folder, options = cached
    drafter = DRAFTERS[kind] | ({} if kind == "medusa" else {"taps": [1, 3, 5]})
    command = [str(folder / "recipe.yaml"), *options[:1], f"drafter={json.dumps(drafter)}"]
    run = prepare(load_recipe(command[0], [*command[1:], f"save.dir={tmp_path}/head"]))
    assert isinstance(run.backbone, HeadOnlyBackbone) and run.backbone.files is not None and loop.train(run) == 0
    names = run.backbone.files.read_names
    layer = [name for name in names if name not in HEAD]
    assert sorted(set(names)) == sorted({*HEAD, *layer}) and (bool(layer) == (kind != "medusa"))
    assert all(name.startswith(LAYER) for name in layer) and len(layer) == len(set(layer)) <= 9  # what a fresh head starts as
    beside = f"heads={json.dumps([drafter, {'kind': 'draft_model', 'depth': 2, 'layers': 1}])}"
    assert train([*command[:2], "drafter={}", beside, f"save.dir={tmp_path}/whole"]) == 0
    whole = [line["loss"] for line in read_log(tmp_path / "whole") if line.get("head") == kind and "loss" in line]
    assert losses(tmp_path / "head") == whole and len(whole) == 12
    ours, theirs = (next((tmp_path / name).glob("*.safetensors")) for name in ("head", f"whole/{kind}"))
    one, other = load_file(ours), load_file(theirs)
    assert one.keys() == other.keys() and all(torch.equal(one[name], weight) for name, weight in other.items())


def test_a_run_that_goes_on_reads_three_tensors_and_needs_no_others(cached: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The checkpoint's layers may be gone."""
    folder, options = cached
    shutil.copytree(folder, tmp_path / "copy")
    recipe = tmp_path / "copy" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(folder), str(tmp_path / "copy")))
    options = [f"cache.dir={tmp_path / 'copy' / 'cache'}", *options[1:]]
    assert train([str(recipe), *options, "train.steps=3"]) == 0
    file = tmp_path / "copy" / "backbone" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name in HEAD}, file, {"format": "pt"})
    run = prepared(recipe, *options, "train.steps=3")
    assert isinstance(run.backbone, HeadOnlyBackbone) and run.backbone.files is not None and run.done == 3
    assert sorted(run.backbone.files.read_names) == HEAD
    assert sum(weight.numel() for weight in run.backbone.weights) == (2 * 256 + 1) * 16
    assert train([str(recipe), *options, f"save.dir={tmp_path}/fresh"]) == 0  # starts at random then


def test_held_out_rows_are_evaluated_on_their_features(cached: tuple[Path, list[str]], tmp_path: Path, capsys: Any) -> None:
    folder, options = cached
    command = [str(folder / "recipe.yaml"), *options, "train.steps=4"]
    assert train([*command, f"save.dir={tmp_path}/out"]) == 0
    [line] = [line for line in read_log(tmp_path / "out") if "teacher_forced_tau" in line]
    shares = line["teacher_forced_acceptance_per_depth"]
    assert line["teacher_forced_tau"] == pytest.approx(1 + sum(shares)) and 1 >= shares[0] >= shares[1] >= 0
    assert "as a teacher-forced chain on held-out features (not decoded" in capsys.readouterr().err
    provenance = json.loads((tmp_path / "out" / "headstart.json").read_text())["provenance"]
    assert provenance["teacher_forced"]["teacher_forced_tau"] == line["teacher_forced_tau"] and provenance["tau"] is None
    shutil.copytree(folder / "cache", tmp_path / "old")
    (tmp_path / "old" / SUPPLEMENT).unlink()
    assert train([*command, f"cache.dir={tmp_path}/old", f"save.dir={tmp_path}/unevaluated"]) == 2
    assert f"lacks {SUPPLEMENT}; run headstart cache with this recipe to write it" in capsys.readouterr().err


def test_the_plan_counts_no_layers_and_no_reading(cached: tuple[Path, list[str]]) -> None:
    folder, options = cached
    head, whole = (memory_plan(folder / "recipe.yaml", *changes) for changes in (options, []))
    assert head.persistent["backbone weights"] == 4 * (2 * 256 + 1) * 16 < whole.persistent["backbone weights"] / 2
    phases = head.step(MicroBatch(2, 32)).phases
    assert "backbone activations" not in phases[TARGET_FORWARD] and phases[DRAFT_STEP]["features"] > 0


def test_an_adapter_needs_the_whole_backbone(cached: tuple[Path, list[str]]) -> None:
    folder, options = cached
    recipe = load_recipe(folder / "recipe.yaml", options)
    assert opening.opens_head_only(recipe)
    for change in ("backbone.adapter=somewhere", "drafter={kind: draft_model, layers: 2, depth: 2}", "cache.dir=null"):
        assert not opening.opens_head_only(load_recipe(folder / "recipe.yaml", [*options[:1], change]))
    assert not issubclass(Backbone, HeadOnlyBackbone)


# The embedding, final norm and output layer of a backbone, read by name: equal to the whole model's, and nothing else is read.

UNVERIFIED = {"DeepSeek-V3.2, GLM-5", "MiniMax-01", "Jamba", "LFM2", "Nemotron-H", "BLOOM", "Llama-4"}
"""Architectures that decoding refuses, and whose tiny model transformers runs."""
SHIPPED = Path(__file__).parents[2] / "recipes" / "quickstart" / "backbone"


@pytest.mark.matrix(cells=8)
@pytest.mark.parametrize("architecture", served(), ids=lambda one: one.name)
def test_it_is_the_whole_backbones(architecture: Architecture, tmp_path: Path) -> None:
    architecture.model().eval().save_pretrained(tmp_path)
    whole, head = load_backbone(str(tmp_path), dtype="fp32"), load_head_only(str(tmp_path), dtype="fp32")
    tokens, last = torch.arange(1, 9)[None] % whole.vocab, whole.num_layers
    features = whole.read(tokens, taps=(last,))
    assert features.taps is not None
    assert head.contract() == whole.contract() and (head.name, head.precision) == (whole.name, whole.precision)
    assert torch.equal(head.embed(tokens), whole.embed(tokens))
    assert torch.equal(head.readout(features.hidden_BTD), whole.readout(features.hidden_BTD))
    torch.testing.assert_close(head.norm(features.taps[last]), features.hidden_BTD, rtol=1e-5, atol=1e-6)
    assert head.files is not None and len(head.files.read_names) <= 5
    assert sum(weight.numel() for weight in head.weights) < 3.2 * whole.vocab * whole.dim + 4096
    assert all(weight.is_meta for weight in head.layers.parameters())


@pytest.mark.parametrize("architecture", [one for one in chained() + refused() if one.name in UNVERIFIED], ids=lambda one: one.name)
def test_what_decoding_refuses_has_one_too(architecture: Architecture, tmp_path: Path) -> None:
    """Its norm and readout of the last layer's states are the model's own logits."""
    model = architecture.model().eval()
    model.save_pretrained(tmp_path)
    head, kept = load_head_only(str(tmp_path), dtype="fp32"), {}
    final_norm(model).register_forward_pre_hook(lambda module, args: kept.update(last=args[0]))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(1, 9)[None]).logits
    torch.testing.assert_close(head.readout(head.norm(kept["last"])), logits, rtol=1e-4, atol=1e-5)


def changed(folder: Path, change: dict[str, Tensor | None]) -> str:
    """A copy of the shipped backbone with tensors replaced, added or (None) left out."""
    tensors: dict[str, Tensor] = {}
    for file in SHIPPED.glob("*.safetensors"):
        tensors |= load_file(file)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    folder.mkdir()
    for file in SHIPPED.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def table() -> Tensor:
    return load_head_only(str(SHIPPED), dtype="fp32").embed.weight.detach()


@pytest.mark.parametrize("scaled", ["block", "row", "whole"])
def test_weights_in_fp8_are_dequantized(scaled: str, table: Tensor, tmp_path: Path) -> None:
    """By factors of blocks of 128 x 128 (DeepSeek), of rows (compressed-tensors) or of the whole (ModelOpt)."""
    rows, columns = table.shape
    shape = {"block": (-(-rows // 128), -(-columns // 128)), "row": (rows, 1), "whole": (1,)}[scaled]
    scale = torch.rand(shape) * 0.01 + 0.001
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns] if scaled == "block" else scale
    packed = (table / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    name = f"{TABLE}_scale_inv" if scaled == "block" else f"{TABLE}_scale"
    head = load_head_only(changed(tmp_path / "new", {TABLE: packed, name: scale}), dtype="fp32")
    assert torch.equal(head.embed.weight, packed.float() * spread)


@pytest.mark.parametrize("layout", ["ModelOpt", "compressed-tensors"])
def test_weights_in_nvfp4_are_dequantized(layout: str, table: Tensor, tmp_path: Path) -> None:
    rows, columns = table.shape
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scale, whole = torch.rand(rows, columns // 16).to(torch.float8_e4m3fn), torch.tensor(0.03)
    values = torch.tensor([(-1 if code > 7 else 1) * E2M1[code % 8] for code in range(16)])[codes.long()]
    expected = values * scale.float().repeat_interleave(16, 1) * whole
    stem = TABLE.removesuffix("weight")
    names = {TABLE: packed, f"{TABLE}_scale": scale, f"{TABLE}_scale_2": whole}
    if layout == "compressed-tensors":
        names = {TABLE: None, f"{stem}weight_packed": packed, f"{stem}weight_scale": scale, f"{stem}weight_global_scale": 1 / whole[None]}
    head = load_head_only(changed(tmp_path / "new", names), dtype="fp32")
    torch.testing.assert_close(head.embed.weight, expected, rtol=1e-6, atol=0)


def test_an_output_layer_in_the_files_of_a_tied_model(table: Tensor, tmp_path: Path) -> None:
    """As transformers does: equal ones are one, others stay two; and either may be the one that is there."""
    copied = load_head_only(changed(tmp_path / "a", {"lm_head.weight": table.clone()}), dtype="fp32")
    assert copied.unembed.weight is copied.embed.weight
    apart = load_head_only(changed(tmp_path / "b", {"lm_head.weight": table + 1}), dtype="fp32")
    assert torch.equal(apart.unembed.weight, table + 1) and torch.equal(apart.embed.weight, table)
    moved = load_head_only(changed(tmp_path / "c", {"lm_head.weight": table.clone(), TABLE: None}), dtype="fp32")
    assert torch.equal(moved.embed.weight, table)


@pytest.mark.parametrize(("change", "message"), [
    ({TABLE: None}, "lacks model.embed_tokens.weight, so it cannot train heads"),
    ({"model.norm.weight": None}, "lacks model.norm.weight, so it cannot train heads"),
    ({TABLE: torch.zeros(4, 4, dtype=torch.int8)}, "is int8, in a way that is not known"),
    ({TABLE: torch.zeros(4, 4)}, r"is \[4, 4\], by its configuration \["),
])  # fmt: skip
def test_what_cannot_be_read_is_said(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    refuses(message, load_head_only, changed(tmp_path / "new", change))


@pytest.mark.parametrize("kind", ["bart", "cpmant", "inkling_text", "molmo2", "paligemma"])
def test_classes_of_other_shapes_train_from_a_cache(kind: str, tmp_path: Path) -> None:
    """Without a norm at the end, so that the last tap is the final state; with states for more than the tokens; with a normed embedding, or
    one that another class scales, or that is stored in two parts.
    """
    recipe = str(make_recipe(tmp_path, drafter=DRAFTERS["medusa"], train={"steps": 10}, eval={"prompts": 1}))
    (model := tiny_model(kind)).save_pretrained(tmp_path / "backbone")
    head, tokens = load_head_only(str(tmp_path / "backbone")), torch.arange(9)
    assert torch.equal(head.embed(tokens), model.get_input_embeddings()(tokens))
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in ("CATSEESDOG", "DOGFINDSSUN") * 10))
    for command in ("cache", "train"):
        assert main([command, recipe, f"cache.dir={tmp_path / 'cache'}"]) == 0
    if kind == "bart":  # whose features are kept between epochs too
        assert train([recipe, "drafter={kind: eagle3, depth: 2, taps: [1, 3, 6]}", f"save.dir={tmp_path}/live"]) == 0


@pytest.mark.parametrize("kind", ["blt", "blip", "prophetnet"])
def test_models_that_have_no_such_parts_are_refused(kind: str, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    refuses("layers of width None|does not name an output layer|more than its final hidden states", load_head_only, str(tmp_path))


def test_it_reads_no_text_and_a_layer_by_its_name() -> None:
    head, whole = load_head_only("embedded", dtype="fp32"), load_backbone("embedded", dtype="fp32")
    refuses("only the embedding and the output layer of embedded are here", head.read, torch.zeros(1, 2, dtype=torch.int64))
    ours, theirs = layer_weights(head), layer_weights(whole)
    assert ours is not None and theirs is not None and torch.equal(ours[1], theirs[1])
    assert ours[0].keys() == theirs[0].keys() and all(torch.equal(ours[0][name], weight) for name, weight in theirs[0].items())
    assert all(weight.is_meta for weight in head.layers.parameters())
