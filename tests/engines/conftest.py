"""Prompts, and whether there is an engine. `make test-engines` runs these tests; `make test` does not."""

import pytest
from trained import ROOT

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.serving.verify.vllm import VLLM
from headstart.support.errors import UserError
from headstart.support.json_text import read_jsonl

LENGTHS = (24, 31, 40, 47, 64)
PROMPTS = 6


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    """Skip where vLLM is not installed."""
    try:
        VLLM.find_python()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Held-out texts, cut to different lengths."""
    tokenizer = load_tokenizer("embedded")
    texts = [row["text"] for _, row in read_jsonl(ROOT / "recipes" / "quickstart" / "prompts.jsonl")][:PROMPTS]
    return [tokenizer(text)["input_ids"][: LENGTHS[i % len(LENGTHS)]] for i, text in enumerate(texts)]
