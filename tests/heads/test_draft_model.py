"""Drafters without training, a smaller model and the backbone's first layers: lossless, and fully accepted where they are right.

Shape suffixes: B batch, T positions, N tree nodes, V vocabulary.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import refuses
from families import FAMILIES, LAYERS, VOCAB, backbone, build, left_padded, prompts, random_drafter, say, texts, tiny, unpadded
from test_cache import audited
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from headstart import Backbone, Drafter, SpeculativeModel, TreeShape
from headstart.heads.backbone.features import Features, join_features
from headstart.heads.draft_model import DraftModel, load_draft_model
from headstart.heads.methods import build_drafter
from headstart.inference.early_exit import EarlyExit
from headstart.inference.engine.suffix import SuffixProposer
from headstart.support.errors import UserError

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
each_family = pytest.mark.parametrize("family", FAMILIES)
greedy_and_sampled = pytest.mark.parametrize("sample", [False, True])


@cache
def near(family: str) -> PreTrainedModel:
    """A perturbed copy of the backbone that often agrees with it."""
    model = copy.deepcopy(backbone(family).model)
    make = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        weight.data += 0.03 * weight.std() * torch.randn(weight.shape, generator=make)
    return model


def drafters(family: str) -> list[Drafter]:
    on = backbone(family)
    return [DraftModel.of(on, near(family), depth=3), EarlyExit(on, layers=LAYERS - 1, depth=3)]


@pytest.mark.matrix(cells=1)
@each_family
@greedy_and_sampled
def test_they_change_no_token(family: str, sample: bool) -> None:
    """Alone and with other sources; one row past the first 64 slots; five ragged rows that end at different times, two at once or all."""
    on, row, rows = backbone(family), left_padded(prompts((59,))), left_padded(prompts())
    options: dict[str, Any] = {"do_sample": sample, "seed": 3, "max_new_tokens": 20, "return_dict_in_generate": True}
    ending = options | {"eos_token_id": [4, 5, 15, 20]}
    alone, truth = say(SpeculativeModel(on), row, **options).sequences, say(SpeculativeModel(on), rows, **ending).sequences
    model, early = drafters(family)
    for proposers in ([model], [early], [model, early, random_drafter("eagle3", on), SuffixProposer()]):
        of = SpeculativeModel(on, proposers=proposers, capture="off")
        out = say(of, row, tree=TreeShape(14, 4), **options)
        assert torch.equal(out.sequences, alone) and out.tau > 1.2
        others = [(TreeShape(5, 1), None), ("auto", 2)] if len(proposers) > 1 else []
        for tree, batch in [(TreeShape(14, 4), 2), *others]:
            assert torch.equal(say(of, rows, tree=tree, batch_size=batch, **ending).sequences, truth), (tree, batch)


@pytest.mark.matrix(cells=1)
@each_family
@greedy_and_sampled
def test_the_backbone_itself_is_always_right(family: str, sample: bool) -> None:
    """Chains of its drafts are accepted whole, and its trees are the same whichever cache it drafts on."""
    on, rows = backbone(family), left_padded(prompts((59, 3, 20)))
    model, early = DraftModel.of(on, on.model, depth=4), EarlyExit(on, layers=LAYERS)
    options: dict[str, Any] = {"do_sample": sample, "seed": 8, "top_k": 0, "max_new_tokens": 26, "return_dict_in_generate": True}
    truth = say(SpeculativeModel(on), rows, **options).sequences
    counts = []
    for drafter in (model, early):
        of = SpeculativeModel(on, proposers=[drafter], capture="off")
        for batch in (None, 2):
            out = say(of, rows, tree=TreeShape(5, 1), batch_size=batch, **options)
            assert torch.equal(out.sequences, truth) and out.accept_lengths == [[5] * 5] * 3, (type(drafter), batch)
        counts.append(say(of, rows, tree=TreeShape(24, 6), **options).accept_lengths)
    assert counts[0] == counts[1]


def news(all_BT: Tensor, starts: list[int], counts: list[int]) -> Features:
    """The next tokens of each row, right-padded."""
    there_BT = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    places_BT = (torch.tensor(starts)[:, None] + torch.arange(max(counts))).clamp(max=all_BT.shape[1] - 1)
    hidden_BTD = torch.zeros(*places_BT.shape, 1)
    return Features(all_BT.gather(1, places_BT).where(there_BT, 7), hidden_BTD, document_BT=torch.where(there_BT, 0, -1))


def said_after(model: PreTrainedModel, text_T: Tensor) -> Tensor:
    return model(text_T[None]).logits[0, -1]


@each_family
def test_a_tree_is_its_paths_behind_ragged_rows_read_in_pieces(family: str) -> None:
    """Deeper than the sliding window; some rows add no token; one row leaves and one joins."""
    drafter, all_BT, N = DraftModel.of(backbone(family), near(family), depth=7), texts(4, 90, seed=4), 4
    state = drafter.begin(news(all_BT, [0] * 3, [60, 9, 1]))
    state = drafter.begin(news(all_BT, [60, 9, 1], [4, 0, 2]), drafter.reserve(state, 70))
    state = drafter.begin(news(all_BT, [64, 9, 3], [1, 5, 0]), drafter.reserve(state, 70))
    state = drafter.select(state, torch.tensor([2, 0]))
    state = drafter.join(state, drafter.begin(news(all_BT[3:], [0], [12])))
    state = drafter.begin(news(all_BT[[2, 0, 3]], [3, 65, 12], [2, 0, 3]), drafter.reserve(state, 70))
    past = [all_BT[2, :5], all_BT[0, :65], all_BT[3, :15]]
    state, make = drafter.reserve(state, 65 + 1 + 7 * N), torch.Generator().manual_seed(3)
    tokens_BN, parents_BN = texts(3, 1, seed=8), torch.zeros(3, 1, dtype=torch.int64)
    paths = [[torch.cat([text, root])] for text, root in zip(past, tokens_BN, strict=True)]
    for k in range(7):
        hidden_BND, state = drafter.step(state, tokens_BN, parents_BN, k)
        logits_BNV = drafter.readout(hidden_BND, k)
        for b, row in enumerate(paths):
            for n, path in enumerate(row):
                torch.testing.assert_close(logits_BNV[b, n], said_after(near(family), path), **CLOSE)
        parents_BN = torch.randint(tokens_BN.shape[1], (3, N), generator=make)
        tokens_BN = torch.randint(VOCAB, (3, N), generator=make)
        paths = [[torch.cat([paths[b][int(parents_BN[b, n])], tokens_BN[b, n, None]]) for n in range(N)] for b in range(3)]


def test_a_paused_draft_model_reads_all_it_missed() -> None:
    """Rows that accepted alternately: padding reaches far past the slots."""
    on, all_BT, ends = backbone("llama"), texts(2, 220), [10, 10]
    drafter = DraftModel.of(on, on.model)
    state, missed = drafter.begin(news(all_BT, [0, 0], ends)), []
    for i in range(66):
        counts = [5, 1] if i % 2 else [1, 5]
        missed.append(news(all_BT, ends, counts))
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
    state = drafter.begin(join_features(missed), drafter.reserve(state, ends[0] + 20))
    hidden_B1D, _ = drafter.step(state, texts(2, 1, seed=5), torch.zeros(2, 1, dtype=torch.int64), 0)
    for b, root in enumerate(texts(2, 1, seed=5)):
        text_T = torch.cat([all_BT[b, : ends[b]], root])
        torch.testing.assert_close(drafter.readout(hidden_B1D, 0)[b, 0], said_after(on.model, text_T), **CLOSE)


def test_a_long_text_may_join_right_after_one_that_ended_at_once() -> None:
    on, rows = backbone("llama"), left_padded(prompts((9, 5, 3, 125), seed=3))
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "seed": [2, 1002, 2002, 3002]}
    first = say(SpeculativeModel(on), rows, **options)[:, -12:]
    options["eos_token_id"] = [int(first[2, 0]), int(first[1, 2])]
    truth = say(SpeculativeModel(on), rows, **options)
    lengths = [text.index(0) if 0 in text else 12 for text in truth[:, -12:].tolist()]
    assert lengths == [12, 3, 1, 12], "the third text ends with its first token"
    for drafter in (random_drafter("eagle3", on), *drafters("llama")):
        assert torch.equal(say(SpeculativeModel(on, proposers=[drafter]), rows, batch_size=2, tree=TreeShape(24, 4), **options), truth)


@each_family
def test_early_exit_leaves_the_model_and_its_cache_as_they_are(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on, rows = backbone(family), left_padded(prompts())
    before = on.model(texts(1, 9)).logits
    of = SpeculativeModel(on, proposers=[EarlyExit(on, layers=2)])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "seed": 7}
    wrote = audited(of, monkeypatch, 4, **rows, tree=TreeShape(20, 6), **options)
    assert unpadded(torch.tensor(wrote), rows) == unpadded(say(SpeculativeModel(on), rows, **options), rows)
    assert len(on.layers) == LAYERS and torch.equal(on.model(texts(1, 9)).logits, before)
    assert not list(of.drafters[0].parameters())


def test_a_draft_model_may_know_fewer_positions() -> None:
    on, rows = backbone("llama"), left_padded(prompts((30, 3)))
    small = tiny("gpt2", n_positions=24, n_layer=2)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    out = say(SpeculativeModel(on, proposers=[DraftModel.of(on, small)]), rows, tree=TreeShape(12, 3), **options)
    assert torch.equal(out, say(SpeculativeModel(on), rows, **options))


def words(*changed: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one word per id; the changed ids have other words."""
    vocabulary = {f"{'other' if i in changed else 'word'}{i}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="word0")))


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("size", [VOCAB - 9, VOCAB + 7])
def test_sizes_may_differ_where_tokenizers_show_that_it_is_padding(size: int) -> None:
    on, rows = backbone("qwen3"), left_padded(prompts())
    small = tiny("llama", vocab_size=size)
    refuses(f"vocabulary of {size} and backbone .* of {VOCAB}.*padded", DraftModel.of, on, small)
    drafter = DraftModel.of(on, small, tokenizers=(words(), words()))
    for sample in (False, True):
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": sample, "seed": 1}
        out = say(SpeculativeModel(on, proposers=[drafter]), rows, tree=TreeShape(12, 3), **options)
        assert torch.equal(out, say(SpeculativeModel(on), rows, **options))


def test_a_draft_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    on, folder = backbone("llama"), tmp_path / "small"
    near("llama").save_pretrained(folder)
    words(5, 8).save_pretrained(folder)
    row, options = left_padded(prompts((9,))), {"max_new_tokens": 12, "do_sample": False, "tree": TreeShape(12, 3)}
    loaded = load_draft_model(str(folder), on, depth=3)
    assert loaded.depth == 3 and say(SpeculativeModel(on, proposers=[loaded]), row, return_dict_in_generate=True, **options).tau > 1.2
    assert load_draft_model(str(folder), on, tokenizer=words(5, 8)).small.name == str(folder)
    with pytest.raises(UserError, match=r"token 5 is 'other5' to draft model .*small and 'word5' to backbone .*\(2 tokens differ\)"):
        load_draft_model(str(folder), on, tokenizer=words())
    refuses("draft model: no backbone at .*nowhere", load_draft_model, str(tmp_path / "nowhere"), on)


@pytest.mark.parametrize("layers", [0, -1, LAYERS + 1, "2", True])
def test_early_exit_refuses_layers_that_are_not_there(layers: Any) -> None:
    refuses(f"early exit.layers .*; got {layers!r}", EarlyExit, backbone("gpt2"), layers=layers)


def test_what_is_not_trained_is_neither_taught_nor_saved(tmp_path: Path) -> None:
    drafter = EarlyExit(backbone("llama"), layers=2)
    for wrong in (lambda: drafter(None), lambda: drafter.use_vocabulary(None), lambda: drafter.save_pretrained(tmp_path / "x")):
        refuses("EarlyExit drafts", wrong)
    assert not (tmp_path / "x").exists(), "nothing half-written"
    with pytest.raises(TypeError, match="abstract"):
        Drafter(backbone("llama"))  # type: ignore[abstract]


def test_what_does_not_work_is_refused() -> None:
    on, wrapped = backbone("llama"), tiny("llama")
    wrapped.base_model.forward = wrapped.base_model.forward  # bound to the whole model, as libraries that place layers on devices do
    refuses("LlamaForCausalLM does not run with its first 2 layers alone", EarlyExit, Backbone(wrapped), layers=2)
    for make in (lambda: DraftModel.of(on, near("llama"), depth=0), lambda: EarlyExit(on, layers=2, depth=0)):
        refuses("depth is a whole number of at least 1; got 0", make)
    elsewhere = copy.copy(backbone("gpt2"))
    elsewhere.embed = torch.nn.Embedding(VOCAB, 2, device="meta")
    refuses("is on meta and backbone .* on cpu; move one", DraftModel.of, on, elsewhere)
    hybrid: Any = copy.copy(on)
    hybrid.recurrent = "layers"
    refuses("draft model .* has recurrent layers", DraftModel.of, on, hybrid)
    refuses("has recurrent layers.*without early exit", EarlyExit, hybrid, layers=2)


def test_layers_may_lie_deeper_in_the_model() -> None:
    model = build("OPT", {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "word_embed_proj_dim": 32})
    on, row = Backbone(model), left_padded(prompts((9,)))
    heads = SpeculativeModel(on, proposers=[EarlyExit(on, layers=4)])
    out = say(heads, row, tree=TreeShape(5, 1), max_new_tokens=21, return_dict_in_generate=True)
    assert out.tau == 5 and len(on.layers) == 4


def test_a_decoder_whose_layers_are_counted_otherwise_is_not_pruned() -> None:
    sizes = {"d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    on = Backbone(build("Bart", sizes | {"is_decoder": True, "is_encoder_decoder": False}), trees=False)
    with pytest.raises(UserError, match="BartForCausalLM cannot be pruned: weight .* has no counterpart of its shape; give a smaller"):
        build_drafter("draft_model", on, {"layers": 2})
