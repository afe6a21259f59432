"""Every class of transformers' causal and image-text mappings: a dozen here; all by `make test-models`, which writes their table."""

import re
from pathlib import Path

import pytest
import transformers
from every_model import GREEDY, LOOKING, MEANS, SEEN, TITLE, outcome, same_text, text_prompts
from tiny_models import CAUSAL, IMAGE_TEXT, KINDS, tiny_model

from headstart.heads.backbone.backbone import Backbone

ROOT = Path(__file__).parents[2]
PAGE, _, IMAGES = (ROOT / "docs" / "families.md").read_text().partition(TITLE)[2].partition(LOOKING)
DOZEN = (
    "llama", "gemma4_text", "gpt_oss", "qwen3_5_text", "minicpm3", "lfm2", "nemotron_h", "trocr", "falcon_mamba", "bert", "qwen3_vl",
    "kosmos-2.5", "aria", "florence2", "gemma3n_text", "mamba2", "mllama", "qwen4_exp", "openai-gpt",
    *(f"{kind}{SEEN}" for kind in ("mistral3", "glm5_next", "paligemma", "lfm2_vl", "blip-2")),
)  # fmt: skip
"""Trees, chains and lines, of texts and of images; those in which the first sweep found a fault are among them."""


def rows(page: str) -> dict[str, str]:
    """Class -> what became of it, by the page."""
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and "`" in line]
    return {name.strip("`"): end for end, names in cells for name in names.split(", ")}


@pytest.mark.parametrize("kind", DOZEN)
def test_what_becomes_of_a_class(kind: str) -> None:
    if kind.removesuffix(SEEN) not in KINDS:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    found = outcome(kind)
    assert found.end != "fault", found
    if f"transformers {transformers.__version__}:" in PAGE:
        page = IMAGES if kind.endswith(SEEN) else PAGE
        assert rows(page)[found.name.removesuffix(SEEN)].startswith(MEANS[found.end]), found


def test_another_text_is_a_fault() -> None:
    asked = text_prompts()
    wrong = [[*one["input_ids"][0].tolist(), *[7] * 12] for one in asked]
    with pytest.raises(AssertionError, match="greedy, 9 tokens"):
        same_text(Backbone(tiny_model("llama")), asked, wrong, GREEDY)


def test_the_page_holds_every_class() -> None:
    ends, seen = list(rows(PAGE).values()), list(rows(IMAGES).values())
    assert len(ends) > 240 and all(end.startswith(tuple(MEANS.values())) for end in ends)
    assert len(seen) > 80 and sum(end.startswith((MEANS["trees"], MEANS["chains"])) for end in seen) >= 45
    counted = [int(number) for number in re.findall(r"\d+", PAGE.partition("transformers ")[2].partition(": ")[2].partition(".")[0])]
    (causal, trees, chains), (image_text, image_trees, image_chains) = counted[:3], counted[3:]
    assert trees + chains >= 0.75 * causal and image_trees + image_chains >= 0.6 * image_text
    if f"transformers {transformers.__version__}:" in PAGE:
        assert (causal, image_text) == (len(CAUSAL), len(IMAGE_TEXT))
