"""What the released model writes is what is trained on, token by token: 200 answers in process, 200 through an OpenAI-compatible server.

ROUND_TRIP=24 tries as many answers. Half of the questions are answered greedily, half are sampled, so that some tokens are not those
that the tokenizer makes of the text.
"""

import json
import os
from typing import Any

import pytest
from command import Folder
from fetch import FILE
from served import serving

import headstart
from conftest import write_rows

KEPT = int(os.environ.get("ROUND_TRIP", "200"))
ASKED = 2 * KEPT
"""Questions: answers that do not end within the limit are dropped."""
FORMS = ("What is the capital of {}?", "Tell me the capital city of {}.", "Where is {}? Answer in a few words.")
PLACES = (
    "France, Italy, Spain, Portugal, Germany, Austria, Poland, Hungary, Greece, Turkey, Norway, Sweden, Finland, Denmark, Iceland, "
    "Ireland, Belgium, Luxembourg, Switzerland, Malta, Cyprus, Croatia, Serbia, Slovenia, Slovakia, Romania, Bulgaria, Albania, "
    "Ukraine, Belarus, Lithuania, Latvia, Estonia, Russia, Georgia, Armenia, Iran, Iraq, Syria, Lebanon, Jordan, Israel, Egypt, "
    "Libya, Tunisia, Algeria, Morocco, Sudan, Ethiopia, Kenya, Uganda, Tanzania, Rwanda, Zambia, Zimbabwe, Malawi, Mozambique, "
    "Madagascar, Namibia, Botswana, Angola, Nigeria, Ghana, Senegal, Mali, Niger, Chad, Cameroon, Gabon, Togo, Benin, Liberia, "
    "China, Japan, Mongolia, Nepal, Bhutan, India, Pakistan, Bangladesh, Thailand, Vietnam, Laos, Cambodia, Malaysia, Indonesia, "
    "Australia, Fiji, Canada, Mexico, Cuba, Jamaica, Haiti, Panama, Nicaragua, Honduras, Guatemala, Belize, Colombia, Venezuela, "
    "Ecuador, Peru, Bolivia, Chile, Argentina, Uruguay, Paraguay, Brazil, Guyana, Suriname, Qatar, Oman, Yemen, Kuwait, Bahrain, "
    "Kazakhstan, Uzbekistan, Tajikistan, Afghanistan, Texas, Ohio, Utah, Nevada, Oregon, Idaho, Montana, Kansas, Iowa, Maine, "
    "Vermont, Florida, Alabama, Hawaii, Alaska, Arizona, Colorado, Indiana, Illinois, Michigan, Nebraska, Oklahoma, Arkansas, "
    "Louisiana, Tennessee, Kentucky, Virginia, Maryland, Delaware, Minnesota"
).split(", ")
REGENERATE = """
import json, headstart
from headstart.cli.main import main
from headstart.training.regenerate.in_process import InProcess
wrote, response = {}, InProcess._response
def noted(self, item, prompt, tokens):
    wrote[item.messages[-1]["content"]] = (prompt.tolist(), list(tokens))
    return response(self, item, prompt, tokens)
InProcess._response = noted
assert main(WORDS) == 0
print(json.dumps(wrote))
"""
TRAINED = """
import json, headstart
from headstart.heads.backbone.model_config import read_end_tokens
from headstart.training.data.samples import find_column
from headstart.training.data.rows import read_rows
from headstart.training.data.tokenise import make_samples, reader_of
from headstart.training.recipe.recipe import Data
tokenizer = headstart.load_tokenizer("FILE")
data = Data(train="ANSWERS", format="FORM", limit=LIMIT)
rows, ends = read_rows("ANSWERS", limit=LIMIT), read_end_tokens("FILE")
samples, stats = make_samples(rows, reader_of(find_column(rows, data, "ANSWERS"), tokenizer, ends), data, source="ANSWERS")
print(json.dumps({"samples": [[one.tokens.tolist(), one.loss_mask.int().tolist()] for one in samples]}))
"""
Wrote = dict[str, tuple[list[int], list[int]]]


def questions() -> list[str]:
    return [form.format(place) for form in FORMS for place in PLACES][:ASKED]


def words(out: str) -> list[str]:
    settings = {"limit": ASKED, "max_new_tokens": 32, "batch_size": 32, "concurrency": 64, "out": out, "temperature": "[0, 1]"}
    given = [f"regenerate.{name}={value}" for name, value in settings.items()]
    first = ["regenerate", "recipe.yaml", "backbone.dtype=fp32", "data.train=questions.jsonl", "data.eval_rows=0"]
    return [*first, "regenerate.timeout=900", *given]


def trained(at: Folder, out: str, form: str) -> list[Any]:
    """The training samples of the answers."""
    code = TRAINED.replace("FILE", FILE.name).replace("ANSWERS", out).replace("FORM", form).replace("LIMIT", str(KEPT))
    found: list[Any] = at.python(code)["samples"]
    return found


def alike(samples: list[Any], asked: list[str], wrote: Wrote) -> int:
    """How many samples are the prompt and the answer that were written for their question, with a loss on the answer alone."""
    pairs = [wrote[question] for question in asked]
    wanted = [[[*prompt, *answer], [0] * len(prompt) + [1] * len(answer)] for prompt, answer in pairs]
    return sum(list(sample) == one for sample, one in zip(samples, wanted, strict=True))


def check(at: Folder, out: str, wrote: Wrote) -> tuple[int, int]:
    rows = [json.loads(line) for line in (at.path / out).read_text().splitlines()][:KEPT]
    assert len(rows) == KEPT, "too few answers ended"
    asked = [row["messages"][-2]["content"] for row in rows]
    exact, texts = (alike(trained(at, out, form), asked, wrote) for form in ("auto", "messages"))
    print(f"\n{out}: {exact} of {KEPT} samples are what was written; from the text alone {texts}")
    at.run("train", "recipe.yaml", f"data.train={out}", "data.eval_rows=0", "train.steps=1", f"data.limit={KEPT}", f"save.dir=on-{out}")
    return exact, texts


@pytest.fixture(scope="module", autouse=True)
def asked(at: Folder) -> None:
    write_rows(at.path / "questions.jsonl", [{"messages": [{"role": "user", "content": one}]} for one in questions()])


def test_in_process(at: Folder) -> None:
    wrote = at.python(REGENERATE.replace("WORDS", repr(words("own.jsonl"))))
    exact, texts = check(at, "own.jsonl", {question: (prompt, answer) for question, (prompt, answer) in wrote.items()})
    assert exact == KEPT and texts > KEPT / 2


def test_through_a_server(at: Folder) -> None:
    """The server's side is transformers alone: its template, its decoding, its ends."""
    backbone, tokenizer = headstart.load_backbone(str(FILE), dtype="fp32"), headstart.load_tokenizer(str(FILE))
    with serving(backbone.model, tokenizer) as (served, url):
        at.run(*words("served.jsonl"), f"regenerate.endpoint={url}", "--json", "served.json")
    report = at.json("served.json")
    assert report["answers_with_token_ids"] >= KEPT
    exact, texts = check(at, "served.jsonl", served.wrote)
    assert exact == KEPT and texts > KEPT / 2
