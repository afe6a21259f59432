"""Data: reading and refusing files and datasets, held-out rows, batches, order, draft vocabulary, prompts."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from chat_templates import CHATML, TURNS, chat, make_samples, make_tokenizer
from errors import error_of, refuses
from small_run import make_recipe, read_log
from tiny_models import CONFIG_MAPPING, built, small

from headstart.cli.train import main
from headstart.support.errors import UserError
from headstart.training.data.batches import BatchSampler, Mix, epoch_order
from headstart.training.data.data import Sample, count_labels, hold_out, load_data, most_frequent, prompts
from headstart.training.data.rows import read_rows
from headstart.training.features.caching import write_cache
from headstart.training.recipe.recipe import Data, Eval, Train, load_recipe, to_dict, to_yaml

ROWS = [{"text": f"It is {word}."} for word in ("two", "three", "fünf", "six")]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + "\n")  # an empty line at the end is ignored
    return str(path)


def sample(tokens: list[int], learn: str = "") -> Sample:
    """``learn``: one character per token, x for a label token; empty marks all."""
    return Sample(torch.tensor(tokens), torch.tensor([mark == "x" for mark in learn or "x" * len(tokens)]))


def test_datasets_by_name_and_by_folder(tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus" / "train.jsonl", ROWS)
    datasets.disable_progress_bars()
    assert read_rows(str(tmp_path / "corpus"), split="train", limit=2) == ROWS[:2]
    with pytest.raises(UserError, match=r"no data .*corpus, split test: it is no file here, and as a dataset it gives: Unknown split"):
        read_rows(str(tmp_path / "corpus"), split="test")
    files = "configs: [{config_name: en, data_files: [{split: train_sft, path: rows.jsonl}]}]"
    (tmp_path / "someone" / "corpus").mkdir(parents=True)
    (tmp_path / "someone" / "corpus" / "README.md").write_text(f"---\n{files}\n---\n")
    write(tmp_path / "someone" / "corpus" / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert read_rows("someone/corpus", split="train_sft", subset="en") == ROWS


def test_held_out_rows_are_spread_and_never_trained_on():
    rows = [{"text": str(i)} for i in range(10)]
    (train,), (held,) = hold_out([rows], 3, "x")
    assert [row["text"] for row in held] == ["0", "3", "6"]
    assert [row for row in rows if row not in held] == train
    kept, out = hold_out([rows[:4], rows[4:]], 3, "x and y")
    assert out == [held[:2], held[2:]] and kept[0] + kept[1] == train
    refuses("data.eval_rows=9 would hold out all rows of one of x and y", hold_out, [rows[:4], rows[4:]], 9, "x and y")
    refuses("data.eval_rows=10 would hold out all 10 rows of x", hold_out, [rows], 10, "x")


def test_what_a_recipe_names(tmp_path):
    tokenizer = make_tokenizer()
    train, held = write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "held.jsonl", [{"text": "And three? Six, I think."}] * 5)

    def texts(samples: list[Sample]) -> list[str]:
        return [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]

    splits = load_data(Data(train=train, eval_rows=1, max_length=64), tokenizer, 64, progress=False)
    assert texts(splits.eval) == ["It is two."] and texts(splits.train) == ["It is three.", "It is fünf.", "It is six."]
    assert (splits.stats.rows, splits.stats.samples) == (3, 3)
    splits = load_data(Data(train=train, eval=held, eval_rows=2, limit=3, max_length=64), tokenizer, 64, progress=False)
    assert texts(splits.eval) == ["And three? Six, I think."] * 2 and len(splits.train) == 3
    splits = load_data(Data(train=train, eval_rows=0, max_length=64), tokenizer, 64, progress=False)
    assert splits.eval == [] and len(splits.train) == 4
    with pytest.raises(UserError, match="data.max_length=65 is longer than the backbone's context of 64"):
        load_data(Data(train=train, max_length=65), tokenizer, 64, progress=False)


def test_long_samples_are_cut_or_split_and_counted():
    rows = [{"text": " ".join(map(str, range(count)))} for count in (3, 40, 90)]
    tokenizer = make_tokenizer()
    whole, _ = make_samples(rows, tokenizer, Data(train="x", overlong="error"), source="x")
    lengths = [len(one.tokens) for one in whole]
    assert lengths[0] < 30 < lengths[1] < lengths[2]
    cut, stats = make_samples(rows, tokenizer, Data(train="x", max_length=30), source="x")
    lost = sum(max(length - 30, 0) for length in lengths)
    assert [len(one.tokens) for one in cut] == [min(length, 30) for length in lengths] and stats.tokens_truncated == lost > 0
    assert f"2 samples truncated ({lost:,} tokens cut off)" in str(stats)
    for data in (Data(train="x", max_length=30, overlong="split"), Data(train="x", max_length=30, packing=True)):
        pieces, stats = make_samples(rows, tokenizer, data, source="x")
        joined = torch.cat([piece.tokens for piece in pieces])
        assert joined.equal(torch.cat([one.tokens for one in whole])) and max(len(piece.tokens) for piece in pieces) <= 30
        counts = [-(-length // 30) for length in lengths]
        assert (stats.samples_split, stats.pieces, stats.samples, stats.samples_truncated) == (2, sum(counts[1:]), sum(counts), 0)
        assert f"2 samples cut into {sum(counts[1:])} pieces" in str(stats)
    skipped, stats = make_samples(rows, tokenizer, Data(train="x", max_length=30, packing=True, overlong="skip"), source="x")
    assert len(skipped) == 1 and stats.samples_too_long == 2


def test_pieces_with_nothing_to_learn_are_counted_and_prompts_are_never_pieces(tmp_path):
    talk = [{"messages": chat(("user", "word " * 60), ("assistant", "Four."))}] * 3
    tokenizer = make_tokenizer(CHATML)
    pieces, stats = make_samples(talk[:1], tokenizer, Data(train="x", max_length=20, packing=True), source="x")
    assert len(pieces) == 1 and stats.samples_empty == stats.pieces - 1 > 0 and pieces[0].loss_mask.any()
    held = write(tmp_path / "held.jsonl", [{"text": "one two three four five six seven eight nine ten"}])
    train = write(tmp_path / "train.jsonl", ROWS)
    splits = load_data(Data(train=train, eval=held, eval_rows=1, max_length=8, packing=True), tokenizer, 64, progress=False)
    assert len(splits.eval) == 1 and len(splits.eval[0].tokens) == 8


def test_the_order_depends_on_epoch_and_seed_alone():
    torch.manual_seed(0)
    first = epoch_order(50, 0, 7)
    torch.manual_seed(1)
    assert epoch_order(50, 0, 7) == first and sorted(first) == list(range(50)) != first
    assert len({tuple(epoch_order(50, epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
    assert epoch_order(6, 1, 2) == [3, 2, 1, 0, 5, 4]  # pinned: a resumed run must find the same order


def test_the_draft_vocabulary_is_the_most_frequent_learned():
    samples = [sample([9, 9, 9, 4, 4, 2, 2], "xxxxx.x"), sample([7, 7, 7], "...")]
    counts_V = count_labels(samples, 12)
    assert most_frequent(counts_V, 2).tolist() == [4, 9]
    assert most_frequent(counts_V, 3).tolist() == [2, 4, 9]
    assert most_frequent(counts_V, 5).tolist() == [0, 1, 2, 4, 9]  # filled up with the lowest ids
    assert most_frequent(counts_V, 12).tolist() == list(range(12))
    refuses("between 1 and 12 tokens, as many as the backbone's; got 13", most_frequent, counts_V, 13)
    refuses("the tokenizer gives token 9, but the backbone embeds and scores 9 alone", count_labels, samples, 9)


def test_tokens_that_the_embedding_lacks_are_named(tmp_path, capsys):
    """Marian's may have fewer tokens than the output layer, or more."""
    recipe, fields = make_recipe(tmp_path), {"vocab_size": 256, "decoder_vocab_size": 90, "tie_word_embeddings": False}
    built(small(CONFIG_MAPPING["marian"]().to_dict()) | fields).save_pretrained(tmp_path / "backbone")
    assert "token 220, but the backbone embeds and scores 90 alone" in error_of(capsys, "train", recipe)


