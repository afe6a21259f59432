"""GGUF files as backbones: the model that transformers reads, its tokenizer, what ends a text, and one line for what cannot be read."""

import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from errors import refusal, refuses
from gguf_models import chat_model, stored_as, write_gguf
from gguf_vocabularies import of_bytes, of_pieces, write_vocabulary
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.backbone.fingerprint import same_weights
from headstart.heads.backbone.gguf_file import find_gguf, quick_reader
from headstart.heads.backbone.model_config import load_config, read_end_tokens
from headstart.support.errors import UserError

Made = tuple[LlamaForCausalLM, PreTrainedTokenizerBase]
LLAMA3 = {
    "rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Made:
    return chat_model()


@pytest.fixture(scope="module")
def files(made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {kind: write_gguf(folder / f"chat.{kind}.gguf", *made, kind=kind) for kind in ("F32", "F16", "Q8_0", "Q4_1")}


def logits(model: torch.nn.Module, length: int = 40) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(length)[None] * 7 % 250).logits


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_the_model_is_the_files(made: Made, files: dict[str, Path], kind: str) -> None:
    on, (model, _) = load_backbone(str(files[kind]), dtype="fp32", device="cpu"), made
    embedding = model.get_input_embeddings().weight
    assert torch.equal(on.embed.weight, embedding if kind == "F32" else stored_as(embedding.detach(), kind))
    assert (logits(on.model) - logits(model)).abs().max() <= {"F32": 1e-5, "F16": 0.1, "Q8_0": 2.0, "Q4_1": 20.0}[kind]
    assert (on.name, on.precision) == (str(files[kind]), f"float32 gguf {kind}")
    assert on.gguf is not None and on.gguf.stored == (None if kind.startswith("F") else [kind, kind])


def test_tokenizer_template_and_what_ends_a_text(made: Made, files: dict[str, Path]) -> None:
    tokenizer, (_, given) = load_tokenizer(str(files["Q8_0"])), made
    text = "<|im_start|>user\nWhat is two?<|im_end|>\n Ünd ..."
    assert tokenizer(text)["input_ids"] == given(text)["input_ids"]
    assert (tokenizer.chat_template, tokenizer.eos_token) == (given.chat_template, "<|im_end|>")
    assert load_backbone(str(files["Q8_0"]), device="cpu").model.generation_config.eos_token_id == given.eos_token_id


def test_an_answer_may_end_otherwise_than_a_text(made: Made, tmp_path: Path) -> None:
    """As in files of Llama 3 and Gemma: <|eot_id|> or <end_of_turn> beside the end of a text."""
    file = write_gguf(tmp_path / "two.gguf", *made, tokenizer__ggml__eot_token_id=7)
    assert load_backbone(str(file), device="cpu").model.generation_config.eos_token_id == [made[1].eos_token_id, 7]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3", "qwen2"])
@pytest.mark.parametrize(("named", "ends", "padding"), [
    ({}, (), None), ({"eot_token_id": 7}, (7,), None), ({"eos_token_id": 5, "padding_token_id": 0, "eom_token_id": 9}, (5, 9), 0),
    ({"eos_token_id": 99_999, "padding_token_id": 99_999}, (), None), ({"model": "llama"}, (2,), None),
])  # fmt: skip
def test_no_special_token_is_made_up(
    architecture: str, named: dict[str, Any], ends: tuple[int, ...], padding: int | None, tmp_path: Path
) -> None:
    """Neither transformers' of the architecture nor one beyond the vocabulary; SentencePiece has a second token that ends texts."""
    keys = of_pieces() if "model" in named else {key: value for key, value in of_bytes().items() if not key.endswith("_token_id")} | named
    file = str(write_vocabulary(tmp_path / "small.gguf", keys, architecture))
    assert (read_end_tokens(file), load_config(file).pad_token_id) == (ends, padding)
    assert load_tokenizer(file).eos_token_id == (ends[0] if "eot_token_id" not in named and ends else None)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("Q4_1", torch.bfloat16)])
def test_the_dtype_by_default(files: dict[str, Path], kind: str, dtype: torch.dtype) -> None:
    """On an accelerator; on a CPU as of other backbones."""
    assert load_config(str(files[kind])).dtype == dtype
    assert load_backbone(str(files[kind]), dtype="bf16", device="cpu").dtype == torch.bfloat16


