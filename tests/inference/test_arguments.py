"""No argument of ``generate`` is dropped: each acts as in transformers, changes no text, or is refused in a line; the page says which."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from arguments import CASES, NO, PAGE, ROWS, SAME, YES, Case, fresh
from errors import refuses
from families import ROW, backbone, heads, say, tiny
from tables import with_tables
from transformers import DynamicCache, GenerationConfig, GenerationMixin

import headstart
from headstart import Backbone, SpeculativeModel, TreeShape

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
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run: python tests/helpers/tables.py docs/decode.md"


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


# Options that ``generate`` refuses, each with a line that names it; the model is left unchanged.


@pytest.mark.parametrize("options,named", [
    ({"num_beams": 3, "do_sample": True}, "num_beams"),
    ({"position_ids": torch.tensor([[0, 1, 2, 3, 4, 9, 10, 11, 12]])}, "position_ids other than"),
    ({"token_type_ids": torch.zeros(1, 9, dtype=torch.long)}, "token_type_ids"),
    ({"is_causal": True}, "is_causal"),
    ({"cache_implementation": "quantized"}, "quanto|cache_implementation='quantized'"),
    ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
    ({"do_sample": True, "seed": [1, 2, 3]}, "seed"),
    ({"batch_size": 0}, "batch.*at least 1; got 0"),
    ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])}, "left"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]])}, "left"),
])  # fmt: skip
def test_refusals(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        say(heads("llama", "medusa"), ROW | options, max_new_tokens=9)


def test_more_refusals() -> None:
    of = heads("llama", "eagle3")
    ids = ROW["input_ids"]
    with pytest.raises(ValueError, match="another model"):
        other = tiny("llama")
        other.generate(ids, custom_generate=of.generate, max_new_tokens=9)
    assert say(of, ROW, max_new_tokens=9, past_key_values=DynamicCache()).shape == (1, 18), "an empty cache is no reason to refuse"
    refuses("a backbone is a loaded model, as .* returns it; got 'some/model'", headstart.load, None, "some/model")


def needs_an_image() -> transformers.PreTrainedModel:
    text = {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "vocab_size": 40}
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28}
    config = transformers.Kosmos2Config(text_config=text, vision_config=seen, latent_query_num=4)
    return transformers.Kosmos2ForConditionalGeneration(config)


def writes_sounds() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "num_codebooks": 4}
    return transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**sizes))


@pytest.mark.parametrize("made, said", [
    (writes_sounds, "MusicgenForCausalLM does not name embeddings for text, or several"),
    (needs_an_image, "Kosmos2ForConditionalGeneration does not read text alone .You have to specify either `pixel_values` or"),
])  # fmt: skip
def test_models_of_other_things_than_text(made: Callable[[], transformers.PreTrainedModel], said: str) -> None:
    for trees in (True, False):
        refuses(said, Backbone, made().eval(), trees=trees)
