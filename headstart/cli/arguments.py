"""Command-line arguments of all subcommands. Imports no libraries, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from headstart.cli.numbers import BATCH, DEPTH, NODES, SEED, THREADS, TUNED_NODES, WIDTH, count, number, temperature
from headstart.heads.backbone.embedded import HEADS

GENERATE_EXAMPLE = """examples:
  headstart generate --heads out/eagle3 "def fibonacci(n):"
  headstart generate --heads out/eagle3 --temperature 0.7 --seed 1 --file question.txt --json answer.json
  headstart generate --backbone Qwen/Qwen3-0.6B --no-draft "Why is the sky blue?" """
CHAT_EXAMPLE = """examples:
  headstart chat --heads out/eagle3
  headstart chat --backbone Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7

while it runs: /reset begins anew, /exit or the end of the input leaves, /help lists these; Ctrl-C stops an answer"""
BENCH_EXAMPLE = """examples:
  headstart bench --heads out/eagle3 --heads out/medusa --prompts prompts.jsonl --temperature 0 1 --json report.json
  headstart bench --heads out/eagle3 --prompts spec_bench/question.jsonl --per-task 10 --prompt-lookup --html report.html
  headstart bench --heads out/eagle3 --prompts HumanEval.jsonl gsm8k/test.jsonl --batch-size 1 2 4 8 --limit 64
  headstart bench --backbone Qwen/Qwen3-0.6B --propose suffix recycling --prompts articles.jsonl --prompt-lookup"""


COMPARE_EXAMPLE = """examples:
  headstart compare before.json after.json --html compared.html
  headstart compare out/eagle3 out/medusa --html runs.html"""
TUNE_EXAMPLE = """examples:
  headstart tune --heads out/eagle3 --prompts prompts.jsonl
  headstart tune --backbone Qwen/Qwen3-0.6B --batch-size 1 8 --contexts 512 4096"""
TRAIN_EXAMPLE = """examples:
  headstart train recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine
  accelerate launch train_heads.py recipes/quickstart/eagle3.yaml train.lr=3e-4 save.dir=out/mine
  torchrun --nproc-per-node 2 train_heads.py recipes/quickstart/eagle3.yaml"""
NEW_RECIPE_EXAMPLE = """examples:
  headstart new-recipe embedded --data my_chats.jsonl --out recipe.yaml
  headstart new-recipe Qwen/Qwen3-8B
  headstart new-recipe meta-llama/Llama-3.3-70B-Instruct --gpus 8 --memory 80 --data my_chats.jsonl --out recipe.yaml
  headstart new-recipe lmsys/vicuna-7b-v1.5 --method medusa --gpus 1 --memory 40 --data sharegpt"""
CACHE_EXAMPLE = "example: headstart cache recipes/quickstart/eagle3.yaml cache.dir=out/features"
SERVE_FEATURES_EXAMPLE = """examples:
  headstart serve-features recipes/llama-3.3-70b-instruct/eagle3.yaml --gpus 4
  headstart serve-features recipes/quickstart/eagle3.yaml --run --port 8001"""
REGENERATE_EXAMPLE = """examples:
  headstart regenerate recipes/qwen3-0.6b/eagle3.yaml regenerate.out=data/answers.jsonl regenerate.temperature=0.7
  headstart regenerate recipes/qwen3-8b/eagle3.yaml regenerate.out=data/answers.jsonl regenerate.endpoint=http://localhost:8000/v1
  headstart regenerate recipes/qwen3-8b/eagle3.yaml regenerate.out=answers.jsonl cache.dir=out/states features.endpoint=http://localhost:8000"""
PLAN_EXAMPLE = """examples:
  headstart plan recipes/quickstart/eagle3.yaml
  headstart plan recipes/qwen3-8b/eagle3.yaml train.micro_batch=4 --gpus 8 --memory 80 --no-calibration"""