def test_what_it_takes_in_memory_is_said_before(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    on = load_backbone(str(files["Q4_1"]), dtype="fp32", device="cpu")
    size = sum(weight.numel() for weight in on.model.parameters()) * 4
    assert caplog.messages == [f"backbone chat.Q4_1.gguf, Q4_1, 0.1 MB; dequantized to fp32 {size / 1e6:.1f} MB of memory"]


def test_the_quick_reader_reads_the_same(files: dict[str, Path]) -> None:
    with quick_reader():
        fields = gguf.GGUFReader(files["F16"]).fields
    slowly = gguf.GGUFReader(files["F16"]).fields
    assert {name: field.contents() for name, field in fields.items()} == {name: field.contents() for name, field in slowly.items()}


def test_nothing_takes_it_for_a_quantized_model(files: dict[str, Path], tmp_path: Path) -> None:
    on = load_backbone(str(files["Q8_0"]), dtype="bf16", device="cpu")
    assert "quantization_config" not in on.model.config.to_dict()
    on.model.save_pretrained(tmp_path)
    again = load_backbone(str(tmp_path), dtype="bf16", device="cpu")
    assert torch.equal(logits(again.model), logits(on.model)) and same_weights(again.fingerprint(), on.fingerprint())


def test_a_folder_that_holds_one_file(files: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(files["Q8_0"], tmp_path)
    assert load_backbone(str(tmp_path), device="cpu").name == str(tmp_path / "chat.Q8_0.gguf")
    assert len(load_tokenizer(str(tmp_path))) > 250
    shutil.copy(files["Q4_1"], tmp_path)
    assert refused(tmp_path) == (
        f"{tmp_path} holds 2 GGUF files; name one: {tmp_path}/FILE, or backbone.gguf_file=FILE (there are chat.Q4_1.gguf, chat.Q8_0.gguf)"
    )


def test_safetensors_in_the_folder_come_first(made: Made, files: dict[str, Path], tmp_path: Path) -> None:
    made[0].save_pretrained(tmp_path)
    shutil.copy(files["Q4_1"], tmp_path)
    assert load_backbone(str(tmp_path), device="cpu").gguf is None


def test_as_many_heads_of_keys_as_of_queries_where_the_file_does_not_say(tmp_path: Path) -> None:
    """transformers leaves the weights of such a file in the order in which llama.cpp rotates."""
    model, tokenizer = chat_model(num_key_value_heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda *_: None)
        file = write_gguf(tmp_path / "all.gguf", model, tokenizer, "F32")
    torch.testing.assert_close(logits(load_backbone(str(file), dtype="fp32", device="cpu").model), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}])
def test_scaled_rotary_frequencies_are_read(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """transformers leaves them out: texts of Llama 3.1 and later would be wrong."""
    model, tokenizer = chat_model(rope_parameters=scaling, max_position_embeddings=8192)
    keys: dict[str, Any] = {} if scaling is LLAMA3 else {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    on = load_backbone(str(write_gguf(tmp_path / "scaled.gguf", model, tokenizer, "F32", **keys)), dtype="fp32", device="cpu")
    assert {key: on.config.rope_parameters[key] for key in scaling} == scaling
    torch.testing.assert_close(logits(on.model, 200), logits(model, 200), atol=1e-4, rtol=0)


def refused(path: Path | str, **options: Any) -> str:
    """The error message, which must be one line."""
    (message,) = {refusal(load_backbone, str(path), **options), *(refusal(load, str(path)) for load in (load_config, load_tokenizer))}
    return message


def test_scaling_that_transformers_cannot_have_from_gguf(made: Made, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "long.gguf", *made, llama__rope__scaling__type="longrope")
    refuses(r"rotary frequencies are scaled by longrope\); give its folder of safetensors or its hub id", load_backbone, str(file))


def test_an_architecture_that_transformers_does_not_read(made: Made, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", *made)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0zebra", 1))
    refuses(r"cannot read this 'zebra' model from GGUF \(.*; give its folder of safetensors or its", load_config, str(file))


@pytest.mark.parametrize(("damage", "message"), [
    (lambda data: data[:-5000], r"is cut short: it has [\d,]+ bytes of the [\d,]+ that its header states; fetch it again"),
    (lambda data: data[:3000], "its header is cut short or damaged"),
    (lambda data: b"", "0 bytes are no GGUF file"),
    (lambda data: b"<html>not found</html>    ", "it begins with b'<htm', not with b'GGUF'"),
    (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    (lambda data: data[:8] + b"\xff" * 16 + data[24:], "its header"),
])  # fmt: skip
def test_a_damaged_file_is_one_line(files: dict[str, Path], tmp_path: Path, damage: Any, message: str) -> None:
    file = tmp_path / "damaged.gguf"
    file.write_bytes(damage(files["Q8_0"].read_bytes()))
    found = refused(file)
    assert found.startswith(str(file)) and re.search(message, found)


def test_every_cut_and_changed_byte_of_a_header_is_a_line(files: dict[str, Path], tmp_path: Path) -> None:
    data, file = files["Q8_0"].read_bytes(), tmp_path / "fuzzed.gguf"
    noise = torch.Generator().manual_seed(0)
    for place in torch.randint(4, 900, (150,), generator=noise).tolist():
        changed = bytearray(data)
        changed[place] ^= 1 << int(torch.randint(8, (1,), generator=noise))
        file.write_bytes(changed if place % 2 else data[:place])
        try:
            find_gguf(str(file))
        except UserError as error:
            assert "\n" not in str(error)


def test_pieces_of_a_split_file(files: dict[str, Path], made: Made, tmp_path: Path) -> None:
    first = tmp_path / "large-00001-of-00002.gguf"
    write_gguf(first, *made, split__count=2)
    shutil.copy(first, tmp_path / "large-00002-of-00002.gguf")
    for path in (first, tmp_path):
        assert "is a piece of a split file; join the pieces first: llama-gguf-split --merge" in refused(path)


def test_no_such_file(tmp_path: Path) -> None:
    file = str(tmp_path / "none.gguf")
    assert refused(file) == f"no GGUF file at {file!r}; give the path of a file, or USER/REPO/FILE.gguf on the hub"
    assert "is out of reach" in refused("nobody/nothing/none.gguf")


def test_without_the_package(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refused(files["F16"]).endswith("is a GGUF file, which takes the package gguf: pip install 'headstart[gguf]'")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_are_for_safetensors(files: dict[str, Path], dtype: Any) -> None:
    with pytest.raises(UserError, match=f"dtype {dtype} quantizes safetensors, and this is a GGUF file: take auto, fp32, bf16 or fp16"):
        load_backbone(str(files["F16"]), dtype=dtype)


def test_only_the_first_of_several_processes_speaks(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    load_backbone(str(files["F16"]), device="cpu")
    assert not caplog.messages
