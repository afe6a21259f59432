"""A queue of prompts decoded in a full batch gives each prompt's own text, and hands it out when it ends."""

from collections import deque

import pytest
import torch
from families import build, prompts, random_drafter
from test_rotary import TURN
from test_rotary import heads as turning

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, continue_text
from headstart.inference.proposers.suffix import SuffixProposer
from headstart.inference.steps import Tally
from headstart.inference.stream import Ended, Progress, Prompt, Queue, stream

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
