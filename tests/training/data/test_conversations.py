"""``recipes/conversations/run.sh``: one command from conversations to a report, which resumes where it stopped and names errors."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, TURNS, chat, make_chat_model, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headstart.chat.conversation import Chat, Pieces, tokenise

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "recipes" / "conversations"
OVERRIDES = (
    "data.max_length=128", "drafter.depth=2", "regenerate.max_new_tokens=24", "regenerate.batch_size=16", "train.epochs=null",
    "train.steps=4", "train.batch_size=4", "save.every=2", "eval.prompts=2", "eval.max_new_tokens=8",
)  # fmt: skip


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [FOLDER / "run.sh", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=600)


def steps(output: str) -> list[str]:
    """Steps that ran, and in brackets those skipped because they were done before."""
    lines = [line.removeprefix("== ") for line in output.splitlines() if line.startswith("== ")]
    return [f"({line.partition(':')[0]})" if ": done before, " in line else line.partition(":")[0] for line in lines]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that ends an answer after about ten tokens, and conversations of one to three questions, one of which appears twice."""
    folder = tmp_path_factory.mktemp("given")
    turns = [("human", "What is two?"), ("gpt", "It is four."), ("human", "And three?"), ("gpt", "Six.")]
    rows = [[*turns[: 2 * (i % 2)], ("human", f"What is {i % 23}?"), ("gpt", "It is four.")] for i in range(24)]
    lines = [json.dumps({"conversations": [{"from": who, "value": text} for who, text in row]}) + "\n" for row in rows]
    (folder / "chats.jsonl").write_text("".join(lines))
    return make_chat_model(folder / "model", max_position_embeddings=320), folder / "chats.jsonl"