INSPECT_EXAMPLE = """examples:
  headstart inspect recipes/quickstart/eagle3.yaml --row 3
  headstart inspect out/quickstart/eagle3 --json heads.json"""
SCHEMA_EXAMPLE = """in a clone:
  headstart schema --out recipes/schema.json --tables docs/recipe.md"""
DEBUG = "--debug"
PROPOSERS = ("suffix", "recycling", "history", "lookahead")


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart generate``."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue or question to answer (default: standard input)")
    parser.add_argument("--file", metavar="F", help="read the prompt from this file")
    parser.add_argument("--echo", action="store_true", help="print the prompt too")
    parser.add_argument("--stop", action="append", metavar="STRING", help="stop at this text; may be repeated")
    _add_style(parser)
    _add_one_text(parser)
    _add_shared(parser)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart chat``; the chat template is always used."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_template_arguments(parser)
    _add_one_text(parser)
    _add_shared(parser)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart bench``."""
    add_measured(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots, one self-contained page")


def add_measured(parser: argparse.ArgumentParser, prompts_required: bool = True) -> None:
    """Arguments of ``headstart bench`` that say what is measured, and how, and ``--json``."""
    shipped = f"folders, hub ids, or those that ship: {', '.join(HEADS)}"
    parser.add_argument("--heads", action="extend", nargs="+", metavar="DIR", help=f"heads to measure: {shipped}")
    sets = "Spec-Bench, MT-bench, HumanEval, GSM8K or your own (.jsonl, .ndjson, also .gz or .zst; .txt)"
    parser.add_argument("--prompts", action="extend", nargs="+", required=prompts_required, metavar="FILE", help=sets)
    parser.add_argument("--limit", type=count(1), metavar="N", help="the first N prompts of each file only")
    parser.add_argument("--per-task", type=count(1), metavar="N", help="the first N prompts of each task only")
    parser.add_argument("--skip-long", action="store_true", help="skip prompts that do not fit the context (default: an error)")
    parser.add_argument("--prompt-tokens", type=count(1), default=64, metavar="N", help="tokens of a plain text that are the prompt (64)")
    parser.add_argument("--temperature", type=temperature, action="extend", nargs="+", metavar="T", help="one or several; 0: greedy (0)")
    parser.add_argument(
        "--batch-size", type=BATCH, action="extend", nargs="+", metavar="N", help="sequences decoded together; one or several (1)"
    )
    parser.add_argument("--seed", type=SEED, default=0, metavar="S", help="seed of the first prompt (0)")
    parser.add_argument("--sampled-nodes", type=NODES, metavar="N", help="--nodes above temperature 0 (default: the same)")
    parser.add_argument("--sampled-width", type=WIDTH, metavar="W", help="--width above temperature 0 (default: the same)")
    beside = "measure the heads also with trees of a fixed size (set by --nodes, --width and so on) and no proposers"
    parser.add_argument("--also-fixed-tree", action="store_true", help=beside)
    parser.add_argument("--also-alone", action="store_true", help="measure the heads also without --propose and the like")
    parser.add_argument("--prompt-lookup", action="store_true", help="measure transformers' prompt lookup decoding too")
    parser.add_argument("--assistant", metavar="MODEL", help="measure transformers' assisted decoding with this draft model too")
    _add_style(parser)
    _add_shared(parser)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart compare``."""
    about = "two reports of bench --json (before, after), or the folders of training runs"
    parser.add_argument("what", nargs="+", metavar="REPORT|RUN", help=about)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, complete in itself")


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart tune``."""
    parser.add_argument("--heads", metavar="DIR", help="the heads to tune for (default: proposers that need none)")
    sets = "prompts to measure acceptance rates on, as for bench (default: measure latency only)"
    parser.add_argument("--prompts", action="extend", nargs="+", metavar="FILE", help=sets)
    parser.add_argument("--limit", type=count(1), default=16, metavar="N", help="the first N prompts of each file only (16)")
    parser.add_argument("--prompt-tokens", type=count(1), default=64, metavar="N", help="tokens of a plain text that are the prompt (64)")
    parser.add_argument("--batch-size", type=BATCH, action="extend", nargs="+", metavar="N", help="sequences decoded together (1 4)")
    parser.add_argument("--contexts", type=count(1), action="extend", nargs="+", metavar="T", help="tokens before the tree (256 1024)")
    parser.add_argument("--max-nodes", type=TUNED_NODES, default=256, metavar="N", help="nodes of the largest tree measured (256)")
    _add_style(parser)
    _add_proposers(parser)
    _add_limits(parser)
    _add_model(parser)
    parser.add_argument("--max-new-tokens", type=count(2), default=64, metavar="N", help="tokens to generate after each prompt (64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements as JSON too")


def add_train(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart train`` and ``train_heads.py``."""
    _add_recipe(parser, "YAML file: the only configuration")


