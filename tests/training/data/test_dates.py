"""Chat templates that print the date: a run, its cache and a file of answers keep the instant they began with; decoding uses the clock."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, conversations, make_chat_model, make_chat_recipe, make_tokenizer, read_rows, write_rows
from errors import error_of, output_of

from headstart.chat.conversation import Chat
from headstart.chat.template import ChatSettings
from headstart.cli.main import main
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.checkpoint import read_metadata
from headstart.training import setup
from headstart.training.features import caching
from headstart.training.regenerate import regenerate
from headstart.training.regenerate.partial import PartialFile

TIME = "2024-02-05T07:08:09"
ASKED = [{"role": "user", "content": "Hi"}]
DATED = "{{ 'Today: ' + strftime_now('%H:%M:%S %d %b %Y') }}" + CHATML
LIKE_LLAMA = (
    """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\n" }}"""
    + CHATML
)
IN_MACRO = (
    """{%- macro head(role) %}{{ '<|im_start|>' + role + ' ' + strftime_now('%A, %-d. %B %y, 100%%, %I %p, week %W') }}{% endmacro %}
{{- head('system') }}"""
    + CHATML
)
STARTS_WITH_BLANKS = "\n  {% if true %}{{ strftime_now('%Y-%m-%d') }}{% endif %}\n" + CHATML


@pytest.mark.parametrize("template", [DATED, LIKE_LLAMA, IN_MACRO, STARTS_WITH_BLANKS], ids=["plain", "llama", "macro", "blanks"])
def test_a_stopped_clock_changes_nothing_but_the_instant(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls.fromisoformat(TIME)

    tokenizer = make_tokenizer(template, special="<|im_start|> <|im_end|>")
    stopped = Chat(tokenizer, ChatSettings(time=TIME))
    assert stopped.prompt(ASKED) != Chat(tokenizer).prompt(ASKED)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    assert stopped.prompt(ASKED) == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    said = [*ASKED, {"role": "assistant", "content": "Ho"}]
    assert tokenizer.decode(stopped.answer(said)) == "Ho<|im_end|>" and len(stopped.samples([*said, *said])) == 1


def test_a_variable_sets_the_date() -> None:
    chat = Chat(make_tokenizer(LIKE_LLAMA, special="<|im_start|> <|im_end|>"), ChatSettings(variables={"date_string": "1 May"}, time=TIME))
    assert chat.tokenizer.decode(chat.prompt(ASKED)).startswith("Today Date: 1 May\n")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instants at which commands begin; the last one is now."""
    times = [TIME]
    for module in (setup, caching, regenerate):
        monkeypatch.setattr(module, "now", lambda: times[-1])
    return times


def test_a_run_and_its_cache_go_on_on_another_day(tmp_path: Path, clock: list[str]) -> None:
    recipe = str(make_chat_recipe(tmp_path, make_chat_model(tmp_path / "model", DATED)))
    assert main(["train", recipe]) == 0
    features = f"cache.dir={tmp_path / 'features'}"
    assert main(["cache", recipe, features]) == 0
    clock.append("2025-12-24T18:00:00")
    assert main(["train", recipe, "train.steps=4"]) == 0, "resumed"
    other = f"save.dir={tmp_path / 'other'}"
    assert main(["train", recipe, features, other]) == 0 and main(["cache", recipe, features]) == 0
    for folder in ("out", "other"):
        kept = read_metadata(tmp_path / folder)[1]["provenance"]
        assert kept["recipe"]["data"]["template_time"] == TIME and kept["steps"] == (4 if folder == "out" else 2)
    fresh = f"save.dir={tmp_path / 'fresh'}"
    assert main(["train", recipe, fresh]) == 0, "another run begins today"
    assert read_metadata(tmp_path / "fresh")[1]["provenance"]["recipe"]["data"]["template_time"] == clock[-1]


def test_a_recipe_may_set_the_instant_and_a_template_without_dates_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(make_chat_recipe(tmp_path, make_chat_model(tmp_path / "model", CHATML)))
    assert main(["train", recipe]) == 0
    assert read_metadata(tmp_path / "out")[1]["provenance"]["recipe"]["data"]["template_time"] is None
    dated = [f"data.chat_template={json.dumps(DATED)}", f"data.template_time={TIME}"]
    assert "Today: 07:08:09 05 Feb 2024" in output_of(capsys, "inspect", recipe, *dated, "--json", str(tmp_path / "sample.json"))
    said = "data.template_time is an instant in ISO 8601, as '2026-11-26T09:00:00', or null; got 'yesterday'"
    assert said in error_of(capsys, "train", recipe, "data.template_time=yesterday")


def test_a_file_of_answers_goes_on_on_another_day(tmp_path: Path, clock: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_chat_model(tmp_path / "model", DATED)
    recipe, append, count = str(make_chat_recipe(tmp_path, model)), PartialFile.append, iter(range(99))

    def dying(self: PartialFile, line: dict[str, Any]) -> None:
        if next(count) == 3:
            raise KeyboardInterrupt
        append(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", dying)
        assert main(["regenerate", recipe, "regenerate.batch_size=1"]) == 130
    clock.append("2025-12-24T18:00:00")
    assert main(["regenerate", recipe]) == 0
    tokenizer = load_tokenizer(str(model))
    prompts = [
        tokenizer.decode(row["input_ids"] if isinstance(row["input_ids"][0], int) else row["input_ids"][0])
        for row in read_rows(tmp_path / "answers.jsonl")
    ]
    assert len(prompts) > 4 and all(prompt.startswith("Today: 07:08:09 05 Feb 2024") for prompt in prompts)


def test_bench_and_generate_ask_at_the_time_of_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_chat_model(tmp_path / "model", "{{ 'Year ' + strftime_now('%Y') }}" + CHATML)
    assert f"Year {datetime.now().year}" in output_of(capsys, "generate", "--backbone", str(model), "--max-new-tokens", "2", "--echo", "Hi")
    write_rows(tmp_path / "prompts.jsonl", conversations(1))
    command = ["bench", "--backbone", str(model), "--propose", "suffix", "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main([*command, "--max-new-tokens", "2", "--json", str(tmp_path / "report.json")]) == 0
    assert f"Year {datetime.now().year}" in (tmp_path / "report.json").read_text()