@pytest.mark.slow
def test_from_conversations_to_a_report(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["--held-out", 3, "--max-new-tokens", 8, *inputs, out, *OVERRIDES]
    stopped = run("--until", "regenerate", *command)
    assert stopped.returncode == 0 and steps(stopped.stdout) == ["plan", "regenerate", "hold-out"], stopped.stderr
    assert "with the live backbone, since there is no feature cache yet" in stopped.stdout
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert steps(done.stdout) == ["(plan)", "(regenerate)", "(hold-out)", "cache", "train", "bench"]
    assert "size      " in done.stderr and "Every token of every prompt is identical" in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["prompts"] == 3 and {row["temperature"] for row in report["results"]} == {0.0, 1.0}
    assert (out / "report.html").exists()
    second = run(*command)
    assert steps(second.stdout) == [f"({name})" for name in ("plan", "regenerate", "hold-out", "cache", "train", "bench")]
    assert "all done" in second.stdout and second.returncode == 0
    other = run(*command, "train.lr=1e-4")
    assert other.returncode == 2 and "train.lr (was 0.0005, now 0.0001)" in other.stderr
    assert steps(other.stdout) == ["plan", "(regenerate)", "(hold-out)", "(cache)", "train"]
    (out / "answers.jsonl").unlink()
    renewed = run("--no-plan", "--until", "train", *command)
    assert steps(renewed.stdout) == ["regenerate", "hold-out", "cache", "train"], "all that follows is looked at again"
    assert renewed.returncode == 0 and "already at step 4 of 4" in renewed.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "three arguments are needed, MODEL CONVERSATIONS OUT; got 0"),
    (("model", "rows.jsonl"), "three arguments are needed, MODEL CONVERSATIONS OUT; got 2"),
    (("model", "rows.jsonl", "train.lr=1"), "MODEL CONVERSATIONS OUT come before section.key=value; got 'train.lr=1'"),
    (("model", "rows.jsonl", "out", "epochs"), "'epochs' is no setting; write section.key=value"),
    (("model", "rows.jsonl", "out", "save.dir=x"), "save.dir is given by MODEL, CONVERSATIONS and OUT; leave save.dir=x out"),
    (("model", "rows.jsonl", "out", "data.eval_rows=5"), "data.eval_rows is given by --held-out"),
    (("--cores", "2", "model"), "unknown option --cores"),
    (("--processes",), "--processes needs a value"),
    (("--processes", "0", "m", "r", "o"), "--processes is a whole number of at least 1; got '0'"),
    (("--until", "dawn", "m", "r", "o"), "--until is plan, regenerate, cache, train or bench; got 'dawn'"),
    (("m", "r", FOLDER / "run.sh"), "OUT is a folder; "),
    (("m", "r", "/proc/nowhere"), "/proc/nowhere cannot be made; choose another OUT"),
])  # fmt: skip
def test_wrong_arguments_cost_one_line(arguments: tuple[object, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_missing_data_cost_one_line(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("--no-plan", inputs[0], tmp_path / "none.jsonl", tmp_path / "out")
    assert done.returncode == 2 and f"error: data file {tmp_path / 'none.jsonl'}" in done.stderr
    assert "Traceback" not in done.stderr and [path.name for path in (tmp_path / "out").iterdir()] == ["done"]


def hold_out(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FOLDER / "hold_out.py", *map(str, arguments)], capture_output=True, text=True)


def test_what_is_held_out_is_asked_nowhere_else(tmp_path: Path) -> None:
    """Equal questions are held out together."""
    questions = [f"why {i % 33} or\u2028not?" for i in range(40)]
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": f"since {i}"}] for i, text in enumerate(questions)]
    lines = [json.dumps({"row": i, "messages": one}, ensure_ascii=False) for i, one in enumerate(turns)]
    (tmp_path / "answers.jsonl").write_text("\n".join([*lines, json.dumps({"row": 40, "text": "a text"}), ""]), encoding="utf-8")
    done = hold_out(tmp_path / "answers.jsonl", tmp_path / "data", 4)
    assert done.returncode == 0, done.stderr
    parts, numbers = {}, {}
    for name in ("eval", "bench", "train"):
        rows = [json.loads(line) for line in (tmp_path / "data" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
        numbers[name] = [row["row"] for row in rows]
        parts[name] = [row["messages"][0]["content"] if "messages" in row else row["text"] for row in rows]
    question_sets = [set(part) for part in parts.values()]
    assert sum(map(len, question_sets)) == len(set.union(*question_sets)) == 34, "every question, each in one file"
    assert [len(part) for part in parts.values()] == [4, 4, 30] and "; 3 left out, which ask the same" in done.stdout
    assert all(indices == sorted(indices) for indices in numbers.values())


def test_too_few_rows_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps({"text": f"a text {i}"}) + "\n" for i in range(15)))
    done = hold_out(tmp_path / "answers.jsonl", tmp_path / "data", 4)
    assert done.returncode == 2 and "has 15 rows; with 4 held out to evaluate on and 4 to measure on" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "data").exists()
    assert hold_out(tmp_path / "answers.jsonl", tmp_path / "data", 3).returncode == 0


# Texts are tokenised in pieces as they are whole.

PARTS = ["<|im_start|>", "<|im_end|>", "<s>", "<s", " a b", "\n", "user", "\u00fcnder", "<|im", "four.", "  ", "x<|im_end|>x", "Added"]


def blanks(scheme: str, normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    bpe.decoder = decoders.Metaspace(prepend_scheme=scheme)
    bpe.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<s>", "<|im_start|>", "<|im_end|>"], show_progress=False)
    bpe.train_from_iterator(["user a b four. \u00fcnder", "a b a b x ed Added"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", extra_special_tokens=["<|im_start|>", "<|im_end|>"])


def more(*tokens: AddedToken) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


@pytest.mark.parametrize(("tokenizer", "pieces"), [
    (make_tokenizer(CHATML), 3), (blanks("first"), 3), (blanks("always"), 3), (blanks("never"), 3),
    (blanks("first", normalizers.Sequence([normalizers.Prepend("_"), normalizers.Lowercase()])), 3),
    (more(AddedToken("Added"), AddedToken("a<s>b", normalized=False), AddedToken("x<|im", normalized=False)), 1),
    (more(AddedToken("four.", lstrip=True)), 1), (more(AddedToken("user", single_word=True)), 1),
])  # fmt: skip
def test_pieces_have_the_tokens_of_the_whole(tokenizer: PreTrainedTokenizerFast, pieces: int) -> None:
    def called(texts: list[str]) -> list[list[int]]:
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    rng, cutter = random.Random(0), Pieces(tokenizer)
    assert len(cutter.cut("a<s>b<s>c".replace("b<s>", "b" if pieces == 1 else "b<s>"))) == pieces and cutter.cut("") == []
    for _ in range(200):
        texts = ["".join(rng.choices(PARTS, k=rng.randrange(12))) for _ in range(3)]
        assert cutter.tokens(texts, called) == called(texts) == tokenise(tokenizer, texts)
        assert all("".join(cutter.cut(text)) == text for text in texts)


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer whose class changes what a call gives, as code that comes with a model may."""

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus([one.upper() for one in text], *args, **kwargs)


def test_a_tokenizer_that_changes_calls_cuts_or_pads_is_called() -> None:
    plain = make_tokenizer(CHATML)
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    assert tokenise(shouting, ["four."]) == tokenise(plain, ["FOUR."]) != tokenise(plain, ["four."])
    expected = tokenise(plain, ["four. " * 9, "a"])
    plain.backend_tokenizer.enable_truncation(3)
    plain.backend_tokenizer.enable_padding()
    assert tokenise(plain, ["four. " * 9, "a"]) == expected and tokenise(plain, []) == []
    plain.split_special_tokens = True
    assert tokenise(plain, ["<s>a"]) == plain(["<s>a"], add_special_tokens=False)["input_ids"] and len(tokenise(plain, ["<s>a"])[0]) > 2


def test_what_turns_have_in_common_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, read = Chat(make_tokenizer(CHATML)), 0
    tokens = conversation.tokens

    def counted(texts: list[str]) -> list[list[int]]:
        nonlocal read
        read += sum(map(len, texts))
        return tokens(texts)

    assert conversation.ending
    monkeypatch.setitem(conversation.__dict__, "tokens", counted)
    messages = chat(*TURNS * 20)
    ((ids, _),) = conversation.samples(messages)
    assert ids and read < 2.5 * len(conversation.template.render(messages).text)
