"""Options that ``generate`` refuses, each with a line that names it; the model is left unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import build, heads, prompts, say, tiny
from torch import Tensor
from transformers import DynamicCache

import headstart
from headstart.heads.backbone.backbone import Backbone
from headstart.support.errors import UserError


@pytest.fixture(scope="module")
def row() -> dict[str, Tensor]:
    return {"input_ids": prompts((9,))[0][None]}


@pytest.mark.parametrize(
    "options,named",
    [
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
    ],
)
def test_refusals(row: dict[str, Tensor], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        say(heads("llama", "medusa"), row | options, max_new_tokens=9)


def test_more_refusals(row: dict[str, Tensor]) -> None:
    of = heads("llama", "eagle3")
    ids = row["input_ids"]
    with pytest.raises(ValueError, match="another model"):
        other = tiny("llama")
        other.generate(ids, custom_generate=of.generate, max_new_tokens=9)
    assert say(of, row, max_new_tokens=9, past_key_values=DynamicCache()).shape == (1, 18), "an empty cache is no reason to refuse"


def test_models_that_cannot_be_backbones() -> None:
    with pytest.raises(UserError, match="a backbone is a loaded model, as .* returns it; got 'some/model'"):
        headstart.load(None, "some/model")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'recurrent': .* does not go on from the state before it .*; train and export only"):
        headstart.load(None, build("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}))


LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
KOSMOS = {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "vocab_size": 40}


def speaks_of_images() -> transformers.PreTrainedModel:
    """Its output layer is in the language model within it."""
    pytest.importorskip("transformers.models.nemotron_h_omni")  # not in transformers 5.20
    sizes = {"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "num_key_value_heads": 2, "vocab_size": 40}
    text = {**LAYERS, **sizes, "layers_block_type": ["full_attention", "mlp"]}
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=text,
        vision_config=LAYERS | {"image_size": 32, "video_temporal_patch_size": 2},
        projector_hidden_size=32,
        vision_hidden_size=32,
    )
    return transformers.NemotronH_Omni_Reasoning_V3(config)


def needs_an_image() -> transformers.PreTrainedModel:
    config = transformers.Kosmos2Config(text_config=KOSMOS, vision_config=LAYERS | {"image_size": 28}, latent_query_num=4)
    return transformers.Kosmos2ForConditionalGeneration(config)


def writes_sounds() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "num_codebooks": 4}
    return transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**sizes))


def moves_a_robot() -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return transformers.PI0ForConditionalGeneration(transformers.PI0Config())


@pytest.mark.parametrize(
    "made, said",
    [
        (moves_a_robot, "PI0ForConditionalGeneration does not name an output layer for text, or several; heads need a model with one"),
        (speaks_of_images, "NemotronH_Omni_Reasoning_V3 does not name an output layer for text, or several; heads need a model with one"),
        (writes_sounds, "MusicgenForCausalLM does not name embeddings for text, or several"),
        (needs_an_image, "Kosmos2ForConditionalGeneration does not read text alone .You have to specify either `pixel_values` or"),
    ],
)
def test_models_of_other_things_than_text(made: Callable[[], transformers.PreTrainedModel], said: str) -> None:
    for trees in (True, False):
        with pytest.raises(UserError, match=said) as caught:
            Backbone(made().eval(), trees=trees)
        assert "\n" not in str(caught.value)
