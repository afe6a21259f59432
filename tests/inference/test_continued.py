"""Conversations that continue: a cache given back is used, what is in it already is not read again, and the text is transformers' own."""

import io
from typing import Any

import pytest
import torch
from families import DRAFTERS, VOCAB, backbone, heads, left_padded, prompts, say, texts, tiny
from talker import talker
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StaticCache

from headstart.cli.conversation import Chat, Painter
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import CACHE
from headstart.inference.early_exit import EarlyExit
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings
from headstart.support.errors import UserError

HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
NEW = 5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of each prefill, but for those of smaller models that draft."""
    seen: list[int] = []
    read = Backbone.read

    def noted(
        self: Backbone, tokens_BT: Tensor, cache: Any = None, positions: Any = None, mask: Any = None, *rest: Any, **more: Any
    ) -> Any:
        if mask is None and self.num_layers > 2:
            seen.append(tokens_BT.shape[1])
        return read(self, tokens_BT, cache, positions, mask, *rest, **more)

    monkeypatch.setattr(Backbone, "read", noted)
    return seen


def own(family: str, kind: str = "eagle3") -> SpeculativeModel:
    """Heads whose passes are not captured, so that every prefill is seen."""
    if kind == "early exit":
        return SpeculativeModel(backbone(family), proposers=[EarlyExit(backbone(family), layers=2)], capture="off")
    return SpeculativeModel(backbone(family), heads(family, kind).drafter, capture="off")


def row(ids: Tensor) -> dict[str, Tensor]:
    """A prompt without padding, whatever its tokens are."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def follow(text: Tensor, turn: int) -> Tensor:
    """The prompt of the next turn: the text so far and some tokens of a user."""
    return torch.cat([text, texts(1, NEW, 100 + turn)], 1)


@pytest.mark.matrix(cells=4)
@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in (*DRAFTERS, "early exit")), *((family, "eagle3") for family in ("gpt2", "gemma3"))]
)
def test_only_what_is_new_is_read(family: str, kind: str, reads: list[int]) -> None:
    of, cache, ids = own(family, kind), DynamicCache(), prompts((20,))[0][None]
    for turn in range(2):
        truth = of.backbone.model.generate(**row(ids), **HOW)
        reads.clear()
        out = say(of, row(ids), past_key_values=cache, return_dict_in_generate=True, **HOW)
        assert torch.equal(out.sequences, truth) and out.past_key_values is cache
        assert cache.get_seq_length() == truth.shape[1] - 1, "as transformers leaves it"
        assert reads == [20 if turn == 0 else NEW + 1], "the last token of the answer, and the new ones"
        ids = follow(truth, turn)
    assert torch.equal(of.backbone.model.generate(**row(ids), past_key_values=cache, **HOW), of.backbone.model.generate(**row(ids), **HOW))


def test_drafts_are_those_of_a_text_read_whole() -> None:
    of, cache, ids = own("llama"), DynamicCache(), prompts((20,))[0][None]
    for turn in range(3):
        given = {"tree": TreeShape(12, 4), "return_dict_in_generate": True, **HOW}
        kept, anew = (say(of, row(ids), **given, **more) for more in ({"past_key_values": cache}, {}))
        assert kept.trees == anew.trees and kept.tau == anew.tau
        ids = follow(kept.sequences, turn)


def test_the_longest_common_prefix_counts(reads: list[int]) -> None:
    """Templates drop earlier thoughts, and users ask again."""
    of, cache, ids = own("llama"), DynamicCache(), prompts((20,))[0][None]
    text = say(of, row(ids), past_key_values=cache, **HOW)
    shorter, without = torch.cat([text[:, :24], text[:, 27:]], 1), text[:, 3:]
    for changed, read in ((shorter, 5), (ids, 1), (text, 1), (text, 1), (without, without.shape[1])):
        reads.clear()
        out = say(of, row(changed), past_key_values=cache, **HOW)
        assert torch.equal(out, of.backbone.model.generate(**row(changed), **HOW))
        assert reads == [read]


@pytest.mark.parametrize("options", [{"do_sample": True, "seed": 3}, {"streamer": None, "stop_strings": None}, {"speculate": False}])
def test_other_ways_to_decode(options: dict[str, Any], reads: list[int]) -> None:
    of, cache, ids = own("llama"), DynamicCache(), prompts((9,))[0][None]
    for turn in range(2):
        reads.clear()
        text = say(of, row(ids), past_key_values=cache, **HOW | options)
        assert reads == [9 if turn == 0 else NEW + 1]
        assert torch.equal(text, say(of, row(ids), **HOW | options))
        ids = follow(text, turn)


