"""Mixes of several datasets: the share of each, its passes, resumption, packing, the feature cache and what is refused."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from small_run import make_recipe, read_log
from test_data import make_tokenizer

from headstart.cli.train import main
from headstart.support.errors import UserError
from headstart.training.data.batches import BatchSampler, Mix
from headstart.training.data.data import Sample, load_data
from headstart.training.features.caching import write_cache
from headstart.training.recipe.recipe import Data, Train, load_recipe, to_dict, to_yaml
from headstart.training.regenerate.regenerate import write_answers

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


@pytest.mark.parametrize("row_length", [None, 30])
def test_a_step_reads_the_same_whether_resumed_or_shared_by_processes(row_length: int | None) -> None:
    samples = [Sample(torch.arange(4 + index % 7), torch.ones(4 + index % 7, dtype=torch.bool)) for index in range(53)]
    train = Train(batch_size=6, steps=30)
    steps = list(range(1, 31))
    whole = BatchSampler(samples, train, 3, row_length=row_length, mix=MIX)
    read = {step: whole.global_rows(step) for step in steps}
    for step in reversed(steps):  # a new process, at any step, knows nothing of the earlier ones
        assert BatchSampler(samples, train, 3, row_length=row_length, mix=MIX).global_rows(step) == read[step]
    halves = [BatchSampler(samples, train, 3, process, 2, row_length, mix=MIX) for process in (0, 1)]
    for step in (1, 17, 30):
        assert sorted(row for half in halves for rows in half.local_rows(step) for row in rows) == sorted(read[step])
    shares = Counter(0 if index < 10 else 1 if index < 13 else 2 for rows in read.values() for row in rows for index in row)
    assert shares[2] / shares.total() == pytest.approx(0.5, abs=0.06) and shares[1] / shares.total() == pytest.approx(0.25, abs=0.06)


def test_other_weights_are_other_data() -> None:
    samples = [Sample(torch.arange(5), torch.ones(5, dtype=torch.bool))] * 53
    plain, mixed, other = (
        BatchSampler(samples, Train(), 0, mix=mix).samples_hash for mix in (None, MIX, Mix(MIX.names, MIX.sizes, (1.0, 1.0, 3.0)))
    )
    assert len({plain, mixed, other}) == 3


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


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("[]", "data.train is a file or the name of a dataset, or a list"),
        ("3", "data.train is a file or the name of a dataset, or a list"),
        ("''", "data.train is a file or the name of a dataset, or a list"),
        ("[{path: a.jsonl, weigth: 1}]", "unknown key data.train[0].weigth; did you mean data.train[0].weight?"),
        ("[{weight: 1}]", "missing key data.train[0].path"),
        ("[{path: a.jsonl, weight: 0}]", "data.train[0].weight is a number above 0, or null; got 0"),
        ("[{path: a.jsonl, weight: 1}, b.jsonl]", "data.train[1].weight is a number above 0, as other entries"),
        ("[3]", "data.train[0]"),
    ],
)
def test_a_mistake_in_a_mix_is_named(tmp_path: Path, train: str, message: str) -> None:
    recipe = make_recipe(tmp_path)
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, [f"data.train={train}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_mix_is_written_as_it_was_given(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    mix = "data.train=[{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 2, limit: 3}]"
    plain, mixed = load_recipe(recipe), load_recipe(recipe, [mix])
    assert isinstance(to_dict(plain)["data"]["train"], str)
    assert to_dict(mixed)["data"]["train"] == [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 2.0, "limit": 3}]
    (tmp_path / "again.yaml").write_text(to_yaml(mixed))
    assert load_recipe(tmp_path / "again.yaml") == mixed


@pytest.mark.usefixtures("on_the_cpu")
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


def test_regenerating_a_mix_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(tmp_path), ["data.train=[a.jsonl, b.jsonl]", f"regenerate.out={tmp_path / 'answers.jsonl'}"])
    with pytest.raises(UserError, match=r"data.train mixes 2 datasets.*one at a time"):
        write_answers(recipe)
