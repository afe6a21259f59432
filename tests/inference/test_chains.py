"""Models whose states cannot branch along a tree: chains, read again in front of the next draft where they were not accepted."""

import functools
from typing import Any

import pytest
import torch
from architectures import CHAINS, of_transformers
from families import Scripted, left_padded, prompts, say, tiny, unpadded
from torch import Tensor

from headstart import Backbone, SpeculativeModel
from headstart.heads.backbone.chain_cache import MOST_PENDING, ChainRow, copied, mixers_of
from headstart.heads.backbone.probes import layer_kinds
from headstart.inference.capture.capture import Capturer
from headstart.inference.early_exit import EarlyExit
from headstart.inference.engine.judge import Judge, Text
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.reader import ChainReader
from headstart.inference.engine.tree import CandidateTree, Pool, TreeShape, chain
from headstart.inference.policy import Policy
from headstart.support.errors import UserError

pytestmark = pytest.mark.usefixtures("on_the_cpu")
MODELS = ("LFM2", "Mamba-2", "BLOOM", "RWKV")
"""A window of the last tokens beside attention, states alone, keys and values alone, which are cut, and states outside of a cache."""
LENGTH = 24


@functools.cache
def backbone(name: str) -> Backbone:
    return Backbone(of_transformers({name: CHAINS[name]})[0].model())


def alone(on: Backbone, row: Tensor, **options: Any) -> list[int]:
    return on.model.generate(row[None], max_new_tokens=LENGTH, **{"do_sample": False} | options)[0].tolist()


