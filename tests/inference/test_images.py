"""Prompts with images: read by the model's own pass, and every token behind them transformers' own, in trees and in chains."""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, refuses, report_of
from families import Scripted, random_drafter, say, texts, unpadded
from image_models import FAMILIES, IMAGE, LAST, Picture, batch_of, image_backbone, image_model, make_image_model, prompt_of
from PIL import Image
from torch import Tensor
from transformers import DynamicCache

from headstart import Backbone, SpeculativeModel, TreeShape, load_backbone
from headstart.chat.images import ImagePrompter, read_image
from headstart.heads.backbone.features import image_reader, load_processor
from headstart.inference.capture.capture import warn_once
from headstart.inference.engine.inputs import read_images
from headstart.inference.engine.judge import Rounding
from headstart.inference.engine.proposer import made
from headstart.inference.engine.request import Request
from headstart.inference.engine.suffix import SuffixProposer
from headstart.support.errors import UserError

TREE = TreeShape(8, 3)
HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [*range(LAST + 1, IMAGE + 1)]}
SAMPLED: dict[str, Any] = HOW | {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
ONE, SEVERAL, NONE = [3, Picture(1), 4], [3, Picture(1, wide=True), 2, Picture(2), 4], [9]


def drafting(family: str, kind: str = "medusa") -> SpeculativeModel:
    """Random heads and n-grams."""
    on = image_backbone(family)
    return SpeculativeModel(on, random_drafter(kind, on), proposers=made(["suffix", "recycling"]), capture="off")


def also_written(inputs: dict[str, Tensor], ids: Tensor, pictures: bool = True) -> dict[str, Tensor]:
    """The inputs of a prompt that goes on as ``ids``, with its pictures or without."""
    kinds = {name: value for name, value in inputs.items() if name.endswith("token_type_ids")}
    more = {name: torch.cat([value, value.new_zeros(1, ids.shape[1] - value.shape[1])], 1) for name, value in kinds.items()}
    others = inputs if pictures else {}
    return {**others, **more, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_transformers_own(family: str) -> None:
    prompts, model = [prompt_of(family, parts, seed) for seed, parts in enumerate((ONE, SEVERAL, NONE))], image_backbone(family).model
    alone = [model.generate(**prompt, **HOW)[0].tolist() for prompt in prompts]
    other = model.generate(**prompt_of(family, [3, Picture(7), 4]), **HOW)[0].tolist()
    assert other != alone[0], "another image is another text"
    right = SpeculativeModel(image_backbone(family), Scripted(image_backbone(family), alone, "nearly"), capture="off")
    for prompt, text in zip(prompts, alone, strict=True):
        assert say(drafting(family), prompt, tree=TREE, **HOW)[0].tolist() == text
        out = say(right, prompt, tree=TREE, return_dict_in_generate=True, **HOW)
        assert out.sequences[0].tolist() == text and max(out.accept_lengths[0]) > 1, "drafts are accepted behind images"
    batch = batch_of(prompts)
    together = say(right, batch, tree=TREE, **HOW)
    assert torch.equal(together, model.generate(**batch, **HOW)) and unpadded(together, batch) == alone
    assert torch.equal(say(right, batch, tree=TREE, batch_size=2, **HOW), together), "rows begin as others end"


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "hydra", "mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_text_is_that_without_drafts(family: str, kind: str) -> None:
    of, prompt = drafting(family, kind), prompt_of(family, SEVERAL)
    for seed in range(2):
        plain = say(of, prompt, seed=seed, speculate=False, **SAMPLED)
        assert torch.equal(say(of, prompt, seed=seed, tree=TREE, **SAMPLED), plain)
        assert torch.equal(say(of, prompt, seed=seed, **SAMPLED), plain), "adaptive"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3.5"])  # whose states no cache of the caller's gets
def test_a_conversation_continues_behind_its_images(family: str) -> None:
    of, prompt, cache = drafting(family, "eagle3"), prompt_of(family, SEVERAL), DynamicCache()
    model = of.backbone.model
    first = model.generate(**prompt, **HOW)
    assert torch.equal(say(of, prompt, past_key_values=cache, tree=TREE, **HOW), first)
    assert cache.get_seq_length() == first.shape[1] - 1
    model.generate(**prompt_of(family, NONE), **HOW)  # transformers keeps the offset on the model, and forgets it here
    ids = torch.cat([first, texts(1, 5, 9).clamp(max=LAST)], 1)
    second = model.generate(**also_written(prompt, ids), **HOW)
    assert torch.equal(say(of, also_written(prompt, ids, pictures=False), past_key_values=cache, tree=TREE, **HOW), second)
    refuses("not read after what a", say, of, also_written(prompt, ids), past_key_values=cache, **HOW)
    other = torch.cat([prompt["input_ids"][:, :6], ids[:, 5:]], 1)  # another text before the last image
    refuses("places for image input that is not given", say, of, also_written(prompt, other, pictures=False), past_key_values=cache, **HOW)


def test_passes_that_are_traced_take_the_positions_behind_images() -> None:
    on, prompt = Backbone(image_model("qwen2.5-vl")), prompt_of("qwen2.5-vl", SEVERAL)
    heads = SpeculativeModel(on, random_drafter("eagle3", on), capture="trace")
    alone = on.model.generate(**prompt, **HOW | {"max_new_tokens": 60})
    out = say(heads, prompt, tree=TREE, return_dict_in_generate=True, **HOW | {"max_new_tokens": 60})
    assert torch.equal(out.sequences, alone) and out.capture == "trace"


def test_rounding_is_measured_behind_images() -> None:
    on, prompt, found = image_backbone("qwen2.5-vl"), prompt_of("qwen2.5-vl", SEVERAL), []

    def images(model: Any, ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **given: Any) -> Tensor:
        found.extend(read_images(on, Request.plain(ids, 0, (), logits_processor, False), given))
        return ids

    on.model.generate(**prompt, custom_generate=images, max_new_tokens=1)
    rounding, ids = Rounding(on), on.model.generate(**prompt, **HOW)[0]
    rounding.measure(ids, len(ids) - 12, images=found[0])
    assert 0 < rounding.measured < 1e-4


class Noting(SuffixProposer):
    def open(self, sequence: int, tokens: list[int]) -> None:
        self.opened = tokens[:-1]
        super().open(sequence, tokens)


def test_proposers_see_text_alone() -> None:
    noting, prompt = Noting(), prompt_of("qwen2.5-vl", SEVERAL)
    say(SpeculativeModel(image_backbone("qwen2.5-vl"), proposers=[noting], capture="off"), prompt, **HOW)
    assert noting.opened == [token for token in prompt["input_ids"][0].tolist() if token != IMAGE]


def test_heads_say_once_that_they_have_seen_no_images(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        say(drafting("smolvlm"), prompt_of("smolvlm", ONE), **HOW)
    assert caplog.text.count("have seen no images in training") == 1


@pytest.mark.parametrize(("changes", "said"), [
    ({"input_ids": texts(1, 9).clamp(max=LAST)}, "places for {'image': 0} features, the images {'image': 4}"),
    ({"pixel_values": None, "pixel_attention_mask": None}, "has 4 tokens 60, places for image input that is not given"),
    ({"input_ids": torch.tensor([[3, 4, *[IMAGE] * 4]])}, "the prompt ends with an image"),
    ({"num_beams": 2}, "images are not read in a beam search"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    prompt = {name: value for name, value in (prompt_of("smolvlm", ONE) | changes).items() if value is not None}
    refuses(said, say, drafting("smolvlm"), prompt | {"attention_mask": torch.ones_like(prompt["input_ids"])}, **HOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, pictures and prompts on disk."""
    path = tmp_path_factory.mktemp("images")
    make_image_model(path / "model")
    Image.new("RGB", (50, 40), (255, 0, 0)).save(path / "red.png")
    Image.radial_gradient("L").save(path / "grey.png")
    (path / "text.png").write_text("no image")
    (path / "prompts.jsonl").write_text('{"prompt": "What is this?"}\n{"turns": ["Say what you see.", "And now?"]}\n')
    return path


ARGUMENTS = ["--backbone", "model", "--dtype", "fp32", "--capture", "off", "--max-new-tokens", "12", "--propose", "suffix"]


def by_hand(messages: list[tuple[str, str]], pictures: list[str]) -> str:
    """What transformers writes for a conversation that begins with pictures."""
    model, processor = load_backbone("model", dtype="fp32").model, load_processor("model")
    whole = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in messages]
    whole[0]["content"] = [{"type": "image"}] * len(pictures) + whole[0]["content"]
    text = processor.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    inputs = processor(
        text=[text], images=[Image.open(one).convert("RGB") for one in pictures] or None, add_special_tokens=False, return_tensors="pt"
    )
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(out, skip_special_tokens=True)


def test_generate_and_chat_with_images(folder: Path, monkeypatch: pytest.MonkeyPatch, stdin: Callable[[str], None]) -> None:
    monkeypatch.chdir(folder)
    pictures = ["red.png", "grey.png"]
    url = "data:image/png;base64," + base64.b64encode((folder / "grey.png").read_bytes()).decode()
    written = report_of(folder, "generate", *ARGUMENTS, "--image", "red.png", "--image", url, "What is this?")["text"]
    assert written == by_hand([("user", "What is this?")], pictures) != by_hand([("user", "What is this?")], pictures[::-1])
    stdin("What is this?\nAnd now?\n/reset\nAnd now?\n")
    answers = report_of(folder, "chat", *ARGUMENTS, "--image", "red.png")["answers"]
    first, second, again = [answer["answer"] for answer in answers]
    assert first == by_hand([("user", "What is this?")], ["red.png"])
    assert second == by_hand([("user", "What is this?"), ("assistant", first), ("user", "And now?")], ["red.png"])
    assert again == by_hand([("user", "And now?")], ["red.png"])


def test_bench_judges_texts_about_images(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    how = ["--image", "red.png", "--prompts", "prompts.jsonl", "--rounds", "1", "--temperature", "0", "1"]
    report = report_of(folder, "bench", *ARGUMENTS, *how)
    assert report["verdict"] == "identical" and all(row["identical_to_transformers"] for row in report["results"] if not row["temperature"])
    assert "without transformers' assisted decoding" in error_of(capsys, "bench", *ARGUMENTS, *how, "--prompt-lookup")


def test_bench_asks_rows_with_their_own_images(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    part = {"type": "image", "image": "grey.png"}
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}, {"role": "assistant", "content": "x"}]
    rows = [
        {"messages": talk},
        {"question": "What is this?", "image": "red.png"},
        {"conversations": [{"from": "human", "value": "<image>What is this?"}], "images": ["red.png"]},
        {"question": "What is this?"},
    ]
    pictures, how = (["grey.png"], ["red.png"], ["red.png"], []), ["--rounds", "1", "--temperature", "0"]
    for number, (row, given) in enumerate(zip(rows, pictures, strict=True)):
        (folder / "row.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(rows[3 - number]) + "\n")
        report = report_of(folder, "bench", *ARGUMENTS, *how, "--prompts", "row.jsonl", "--images")
        written = ["".join(sample["tokens"]) for sample in report["samples"]]
        assert report["verdict"] == "identical" and by_hand([("user", "What is this?")], given) in written, (number, written)
    how += ["--prompts", "row.jsonl"]
    (folder / "row.jsonl").write_text(json.dumps(rows[1]) + "\n")
    for given, said in (([], "the row has images: give --images"), (["--images", "--raw"], "--images asks with a chat template"),
                        (["--images", "--image", "red.png"], "give one of them"),
                        (["--images", "--batch-size", "2"], "one at a time")):  # fmt: skip
        assert said in error_of(capsys, "bench", *ARGUMENTS, *how, *given)


def test_rows_of_the_same_tokens_have_their_own_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    tokenizer = load_processor("model").tokenizer
    prompter = ImagePrompter(tokenizer, with_images=True, reader=image_reader("model", tokenizer))
    red, grey = (prompter.of_row({"question": "What is this?", "image": name}).ids_T for name in ("red.png", "grey.png"))
    assert torch.equal(red, grey) and not torch.equal(*(prompter.beside(one, torch.device("cpu"))["pixel_values"] for one in (red, grey)))
    text, twice = (prompter.of_row({"text": f"{first}Some text."}).ids_T for first in ("", tokenizer.bos_token))
    assert not prompter.beside(text, torch.device("cpu")) and torch.equal(text, twice), "with one first token"
    for row, said in (({"text": "Some text.", "image": "red.png"}, "to ask a question with them"),
                      ({"question": "An <image>?"}, "has 1 more tokens of images than its images give")):  # fmt: skip
        refuses(said, prompter.of_row, row)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    refusing = ImagePrompter(tokenizer, with_images=True, reader=prompter.reader)
    with pytest.raises(UserError, match="refuses the conversation with images: no; change it, or leave it out"):
        refusing.of_row({"question": "What is this?", "image": "red.png"})


@pytest.mark.parametrize(("given", "said"), [
    (["--image", "none.png"], "--image none.png: there is no such file"),
    (["--image", "text.png"], "--image text.png cannot be read as an image (Pillow knows no such format)"),
    (["--image", "https://example.org/a.png"], "--image https://example.org/a.png: nothing is fetched"),
    (["--image", "data:image/png;base64,?"], "--image data:image/png;base64,? cannot be read as an image"),
    (["--image", "red.png", "--raw"], "the prompt has 0 places for images (<boi>), and 1 are given"),
    (["--raw", "an <image>"], "the prompt has 1 tokens 4, places for image input that is not given"),
])  # fmt: skip
def test_images_that_cannot_be_read(given: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    assert said in error_of(capsys, "generate", *ARGUMENTS, *given, *([] if given[-1] == "an <image>" else ["What?"]))


def test_the_processors_template_counts(folder: Path) -> None:
    tokenizer = (processor := load_processor(str(folder / "model"))).tokenizer
    tokenizer.chat_template = "{{ 'of text alone' }}"
    image_reader(str(folder / "model"), tokenizer)
    assert tokenizer.chat_template == processor.chat_template and "<boi>" in tokenizer.chat_template


def test_a_model_without_image_settings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (folder / "model").glob("*token*"):
        (tmp_path / file.name).symlink_to(file)
    refuses("no settings for images|cannot load processor", load_processor, str(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    refuses("needs Pillow: pip install", read_image, "red.png")
