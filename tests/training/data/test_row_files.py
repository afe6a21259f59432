"""Files that people have: compressed lines, tables, JSON lines in .json, patterns, folders of `Dataset.save_to_disk`."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from chat_templates import CHATML, TURNS, chat, make_samples, make_tokenizer
from errors import refusal, refuses

from headstart.chat.messages import read_messages
from headstart.chat.prompts import Prompter, read_prompts
from headstart.support.errors import UserError
from headstart.training.data.data import load_data
from headstart.training.data.rows import read_rows
from headstart.training.recipe.recipe import Data

ROWS = [{"text": f"It is {word}."} for word in ("two", "three", "fünf", 'six, "six"\n')]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CELLS = 'text\nIt is two.\n"It is three."\nIt is fünf.\n\n"It is six, ""six""\n."\n'.encode()


def zst(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


PACKED: dict[str, Callable[[bytes], bytes]] = {"": lambda content: content, ".gz": gzip.compress, ".zst": zst}


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize(("kind", "content"), [
    ("jsonl", LINES), ("ndjson", LINES), ("json", LINES), ("json", b"\xef\xbb\xbf\n" + LINES), ("json", json.dumps(ROWS).encode()),
    ("csv", CELLS), ("csv", b"\xef\xbb\xbf" + CELLS.replace(b"\n", b"\r\n")), ("tsv", CELLS),
])  # fmt: skip
def test_every_kind_of_file_compressed_or_not(tmp_path: Path, kind: str, content: bytes, packed: str) -> None:
    source = written(tmp_path / f"rows.{kind}{packed}", PACKED[packed](content))
    assert [row["text"].replace("\r", "") for row in read_rows(source)] == [row["text"] for row in ROWS]
    assert read_rows(source, limit=2) == ROWS[:2]


def test_conversations_in_tables_are_json_text_and_empty_cells_are_null(tmp_path: Path) -> None:
    tokenizer, talk = make_tokenizer(CHATML), chat(*TURNS)
    table = "id,messages,tools,system\n" + '1,"{}",,\n'.format(json.dumps(talk).replace('"', '""'))
    (row,) = read_rows(written(tmp_path / "rows.csv", table.encode()))
    assert (row["id"], row["tools"], row["system"]) == ("1", None, None)
    (there,), (here,) = (make_samples([one], tokenizer, Data(train="x"), source="x")[0] for one in (row, {"messages": talk}))
    assert there.tokens.equal(here.tokens) and there.loss_mask.equal(here.loss_mask)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("rows.jsonl", b'{"text": "a"}\n{"text": \n', "rows.jsonl, line 2: not valid JSON"),
    ("rows.jsonl", b'{"text": "a"}\n\n["a"]\n', "rows.jsonl, line 3: a row is a mapping from column to value; got list"),
    ("rows.jsonl", b"\n", "rows.jsonl holds no rows"),
    ("rows.jsonl", b'{"text": "\xff"}\n', "rows.jsonl, line 1 is not UTF-8 text"),
    ("rows.json", b"[1]", "rows.json: a .json file of data is one list of rows"),
    ("rows.jsonl.gz", b"plain", "rows.jsonl.gz, line 1: not valid JSON"),
    ("rows.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], "rows.jsonl.gz cannot be read: Compressed file ended"),
    ("rows.parquet", b"PAR1", "rows.parquet cannot be read"),
    ("rows.txt", b"a", "rows.txt is not a kind of file that can be read; its name should end in .jsonl, .ndjson, .json"),
    ("rows.jsonl.zst", zst(LINES)[:-9], "rows.jsonl.zst cannot be read: Truncated compressed stream; check the file"),
    ("rows.jsonl.zst", zst(LINES)[:4] + b"\xff" * 40, "rows.jsonl.zst cannot be read: ZSTD decompress failed"),
    ("rows.csv", gzip.compress(b"a\n1\n", mtime=0)[:-9], "rows.csv cannot be read: Compressed file ended"),
    ("rows.csv.zst", b"plain", "rows.csv.zst holds no rows"),
    ("rows.json", b'{\n"text": "a"}', "; a .json file of data is one list of rows, each a mapping from column to value, or"),
    ("rows.json", b'{"text": "a"}\n{"text": ', "rows.json, line 2: not valid JSON"),
    ("rows.csv", b"a,b\n1\n", "rows.csv, row 1 has 1 cells for 2 columns; put text with delimiters in quotes"),
    ("rows.csv", b'a\n"1"2\n', "rows.csv, line 2: ',' expected after '\"'"),
    ("rows.csv", b'a\n"1', "rows.csv, line 2: unexpected end of data"),
    ("rows.csv", b"a,a\n1,2\n", "rows.csv: the first line of a table names its columns, each once; got a, a"),
    ("rows.csv", b"a\n\xff\n", "rows.csv is not UTF-8 text"),
    ("rows.csv", b"a\n", "rows.csv holds no rows"),
])  # fmt: skip
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    assert message in refusal(read_rows, written(tmp_path / name, content))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_what_a_file_begins_with_says_how_it_is_compressed(tmp_path: Path, name: str) -> None:
    for pack in PACKED.values():
        assert read_rows(written(tmp_path / name, pack(LINES))) == ROWS


def test_a_pattern_reads_all_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name, rows in (("b.jsonl", ROWS[2:]), ("a.csv", ROWS[:1]), ("more/c.json", ROWS[1:2])):
        lines = b"text\nIt is two.\n" if name == "a.csv" else "".join(json.dumps(row) + "\n" for row in rows).encode()
        written(tmp_path / name, lines)
    assert read_rows(f"{tmp_path}/*.*") == [ROWS[0], *ROWS[2:]]
    assert read_rows(f"{tmp_path}/**/*.json*") == [*ROWS[2:], ROWS[1]]
    assert read_rows(f"{tmp_path}/[ab].*", limit=2) == [ROWS[0], ROWS[2]]
    assert read_rows(written(tmp_path / "odd[1].jsonl", LINES)) == ROWS  # a file of this very name
    for name, message in (("z*.jsonl", "no file matches this pattern"), ("z.jsonl", "there is no such file")):
        refuses(f"data .*/{re.escape(name)}: {message}", read_rows, f"{tmp_path}/{name}")
    written(tmp_path / "notes.md", b"x")
    refuses(r"notes.md is not a kind of file that can be read; its name should end in .jsonl, .ndjson", read_rows, f"{tmp_path}/n*")


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(str(tmp_path / "several"))
    assert read_rows(str(tmp_path / "one"), split="anything") == ROWS and read_rows(str(tmp_path / "one"), limit=2) == ROWS[:2]
    assert read_rows(str(tmp_path / "several"), split="test") == read_rows(str(tmp_path / "several" / "test")) == ROWS[1:2]
    with pytest.raises(UserError, match=r"several holds the splits test, train, not dev; name the folder of one, .*/several/test"):
        read_rows(str(tmp_path / "several"), split="dev")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"x")
    refuses("one cannot be read as a folder of Dataset.save_to_disk: .*; save it again", read_rows, str(tmp_path / "one"))


SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
SYSTEM = {"role": "system", "content": "Be short."}


def tokens_of(row: dict[str, Any]) -> list[int]:
    (sample,), _ = make_samples([row], make_tokenizer(CHATML), Data(train="x"), source="x")
    return list(sample.tokens.tolist())


def test_a_column_system_is_the_system_message_of_a_conversation_without_one() -> None:
    talk = read_messages(SHAREGPT, "x")
    expected = tokens_of({"messages": [SYSTEM, *talk]})
    assert tokens_of({"conversations": SHAREGPT, "system": "Be short."}) == expected != tokens_of({"messages": talk})
    assert tokens_of({"messages": talk, "system": [{"type": "text", "text": "Be short."}]}) == expected
    assert tokens_of({"messages": [SYSTEM, *talk], "system": "Be long."}) == expected
    assert all(tokens_of({"messages": talk, "system": nothing}) == tokens_of({"messages": talk}) for nothing in (None, "", " \n"))
    refuses("x, row 1, column system: content is text, or a list of parts with a type; got 5", tokens_of, {"messages": talk, "system": 5})


def test_prompts_of_a_file_have_the_system_message_and_tools_of_training(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    row = {"conversations": SHAREGPT, "system": "Be short.", "tools": json.dumps([{"name": "add"}])}
    prompter = Prompter(make_tokenizer(template, special="<|im_start|> <|im_end|>"))
    (prompt,) = read_prompts(written(tmp_path / "prompts.ndjson.zst", zst(json.dumps(row).encode())), prompter)
    assert prompter.tokenizer.decode(prompt.ids_T).startswith("add<|im_start|>system\nBe short.")


def test_calls_of_sharegpt_turns_get_ids_and_results_refer_to_them() -> None:
    calls = '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]'
    turns = [
        SHAREGPT[0],
        {"from": "function_call", "value": calls}, {"from": "observation", "value": "3"}, {"from": "observation", "value": "4"},
        {"from": "function_call", "value": '{"name": "add"}'}, {"from": "observation", "value": "5"}, SHAREGPT[1],
    ]  # fmt: skip
    messages = read_messages(turns, "x")
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3 and all(len(one) == 9 and one.isalnum() for one in ids)  # as Mistral's template wants them
    assert [message.get("tool_call_id") for message in messages] == [None, None, *ids[:2], None, ids[2], None]
    assert "tool_call_id" not in read_messages([{"role": "tool", "content": "3"}], "x")[0]


def test_one_bad_row_of_the_held_out_rows_is_left_out_and_named(tmp_path: Path) -> None:
    good, bad = [{"messages": chat(*TURNS)}] * 63, {"messages": [{"from": "alien", "value": "x"}]}
    files = [tmp_path / "train.jsonl", tmp_path / "eval.jsonl"]
    for file, rows in zip(files, (good, [*good, bad]), strict=True):
        written(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    splits = load_data(Data(train=str(files[0]), eval=str(files[1])), make_tokenizer(CHATML), 4096, progress=False)
    assert (len(splits.train), len(splits.eval), splits.stats.rows_bad) == (63, 63, 1)
    assert "1 bad rows left out" in str(splits.stats) and "eval.jsonl, row 64, turn 0: unknown speaker 'alien'" in str(splits.stats)
    written(files[1], "".join(json.dumps(row) + "\n" for row in [*good, bad, bad]).encode())
    with pytest.raises(UserError, match=r"eval.jsonl, row 64.*\(2 of 65 rows are bad; below 1 % they are skipped\)"):
        load_data(Data(train=str(files[0]), eval=str(files[1]), eval_rows=65), make_tokenizer(CHATML), 4096, progress=False)
    written(files[1], "".join(json.dumps(row) + "\n" for row in [*good[:9], bad]).encode())
    with pytest.raises(UserError, match=r"\(1 of 10 rows are bad; one of at least 20 is skipped\)"):
        load_data(Data(train=str(files[0]), eval=str(files[1])), make_tokenizer(CHATML), 4096, progress=False)
