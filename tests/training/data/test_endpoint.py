"""``headstart regenerate`` from a server: requests, retries, concurrency, kept answers, and error messages."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chat_templates import make_tokenizer, read_rows
from server import Reply, said, serving
from test_regenerate import result

from headstart.support.post import Client, Passing
from headstart.training.regenerate import endpoint

CALL = {"id": "new", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def questions(count: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(count)]


def echo(path: str, body: dict[str, Any]) -> Reply:
    return said(f"to {body['messages'][-1]['content']}")


def test_a_server_is_asked_no_more_after_its_time(ask_server: Any, tmp_path: Path) -> None:
    with serving(echo) as server:
        assert ask_server(questions(500), server.url, "regenerate.hours=1e-6", "regenerate.concurrency=2") == 0
    assert 0 < len(read_rows(tmp_path / "new.jsonl")) == 500 - result(tmp_path)["rows_not_asked"] < 500


def test_turn_by_turn_with_thoughts_tools_and_settings(ask_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [
        {"role": "system", "content": "Use tools"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "old"}]},
        {"role": "tool", "content": "4", "tool_call_id": "old"},
        {"role": "assistant", "content": "five", "reasoning_content": "old thoughts"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "old"},
    ]
    script = [
        said(None, "tool_calls", tool_calls=[CALL], reasoning_content="a tool", refusal=None),
        said("four", reasoning="it says 4"),
        said("Welcome"),
    ]
    monkeypatch.setenv("MY_KEY", "secret")
    options = ("regenerate.api_key=MY_KEY", "regenerate.temperature=0.6", "regenerate.top_p=0.9", "regenerate.top_k=20")
    with serving(lambda path, body: script.pop(0)) as server:
        assert ask_server([{"messages": messages, "tools": [tool]}], server.url + "/", *options, "regenerate.max_new_tokens=50") == 0
    called = {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "old"}], "reasoning_content": "a tool"}
    four = {"role": "assistant", "content": "four", "reasoning_content": "it says 4"}
    expected = [*messages[:2], called, messages[3], four, messages[5], {"role": "assistant", "content": "Welcome"}]
    assert read_rows(tmp_path / "new.jsonl") == [{"row": 0, "messages": expected, "tools": [tool]}]
    assert [body["messages"] for body in server.asked] == [expected[:2], expected[:4], expected[:6]]
    settings = {"model": "some/model", "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 50, "tools": [tool]}
    assert all({key: body[key] for key in settings} == settings for body in server.asked)
    assert len({body["seed"] for body in server.asked}) == 3 and all(0 <= body["seed"] < 1 << 31 for body in server.asked)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert "secret" not in (tmp_path / "new.jsonl").read_text() + (tmp_path / "result.json").read_text()
    report = result(tmp_path)
    assert (report["turns"], report["tokens"], report["rows_written"]) == (3, 9, 1) and "tau" not in report


def test_busy_or_failing_servers_are_retried(ask_server: Any, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    failures: list[Reply] = [(429, "slow down"), (500, "oh"), (503, {"error": "loading"})]

    def flaky(path: str, body: dict[str, Any]) -> Reply:
        question = body["messages"][-1]["content"]
        seen[question] += 1
        return echo(path, body) if seen[question] == 4 else failures[seen[question] - 1]

    with serving(flaky) as server:
        assert ask_server(questions(5), server.url, "regenerate.retries=3") == 0
    assert set(seen.values()) == {4}
    assert [row["messages"][-1]["content"] for row in read_rows(tmp_path / "new.jsonl")] == [f"to question {i}" for i in range(5)]
    assert len({body["seed"] for body in server.asked}) == 5, "the same request again"


def test_waits_grow_and_follow_retry_after() -> None:
    waits = [[endpoint._pause(attempt, 0.0) for _ in range(50)] for attempt in range(1, 12)]
    longest = [min(endpoint.FIRST_WAIT * 2**k, 60) for k in range(11)]
    assert all(most / 2 <= wait <= most for most, some in zip(longest, waits, strict=True) for wait in some)
    assert endpoint._pause(1, 7.0) == 7 and endpoint._pause(1, 7000.0) == 60
    client = Client("regenerate", None, 1.0, 1)
    for header, seconds in (("3", 3), ("", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)):
        answer = httpx2.Response(429, headers={"retry-after": header})
        client.http = httpx2.Client(transport=httpx2.MockTransport(lambda _, answer=answer: answer))
        with pytest.raises(Passing) as caught:
            client.post("http://localhost", {})
        assert caught.value.after == seconds


@pytest.mark.parametrize(("reply", "message"), [
    ((500, "kernel panic\nin line 3"), "gave no answer in 3 attempts, at last status 500: kernel panic in line 3; see that it runs"),
    ((429, {"error": "quota"}), 'gave no answer in 3 attempts, at last status 429: {"error": "quota"}'),
    ((401, "who are you"), "refuses with status 401: who are you; name the environment variable"),
    ((404, ""), "refuses with status 404: (no body); see that regenerate.endpoint is all that stands before /chat/completions"),
    ((200, "<html>hello</html>"), "does not answer as OpenAI's protocol has it: <html>hello</html>"),
    ((200, {"choices": []}), "does not answer as OpenAI's protocol has it: {'choices': []}"),
    ((400, "no such parameter"), "refused the first 20 rows, the last one with status 400: no such parameter"),
])  # fmt: skip
def test_it_gives_up_with_one_clear_line(ask_server: Any, tmp_path: Path, capsys: Any, reply: Reply, message: str) -> None:
    with serving(lambda path, body: reply) as server:
        assert ask_server(questions(30), server.url, "regenerate.retries=2", "regenerate.concurrency=1") == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in error and server.url in error
        assert not (tmp_path / "new.jsonl").exists()
        server.reply = echo  # repaired
        assert ask_server(questions(30), server.url, "regenerate.concurrency=4") == 0
    assert len(read_rows(tmp_path / "new.jsonl")) == 30


def test_an_unreachable_server(ask_server: Any, capsys: Any) -> None:
    with serving(echo) as server:
        pass
    assert ask_server(questions(2), server.url, "regenerate.retries=1") == 2
    assert "gave no answer in 2 attempts, at last ConnectError" in capsys.readouterr().err


@pytest.mark.parametrize("most", [1, 3])
def test_requests_at_once_are_bounded_and_used(ask_server: Any, tmp_path: Path, most: int) -> None:
    start = time.perf_counter()
    with serving(echo, seconds=0.03) as server:
        assert ask_server(questions(12), server.url, f"regenerate.concurrency={most}") == 0
    assert server.most_at_once == most and time.perf_counter() - start > 0.03 * 12 / most
    assert [row["row"] for row in read_rows(tmp_path / "new.jsonl")] == list(range(12))


def test_truncated_too_long_and_refused_rows_are_told_apart(ask_server: Any, tmp_path: Path, capsys: Any) -> None:
    script = {
        "question 0": said("cut", "length"),
        "question 1": (400, {"error": {"message": "This model's maximum context length is 4096 tokens."}}),
        "question 2": (422, "roles must alternate"),
        "question 3": said(None),
        "question 4": said("fine", reasoning_content=None, tool_calls=[]),
    }
    with serving(lambda path, body: script[body["messages"][-1]["content"]]) as server:
        assert ask_server(questions(5), server.url, "regenerate.model=theirs", "regenerate.concurrency=1") == 1
    assert {body["model"] for body in server.asked} == {"theirs"}
    assert read_rows(tmp_path / "new.jsonl") == [
        {"row": 4, "messages": [*questions(5)[4]["messages"], {"role": "assistant", "content": "fine"}]}
    ]
    report = result(tmp_path)
    assert {name: report[name] for name in ("truncated", "too_long", "refused", "rows_dropped")} == {
        "truncated": 2, "too_long": 1, "refused": 1, "rows_dropped": 4,
    }  # fmt: skip
    assert "refused (status 422: roles must alternate)" in capsys.readouterr().err


@pytest.mark.parametrize("first", ["", "<s>"])
def test_texts_are_completed(ask_server: Any, tmp_path: Path, first: str) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").write_text('{"model_type": "llama"}')
    text = f"{first}What is two and two? It is four."

    def complete(path: str, body: dict[str, Any]) -> Reply:
        return 200, {"choices": [{"text": " and on", "finish_reason": "length"}], "usage": None}

    with serving(complete) as server:
        assert ask_server([{"text": text}], server.url, f"backbone.path={tmp_path / 'tokenizer'}", "regenerate.prompt_tokens=4") == 0
    prompt = server.asked[0]["prompt"]
    assert prompt == "What is two" and server.asked[0]["model"] == str(tmp_path / "tokenizer")
    assert read_rows(tmp_path / "new.jsonl") == [{"row": 0, "text": f"{first}{prompt} and on"}]