def test_prompts():
    text, short, talk = sample(list(range(20))), sample([1, 2, 3, 4]), sample(list(range(9)), "..xx..xx.")
    settings = Eval(prompts=3, prompt_tokens=8, max_new_tokens=10)
    assert [p.tokens.tolist() for p in prompts([text, short, talk, text], settings, 100)] == [list(range(8)), [1, 2], [0, 1, 2, 3, 4, 5]]
    assert [len(p.tokens) for p in prompts([text, short, talk], settings, 16)] == [2, 6]  # eight more would not fit
    assert prompts([], settings, 100) == []
    refuses("no held-out prompt leaves eval.max_new_tokens=10 of the backbone's context of 11", prompts, [text, talk], settings, 11)


def test_a_prompt_of_a_conversation_is_what_the_template_asks_with():
    tokenizer = make_tokenizer(CHATML)
    samples, _ = make_samples([{"messages": chat(*TURNS)}], tokenizer, Data(train="x"), source="x")
    (prompt,) = prompts(samples, Eval(), 2048)
    assert prompt.tokens.tolist() == tokenizer.apply_chat_template(chat(*TURNS[:3]), add_generation_prompt=True, return_dict=False)


# Mixes of several datasets: the share of each, its passes, resumption, packing, the feature cache and what is refused.

