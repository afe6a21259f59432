"""A feature cache: written by several processes or after a kill, refused if of another run, trained from without the backbone."""

import json
import os
import re
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from errors import error_of, report_of
from safetensors.torch import load_file, save_file
from small_run import Forked, make_recipe, read_log
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaModel

from headstart.cli.main import main
from headstart.cli.train import main as train
from headstart.training.data.data import Sample
from headstart.training.features import caching
from headstart.training.features.cached import FeaturesBetweenEpochs, keep_between_epochs
from headstart.training.features.codec import CacheFormat
from headstart.training.features.manifest import plan_shards, read_manifest
from headstart.training.features.source import LiveFeatures
from headstart.training.loop import train as go_on
from headstart.training.recipe.recipe import load_recipe
from headstart.training.setup import prepare

EAGLE = {"kind": "eagle3", "depth": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and, in ``cache``, the features of its samples in several shards."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = make_recipe(folder, 6, drafter=EAGLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caching, "plan_shards", lambda samples, form, shard_mb: tuple((i, min(i + 5, 36)) for i in range(0, 36, 5)))
        assert main(["cache", str(recipe), f"cache.dir={folder / 'cache'}"]) == 0
    assert len(shards(folder / "cache")) == 8
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def options(folder: Path, *more: str) -> list[str]:
    return [str(folder / "recipe.yaml"), f"cache.dir={folder / 'cache'}", *more]


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    text = (whole / "recipe.yaml").read_text().replace(str(whole), str(tmp_path / "copy"))
    (tmp_path / "copy" / "recipe.yaml").write_text(text)
    return tmp_path / "copy"


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", [EAGLE, {"kind": "medusa", "depth": 2}], ids=lambda drafter: drafter["kind"])
@pytest.mark.parametrize("packing", ["false", "true"])
def test_trained_from_a_cache_the_losses_are_the_live_ones(whole: Path, tmp_path: Path, drafter: dict[str, Any], packing: str) -> None:
    """Equal within the error of int8, and training never runs the backbone. A cache serves any heads whose taps it holds."""
    same = [f"drafter={json.dumps(drafter)}", f"data.packing={packing}", "eval.prompts=1"]
    assert train([str(whole / "recipe.yaml"), f"save.dir={tmp_path}/live", *same]) == 0
    run = prepare(load_recipe(whole / "recipe.yaml", [*same, f"cache.dir={whole / 'cache'}", f"save.dir={tmp_path}/kept"]))
    assert not run.backbone.whole
    run.prompts = []
    assert go_on(run) == 0
    run.log.close()
    live, kept = ([line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("live", "kept"))
    assert kept == pytest.approx(live, rel=2e-3) and kept != live


def test_shards_have_about_the_size_asked_for() -> None:
    samples = [Sample(torch.zeros(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool)) for n in (300, 200, 700, 50, 900, 100)]
    form = CacheFormat((1, 2), 1024, torch.float32, "bf16")  # 6 KB per token
    assert plan_shards(samples, form, 3) == ((0, 3), (3, 5), (5, 6))
    assert plan_shards(samples, form, 1000) == ((0, 6),)


def test_a_manifest_tells_what_it_is(whole: Path) -> None:
    content = json.loads((whole / "cache" / "manifest.json").read_text())["contents"]
    assert content["features"]["backbone hidden_size"] == 16 and len(content["features"]["backbone weights"]) == 64
    assert content["features"]["taps"] == [1, 3, 5] and content["features"]["cache.dtype"] == "int8"
    assert content["samples"]["count"] == 36 and content["data"]["data.max_length"] == 64 and "tokenizer" in content["data"]
    assert not list((whole / "cache").glob(".*"))  # neither locks nor partial files
    manifest = read_manifest(whole / "cache")
    assert manifest is not None and caching.measured_errors(manifest)["hidden"] < 0.01


@pytest.mark.parametrize(("change", "message"), [
    ("drafter.taps=[1, 4]", "taps: found [1, 3, 5], expected [1, 4]"),
    ("cache.dtype=bf16", "cache.dtype: found 'int8', expected 'bf16'"),
    ("backbone.dtype=bf16", "backbone.dtype: found 'fp32', expected 'bf16'"),
    ("data.max_length=20", "data.max_length: found 64, expected 20"),
    ("data.eval_rows=5", "data.eval_rows: found 4, expected 5"),
    ("cache.dir=nowhere", "no features in nowhere: found no manifest.json; run headstart cache with this recipe"),
])  # fmt: skip
def test_another_cache_is_refused_by_what_differs(whole: Path, tmp_path: Path, capsys: Any, change: str, message: str) -> None:
    assert message in error_of(capsys, "train", *options(whole), f"save.dir={tmp_path}/out", change)
    if "dir" not in change:
        assert message in error_of(capsys, "cache", *options(whole), change)  # it is not overwritten either


def test_other_weights_and_other_rows_are_refused(tmp_path: Path, capsys: Any) -> None:
    make_recipe(tmp_path, 6, drafter=EAGLE)
    assert main(["cache", *options(tmp_path)]) == 0
    rows = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "text.jsonl").write_text("".join(rows[:7] + ['{"text": "a sun finds so"}\n'] + rows[8:]))
    assert "the rows of data.train: found {'count': 36" in error_of(capsys, "train", *options(tmp_path))
    (tmp_path / "text.jsonl").write_text("".join(rows))
    weights = load_file(tmp_path / "backbone" / "model.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in weights.items()}, tmp_path / "backbone" / "model.safetensors", {"format": "pt"})
    error = error_of(capsys, "train", *options(tmp_path))
    assert re.search(r"backbone weights: found (-?[\d.]+), expected (-?[\d.]+); restore that", error)


def test_half_a_cache_and_shards_of_others_are_refused_by_name(copy: Path, capsys: Any) -> None:
    cache = copy / "cache"
    third, total = shards(cache)[2], len(shards(cache))
    content = third.read_bytes()
    third.unlink()
    error = error_of(capsys, "train", *options(copy))
    assert f"found {total - 1} shards, expected {total} (missing: {third.name}); run headstart cache" in error
    save_file(load_file(shards(cache)[0]), third, metadata={"cache": "0123"})
    error = error_of(capsys, "train", *options(copy))
    assert f"{third.name} in {cache} is a shard of another cache: found 0123, expected " in error
    third.write_bytes(content[:-40])
    assert f"{third} is damaged" in error_of(capsys, "train", *options(copy))
    third.write_bytes(content)
    (cache / "manifest.json").write_text((cache / "manifest.json").read_text().replace('"cache.dtype": "int8"', '"cache.dtype": "bf16"'))
    assert "manifest.json is damaged (ValueError: its id does not match its contents)" in error_of(capsys, "train", *options(copy))
    (cache / "manifest.json").unlink()
    assert "holds shards but no manifest.json" in error_of(capsys, "cache", *options(copy))


def test_a_killed_writer_goes_on_and_two_share_the_work(copy: Path, whole: Path) -> None:
    """One is killed while writing a shard that it had locked; two finish the rest, and each shard is written once."""
    cache = copy / "cache"
    names = [path.name for path in shards(cache)]
    for path in shards(cache)[1:]:
        path.unlink()
    rename, count = os.replace, iter(range(9))

    def dying(command: list[str]) -> int:
        def replace(here: Path, there: Path) -> None:
            if there.suffix == ".safetensors" and next(count) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(here, there)

        os.replace = replace  # type: ignore[assignment]
        return main(command)

    def start(target: Callable[..., int], *more: str) -> Any:
        process = get_context("fork").Process(target=target, args=[["cache", *options(copy), *more]])
        process.start()
        return process

    killed = start(dying)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert [path.name for path in shards(cache)] == names[:3] and list(cache.glob(".shard-00003*.tmp"))
    reports = [copy / f"{i}.json" for i in range(2)]
    started = [start(main, "--json", str(report)) for report in reports]
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 0]
    written = [json.loads(report.read_text())["shards_written"] for report in reports]
    assert sum(written) == len(names) - 3
    for mine, expected in zip(shards(cache), shards(whole / "cache"), strict=True):
        one, other = load_file(mine), load_file(expected)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    recipe, usage = make_recipe(tmp_path, 6), namedtuple("usage", "total used free")
    command = ["cache", str(recipe), f"cache.dir={tmp_path}/new"]
    size = report_of(tmp_path, *command, "--estimate")
    assert f"{size['bytes'] / 1e6:.1f} MB, {size['bytes_per_token']:.0f} bytes per token, in 1 shards" in capsys.readouterr().err
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda path: usage(9, 9, caching.SPARE_BYTES + size["bytes"] - 1))
    assert "new needs 0.0 MB and the disk has 67.1 MB free; make room" in error_of(capsys, *command) and not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert main(command) == 0
    assert size["bytes"] <= shards(tmp_path / "new")[0].stat().st_size <= size["bytes"] + 2000
    assert "cache.dir is not set" in error_of(capsys, *command, "cache.dir=null")


