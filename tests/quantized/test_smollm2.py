"""SmolLM2-135M-Instruct in each quantization, with the heads that ship and n-grams: every token of decoding without drafts, or a line.

Where `tests/real/fetch.py` has fetched the model. PROMPTS=14 tries more prompts.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from schemes import SCHEMES

import headstart
from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer

ROOT = Path(__file__).parents[2]
FILE = ROOT / "out" / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS, WRITTEN = int(os.environ.get("PROMPTS", "4")), 24
OTHER_WIDTHS = ("W4A16", "GPTQ, 4 bits", "AWQ, 4 bits")
"""Groups of 128 inputs, which the model's 576 are no multiple of."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not FILE.is_file():
        pytest.skip(f"no {FILE.name}; fetch it with python tests/real/fetch.py")
    where = tmp_path_factory.mktemp("smollm2")
    model = load_backbone(str(FILE), dtype="fp32", device="cpu").model
    model.config.quantization_config = None
    model.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def asked() -> list[torch.Tensor]:
    tokenizer = load_tokenizer(str(FILE))
    rows = [json.loads(line) for line in (ROOT / "recipes" / "smollm2" / "measure.jsonl").read_text().splitlines()]
    chosen = rows[:: max(len(rows) // PROMPTS, 1)][:PROMPTS]
    kept = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return [tokenizer.apply_chat_template(row["messages"], **kept)["input_ids"] for row in chosen]


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in OTHER_WIDTHS])
def test_the_text_is_that_without_drafts(name: str, folder: Path, asked: list[torch.Tensor], tmp_path: Path) -> None:
    on = Backbone(SCHEMES[name][1](folder, tmp_path))
    heads = headstart.load("smollm2", on, proposers=("suffix", "recycling"), allow_finetuned=True, capture="off")
    drafted = 0
    for number, ids_1T in enumerate(asked):
        for sample in (False, True):
            given = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T), "max_new_tokens": WRITTEN, "do_sample": sample}
            given |= {
                "custom_generate": heads.generate,
                "seed": number,
                "tree": headstart.TreeShape(8, 2, 4),
                "return_dict_in_generate": True,
            }
            texts = [on.model.generate(**given, speculate=speculate) for speculate in (True, False)]
            assert torch.equal(texts[0].sequences, texts[1].sequences), (number, sample)
            drafted += texts[0].tau > 1
    assert (drafted > 0) == (on.dependence is None)