MIX = Mix(("a", "b", "c"), (10, 3, 40), (1.0, 1.0, 2.0))


def test_each_dataset_gets_its_share_and_no_sample_comes_again_before_all_have() -> None:
    assert MIX.shares == (0.25, 0.25, 0.5) and MIX.counts == (13, 13, 26)
    epochs = [MIX.order(epoch, 7) for epoch in range(4)]
    for order in epochs:
        assert [sum(low <= index < high for index in order) for low, high in ((0, 10), (10, 13), (13, 53))] == [13, 13, 26]
    counts = Counter(itertools.chain(*epochs))
    assert {counts[index] for index in range(10)} == {5, 6} and {counts[index] for index in range(10, 13)} == {17, 18}
    assert {counts[index] for index in range(13, 53)} == {2, 3}
    early = Counter(itertools.chain(*epochs[:1]))
    assert max(early[index] for index in range(13, 53)) == 1
    assert MIX.order(2, 7) == epochs[2] != MIX.order(2, 8) and epochs[0] != epochs[1]


SAMPLES = [Sample(torch.arange(4 + index % 7), torch.ones(4 + index % 7, dtype=torch.bool)) for index in range(53)]


@pytest.mark.parametrize("mix", [None, MIX], ids=["one", "mix"])
@pytest.mark.parametrize("row_length", [None, 30])
def test_a_step_reads_the_same_whether_resumed_or_shared_by_processes(row_length: int | None, mix: Mix | None) -> None:
    train = Train(batch_size=6, steps=30)
    whole = BatchSampler(SAMPLES, train, 3, row_length=row_length, mix=mix)
    read = {step: whole.global_rows(step) for step in range(1, 31)}
    for step in reversed(read):  # a new process, at any step, knows nothing of the earlier ones
        assert BatchSampler(SAMPLES, train, 3, row_length=row_length, mix=mix).global_rows(step) == read[step]
    for step, processes in itertools.product((1, 17, 30), (2, 3)):
        parts = [BatchSampler(SAMPLES, train, 3, process, processes, row_length, mix=mix) for process in range(processes)]
        assert sorted(row for part in parts for rows in part.local_rows(step) for row in rows) == sorted(read[step])
    if mix is not None:
        shares = Counter(0 if index < 10 else 1 if index < 13 else 2 for rows in read.values() for row in rows for index in row)
        assert shares[2] / shares.total() == pytest.approx(0.5, abs=0.06) and shares[1] / shares.total() == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("row_length", [None, 30])