EPOCHS = ["train.steps=null", "train.epochs=3"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    drafter = {"kind": "eagle3", "depth": 2, "draft_vocab_size": 40}
    return str(make_recipe(tmp_path, drafter=drafter, data={"eval_rows": 0}, save={"every": 4}))


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """The rows of each forward pass of the backbone."""
    rows = list[int]()

    def count(module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(module, LlamaModel):
            rows.append(len(output[0]))

    handle = register_module_forward_hook(count, with_kwargs=True)
    yield rows
    handle.remove()


def test_the_backbone_reads_each_sample_once(recipe: str, tmp_path: Path, passes: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    read, losses = {}, {}
    for name, extra in {"kept": [], "live": ["cache.between_epochs=false"]}.items():
        passes.clear()
        assert train([recipe, *EPOCHS, f"save.dir={tmp_path / name}", *extra]) == 0
        read[name], losses[name] = sum(passes), [line["loss"] for line in read_log(tmp_path / name) if "loss" in line]
        assert ("of the first epoch are kept for the next ones" in capsys.readouterr().err) == (name != "live")
        assert not list((tmp_path / name).rglob("features"))
    assert len(losses["live"]) == 30 and read["kept"] == read["live"] - 2 * 40
    assert losses["kept"] == pytest.approx(losses["live"], rel=1e-4)


def test_a_resumed_run_reads_what_was_kept(recipe: str, tmp_path: Path, passes: list[int]) -> None:
    """Ended by a signal in the second epoch, which is at step 11 of 30."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train([recipe, *EPOCHS, f"save.dir={whole}", "drafter.kind=tests.helpers.dying"]) == 0
    stop = {"HEADSTART_TEST_SIGNAL": str(int(signal.SIGTERM)), "HEADSTART_TEST_FORWARD": "15"}
    command = [recipe, *EPOCHS, f"save.dir={parts}", "drafter.kind=tests.helpers.dying"]
    assert Forked(1, command, tmp_path / "said", **stop).wait() == 128 + signal.SIGTERM
    kept = list((parts / "state" / "features").rglob("*.safetensors"))
    assert len(kept) == 40
    kept[3].write_bytes(kept[3].read_bytes()[:-9])  # damaged: read anew
    passes.clear()
    assert train(command) == 0
    assert sum(passes) < 10 and not (parts / "state" / "features").exists()  # the start values' and evaluation's
    ours, others = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    (parts / "state" / "features" / "of a run that was killed at its end").mkdir(parents=True)
    assert train(command) == 0 and not (parts / "state" / "features").exists()


def test_features_that_do_not_fit_on_the_disk_are_computed_again(recipe: str) -> None:
    source = LiveFeatures(families.backbone("llama"), (1,))
    feed = SimpleNamespace(steps=20, rows=40, samples=[SimpleNamespace(tokens=range(10**13))])
    found, line = keep_between_epochs(load_recipe(recipe), source, [], feed, 1)  # type: ignore[arg-type]
    assert isinstance(found, FeaturesBetweenEpochs) and not found.store
    assert line is not None and line.startswith("computed in each epoch: to keep them takes ")
    assert keep_between_epochs(load_recipe(recipe), source, [], feed, 2) == (source, None)  # type: ignore[arg-type]