def add_new_recipe(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart new-recipe``."""
    parser.add_argument("model", metavar="MODEL", help="the backbone: a folder, a GGUF file, a hub id, or 'embedded'")
    methods = "eagle3 (default), block, medusa, medusa2, hydra, eagle, mlp, mtp, draft_model"
    parser.add_argument("--method", default="eagle3", metavar="NAME", help=f"the heads: {methods}")
    data = "ultrachat, sharegpt, perfectblend, mix, text, a file of rows, or a dataset's name (default: ultrachat, or text without chat)"
    parser.add_argument("--data", metavar="NAME", help=data)
    parser.add_argument("--gpus", type=int, metavar="N", help="accelerators that share the batch (default: this machine's, or one)")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of each (default: this machine's accelerator's, or its RAM)")
    parser.add_argument("--tflops", type=float, metavar="N", help="peak of each GPU in bf16 (H100 989), for an estimate of the duration")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the recipe to write (default: MODEL/METHOD.yaml)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the values as JSON too")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart cache``."""
    _add_recipe(parser, "training recipe")
    parser.add_argument("--estimate", action="store_true", help="print the size of the cache and write nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")


def add_serve_features(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart serve-features``."""
    _add_recipe(parser, "training recipe, whose features.folder the server writes to")
    parser.add_argument("--run", action="store_true", help="start the server, from this environment, instead of printing the line alone")
    parser.add_argument("--port", type=count(1), default=8000, metavar="N", help="port that it listens on (8000)")
    parser.add_argument("--gpus", type=count(1), metavar="N", help="GPUs of a server, by tensor parallelism (1)")
    parser.add_argument("--cpu", action="store_true", help="for vLLM's CPU build (default where there is no accelerator)")


def add_regenerate(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart regenerate``."""
    _add_recipe(parser, "recipe whose data.train is answered")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart plan``."""
    _add_recipe(parser, "training recipe")
    parser.add_argument("--gpus", type=int, metavar="N", help="accelerators that share the batch (default: this machine's, or one)")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of each (default: this machine's accelerator's, or its RAM)")
    parser.add_argument("--no-calibration", action="store_true", help="skip timing")
    about = "peak of each GPU in bf16 (H100 989, A100 312), for a duration estimated from the arithmetic of a step"
    parser.add_argument("--tflops", type=float, metavar="N", help=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON too")


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart inspect``."""
    parser.add_argument("what", metavar="RECIPE|CHECKPOINT", help="a recipe, or a folder of trained heads (or their hub id)")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of the recipe")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="sample of the recipe's data to show, counted from 0 (0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that shows the sample, complete in itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart schema``."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the schema there")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="renew the tables of this Markdown page")


def add_debug(parser: argparse.ArgumentParser) -> None:
    """The argument of every command that `failures` reads."""
    parser.add_argument(DEBUG, action="store_true", help="print the traceback of an unforeseen error (or HEADSTART_DEBUG=1)")


def _add_recipe(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=about)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of the recipe")


def _add_one_text(parser: argparse.ArgumentParser) -> None:
    heads = f"heads to draft with: a folder, a hub id, or those that ship: {', '.join(HEADS)} (default: autoregressive decoding)"
    parser.add_argument("--heads", metavar="DIR", help=heads)
    parser.add_argument("--no-draft", action="store_true", help="autoregressive decoding: the same text for the same seed")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=count(0), default=0, metavar="K", help="sample from the K most probable tokens (0: from all)")
    about = "nucleus sampling: from the most probable tokens that reach P together"
    parser.add_argument("--top-p", type=number(0, 1, above=True), default=1.0, metavar="P", help=about)
    parser.add_argument("--seed", type=SEED, metavar="S", help="seed of the sampling (default: random, printed)")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="FILE", help="write JSON of the schema in this file (needs headstart[grammar])")
    grammar.add_argument("--regex", metavar="PATTERN", help="write text that this regular expression matches as a whole")