def test_every_epoch_has_every_sample_once(row_length: int | None) -> None:
    feed = BatchSampler(SAMPLES, Train(batch_size=4, epochs=2.0), 3, row_length=row_length)
    assert feed.steps == -(-2 * feed.rows // 4)
    rows = [row for step in range(1, feed.steps + 1) for row in feed.global_rows(step)]
    first, second = rows[: feed.rows], rows[feed.rows : 2 * feed.rows]
    for epoch in (first, second):
        assert sorted(index for row in epoch for index in row) == list(range(53))
        assert max(sum(len(SAMPLES[index].tokens) for index in row) for row in epoch) <= (row_length or 10)
    assert first != second and (row_length is None or {*map(frozenset, first)} != {*map(frozenset, second)})


def test_other_samples_labels_or_weights_are_other_data() -> None:
    unlearned = replace(SAMPLES[0], loss_mask=~SAMPLES[0].loss_mask)
    other = Mix(MIX.names, MIX.sizes, (1.0, 1.0, 3.0))
    feeds = (SAMPLES, None), (SAMPLES[1:], None), ([unlearned, *SAMPLES[1:]], None), (SAMPLES, MIX), (SAMPLES, other)
    assert len({BatchSampler(samples, Train(), 0, mix=mix).samples_hash for samples, mix in feeds}) == 5


def rows(path: Path, count: int, **more: str) -> str:
    path.write_text("".join(json.dumps({"text": f"row {i} of {path.stem}", **more}) + "\n" for i in range(count)))
    return str(path)


def test_datasets_of_different_columns_are_read_as_each_says(tmp_path: Path) -> None:
    first = rows(tmp_path / "first.jsonl", 12)
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"body": f"chat {i}"}) + "\n" for i in range(8)))
    data = Data.model_validate(
        {"train": [{"path": first, "weight": 3}, {"path": str(chats), "weight": 1, "column": "body", "format": "text", "limit": 6}],
         "eval_rows": 3, "max_length": 64}
    )  # fmt: skip
    splits = load_data(data, make_tokenizer(), 64, progress=False)
    assert splits.mix is not None and splits.mix.shares == (0.75, 0.25)
    assert sum(splits.mix.sizes) == len(splits.train) == 15 and len(splits.eval) == 3
    assert (splits.stats.rows, splits.stats.samples) == (15, 15)
    assert "75.0%" in str(splits.mix)
    twice = Data.model_validate({"train": [first, first], "eval_rows": 0, "max_length": 64})
    plain = load_data(twice, make_tokenizer(), 64, progress=False)
    assert plain.mix is None and len(plain.train) == 24


def test_a_mix_is_written_as_it_was_given(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    mix = "data.train=[{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 2, limit: 3}]"
    plain, mixed = load_recipe(recipe), load_recipe(recipe, [mix])
    assert isinstance(to_dict(plain)["data"]["train"], str)
    assert to_dict(mixed)["data"]["train"] == [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 2.0, "limit": 3}]
    (tmp_path / "again.yaml").write_text(to_yaml(mixed))
    assert load_recipe(tmp_path / "again.yaml") == mixed


def test_a_mix_trains_and_reads_its_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(make_recipe(tmp_path))
    other = rows(tmp_path / "other.jsonl", 9)
    mix = f"data.train=[{{path: {tmp_path / 'text.jsonl'}, weight: 1}}, {{path: {other}, weight: 2}}]"
    assert main([recipe, mix, "train.steps=6"]) == 0
    assert "mix       " in capsys.readouterr().err
    losses = [line["loss"] for line in read_log(tmp_path / "out") if "loss" in line]
    cached = [mix, f"cache.dir={tmp_path / 'features'}", "cache.dtype=exact", f"save.dir={tmp_path / 'cached'}"]
    write_cache(load_recipe(recipe, cached), False)
    assert main([recipe, *cached, "train.steps=6"]) == 0
    assert [line["loss"] for line in read_log(tmp_path / "cached") if "loss" in line] == pytest.approx(losses, rel=1e-4)
