"""No argument of ``generate`` is dropped: each acts as in transformers, changes no text, or is refused in a line; the page says which."""

import inspect
from typing import Any

import arguments
import pytest
import torch
from arguments import CASES, NO, PAGE, ROWS, SAME, YES, Case, fresh
from families import backbone, heads, say
from transformers import GenerationConfig, GenerationMixin

from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel

BESIDE = {
    "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "tokenizer", "assistant_tokenizer", "logits_to_keep",
    "trust_remote_code",
}  # fmt: skip
"""Arguments that are neither parameters of ``generate`` nor fields of its configuration."""


def test_every_argument_and_field_of_this_transformers_is_in_the_table() -> None:
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names = [case.name for case in CASES]
    assert set(names) == parameters | fields | BESIDE and len(set(names)) == len(names)
    assert arguments.written(PAGE.read_text()) == PAGE.read_text(), "run: PYTHONPATH=. python tests/helpers/arguments.py"


@pytest.fixture(scope="module")
def of() -> SpeculativeModel:
    return heads("shallow", "eagle3", "off")


def call(of: SpeculativeModel | None, given: dict[str, Any], **own: Any) -> Any:
    """By heads, or by transformers itself."""
    rows = {} if "inputs" in given or "inputs_embeds" in given else ROWS
    options = {"max_new_tokens": 12, "do_sample": False} | fresh(given)
    if "max_length" in given:
        del options["max_new_tokens"]
    model = backbone("shallow").model
    return model.generate(**rows, **options) if of is None else say(of, rows, **options | own)


@pytest.mark.parametrize("case", [case for case in CASES if case.verdict != NO], ids=lambda case: case.name)
def test_honoured_or_without_effect(of: SpeculativeModel, case: Case) -> None:
    sampled, tree = bool(case.given.get("do_sample")), TreeShape(12, 4)
    own = {"seed": 5} if sampled else {}
    text = call(of, case.given, tree=tree, **own)
    fields = ["sequences"] if case.given.get("return_dict_in_generate") else []
    fields += [name.removeprefix("output_") for name in ("output_scores", "output_logits") if case.given.get(name)]
    expected = call(of, case.given, speculate=False, **own) if sampled else call(None, case.given)
    for name in fields or [None]:
        actual, theirs = (one if name is None else one[name] for one in (text, expected))
        torch.testing.assert_close(actual, theirs, atol=2e-4, rtol=1e-4)
    if sampled:  # drawn otherwise, from the same scores
        asks = case.given | {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
        torch.testing.assert_close(call(of, asks, **own).scores, call(None, asks).scores, atol=2e-4, rtol=1e-4)
    if not fields and case.shows:
        bare = call(of, case.without, **({"seed": 5} if case.without.get("do_sample") else {}))
        assert torch.equal(text, bare) == (case.verdict == SAME), "the case does not show the argument's effect"
    assert case.verdict in (YES, SAME)


@pytest.mark.parametrize("case", [case for case in CASES if case.verdict == NO], ids=lambda case: case.name)
def test_refused_in_one_line_that_names_it(of: SpeculativeModel, case: Case) -> None:
    with pytest.raises(ValueError, match=case.name) as caught:
        call(of, case.given)
    assert "\n" not in str(caught.value).strip()
    call(of, {name: value for name, value in case.without.items() if name not in ("num_beam_groups", "diversity_penalty")})