def passes(on: Backbone) -> tuple[list[int], Any]:
    """The numbers of tokens of the passes from here on; and the handle of the hook that counts them."""
    found: list[int] = []
    return found, on.base.register_forward_pre_hook(lambda module, args, given: found.append(given["input_ids"].shape[1]), with_kwargs=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_that_of_transformers_in_fewer_passes(name: str) -> None:
    """With heads that are right at seven of ten positions; in rows of different lengths, in fixed shapes and adaptive."""
    on, rows = backbone(name), prompts((9, 1, 14))
    truths = [alone(on, row) for row in rows]
    heads = SpeculativeModel(on, Scripted(on, truths, "nearly"), capture="off")
    for tree in (TreeShape(6, 4), "auto"):
        out = say(heads, left_padded(rows), tree=tree, max_new_tokens=LENGTH, do_sample=False, return_dict_in_generate=True)
        assert unpadded(out.sequences, left_padded(rows)) == truths
        # Adaptive trees rest where passes of several tokens cost much more, as on a CPU without kernels.
        assert tree == "auto" or out.tau > 1.3
    assert say(heads, {"input_ids": rows[0][None]}, max_new_tokens=LENGTH, do_sample=False, speculate=False)[0].tolist() == truths[0]


def test_what_was_accepted_in_part_is_read_again_up_to_a_limit() -> None:
    """Tokens pend, at most `MOST_PENDING`, where there are states; keys and values are cut at once. Logits are those of one pass."""
    text = [*range(1, 40)]
    for name, pending in (("LFM2", True), ("BLOOM", False)):
        on = backbone(name)
        reader = ChainReader(on, (), Capturer("off", on.device))
        whole = on.readout(on.read(torch.tensor([text])).hidden_BTD)[0]
        _, cache = reader.prompts(torch.tensor([text[:8]]), torch.tensor([8]))
        counts, handle = passes(on)
        for at in range(8, 20, 2):  # two of four are accepted
            _, logits, _ = reader.tree(cache, chain([*text[at : at + 2], 59, 58]))
            torch.testing.assert_close(logits[0, :2], whole[at : at + 2], atol=1e-4, rtol=1e-4)
            cache.keep([[0, 1]])
            assert cache.longest == at + 2
        handle.remove()
        assert counts == ([4, 6, 8, 10, 12, 10, 4] if pending else [4] * 6)
        assert max(counts) <= MOST_PENDING + 4 or not pending


def test_an_accepted_chain_needs_no_copy_and_no_second_reading() -> None:
    on = backbone("LFM2")
    reader = ChainReader(on, (), Capturer("off", on.device))
    _, cache = reader.prompts(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    [row] = cache.rows
    assert isinstance(row, ChainRow)
    reader.tree(cache, chain([8, 9, 10]))
    before = row.cache
    cache.keep([[0, 1, 2]])
    assert row.cache is before and not row.pending and row.length == 6


def test_of_branching_drafts_the_best_path_is_verified() -> None:
    """The path on which most tokens are expected, not the one that begins with the likeliest token."""
    pool = Pool(1)
    likely = pool.add("a", 0, 2, -0.5, 0.5)
    other = pool.add("a", 0, 3, -0.7, 0.45)
    deep = pool.add("a", other, 4, -0.1, 0.9)
    deeper = pool.add("a", deep, 5, -0.1, 0.9)
    assert [node for _, node in pool.best_path()] == [other, deep, deeper] and likely not in {node for _, node in pool.best_path()}
    assert Pool(1).best_path() == []
    assert [node for _, node in Policy(chains=True)._ranked(pool)] == [other, deep, deeper]
    assert CandidateTree.of([pool], [[0, other, deep]]).parents == [[0, 0, 1]]


def test_the_judge_reads_such_texts() -> None:
    on, row = backbone("LFM2"), prompts((9,))[0]
    text = torch.tensor(alone(on, row))
    judge = Judge(on)
    assert not judge.judge(Text(text, LENGTH, None, Processing([], 1))).shortfalls
    judge.rounding.measure(text, len(row))
    assert 0 < judge.rounding.size < 1e-3
    text[-3] = (text[-3] + 1) % 60
    assert judge.judge(Text(text, LENGTH, None, Processing([], 1))).faults(judge.rounding.tolerance)


def test_what_needs_trees_is_refused_in_one_line() -> None:
    on, row = backbone("LFM2"), {"input_ids": prompts((9,))[0][None]}
    with pytest.raises(UserError, match="beams share passes, where Lfm2ForCausalLM has layers of kind 'conv'.*num_beams=1"):
        say(SpeculativeModel(on, capture="off"), row, max_new_tokens=4, num_beams=2)
    with pytest.raises(UserError, match="EarlyExit drafts in the model's KV cache; Lfm2ForCausalLM.*leave it out"):
        SpeculativeModel(on, proposers=[EarlyExit(on, layers=2)])
    (flex := tiny("shallow")).set_attn_implementation("flex_attention")  # whose kernel for CPUs overwrites memory under a tree's mask
    assert "does not follow a 4-D attention mask" in str(layer_kinds(flex, flex.model.layers)[2])


def test_single_tokens_that_are_computed_otherwise_are_found() -> None:
    model = of_transformers({"BLOOM": CHAINS["BLOOM"]})[0].model()
    model.transformer.h[0].mlp.register_forward_hook(lambda module, args, out: out * 1.01 if out.shape[1] == 1 else out)
    with pytest.raises(UserError, match="BloomForCausalLM does not follow .*, and a pass of one token computes otherwise"):
        Backbone(model)


def test_the_smallest_time_step_of_passes_of_several_tokens_does_not_count() -> None:
    """Nemotron-H has one there, and not in passes of one token, by which transformers decodes."""
    on, tokens = backbone("Nemotron-H"), torch.arange(1, 25)[None]
    mixers = mixers_of(on.model)
    assert mixers and all(mixer.time_step_limit[0] > 0 and mixer.chunk_size > 4 for mixer in mixers)
    kept = [(mixer.time_step_limit, mixer.chunk_size) for mixer in mixers]
    reader = ChainReader(on, (), Capturer("off", on.device))
    with on.evaluation():
        _, cache = reader.prompts(tokens[:, :20], torch.tensor([20]))
        one = copied(cache.rows[0].cache)
        singly = torch.cat([on.read(tokens[:, at : at + 1], one, torch.tensor([[at]])).hidden_BTD for at in range(20, 24)], 1)
        together = reader.tree(cache, chain(tokens[0, 20:].tolist()))[0].hidden_BTD
    torch.testing.assert_close(singly, together, atol=1e-4, rtol=1e-4)
    assert kept == [(mixer.time_step_limit, mixer.chunk_size) for mixer in mixers]
