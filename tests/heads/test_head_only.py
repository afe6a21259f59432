"""The embedding, final norm and output layer of a backbone, read by name: equal to the whole model's, and nothing else is read."""

from pathlib import Path

import pytest
import torch
from architectures import Architecture, chained, refused, served
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.backbone.head_only import HeadOnlyBackbone, load_head_only
from headstart.heads.backbone.weight_files import E2M1
from headstart.heads.layers.start_values import layer_weights
from headstart.support.errors import UserError

UNVERIFIED = {"DeepSeek-V3.2, GLM-5", "MiniMax-01", "Jamba", "LFM2", "Nemotron-H", "BLOOM", "Llama-4"}
"""Architectures that decoding refuses, and whose tiny model transformers runs."""
SHIPPED = Path(__file__).parents[2] / "recipes" / "quickstart" / "backbone"


def saved(architecture: Architecture, folder: Path) -> Path:
    architecture.model().eval().save_pretrained(folder)
    return folder


@pytest.mark.matrix(cells=8)
@pytest.mark.parametrize("architecture", served(), ids=lambda one: one.name)
def test_it_is_the_whole_backbones(architecture: Architecture, tmp_path: Path) -> None:
    path = str(saved(architecture, tmp_path))
    whole, head = load_backbone(path, dtype="fp32"), load_head_only(path, dtype="fp32")
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
    norm = next(module for name, module in model.named_modules() if name == _name(head))
    norm.register_forward_pre_hook(lambda module, args: kept.update(last=args[0]))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(1, 9)[None]).logits
    torch.testing.assert_close(head.readout(head.norm(kept["last"])), logits, rtol=1e-4, atol=1e-5)


def _name(head: HeadOnlyBackbone) -> str:
    return next(name for name, module in head.model.named_modules() if module is head.norm)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({TABLE: None}, "lacks model.embed_tokens.weight, so it cannot train heads"),
        ({"model.norm.weight": None}, "lacks model.norm.weight, so it cannot train heads"),
        ({TABLE: torch.zeros(4, 4, dtype=torch.int8)}, "is int8, in a way that is not known"),
        ({TABLE: torch.zeros(4, 4)}, r"is \[4, 4\], by its configuration \["),
    ],
)
def test_what_cannot_be_read_is_said(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_head_only(changed(tmp_path / "new", change))


def test_it_reads_no_text_and_a_layer_by_its_name() -> None:
    head, whole = load_head_only("embedded", dtype="fp32"), load_backbone("embedded", dtype="fp32")
    with pytest.raises(UserError, match="only the embedding and the output layer of embedded are here"):
        head.read(torch.zeros(1, 2, dtype=torch.int64))
    ours, theirs = layer_weights(head), layer_weights(whole)
    assert ours is not None and theirs is not None and torch.equal(ours[1], theirs[1])
    assert ours[0].keys() == theirs[0].keys() and all(torch.equal(ours[0][name], weight) for name, weight in theirs[0].items())
    assert all(weight.is_meta for weight in head.layers.parameters())
