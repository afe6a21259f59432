"""Every architecture through every check, and docs/families.md says the same."""

import functools
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformers
from architectures import Architecture, chained, refused, served
from every_model import GREEDY, LOOKING, MEANS, SEEN, TITLE, reason, same_text, text_prompts
from every_model import outcome as outcome_of
from families_table import SIZES, TOKENS, outcome, page, rows_of, start_of
from family_checks import CHECKS, Subject
from published import SITUATIONS, shapes
from released_model import MODELS, configuration
from released_run import DTYPES, STEPS, Released, Step, exports
from released_sizes import SMALLEST
from shrink import FOLDER
from small_run import ROOT, read_log
from tiny_models import CAUSAL, IMAGE_TEXT, KINDS, tiny_model
from transformers import AutoConfig

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.methods import methods

PAGE = ROOT / "docs" / "families.md"
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@functools.cache
def written() -> dict[str, list[str]]:
    return rows_of(PAGE.read_text())


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return {one.name: Subject(one, tmp_path_factory.mktemp("family")) for one in served() + chained()}


@pytest.mark.matrix(cells=list(CHECKS).index("train"))  # below, models are trained, saved and exported in `make test-all`
@pytest.mark.parametrize("architecture", served() + chained(), ids=lambda one: one.name)
@pytest.mark.parametrize("check", CHECKS)
def test_the_cell_is_true(subjects: dict[str, Subject], architecture: Architecture, check: str) -> None:
    stated = written()[start_of(architecture)[0]]
    assert stated[:2] == start_of(architecture)
    assert outcome(check, subjects[architecture.name]) == stated[2 + list(CHECKS).index(check)]


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("architecture", refused(), ids=lambda one: one.name)
def test_heads_of_those_that_are_not_decoded_are_trained_exported_and_verified(architecture: Architecture, tmp_path: Path) -> None:
    """By the commands: ten steps here lower the loss; the export, read back, drafts as the heads do."""
    of = Subject(architecture, tmp_path)
    losses = [line["loss"] for line in read_log(of.run) if "loss" in line]
    assert len(losses) == 10 and sum(losses[-3:]) < sum(losses[:3])
    assert main(["export", "--heads", str(of.run), "--to", "vllm", "--out", f"{tmp_path}/served"]) == 0
    assert main(["verify", f"{tmp_path}/served"]) == 0


def test_every_published_configuration_and_no_other_is_in_the_table() -> None:
    models = {path.stem for path in FOLDER.glob("*.json")}
    assert models == {name for one in served() + chained() for name in one.models if (FOLDER / f"{name}.json").exists()}
    names = {", ".join(one.models) for one in (*served(), *chained(), *refused())}
    assert names == set(written()) - {"column", "models", *CHECKS, TOKENS, SIZES}
    assert all(cell for line in written().values() for cell in line), "no cell is empty"


def test_the_page_names_every_template_and_situation() -> None:
    text = PAGE.read_text()
    assert f"The shapes of {len(shapes())} published chat templates" in text and f": {', '.join(shapes())}." in text
    assert f"the situations\n{', '.join(SITUATIONS)};" in text


def test_refusals_templates_and_released_sizes_are_those_on_the_page() -> None:
    assert page(PAGE.read_text(), only=["no model"]) == PAGE.read_text()


# Random models of released sizes, through all that users do, in `make test-all`: the smallest of every family, and every method.


def go(model: str, dtype: str, steps: tuple[Step, ...], drafter: dict[str, Any] | None = None) -> None:
    with TemporaryDirectory() as folder:  # not one of pytest's, which keeps those of three runs
        released = Released(model, dtype, Path(folder), drafter)
        for step in steps:
            step(released)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_family_at_the_sizes_of_its_smallest_released_model(model: str, dtype: str) -> None:
    go(model, dtype, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*methods()} - {"eagle3"}))
def test_every_other_method_on_a_released_size(kind: str) -> None:
    go("smollm2-135m-instruct", "fp32", tuple(step for step in STEPS if step is not exports), {"kind": kind, "depth": 3})


def test_every_row_of_the_table_has_a_released_size_of_its_class() -> None:
    assert set(SMALLEST) == {one.name for one in served()}
    for one in served():
        small = AutoConfig.for_model(**one.configuration)
        assert configuration(SMALLEST[one.name]).get_text_config().model_type == small.get_text_config().model_type, one.name


# Every class of transformers' causal and image-text mappings: a dozen here; all by `make test-models`, which writes their table.

TEXTS, _, IMAGES = (ROOT / "docs" / "families.md").read_text().partition(TITLE)[2].partition(LOOKING)
DOZEN = (
    "llama", "gemma4_text", "gpt_oss", "qwen3_5_text", "minicpm3", "lfm2", "nemotron_h", "trocr", "falcon_mamba", "bert", "qwen3_vl",
    "kosmos-2.5", "aria", "florence2", "gemma3n_text", "mamba2", "mllama", "qwen4_exp", "openai-gpt", "pi0",
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
    found = outcome_of(kind)
    assert found.end != "fault", found
    if f"transformers {transformers.__version__}:" in TEXTS:
        page = IMAGES if kind.endswith(SEEN) else TEXTS
        said = rows(page)[found.name.removesuffix(SEEN)]
        assert said == f"{MEANS[found.end]}: {reason(found)}" if found.end == "line" else said.startswith(MEANS[found.end]), found


def test_another_text_is_a_fault() -> None:
    asked = text_prompts()
    wrong = [[*one["input_ids"][0].tolist(), *[7] * 12] for one in asked]
    with pytest.raises(AssertionError, match="greedy, 9 tokens"):
        same_text(Backbone(tiny_model("llama")), asked, wrong, GREEDY)


def test_the_page_holds_every_class() -> None:
    ends, seen = list(rows(TEXTS).values()), list(rows(IMAGES).values())
    assert len(ends) > 240 and all(end.startswith(tuple(MEANS.values())) for end in ends)
    assert len(seen) > 80 and sum(end.startswith((MEANS["trees"], MEANS["chains"])) for end in seen) >= 45
    counted = [int(number) for number in re.findall(r"\d+", TEXTS.partition("transformers ")[2].partition(": ")[2].partition(".")[0])]
    (causal, trees, chains), (image_text, image_trees, image_chains) = counted[:3], counted[3:]
    assert trees + chains >= 0.75 * causal and image_trees + image_chains >= 0.6 * image_text
    if f"transformers {transformers.__version__}:" in TEXTS:
        assert (causal, image_text) == (len(CAUSAL), len(IMAGE_TEXT))
