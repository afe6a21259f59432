"""Training on rows with images: read by the model's own pass, live and from a cache, the same again when resumed."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import write_rows
from datasets import Dataset
from errors import error_of, refuses, report_of
from image_models import make_image_model
from PIL import Image
from safetensors.torch import load_file, save_file
from server import Reply, said, serving
from small_run import losses, read_log
from transformers import AutoModelForImageTextToText

from headstart import load, load_recipe
from headstart.chat.images import as_parts
from headstart.chat.messages import image_parts, named, read_conversation
from headstart.cli.main import main
from headstart.heads.backbone import features as backbone_images
from headstart.inference.capture.capture import warn_once
from headstart.support.text import token_texts
from headstart.training.data.batches import collate
from headstart.training.evaluation import evaluate
from headstart.training.features.source import LiveFeatures
from headstart.training.recipe.yaml_text import dump_yaml
from headstart.training.setup import Run, prepare

FAMILIES = ["gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma4", "smolvlm"]
ANSWERS = ("It is four.", "Six, I think.")


def picture(name: str | Path) -> dict[str, Any]:
    return {"type": "image", "image": str(name)}


def question(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]}


def answer(number: int) -> dict[str, str]:
    return {"role": "assistant", "content": ANSWERS[number % 2]}


def make_rows(folder: Path) -> list[dict[str, Any]]:
    """Twenty rows: text alone, an image before the question, several turns with an image each."""
    for i in range(4):
        Image.effect_noise((40 + 20 * i, 36), 90).save(folder / f"{i}.png")
    rows = []
    for i in range(20):
        first, second = folder / f"{i % 4}.png", folder / f"{(i + 1) % 4}.png"
        if i % 4 == 0:
            turns = [question("What is two?"), answer(i)]
        elif i % 4 == 1:
            turns = [question(picture(first), "What is two?"), answer(i)]
        else:
            turns = [question("What is", picture(first), "?"), answer(i), question("And", picture(second), "three?"), answer(i + 1)]
        rows.append({"messages": turns})
    return rows


def make(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model, rows and a recipe; returns the recipe."""
    processor = make_image_model(folder / "model", family)
    if family != "gemma3":
        monkeypatch.setattr(backbone_images, "load_processor", lambda path, trust_remote_code: processor)
    write_rows(folder / "rows.jsonl", make_rows(folder))
    recipe = {
        "backbone": {"path": str(folder / "model"), "dtype": "fp32"},
        "drafter": {"kind": "eagle3", "depth": 2},
        "data": {"train": str(folder / "rows.jsonl"), "images": True, "eval_rows": 2, "max_length": 384},
        "train": {"steps": 6 if family == "gemma3" else 2, "batch_size": 4, "lr": 3e-3},  # 6: some rows twice
        "cache": {"dtype": "exact"},
        "eval": {"prompts": 2, "max_new_tokens": 8},
        "save": {"dir": str(folder / "out")},
        "log": {"every": 1},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that runs have not been made of."""
    return make(tmp_path_factory.mktemp("rows"), "gemma3", pytest.MonkeyPatch())


def prepared(recipe: Path, tmp_path: Path, *changes: str) -> Run:
    return prepare(load_recipe(recipe, [f"save.dir={tmp_path / 'out'}", *changes]))


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])])
def test_a_few_steps_live_from_a_cache_and_resumed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = str(make(tmp_path, family, monkeypatch))
    assert main(["train", recipe]) == 0
    tau = [line for line in read_log(tmp_path / "out") if "tau" in line]
    assert len(tau) == 1, "prompts with images are decoded"
    parts = [recipe, f"save.dir={tmp_path / 'parts'}"]
    assert main(["train", *parts, "train.steps=1"]) == main(["train", *parts]) == 0
    whole, resumed = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("out", "parts"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    cache = [recipe, f"cache.dir={tmp_path / 'cache'}"]
    assert main(["cache", *cache]) == 0
    shutil.move(tmp_path / "model" / "model.safetensors", tmp_path / "whole.safetensors")
    weights = {key: one for key, one in load_file(tmp_path / "whole.safetensors").items() if "vision" not in key and "visual" not in key}
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})  # what reads images is not needed
    assert main(["train", *cache, f"save.dir={tmp_path / 'cached'}"]) == 0
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "out"), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_answers_alone_and_features_the_models_own(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepared(make(tmp_path, family, monkeypatch), tmp_path, "train.batch_size=2")
    reader = next(image.reader for sample in run.feed.samples for image in sample.images)
    processor, model = reader.processor, AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    rows = {len(sample.images): sample for sample in run.feed.samples}
    assert sorted(rows) == [0, 1, 2]
    alone = [processor(text=[f"{text}<|im_end|>"], add_special_tokens=False)["input_ids"][0] for text in ANSWERS]
    assert rows[1].tokens[rows[1].loss_mask].tolist() in alone
    assert rows[2].tokens[rows[2].loss_mask].tolist() in (alone[0] + alone[1], alone[1] + alone[0])
    for sample in rows.values():
        assert not sample.loss_mask[sample.tokens == reader.token].any()
        assert (sample.tokens == reader.token).sum() == sum(image.tokens for image in sample.images)
    names = [image.name for image in rows[2].images]
    turns = next(
        row["messages"]
        for row in map(json.loads, (tmp_path / "rows.jsonl").open())
        if [part["image"] for part in image_parts(row["messages"])] == names
    )
    text = processor.tokenizer.apply_chat_template(as_parts(turns), tokenize=False).removesuffix("\n")
    images = [Image.open(name).convert("RGB") for name in names]
    inputs = processor(images=images, text=[text], add_special_tokens=False, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == rows[2].tokens.tolist()
    with torch.no_grad():
        expected_TD = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    source, batch = LiveFeatures(run.backbone, ()), collate([rows[0], rows[2], rows[1]], [[0], [1, 2]])
    found = source.read(batch)
    length, last = len(rows[2].tokens), len(rows[0].tokens)
    torch.testing.assert_close(found.hidden_BTD[1, :length], expected_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.hidden_BTD[0, :last], source.read(collate([rows[0]], [[0]])).hidden_BTD[0])
    packed_TD = found.hidden_BTD[1, length : length + len(rows[1].tokens)]
    torch.testing.assert_close(packed_TD, source.read(collate([rows[1]], [[0]])).hidden_BTD[0])


def test_what_prompts_with_images_are_evaluated_on_is_what_generate_writes(shared: Path, tmp_path: Path) -> None:
    run = prepared(shared, tmp_path, "train.batch_size=2", "eval.prompts=2")
    prompt = next(prompt for prompt in run.prompts if prompt.images)
    found = evaluate(run.drafter, [prompt], run.recipe.eval, 0, run.tokenizer)
    model = AutoModelForImageTextToText.from_pretrained(shared.parent / "model", dtype=torch.float32)
    ids = prompt.tokens[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | prompt.images[0].reader.beside(prompt.images, prompt.tokens)
    alone = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, len(prompt.tokens) :].tolist()
    assert found["examples"][0]["tokens"] == token_texts(run.tokenizer, alone)


def test_a_part_in_base64_is_a_data_url() -> None:
    assert named({"type": "image", "base64": "aGk="})["image"] == "data:image/png;base64,aGk="


def test_heads_that_have_seen_images_say_nothing(shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["train", str(shared), f"save.dir={tmp_path / 'out'}", "train.steps=1", "eval.prompts=1"]) == 0
    model = AutoModelForImageTextToText.from_pretrained(shared.parent / "model", dtype=torch.float32)
    sample = next(sample for sample in prepared(shared, tmp_path / "other").feed.samples if sample.images)
    ids = sample.cut(int(sample.loss_mask.nonzero()[0])).tokens[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | sample.images[0].reader.beside(sample.images[:1], ids[0])
    for seen, data in ((True, {}), (False, {"images": False})):
        warn_once.cache_clear()
        caplog.clear()
        card = json.loads((file := tmp_path / "out" / "headstart.json").read_text())
        card["provenance"]["recipe"]["data"] |= data
        file.write_text(json.dumps(card))
        heads = load(tmp_path / "out", model, capture="off")
        model.generate(**inputs, custom_generate=heads.generate, max_new_tokens=4)
        assert ("have seen no images" in caplog.text) is not seen


def test_answers_to_images_are_written_and_trained_on(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    how = ["regenerate.temperature=0", "regenerate.max_new_tokens=8", "regenerate.unfinished=keep", f"save.dir={tmp_path / 'out'}"]
    assert main(["regenerate", str(shared), f"regenerate.out={out}", *how]) == 0
    row = next(row for row in map(json.loads, out.open()) if len(image_parts(row["messages"])) == 1)
    run = prepared(shared, tmp_path, f"data.train={out}", "data.limit=20")
    sample = next(one for one in run.feed.samples if one.tokens.tolist() == row["input_ids"])
    assert [image.name for image in sample.images] == [part["image"] for part in image_parts(row["messages"])]
    prompt = sample.cut(int(sample.loss_mask.nonzero()[0]))
    model, ids = AutoModelForImageTextToText.from_pretrained(shared.parent / "model", dtype=torch.float32), prompt.tokens[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | prompt.images[0].reader.beside(prompt.images, ids[0])
    assert model.generate(**inputs, max_new_tokens=8, do_sample=False)[0].tolist() == row["input_ids"]


def test_a_changed_image_is_noticed(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(shared.parent, tmp_path / "copy")
    text = (folder / "rows.jsonl").read_text().replace(str(shared.parent), str(folder))
    (folder / "rows.jsonl").write_text(text)
    changes = [f"data.train={folder / 'rows.jsonl'}", f"save.dir={folder / 'out'}", f"cache.dir={folder / 'cache'}"]
    assert main(["cache", str(shared), *changes]) == 0
    run = prepare(load_recipe(shared, [*changes, "cache.dir=null"]))
    Image.effect_noise((60, 36), 20).save(folder / "1.png")
    rows = [[i] for i, sample in enumerate(run.feed.samples) if any(image.name.endswith("1.png") for image in sample.images)]
    refuses(r"1.png has changed since its row was read", run.source.read, collate(run.feed.samples, rows))
    capsys.readouterr()
    assert "is a cache of something else: the rows of data.train" in error_of(capsys, "train", shared, *changes)


def test_inspect_shows_the_images_of_a_row(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    found = report_of(tmp_path, "inspect", shared, "--row", "1", "--html", page)
    (first, second), texts = found["images"], [token["text"] for token in found["sample"]]
    assert (first["size"], first["tokens"]) == ([80, 36], 4) and second["size"] == [100, 36]
    start, end = first["place"]
    assert texts[start:end] == ["<image>"] * 4 and not any(token["loss"] for token in found["sample"] if token["text"] == "<image>")
    name = first["name"][:60]
    assert f"{name}: 80 x 36 pixels, 4 tokens ({start} to {end - 1}), no labels" in " ".join(capsys.readouterr().out.split())
    assert base64.b64encode(Path(first["name"]).read_bytes()).decode() in page.read_text()


def test_a_server_is_asked_with_images(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, out, fields = shared.parent / "0.png", tmp_path / "new.jsonl", {"token_ids": [1], "prompt_token_ids": [2]}

    def reply(path: str, body: dict[str, Any]) -> Reply:
        status, answer = said("It is four.")
        return status, answer | {"choices": [answer["choices"][0] | fields]}

    ask = [question("What", picture(name), "?"), answer(1), question("And", picture(as_data(name)), "three?"), answer(1)]
    write_rows(tmp_path / "rows.jsonl", [{"messages": ask}])
    with serving(reply) as server:
        how = [f"data.train={tmp_path / 'rows.jsonl'}", f"regenerate.out={out}", f"regenerate.endpoint={server.url}/v1"]
        assert main(["regenerate", str(shared), *how]) == 0
        write_rows(tmp_path / "rows.jsonl", [{"messages": [question(picture("rows.jsonl"), "?")]}])
        assert main(["regenerate", str(shared), *how[:1], f"regenerate.out={tmp_path / 'no.jsonl'}", *how[2:]]) == 2
    assert "row 1: image rows.jsonl" in capsys.readouterr().err and len(server.asked) == 2, "nothing but images is sent"
    sent = [part for turn in server.asked[1]["messages"] if turn["role"] == "user" for part in turn["content"]]
    assert [part["image_url"]["url"] for part in sent if part["type"] == "image_url"] == [as_data(name)] * 2
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert "input_ids" not in row, "the processor here says how many tokens an image has"
    assert [part["image"] for part in image_parts(row["messages"])] == [str(name), as_data(name)]
    assert [turn["content"] for turn in row["messages"][1::2]] == ["It is four."] * 2
    assert main(["inspect", str(shared), f"data.train={out}", "data.eval_rows=0"]) == 0


def as_data(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def columns_of_pictures(folder: Path, kind: str) -> Dataset:
    """Two rows as public sets have them, with pictures in columns of `datasets.Image`."""
    pictures = [Image.open(folder / f"{i}.png") for i in (0, 1)]
    asked, said = ["What is two?", "And three?"], list(ANSWERS)
    turns = [[{"from": "human", "value": f"<image>\n{ask}"}, {"from": "gpt", "value": say}] for ask, say in zip(asked, said, strict=True)]
    parts = [[question({"type": "image"}, f"\n{ask}"), question(say) | {"role": "assistant"}] for ask, say in zip(asked, said, strict=True)]
    tables: dict[str, dict[str, Any]] = {
        "llava": {"image": pictures, "conversations": turns},
        "trl": {"images": [[picture] for picture in pictures], "messages": parts},
        "questions": {"image": pictures, "question": [f"\n{ask}" for ask in asked], "answer": said},
    }
    table = Dataset.from_dict(tables[kind])
    assert "Image(" in str(table.features)
    return table


@pytest.mark.parametrize(("kind", "saved"), [("llava", "parquet"), ("trl", "folder"), ("questions", "parquet")])
def test_pictures_in_columns_are_those_in_files(kind: str, saved: str, shared: Path, tmp_path: Path) -> None:
    table = columns_of_pictures(shared.parent, kind)
    where = tmp_path / ("rows.parquet" if saved == "parquet" else "rows")
    _ = table.to_parquet(where) if saved == "parquet" else table.save_to_disk(where)
    turns = [[question(picture(shared.parent / f"{i}.png"), f"\n{ask}"), answer(i)] for i, ask in enumerate(("What is two?", "And three?"))]
    write_rows(tmp_path / "rows.jsonl", [{"messages": messages} for messages in turns])
    found, wanted = (
        prepared(shared, tmp_path, f"data.train={path}", "data.eval_rows=0").feed.samples for path in (where, tmp_path / "rows.jsonl")
    )
    assert [sample.tokens.tolist() for sample in found] == [sample.tokens.tolist() for sample in wanted]
    for sample, alike in zip(found, wanted, strict=True):
        assert len(sample.images) == len(alike.images) == 1
        pixels = [image.reader.beside([image], sample.tokens)["pixel_values"] for image in (*sample.images, *alike.images)]
        assert torch.equal(*pixels), "the same pixels, whether in a column or a file"


def test_a_column_beside_parts_with_names_is_not_read(shared: Path) -> None:
    named_, column = str(shared.parent / "0.png"), {"url": None, "path": str(shared.parent / "1.png")}
    for turn, image in ((question(picture(named_), "?"), named_), (question({"type": "image"}, "?"), column["path"])):
        messages, _ = read_conversation({"messages": [turn, answer(0)], "image": column}, "messages", "row 1", images=True)
        assert [part["image"] for part in image_parts(messages)] == [image]
