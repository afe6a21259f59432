"""Rows with images that cannot be read, and settings that take none: one line each."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_templates import write_rows
from errors import error_of, refusal
from PIL import Image
from test_image_rows import answer, make, picture, question
from transformers.image_utils import load_image

from headstart.chat.images import read_image
from headstart.training.data.data import checked_tokenizer, load_data
from headstart.training.recipe.recipe import load_recipe


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("rows"), "gemma3", pytest.MonkeyPatch())


@pytest.fixture(scope="module")
def readers(shared: Path) -> tuple[Any, Any]:
    """The tokenizer, and what reads the rows' images."""
    return checked_tokenizer(load_recipe(shared))


URL = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(("turns", "beside", "said"), [
    ([question(picture("none.png"), "?")], {}, "row 1: image none.png: there is no such file"),
    ([question(picture("rows.jsonl"), "?")], {}, "image rows.jsonl cannot be read as an image (Pillow knows no such format)"),
    ([question(URL, "?")], {}, "image https://example.org/a.png: nothing is fetched"),
    (
        [question({"type": "image"}, "?")],
        {},
        "row 1: images are a list of 1 files or data: URLs, one for each part {'type': 'image'} or <image> in a user's text; got 0",
    ),
    ([question(picture("0.png"), "?")], {"images": ["0.png"]}, "row 1: images are a list of 0 files"),
    ([question("<image> <image>")], {"image": "0.png"}, "row 1: images are a list of 2 files"),
    ([question({"type": "image"}, "?")], {"images": [{"bytes": "a"}]}, "in a user's text; got 1 ['dict']; save those"),
    ([question("a <boi>", picture("0.png"))], {}, "the prompt has 2 places for images (<boi>), and 1 are given"),
    ([question("a <image>", picture("0.png"))], {}, "row 1 has 1 more tokens of images than its images give"),
    ([question("?"), {"role": "assistant", "content": [picture("0.png")]}], {}, "turn 1: content has a part of type 'image'"),
    ([question({"type": "video", "video": "a.mp4"})], {}, "a part of type 'video'; heads are for text, and images in files"),
])  # fmt: skip
def test_rows_that_cannot_be_read(
    turns: list[Any], beside: dict[str, Any], said: str, shared: Path, readers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(shared.parent / "0.png", tmp_path)
    others = [{"messages": [question("?"), answer(0)]}] * 4
    write_rows(tmp_path / "rows.jsonl", [{"messages": [*turns, answer(0)], **beside}, *others])
    data = load_recipe(shared, [f"data.train={tmp_path / 'rows.jsonl'}", "data.on_bad_row=error", "data.eval_rows=0"]).data
    tokenizer, images = readers
    assert said in refusal(load_data, data, tokenizer, 384, images=images, progress=False)


@pytest.mark.parametrize(("command", "changes", "said"), [
    ("inspect", ["data.images=false"], "row 1: a turn has an image; train with data.images=true"),
    ("inspect", ["data.max_length=8"], "data.max_length=8 cuts image "),
    ("train", ["data.overlong=split"], "data.overlong does not split rows with images"),
    ("train", ["data.loss_on=all"], "data.loss_on is assistant with data.images"),
    ("train", ["objective.on_policy=0.5"], "objective.on_policy reads drafts behind text alone"),
    ("train", ["backbone.lora={rank: 2}"], "backbone.lora is trained on text alone"),
    ("train", ["features.endpoint=http://localhost:1"], "features.endpoint serves text alone"),
    ("train", ["backbone.path=embedded"], "embedded reads no images"),
])  # fmt: skip
def test_what_takes_no_images_says_so(command: str, changes: list[str], said: str, shared: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [{"messages": [question(picture(shared.parent / "0.png"), "What?"), answer(0)]}] * 5
    write_rows(tmp_path / "rows.jsonl", rows)
    assert said in error_of(capsys, command, shared, f"data.train={tmp_path / 'rows.jsonl'}", "data.on_bad_row=error", *changes)


def test_photographs_stand_upright(tmp_path: Path) -> None:
    (turned := Image.Exif())[0x0112] = 6
    Image.radial_gradient("L").resize((40, 20)).save(tmp_path / "a.jpg", exif=turned)
    found = read_image(str(tmp_path / "a.jpg"))[0]
    assert found == load_image(str(tmp_path / "a.jpg")) and found.size == (20, 40)
