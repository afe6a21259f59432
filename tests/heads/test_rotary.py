"""Models whose rotary frequencies change with the sequence length: exact on either side of the change, and across LongRoPE's."""

from typing import Any

import pytest
import torch
import transformers
from errors import refuses
from families import SIZES, build, left_padded, prompts, random_drafter, say
from shrink import shrunk
from torch import Tensor
from transformers import LlamaConfig, LogitsProcessorList, StoppingCriteria
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.heads.eagle3 import Eagle3
from headstart.heads.layers.start_values import llama_like
from headstart.heads.mtp import partial_rotary
from headstart.inference.engine.judge import Judge, Text
from headstart.inference.engine.noise import row_seeds
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.suffix import SuffixProposer
from headstart.support.errors import UserError

TURN = 32
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {
    "longrope": {"short_factor": [1.2, 1.5], "long_factor": [1.5, 3.0], "original_max_position_embeddings": TURN},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TURN},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": TURN} | LLAMA3,
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "default": {},
}
"""Kinds of rotary embeddings, and their settings for a model that rotates half of each head of 8."""


def heads(kind: str, method: str | None = "medusa", family: str = "Phi3") -> SpeculativeModel:
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.4, 2.0, 3.0]}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TURN, **factors}
        model = build(family, SIZES | {"max_position_embeddings": 128, "original_max_position_embeddings": TURN, "rope_parameters": rope})
    else:
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        model = build("Llama", SIZES | {"max_position_embeddings": TURN, "rope_parameters": rope})
    on = Backbone(model)
    return SpeculativeModel(on, None if method is None else random_drafter(method, on), proposers=[SuffixProposer()], capture="off")


ONE_TOKEN_AFTER, AT, BEFORE = TURN + 1, TURN, TURN - 1


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["medusa", "eagle3", "block", None])
@pytest.mark.parametrize("length", [20, BEFORE, AT, ONE_TOKEN_AFTER])
def test_across_longropes_change_the_text_is_read_again_as_transformers_does(length: int, method: str | None) -> None:
    of = heads("longrope", method)
    assert of.backbone.rope_limit == TURN
    (ids,) = prompts((length,))
    row = {"input_ids": ids[None], "attention_mask": torch.ones(1, length, dtype=torch.long)}
    want = of.backbone.model.generate(**row, max_new_tokens=30, do_sample=False)
    for tree in ("auto", TreeShape(12, 3)):
        output = say(of, row, max_new_tokens=30, do_sample=False, tree=tree, return_dict_in_generate=True)
        assert torch.equal(output.sequences, want)
        assert 1 + sum(output.accept_lengths[0]) == 30, "no token is written by reading again"
    sampled = [say(of, row, max_new_tokens=30, do_sample=True, seed=3, speculate=speculate) for speculate in (True, False)]
    assert torch.equal(*sampled) and not torch.equal(sampled[0], want)
    judged = Judge(of.backbone).judge(Text(sampled[0][0], 30, row_seeds([3], 1, torch.device("cpu")), Processing(LogitsProcessorList(), 1)))
    assert judged.worst[0] < 1e-4


def test_rows_of_a_batch_cross_it_each_by_itself() -> None:
    of, lengths = heads("longrope"), (9, 40, 28, 20, 20)
    alone = [say(of, left_padded([ids]), max_new_tokens=18, do_sample=False)[0, -18:] for ids in prompts(lengths)]
    together = say(of, left_padded(prompts(lengths)), max_new_tokens=18, do_sample=False, batch_size=2)
    assert torch.equal(together[:, -18:], torch.stack(alone))
    stopped = say(of, left_padded(prompts(lengths)), max_new_tokens=18, do_sample=False, stopping_criteria=[Never()])
    assert torch.equal(stopped, together), "and where rows wait for each other"


class Never(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_beams_across_it_and_texts_beyond_dynamic_scaling_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    row = left_padded(prompts((20,)))
    for family, count in (("Phi3", 0), ("Llama", 1)):
        say(heads("longrope", None, family), row, max_new_tokens=18, do_sample=False)
        assert caplog.text.count("after 32 tokens transformers keeps llama's old keys") == count
    with pytest.raises(UserError, match=f"rotary frequencies beyond {TURN} positions, which beams or rows that go on together may reach"):
        say(heads("longrope"), row, max_new_tokens=18, num_beams=2)
    of = heads("dynamic")
    assert of.backbone.rope_limit == TURN
    said = f"beyond {TURN} positions, where a text of {TURN + 1} tokens cannot be decoded; allowed: texts that end"
    refuses(said, say, of, row, max_new_tokens=18, do_sample=False)
    want = of.backbone.model.generate(**row, max_new_tokens=5, do_sample=False)
    assert torch.equal(say(of, row, max_new_tokens=18, do_sample=False, eos_token_id=int(want[0, -1])), want), "it ends before"
    refuses("where a text of 40 tokens", say, of, left_padded(prompts((40,))), max_new_tokens=18, do_sample=False)


def rope(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.5} | SCALED[kind]


@pytest.mark.parametrize("kind", SCALED)
def test_heads_rotate_whole_heads_alike_at_every_length_and_what_engines_read_says_the_same(kind: str) -> None:
    longer = {"max_position_embeddings": 128} | ({"original_max_position_embeddings": TURN} if kind == "longrope" else {})
    on = Backbone(build("Phi3" if kind in ("longrope", "default") else "StableLm", SIZES | longer | {"rope_parameters": rope(kind)}))
    drafter = random_drafter("eagle3", on)
    assert isinstance(drafter, Eagle3)
    engines = LlamaRotaryEmbedding(LlamaConfig(**{key: value for key, value in drafter.engine_config().items() if key != "model_type"}))
    places = torch.arange(TURN)
    cos, sin = (part[0] for part in engines(torch.ones(1), places[None]))
    rotary = drafter.cached.layers[0].rotary
    own_cos, own_sin = rotary.table(TURN, places.device)
    torch.testing.assert_close(rotary.table(8 * TURN, places.device)[0][:TURN], own_cos)
    assert own_cos.shape == (TURN, 8), "the whole head"
    torch.testing.assert_close(own_cos, cos)
    torch.testing.assert_close(own_sin.abs(), sin.abs())


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear", "default"])
def test_mtp_modules_rotate_the_part_that_the_backbone_rotates(kind: str) -> None:
    sizes = {"head_dim": 8, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
    stated = transformers.Qwen3_5TextConfig(**sizes, rope_parameters=rope(kind) | {"mrope_section": [1, 1, 0]})
    cos, sin = (part[0] for part in Qwen3_5TextRotaryEmbedding(stated)(torch.ones(1), torch.arange(TURN)[None]))
    own_cos, own_sin = partial_rotary(LlamaConfig(**sizes, rope_parameters=rope(kind))).table(TURN, cos.device)
    torch.testing.assert_close(own_cos, cos)
    torch.testing.assert_close(own_sin.abs(), sin.abs())


@pytest.mark.parametrize(("name", "kind"), [("gemma-4-31b-it", "default"), ("ministral-3-8b-instruct-2512", "yarn")])
def test_heads_state_rotary_parameters_that_engines_read(name: str, kind: str) -> None:
    """Not Gemma-4's proportional ones, nor Ministral-3's scale of queries beside them."""
    rope = llama_like(Backbone(shrunk(name)), None).rope_parameters
    assert rope["rope_type"] == kind and not {"llama_4_scaling_beta", "partial_rotary_factor"} & rope.keys()
