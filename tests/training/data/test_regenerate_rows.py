"""``headstart regenerate`` in process: a row is written when it ends, progress is shown from the first step, unfinished answers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, report_of
from server import StatesServer, said, serving, states_server
from small_run import make_recipe, prepared
from test_regenerate import dialogues, result, rows_of
from watched import watched

from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.inference.decode import Decoder
from headstart.inference.engine.proposer import MAX_PROPOSER_ROWS, ProposerSource
from headstart.support import terminal
from headstart.training.data.batches import collate
from headstart.training.features.cached import CachedFeatures

SAMPLED = ("regenerate.temperature=1", "regenerate.max_new_tokens=120")


def test_a_killed_run_keeps_every_row_that_has_ended(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dialogues(12)
    assert ask(rows, *SAMPLED, out="whole.jsonl") == 0
    step, count = Decoder.step, iter(range(10_000))

    def dying(self: Decoder, *args: Any) -> Any:
        if next(count) == 25:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", dying)
        assert ask(None, *SAMPLED) == 130
    kept = rows_of(tmp_path / "new.jsonl.partial")[1:]
    assert 3 <= len(kept) < 12 and not (tmp_path / "new.jsonl").exists()
    with (tmp_path / "new.jsonl.partial").open("ab") as half:
        half.write(b'{"row": 6, "tur')  # partly written when killed
    assert ask(None, *SAMPLED) == 0 and result(tmp_path)["rows_resumed"] == len(kept)
    assert (tmp_path / "new.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_progress_is_shown_from_the_first_step(ask: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(terminal, "FILE_SECONDS", 0.0)
    assert ask(dialogues(9), *SAMPLED) == 0
    states = re.findall(r"(\d)/9 \[[\d:]+<([\d:?]+),[^],]*(, [\d,]+ tokens/s)?\]", capsys.readouterr().err)
    assert states[0] == ("0", "?", "") and states[1][0] == "0" and states[1][2]
    assert states[-1][0] == "9" and [int(rows) for rows, *_ in states] == sorted(int(rows) for rows, *_ in states)
    assert any(rows not in "09" and left != "?" for rows, left, _ in states)


def test_unfinished_answers_are_kept_if_asked_for(ask: Any, tmp_path: Path, capsys: Any) -> None:
    """A kept one is what was written until then, and the last of its conversation."""
    rows, short = dialogues(), ("regenerate.temperature=1", "regenerate.max_new_tokens=7")
    assert ask(rows, *SAMPLED, out="long.jsonl") == ask(rows, *short, out="dropped.jsonl") == 0
    dropped = result(tmp_path)
    assert f"{dropped['truncated']} rows had an answer that did not end within" in capsys.readouterr().err
    assert ask(rows, *short, "regenerate.unfinished=keep", out="kept.jsonl") == 0
    report = result(tmp_path)
    files = (rows_of(tmp_path / f"{name}.jsonl") for name in ("long", "dropped", "kept"))
    whole, less, kept = ({row["row"]: row["messages"] for row in rows} for rows in files)
    assert 0 < len(less) == len(rows) - dropped["rows_dropped"] < len(rows)
    assert len(kept) == len(rows) == report["rows_written"] and report["truncated"] == dropped["truncated"] > 0
    line = f"{report['truncated']} rows had an answer that did not end within regenerate.max_new_tokens, which is kept cut off"
    assert line in capsys.readouterr().err
    cut = 0
    for row, messages in kept.items():
        before, last = messages[:-1], messages[-1]
        assert before == whole[row][: len(before)] and last["role"] == "assistant"
        answer = whole[row][len(before)]["content"]
        if last["content"] != answer:
            cut += 1
            assert answer.startswith(last["content"]) and less.get(row, []) == before[: len(less.get(row, []))]
    assert 0 < cut <= report["truncated"], "one that lacks nothing but its end is whole"
    assert ask(rows, *short, "regenerate.unfinished=cut", out="x.jsonl") == 2
    assert "regenerate.unfinished is one of 'drop', 'keep'; got 'cut'" in capsys.readouterr().err


def test_unfinished_answers_of_a_server_are_kept_too(ask_server: Any, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}]
    answers = iter([said("cut", "length"), said(None, "length"), said("cut", "length")])
    with serving(lambda path, body: next(answers)) as server:
        assert ask_server(rows, server.url, "regenerate.unfinished=keep") == 0
        assert [one["content"] for one in rows_of(tmp_path / "new.jsonl")[0]["messages"]] == ["a", "cut"]
        (tmp_path / "new.jsonl").unlink()
        assert ask_server(rows, server.url, "regenerate.unfinished=keep") == 2, "nothing was written"
        assert ask_server(rows, server.url) == 2


def test_proposers_do_not_draft_for_many_rows(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = watched(monkeypatch, ProposerSource, "draft", lambda self, rows, *_: len(rows.roots))
    assert ask(dialogues(20), *SAMPLED, "regenerate.batch_size=20") == 0
    assert drafted and max(drafted) <= MAX_PROPOSER_ROWS < 20, "they do again for the last rows"


def test_several_answers_to_each_row(ask: Any, tmp_path: Path) -> None:
    """Each is what one more equal row would get; another seed gives others."""
    rows = dialogues(3)
    assert ask(rows, "regenerate.temperature=1", "regenerate.max_new_tokens=24", "regenerate.samples=2") == 0
    several = rows_of(tmp_path / "new.jsonl")
    assert ask([*rows, *rows], "regenerate.temperature=1", "regenerate.max_new_tokens=24", out="again.jsonl") == 0
    assert several == rows_of(tmp_path / "again.jsonl") and [row["row"] for row in several] == list(range(6))
    assert any(one["messages"] != other["messages"] for one, other in zip(several[:3], several[3:], strict=True))
    assert ask(rows, "regenerate.temperature=1", "regenerate.max_new_tokens=24", "seed=1", out="other.jsonl") == 0
    assert rows_of(tmp_path / "other.jsonl") != several[:3]


NAME = "backbone-layers-1-3-5-6"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[StatesServer]:
    make_recipe(tmp_path, 6, drafter={"kind": "eagle3", "depth": 2, "taps": [1, 3, 5]}, data={"max_length": 40})
    backbone = load_backbone(str(tmp_path / "backbone"), dtype="fp32", device="cpu")
    with states_server(backbone, tmp_path / "states", (1, 3, 5, 6), NAME) as server:
        yield server


def command(server: StatesServer, folder: Path, *more: str) -> list[str]:
    endpoint = [f"features.endpoint={server.url}", f"features.folder={server.folder}", "features.patience=5"]
    sampling = ["regenerate.max_new_tokens=8", "regenerate.unfinished=keep", "regenerate.temperature=0"]
    answers = [f"regenerate.out={folder}/answers.jsonl", *sampling]
    return [str(folder / "recipe.yaml"), *endpoint, *answers, "regenerate.prompt_tokens=6", f"cache.dir={folder}/cache", *more]


def test_the_cache_has_the_backbones_own_features(served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    report = report_of(tmp_path, "regenerate", *command(served, tmp_path, "cache.dtype=exact"))
    assert report["rows_written"] == 40 and report["cache"]["shards_missing"] == 0
    assert f"next      train with data.train={tmp_path}/answers.jsonl cache.dir={tmp_path}/cache" in capsys.readouterr().err
    generated = [body for body in served.asked if body["kv_transfer_params"]["include_output_tokens"]]
    assert len(generated) == 40 and len(served.asked) - len(generated) == 1, "but for those that start values come from, none is read twice"
    assert list(served.folder.iterdir()) == [] and not (tmp_path / "cache" / "answers").exists()
    options = [f"data.train={tmp_path}/answers.jsonl", f"cache.dir={tmp_path}/cache", "cache.dtype=exact", f"save.dir={tmp_path}/out"]
    run = prepared(tmp_path / "recipe.yaml", *options)
    assert isinstance(run.source, CachedFeatures) and len(run.feed.samples) == 36
    whole = served.backbone
    for i in range(0, 36, 5):
        batch = collate(run.feed.samples, [[i]])
        kept, read = run.source.read(batch), whole.read(batch.tokens_BT, taps=(1, 3, 5))
        assert kept.taps is not None and read.taps is not None
        for tap in (1, 3, 5):  # the last token was generated, and never an input
            torch.testing.assert_close(kept.taps[tap][:, :-1], read.taps[tap][:, :-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept.hidden_BTD[:, :-1], read.hidden_BTD[:, :-1], rtol=1e-4, atol=1e-5)


def test_tokens_that_are_no_samples_end_it(served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    served.choose = lambda log_probs: int(log_probs.argmin())
    error = error_of(capsys, "regenerate", *command(served, tmp_path, "regenerate.max_new_tokens=16"))
    assert "so improbable as samples are once in 1,000: it samples wrongly while it extracts" in error


def test_wrong_states_end_it_and_it_goes_on(served: StatesServer, tmp_path: Path, capsys: Any) -> None:
    served.change = lambda hidden, tokens: (hidden * 0 if len(served.asked) == 15 else hidden, tokens)
    assert main(["regenerate", *command(served, tmp_path, "regenerate.concurrency=1")]) == 2
    assert "zeros in layers 1, 3, 5, 6" in capsys.readouterr().err and not (tmp_path / "cache" / "manifest.json").exists()
    served.change = lambda hidden, tokens: (hidden, tokens)
    assert main(["regenerate", *command(served, tmp_path)]) == 0
    assert (tmp_path / "cache" / "manifest.json").exists() and len(served.asked) <= 15 + 1 + 26 + 1