def test_an_end_and_an_error_leave_what_was_read(reads: list[int]) -> None:
    of, cache, ids = own("llama"), DynamicCache(), prompts((9,))[0][None]
    plain = of.backbone.model.generate(**row(ids), **HOW)
    for place in (0, 5):  # the first token, or one in the middle of a run, ends the text
        eos = {"eos_token_id": int(plain[0, 9 + place]), "pad_token_id": 0}
        text = say(of, row(ids), past_key_values=cache, **HOW | eos)
        assert torch.equal(text, of.backbone.model.generate(**row(ids), **HOW | eos)) and cache.get_seq_length() == text.shape[1] - 1

    def raising(ids_BT: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("gone")

    ids = follow(text, 0)
    with pytest.raises(RuntimeError, match="gone"):
        say(of, row(ids), past_key_values=cache, **HOW, logits_processor=LogitsProcessorList([raising]))  # type: ignore[list-item]
    reads.clear()
    assert torch.equal(say(of, row(ids), past_key_values=cache, **HOW), of.backbone.model.generate(**row(ids), **HOW))
    assert reads == [NEW + 1]


def test_what_others_have_filled_or_changed_is_read_anew(reads: list[int]) -> None:
    of, other, cache, ids = own("llama"), own("llama", "medusa"), DynamicCache(), prompts((9,))[0][None]
    model = of.backbone.model

    def cropped() -> None:
        cache.crop(-4)

    def lengthened() -> None:
        model.generate(**row(torch.cat([text, torch.ones_like(text[:, :2])], 1)), past_key_values=cache, **HOW)

    text = model.generate(**row(ids), past_key_values=cache, **HOW)  # by transformers
    for change in (None, cropped, lengthened, cache.reset):
        if change is not None:
            change()
        ids = follow(text, 0)
        reads.clear()
        text = say(of, row(ids), past_key_values=cache, **HOW)
        assert torch.equal(text, model.generate(**row(ids), **HOW)) and reads == [ids.shape[1]]
    ids = follow(text, 0)
    assert torch.equal(say(other, row(ids), past_key_values=cache, **HOW), model.generate(**row(ids), **HOW))
    assert reads[-1] == ids.shape[1], "other heads lack its features"


def test_weights_that_changed_are_noticed() -> None:
    on = Backbone(tiny("llama", seed=4))
    of, cache, ids = SpeculativeModel(on), DynamicCache(), prompts((9,))[0][None]
    text = say(of, row(ids), past_key_values=cache, **HOW)
    with torch.no_grad():
        on.model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    ids = follow(text, 0)
    assert torch.equal(say(of, row(ids), past_key_values=cache, **HOW), on.model.generate(**row(ids), **HOW))


def test_batches_and_beams_leave_it_alone() -> None:
    of, cache, rows = own("llama"), DynamicCache(), left_padded(prompts((9, 4)))
    model = of.backbone.model
    for given, how in ((rows, HOW), (row(rows["input_ids"][:1]), HOW | {"num_beams": 2}), ({k: v[1:] for k, v in rows.items()}, HOW)):
        assert torch.equal(say(of, given, past_key_values=cache, **how), model.generate(**given, **how))
        assert cache.get_seq_length() == 0
    model.generate(**rows, past_key_values=cache, **HOW)  # filled by transformers, two rows
    longer = left_padded(list(torch.cat([model.generate(**rows, **HOW), torch.randint(1, VOCAB, (2, 3))], 1)))
    longer["attention_mask"][1, :5] = 0
    assert torch.equal(say(of, longer, past_key_values=cache, **HOW), model.generate(**longer, **HOW))


def test_chat_reads_only_what_is_new(reads: list[int]) -> None:
    (heads, prompter), lengths = talker(), list[int]()
    talk = Chat(SpeculativeModel(heads.backbone, heads.drafter, capture="off"), prompter, Settings(9), 0)
    for turn, question in enumerate(("What is two?", "And three?", "/reset", "And three?")):
        if question == "/reset":
            talk.reset()
            continue
        lengths.append(len(prompter.converse([*talk.messages, {"role": "user", "content": question}])))
        reads.clear()
        talk.ask(question, Painter(prompter.tokenizer, io.StringIO(), False))
        # A random answer is not tokenised as it was written.
        assert reads[0] <= lengths[-1] - lengths[0] if turn == 1 else reads == [lengths[-1]]


def test_other_caches_that_hold_something_are_refused_in_one_line() -> None:
    of, ids = own("llama"), prompts((9,))[0][None]
    cache = StaticCache(config=of.backbone.model.config, max_cache_len=64)
    assert torch.equal(say(of, row(ids), past_key_values=cache, **HOW), of.backbone.model.generate(**row(ids), **HOW))
    of.backbone.model.generate(**row(ids), past_key_values=cache, **HOW)
    with pytest.raises(UserError, match=f"{CACHE} is a StaticCache that holds tokens; give a DynamicCache, or an empty cache"):
        say(of, row(ids), past_key_values=cache, **HOW)
