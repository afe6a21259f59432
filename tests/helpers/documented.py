"""The commands of the README, of docs/ and of ``--help``, and what they need to run: a small chat backbone, heads, files of rows."""

import json
import re
import shlex
import shutil
from pathlib import Path

import torch
from gguf_models import chat_model, write_gguf
from transformers import AutoTokenizer

from headstart.cli.main import COMMANDS
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.methods import build_drafter
from headstart.support.hub import resolve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
NOT_RUN = {
    "regenerate.endpoint=": "asks a server; tests/training/data/test_endpoint.py runs one",
    "serve-features": "starts or names a server; tests/training/test_served_features.py",
    "features.endpoint=": "asks a server; tests/training/test_served_features.py runs one",
    "eagle3.yaml data.train=answers.jsonl cache.dir": "needs that cache; tests/training/data/test_regenerate_rows.py",
    "glm.yaml cache.dir": "needs that recipe; tests/training/test_served_features.py writes a cache by a server",
    "--bench report.json": "uploads; tests/serving/test_push.py",
    "--engine vllm": "needs vLLM; make test-engines",
    "headstart import": "downloads; tests/serving/test_import.py imports every layout",
    "someone/": "downloads; tests/serving/test_engine_processes.py",
    "--heads smollm2": "downloads; tests/real/test_shipped_heads.py",
    "my_head": "in order: tests/headstart/test_own_head.py",
}
"""Part of a command -> why it is only parsed."""
MODELS = (
    "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B", "meta-llama/Llama-3.3-70B-Instruct", "lmsys/vicuna-7b-v1.5",
    "zai-org/GLM-4.5",
)  # fmt: skip
SHORT = [
    "backbone.dtype=fp32", "drafter.draft_vocab_size=256", "drafter.depth=2", "data.limit=8", "data.eval=null", "data.eval_rows=2",
    "data.max_length=64", "train.steps=2", "train.epochs=null", "train.batch_size=8", "train.micro_batch=null", "train.precision=no",
    "eval.every=0", "eval.prompts=1", "eval.max_new_tokens=4", "eval.prompt_tokens=8", "regenerate.max_new_tokens=4", "save.every=0",
]  # fmt: skip
PLACEHOLDERS = re.compile(r"\b[A-Z]{3,}\b(?!\.)|\||\[|\.\.\.")


def blocks(page: Path) -> list[str]:
    return [text for language, text in FENCED.findall(page.read_text()) if language in ("", "bash")]


def commands(pages: list[Path] | None = None) -> list[str]:
    """The lines that begin with ``headstart``, once each, of these pages (None: of all, and of ``--help``).

    Lines with placeholders (RECIPE, DIR|HUB_ID) are not commands.
    """
    examples = [] if pages else [command.example for command in COMMANDS]
    texts = [text for page in pages or PAGES for text in blocks(page)] + examples
    found = [re.sub(r"^examples?: ", "", line.strip()).partition(" # ")[0].strip() for text in texts for line in text.splitlines()]
    return [line for line in dict.fromkeys(found) if line.startswith("headstart ") and not PLACEHOLDERS.search(re.sub(r'".*?"', "", line))]


def make_home(folder: Path) -> Path:
    """Fill a folder with what the commands name: a chat backbone, heads on it and files of rows."""
    shutil.copytree(resolve("embedded"), folder / "backbone")
    tokenizer = AutoTokenizer.from_pretrained(folder / "backbone")
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.save_pretrained(folder / "backbone")
    torch.manual_seed(0)
    backbone = load_backbone(str(folder / "backbone"))
    for name in ("out/mine", "out/eagle3", "out/first", "out/quickstart/eagle3", "out/other", "out/draft_model"):
        build_drafter("eagle3", backbone, {"depth": 2, "draft_vocab_size": 256}).save_pretrained(folder / name)
    build_drafter("eagle3", backbone, {"depth": 2, "norm_output": False}).save_pretrained(folder / "out/llamacpp")
    build_drafter("medusa", backbone, {"depth": 2}).save_pretrained(folder / "out/medusa")
    text = [{"text": "def read(path):\n    return open(path).read()\n" * 3}] * 12
    rows = {
        "my_chats.jsonl": text, "answers.jsonl": text, "mine.jsonl": text, "my_prompts.jsonl": text[:1], "prompts.jsonl": text[:1],
        "articles.jsonl": text[:1], "spec_bench/question.jsonl": [{"question_id": 1, "category": "qa", "turns": ["Why?"]}],
        "HumanEval.jsonl": [{"task_id": "HumanEval/0", "prompt": "def f(x):"}],
        "gsm8k/test.jsonl": [{"question": "1+1?", "answer": "#### 2"}],
    }  # fmt: skip
    for name, lines in rows.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "models").mkdir()
    write_gguf(folder / "models" / "chat.Q4_K_M.gguf", *chat_model())
    (folder / "schema.json").write_text('{"enum": ["red", "blue"]}')
    for name in ("question.txt", "long_text.txt"):
        (folder / name).write_text("def read(path):\n")
    return folder


def shorter(line: str, home: Path) -> list[str]:
    """The words of a command, on the small backbone and few rows."""
    for model in MODELS:
        line = line.replace(model, str(home / "backbone"))
    words = shlex.split(line)[1:]
    given = [word for word in words if not word.startswith("-")]
    if len(given) > 1 and given[1].endswith(".yaml"):
        at = words.index(given[1]) + 1
        data = [] if any(word.startswith("data.train=") for word in words) else [f"data.train={home / 'my_chats.jsonl'}"]
        save = [] if any(word.startswith("save.dir=") for word in words) else ["save.dir=out/new"]
        kept = [word for word in words if not word.startswith("train.steps=")]
        return [*kept[:at], f"backbone.path={home / 'backbone'}", *data, *save, *SHORT, *kept[at:]]
    if words[0] in ("generate", "chat", "bench"):
        words += ["--max-new-tokens", "6"]
    return words


def reason_not_run(line: str) -> str | None:
    """Return why a command is only parsed; None if it runs."""
    return next((reason for part, reason in NOT_RUN.items() if part in line), None)


def clear(words: list[str], folder: Path) -> None:
    """Remove what the command writes, so that it is new."""
    targets = [word.partition("=")[2] for word in words if word.startswith(("save.dir=", "regenerate.out="))]
    targets += [words[words.index("--out") + 1]] if "--out" in words else []
    for target in targets:
        path = folder / target
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
