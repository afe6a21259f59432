"""Conversations that continue: a cache given back is used, what is in it already is not read again, and the text is transformers' own."""

import io
from collections import deque
from typing import Any

import pytest
import torch
from chat_templates import talker
from errors import refuses
from families import DRAFTERS, VOCAB, backbone, build, heads, left_padded, prompts, random_drafter, say, texts, tiny
from test_rotary import TURN
from test_rotary import heads as turning
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StaticCache

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.cli.conversation import Chat, Painter
from headstart.heads.backbone.model_config import CACHE, end_tokens
from headstart.inference.early_exit import EarlyExit
from headstart.inference.engine.suffix import SuffixProposer
from headstart.inference.measure import Ended, Progress, Prompt, Queue, Settings, continue_text, stream
from headstart.inference.steps import Tally
from headstart.support.errors import UserError

HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
NEW = 5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of each prefill, but for those of smaller models that draft."""
    seen: list[int] = []
    read = Backbone.read

    def noted(self: Backbone, tokens_BT: Tensor, cache: Any = None, positions: Any = None, mask: Any = None, *end: Any, **more: Any) -> Any:
        if mask is None and self.num_layers > 2:
            seen.append(tokens_BT.shape[1])
        return read(self, tokens_BT, cache, positions, mask, *end, **more)

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
    of, cache, ids = own(family, kind), None, prompts((20,))[0][None]
    for turn in range(2):
        truth = of.backbone.model.generate(**row(ids), **HOW)
        reads.clear()
        out = say(of, row(ids), past_key_values=cache, return_dict_in_generate=True, **HOW)
        assert torch.equal(out.sequences, truth) and cache in (None, out.past_key_values), "the output brings one where none was given"
        cache = out.past_key_values
        assert cache.get_seq_length() == truth.shape[1] - 1, "as transformers leaves it"
        assert reads == [20 if turn == 0 else NEW + 1], "the last token of the answer, and the new ones"
        ids = follow(truth, turn)
    assert torch.equal(of.backbone.model.generate(**row(ids), past_key_values=cache, **HOW), of.backbone.model.generate(**row(ids), **HOW))


@pytest.mark.matrix(cells=3)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_are_those_of_a_text_read_whole(kind: str) -> None:
    """Turn by turn, after a turn that was taken back, and in rows that join a batch midway."""
    of, cache, ids = own("llama", kind), DynamicCache(), prompts((20,))[0][None]
    given = {"tree": TreeShape(12, 4), "return_dict_in_generate": True, **HOW}
    asked = []
    for turn in range(4):
        kept, anew = (say(of, row(ids), **given, **more) for more in ({"past_key_values": cache}, {}))
        assert kept.trees == anew.trees and kept.tau == anew.tau
        asked.append((Prompt(ids[0], 0, turn), anew.trees[0]))
        ids = follow(kept.sequences[:, : 24 if turn == 1 else None], turn)
    waiting = iter(prompt for prompt, _ in asked)
    found: list[list[Any]] = [[] for _ in asked]
    for step in stream(of, lambda: next(waiting, None), Queue(Settings(12, tree=TreeShape(12, 4)), batch_size=2)):
        for (prompt, _), number in zip(step.written, step.forward.written if step.forward else (), strict=True):
            found[prompt.key].append(step.forward.trees[number])
    assert found == [trees for _, trees in asked]


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

    def lengthened() -> None:
        model.generate(**row(torch.cat([text, torch.ones_like(text[:, :2])], 1)), past_key_values=cache, **HOW)

    text = model.generate(**row(ids), past_key_values=cache, **HOW)  # by transformers
    for change in (None, lambda: cache.crop(-4), lengthened, cache.reset, lambda: cache.layers[-1].values.neg_()):
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
    with pytest.raises(UserError, match=f"{CACHE} is a StaticCache that holds tokens; give a DynamicCache, or an empty StaticCache"):
        say(of, row(ids), past_key_values=cache, **HOW)
    with pytest.raises(UserError, match=f"{CACHE} is a Rounding; give a DynamicCache, or an empty StaticCache"):
        say(of, row(ids), past_key_values=type("Rounding", (DynamicCache,), {})(), **HOW)
    said = "the prompt of row 0 has no token .attention_mask is 0.; give it a first token, or leave the row out"
    refuses(said, say, of, {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}, **HOW)


# A queue of prompts decoded in a full batch gives each prompt's own text, and hands it out when it ends.

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 192}
LENGTHS = (9, 14, 3, 30, 22, 5, 17, 11, 40)


@pytest.fixture(scope="module")
def model() -> SpeculativeModel:
    """Heads and n-grams on a model whose texts end after some ten tokens."""
    on = Backbone(build("Llama", SIZES | {"vocab_size": 96}))
    on.model.generation_config.eos_token_id = [*range(8)]
    return SpeculativeModel(on, random_drafter("eagle3", on, depth=3), proposers=[SuffixProposer()], capture="off")


def steps_of(model: SpeculativeModel, asked: list[Prompt], queue: Queue) -> list[Progress]:
    waiting = iter(asked)
    return list(stream(model, lambda: next(waiting, None), queue))


@pytest.mark.matrix
@pytest.mark.parametrize("speculate", [True, False], ids=["drafts", "plain"])
@pytest.mark.parametrize("settings", [Settings(24), Settings(24, 0.8, top_k=40, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_text_is_its_own(model: SpeculativeModel, settings: Settings, batch_size: int, speculate: bool) -> None:
    ids, tally = prompts(LENGTHS), Tally()
    asked = [Prompt(ids_T, seed=2**62 + i, key=i) for i, ids_T in enumerate(ids)]
    steps = steps_of(model, asked, Queue(settings, batch_size, end_tokens(model.backbone.model.generation_config), speculate))
    texts = {ended.prompt.key: ended.tokens for step in steps for ended in step.ended}
    for i, ids_T in enumerate(ids):
        output = continue_text(model, ids_T, settings, 2**62 + i, speculate=speculate)
        assert texts[i] == output.sequences[0, len(ids_T) :].tolist()
    assert len({*map(len, texts.values())}) > 3, "they end at different times"
    assert all(len(step.written) <= batch_size for step in steps)
    for step in steps:
        if step.forward is not None:
            tally.add(step.forward)
    assert tally.tokens + len(ids) == sum(map(len, texts.values())) and tally.passes == sum(step.forward is not None for step in steps)
    assert sum(count for step in steps for _, count in step.written) == tally.emitted


def test_a_full_batch_gives_a_text_as_soon_as_it_ends(model: SpeculativeModel) -> None:
    """While prompts wait, a step is full but for those that ended with their first token."""
    asked = [Prompt(ids_T, seed=0, key=i) for i, ids_T in enumerate(prompts(LENGTHS * 4))]
    steps = steps_of(model, asked, Queue(Settings(24, 1.0), 4, end_tokens(model.backbone.model.generation_config)))
    rows = [len(step.written) for step in steps]
    while_waiting = rows[: max(i for i, count in enumerate(rows) if count == 4)]
    assert sum(while_waiting) > 0.9 * 4 * len(while_waiting)
    assert next(i for i, step in enumerate(steps) if step.ended) < len(steps) / 4


@pytest.mark.parametrize("batch_size", [1, 5])
def test_prompts_may_follow_from_what_has_ended(model: SpeculativeModel, batch_size: int) -> None:
    """Three turns each: a text and three tokens more are the next prompt."""
    waiting = deque(Prompt(ids_T, seed=i, key=(i, 0)) for i, ids_T in enumerate(prompts(LENGTHS)))
    found: dict[tuple[int, int], list[int]] = {}
    queue = Queue(Settings(9, 1.0), batch_size, end_tokens(model.backbone.model.generation_config))
    texts: dict[tuple[int, int], Ended] = {}
    for step in stream(model, lambda: waiting.popleft() if waiting else None, queue):
        for ended in step.ended:
            i, turn = ended.prompt.key
            texts[i, turn], found[i, turn] = ended, ended.tokens
            if turn < 2:
                waiting.appendleft(Prompt(torch.tensor([*ended.prompt.ids_T.tolist(), *ended.tokens, 20, 21, 22]), i, (i, turn + 1)))
    assert found.keys() == {(i, turn) for i in range(len(LENGTHS)) for turn in range(3)}
    for key, ended in texts.items():
        output = continue_text(model, ended.prompt.ids_T, Settings(9, 1.0), key[0])
        assert found[key] == output.sequences[0, len(ended.prompt.ids_T) :].tolist(), key


def test_left_in_the_middle_it_lets_others_decode(model: SpeculativeModel) -> None:
    for _ in stream(model, iter([Prompt(prompts((9,))[0], 0, 0), None]).__next__, Queue(Settings(24), 2)):
        break
    assert continue_text(model, prompts((9,))[0], Settings(4), 0).sequences.shape[1] > 9


@pytest.mark.parametrize("kind", ["longrope"])
def test_rows_on_two_sides_of_a_change_of_frequencies_take_turns_and_cross_it(kind: str) -> None:
    of = turning(kind)
    ids = prompts((9, TURN + 1, 28, 14, TURN + 8, 25, 10))
    steps = steps_of(of, [Prompt(ids_T, 0, i) for i, ids_T in enumerate(ids)], Queue(Settings(12), 3))
    texts = {ended.prompt.key: ended.tokens for step in steps for ended in step.ended}
    assert texts == {i: continue_text(of, ids_T, Settings(12), 0).sequences[0, len(ids_T) :].tolist() for i, ids_T in enumerate(ids)}