def _add_style(parser: argparse.ArgumentParser) -> None:
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_const", const=True, help="use the chat template (default if there is one)")
    style.add_argument("--raw", dest="chat", action="store_const", const=False, help="continue the prompt as it is")
    add_template_arguments(parser)


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument of every command that makes prompts from conversations."""
    about = "set a variable of the chat template, as enable_thinking=false; may be repeated (default: those of the heads' recipe)"
    parser.add_argument("--template-arg", action="append", metavar="KEY=VALUE", help=about)


def _add_proposers(parser: argparse.ArgumentParser) -> None:
    about = f"draft with n-gram proposers too: any of {', '.join(PROPOSERS)}"
    parser.add_argument("--propose", action="extend", nargs="+", choices=PROPOSERS, metavar="NAME", help=about)
    parser.add_argument("--draft-model", metavar="MODEL", help="draft with this smaller model of the same vocabulary too")
    parser.add_argument("--early-exit", type=count(1), metavar="E", help="draft with the backbone's first E layers too")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    about = "limit the heads' KV cache to the last N positions and a few sink tokens (default: unlimited)"
    parser.add_argument("--draft-window", type=count(1), metavar="N", help=about)
    parser.add_argument("--draft-sink", type=count(0), metavar="N", help="sink tokens kept beside --draft-window (4)")
    parser.add_argument("--draft-offload", action="store_true", help="keep the heads' KV cache in host memory between drafts")


def _add_shared(parser: argparse.ArgumentParser) -> None:
    _add_proposers(parser)
    _add_limits(parser)
    _add_model(parser)
    parser.add_argument("--max-new-tokens", type=count(1), default=128, metavar="N", help="most tokens to generate (128)")
    parser.add_argument("--nodes", type=NODES, metavar="N", help="size of the candidate tree, root included (default: adaptive)")
    parser.add_argument("--width", type=WIDTH, metavar="W", help="beam width: nodes expanded per draft level (8)")
    parser.add_argument("--depth", type=DEPTH, metavar="K", help="draft length, past the trained depth too (default: the heads' own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", metavar="PATH", help="folder, GGUF file, hub id or 'embedded' (default: that of the heads)")
    about = "PEFT adapter to put on the backbone: folder or hub id (default: the one that the heads were trained with, if any)"
    parser.add_argument("--adapter", metavar="DIR", help=about)
    parser.add_argument("--allow-finetuned", action="store_true", help="allow a fine-tune of the backbone the heads were trained on")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository; read it first")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16", "int8", "int4"), default="auto",
                        help="of the backbone (auto: as saved; on a CPU fp32, or bf16 if saved so and the CPU has instructions for it;"
                             " int8, int4: its linear layers' weights, with optimum-quanto)")
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--capture", choices=("auto", "trace", "cuda-graph", "compile", "off"), default="auto",
                        help="how forward passes run without Python's overhead (auto: compiled layers and traces on a CPU,"
                             " off elsewhere; compile: the same, but wait for the compiler)")
