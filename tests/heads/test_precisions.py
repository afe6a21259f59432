"""Heads trained on one precision of a model load on another, with a line; a fine-tune and another model are refused; 8-bit backbones."""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from errors import refuses
from families import DRAFTERS, left_padded, prompts, random_drafter, say, tiny
from gguf_models import chat_model, stored_as, write_gguf
from test_architecture import FOLDERS, sources
from torch import nn

from headstart import Backbone, SpeculativeModel, load_backbone
from headstart.heads.backbone.fingerprint import bits_of, fingerprint, match
from headstart.heads.card import METADATA
from headstart.heads.checkpoint import load_drafter
from headstart.heads.layers.start_values import probe
from headstart.heads.warm_start import read_warm_start
from headstart.support.devices import spread
from headstart.support.errors import UserError
from headstart.training.data.data import LabelCounts
from headstart.training.loop import _sum_over_processes

PRECISIONS = ("fp32", "bf16", "fp16", "int8", "F16", "Q8_0", "Q5_1", "Q4_0", "Q4_1", "Q4_1 in bf16")
QUANTIZED = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Backbone]:
    folder, found = tmp_path_factory.mktemp("precisions"), {}
    model, tokenizer = chat_model(tie_word_embeddings=False)
    model.save_pretrained(folder / "model")
    for precision in PRECISIONS:
        kind, _, loaded = precision.partition(" in ")
        if bits_of(kind) or kind == "F16":
            file = write_gguf(folder / f"{kind}.gguf", model, tokenizer, kind)
            found[precision] = load_backbone(str(file), dtype=loaded or "fp32", device="cpu")  # type: ignore[arg-type]
        else:
            found[precision] = load_backbone(str(folder / "model"), dtype=precision, device="cpu")  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def heads(models: dict[str, Backbone], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    for precision, on in models.items():
        random_drafter("medusa", on, depth=2).save_pretrained(folder / precision)
    return {precision: folder / precision for precision in models}


@pytest.mark.parametrize("trained", PRECISIONS)
def test_heads_of_every_precision_load_on_every_other_with_a_line(
    models: dict[str, Backbone], heads: dict[str, Path], trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    for on in models.values():
        caplog.clear()
        load_drafter(heads[trained], on)
        there, here = models[trained].precision, on.precision
        assert len(caplog.messages) == (there != here)
        assert all(f"in {there}; here it is in {here}: fewer drafts may be accepted" in line for line in caplog.messages)
    assert len({on.precision for on in models.values()}) == len(PRECISIONS)


def test_what_is_recorded(heads: dict[str, Path]) -> None:
    card = json.loads((heads["Q4_1 in bf16"] / METADATA).read_text())
    contract, provenance = card["contract"], card["provenance"]
    assert card["backbone"].endswith("/Q4_1.gguf")
    assert (contract["precision"], contract["stored"], contract["fingerprint"]) == ("bfloat16 gguf Q4_1", ["Q4_1", "Q4_1"], 2)
    assert provenance["gguf"]["file"] == "Q4_1.gguf" and provenance["gguf"]["types"] == {"Q4_1": 30, "F32": 9}
    assert "gguf" not in json.loads((heads["bf16"] / METADATA).read_text())["provenance"]


def changed(on: Backbone, by: float) -> Backbone:
    """A model whose weights differ by a share of their size, as after further training."""
    noise = torch.Generator().manual_seed(1)
    model = Backbone(chat_model(tie_word_embeddings=False)[0])
    model.gguf = on.gguf
    with torch.no_grad():
        for mine, weight in ((model.embed.weight, on.embed.weight), (model.unembed.weight, on.unembed.weight)):
            mine.copy_(weight + by * weight.std() * torch.randn(weight.shape, generator=noise))
    return model


@pytest.mark.parametrize(
    ("trained", "here", "by"),
    [("fp32", "fp32", 0.02), ("bf16", "fp32", 0.02), ("Q8_0", "Q8_0", 0.02), ("Q4_1", "Q4_1", 0.05), ("fp32", "Q8_0", 0.02),
     ("Q8_0", "fp32", 0.02), ("fp32", "Q4_1", 0.25), ("Q4_1", "fp32", 0.25), ("Q4_1", "Q8_0", 0.25), ("Q4_0", "Q5_1", 0.4)],
)  # fmt: skip
def test_a_fine_tune_is_refused(models: dict[str, Backbone], heads: dict[str, Path], trained: str, here: str, by: float) -> None:
    with pytest.raises(UserError, match=r"of that shape with other weights: load the one it was trained on, or, if this is a fine-tune"):
        load_drafter(heads[trained], changed(models[here], by))
    load_drafter(heads[trained], changed(models[here], 0.0))
    load_drafter(heads[trained], changed(models[here], by), allow_finetuned=True)


def test_another_model_is_refused(heads: dict[str, Path], tmp_path: Path) -> None:
    other, tokenizer = chat_model(seed=1, tie_word_embeddings=False)
    file = write_gguf(tmp_path / "other.gguf", other, tokenizer, "Q4_1")
    for on in (Backbone(other), load_backbone(str(file), dtype="fp32", device="cpu")):
        for trained in heads.values():
            refuses("of that shape with other weights", load_drafter, trained, on)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("shape", ["normal", "heavy tails", "small rows"])
def test_the_limits_hold_for_weights_of_other_distributions(kind: str, shape: str) -> None:
    for seed in range(8):
        noise = torch.Generator().manual_seed(seed)
        weight = torch.randn(500, 512, generator=noise) * 0.03
        if shape == "heavy tails":
            weight = weight * torch.rand(weight.shape, generator=noise).rsqrt().clamp(max=8)
        if shape == "small rows":
            weight = weight * torch.rand(500, 1, generator=noise) ** 2
        whole, rounded = [weight, weight], [stored_as(weight, kind)] * 2
        assert match(rounded, [kind, kind], {"weights": fingerprint(whole), "fingerprint": 2}) == "rounded"
        assert match(whole, None, {"weights": fingerprint(rounded), "stored": [kind, kind]}) == "rounded"
        assert match(rounded, None, {"weights": fingerprint(whole), "fingerprint": 2}) == "other", "nothing says that it was rounded"


def test_bits() -> None:
    known = {"Q4_1": 4, "Q8_0": 8, "Q6_K": 6, "IQ3_XXS": 3, "IQ1_S": 2, "TQ2_0": 2, "MXFP4": 3, "BF16": None, "F32": None}
    assert {stored: bits_of(stored) for stored in known} == known


def test_heads_go_on_training_on_another_precision(models: dict[str, Backbone], heads: dict[str, Path]) -> None:
    assert read_warm_start(str(heads["Q4_1"]), "medusa", models["fp32"]).same_backbone
    assert not read_warm_start(str(heads["Q4_1"]), "medusa", changed(models["fp32"], 0.3)).same_backbone


def test_heads_without_a_precision_load_on_a_gguf_file(models: dict[str, Backbone], tmp_path: Path, caplog: Any) -> None:
    """As heads saved before it was recorded."""
    random_drafter("medusa", models["fp32"], depth=2).save_pretrained(tmp_path)
    card = json.loads((tmp_path / METADATA).read_text())
    for key in ("precision", "fingerprint"):
        del card["contract"][key]
    (tmp_path / METADATA).write_text(json.dumps(card))
    load_drafter(tmp_path, models["bf16"])
    assert not caplog.messages
    load_drafter(tmp_path, models["Q4_1"])
    assert "in another precision; here it is in float32 gguf Q4_1" in caplog.messages[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    tiny("llama", hidden_size=64, intermediate_size=128).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Backbone:
    return load_backbone(str(folder), dtype="int8")


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("capture", ["off", "trace"])
def test_the_text_is_the_quantized_models_own(quantized: Backbone, kind: str, capture: str) -> None:
    rows, of = left_padded(prompts()), SpeculativeModel(quantized, random_drafter(kind, quantized), capture=capture)  # type: ignore[arg-type]
    for sample in (False, True):
        options = {"max_new_tokens": 20, "do_sample": sample, "seed": 3}
        assert torch.equal(say(of, rows, **options), say(of, rows, speculate=False, **options))
    row = {name: tensor[:1] for name, tensor in rows.items()}
    want = quantized.model.generate(**row, max_new_tokens=20, do_sample=False)
    assert torch.equal(say(of, row, max_new_tokens=20, do_sample=False), want)


def test_it_is_another_model_to_tune_and_the_same_to_heads(folder: Path, quantized: Backbone) -> None:
    whole = load_backbone(str(folder))
    ids_BT = prompts((9,))[0][None]
    assert not torch.equal(whole.read(ids_BT).hidden_BTD, quantized.read(ids_BT).hidden_BTD), "it has been quantized"
    assert quantized.precision.startswith("float32 quanto")
    assert whole.contract() == quantized.contract()


def test_without_the_library_a_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum", None)
    refuses(r"int8 needs optimum-quanto: pip install 'headstart\[quantized\]', or take auto", load_backbone, str(folder), dtype="int8")


# Quantities of whole models and runs do not pass through fp32, which counts no further than 2^24: embeddings, vocabularies, tokens.
# Tensors of 2^31 elements share the memory of a few thousand (stride 0).

LARGE = 2**24 + 1
ROWS, COLUMNS = 2**19, 2**12


def matrix(rows: int = ROWS, columns: int = COLUMNS) -> nn.Parameter:
    """A matrix whose elements are their columns, in the memory of a row."""
    return nn.Parameter(torch.arange(columns, dtype=torch.float32).expand(rows, columns), requires_grad=False)


def test_the_fingerprint_of_a_large_vocabulary_reads_its_last_element_and_copies_nothing() -> None:
    on = Backbone(tiny("llama"))
    on.embed.weight = matrix()
    on.unembed.weight = nn.Parameter(torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, COLUMNS), requires_grad=False)
    places = [i * (ROWS * COLUMNS - 1) // 31 for i in range(32)]
    expected = [place % COLUMNS for place in places] + [float(f"{place // COLUMNS:.6g}") for place in places]
    assert on.fingerprint() == expected and expected[31] == COLUMNS - 1


def test_the_heads_that_ship_are_of_the_model_that_ships() -> None:
    from headstart.heads.checkpoint import read_metadata

    on = load_backbone("embedded", dtype="bf16", device="cpu")
    assert [on.match(read_metadata(heads)[1]["contract"]) for heads in ("embedded", "embedded-mlp")] == ["same", "same"]


def test_numbers_at_equal_distances_are_exact() -> None:
    assert spread(0, 2**40, 3) == [0, 2**39, 2**40] and spread(1, 60, 8) == [1, 9, 17, 26, 34, 43, 51, 60] and spread(0, 9, 1) == [0]
    assert probe(Backbone(tiny("llama"))).tokens_BT[0, [0, -1]].tolist() == [0, 60]


def test_nothing_takes_places_from_a_range_of_floating_point_numbers() -> None:
    calls = [
        f"{path.name}:{node.lineno}"
        for folder in FOLDERS
        for path in sources(folder)
        for node in ast.walk(ast.parse(Path(path).read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("linspace", "logspace", "quantile", "nanquantile", "histc")
    ]
    assert not calls, f"{calls}: support/devices.py has exact places; quantile takes at most 2^24 elements, histc counts in floating point"


def test_tokens_of_a_step_are_counted_exactly() -> None:
    accelerator = cast(Accelerator, SimpleNamespace(reduce=lambda tensor, how: 3 * tensor))
    tokens: Any = [torch.tensor([LARGE]), torch.tensor([1])]
    assert _sum_over_processes(accelerator, tokens, [])[0] == [[3 * LARGE], [3]]


def test_coverage_is_of_counts_beyond_fp32() -> None:
    counts_V = torch.tensor([2**40 - 2**10, 2**10])
    assert LabelCounts(counts_V, None).coverage(torch.tensor([0]))["training"] == 1 - 2**-30
