"""The commands that measure: ``headstart bench`` and ``compare``; libraries are imported when one runs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cli.arguments import BATCH, HEADS, NODES, SEED, WIDTH, add_no_compile, add_shared, add_style, count, temperature
from headstart.support.errors import UserError, waiting
from headstart.support.files import as_path, write_json, write_text

if TYPE_CHECKING:
    from headstart.chat.prompts import Prompt, Prompter
    from headstart.heads.backbone.backbone import Backbone
    from headstart.inference.bench.bench import Plan
    from headstart.inference.bench.systems import TransformersSystem
    from headstart.inference.generate import SpeculativeModel

UNTRAINED = "untrained"
"""Name of a system without heads in reports."""
BENCH_EXAMPLE = """examples:
  headstart bench --heads out/eagle3 --heads out/medusa --prompts prompts.jsonl --temperature 0 1 --json report.json
  headstart bench --heads out/eagle3 --prompts spec_bench/question.jsonl --per-task 10 --prompt-lookup --html report.html
  headstart bench --heads out/eagle3 --prompts HumanEval.jsonl gsm8k/test.jsonl --batch-size 1 2 4 8 --limit 64
  headstart bench --backbone Qwen/Qwen3-0.6B --propose suffix recycling --prompts articles.jsonl --prompt-lookup"""


def add_bench(parser: argparse.ArgumentParser) -> None:
    add_measured(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as a self-contained page")


def add_measured(parser: argparse.ArgumentParser, prompts_required: bool = True) -> None:
    """Arguments of ``headstart bench`` that say what is measured, and how, and ``--json``."""
    shipped = f"folders, hub ids, or those that ship: {', '.join(HEADS)}"
    parser.add_argument("--heads", action="extend", nargs="+", metavar="DIR", help=f"heads to measure: {shipped}")
    sets = "Spec-Bench, MT-bench, HumanEval, GSM8K or your own (.jsonl, .ndjson, also .gz or .zst; .txt)"
    parser.add_argument("--prompts", action="extend", nargs="+", required=prompts_required, metavar="FILE", help=sets)
    parser.add_argument("--images", action="store_true", help="rows of --prompts have images, as in training with data.images=true")
    parser.add_argument("--limit", type=count(1), metavar="N", help="the first N prompts of each file only")
    parser.add_argument("--per-task", type=count(1), metavar="N", help="the first N prompts of each task only")
    parser.add_argument("--skip-long", action="store_true", help="prompts that do not fit the context are no reason for exit status 1")
    parser.add_argument("--prompt-tokens", type=count(1), default=64, metavar="N", help="tokens of a plain text that are the prompt (64)")
    parser.add_argument("--temperature", type=temperature, action="extend", nargs="+", metavar="T", help="one or several; 0: greedy (0)")
    about = "sequences decoded together; one or several (1)"
    parser.add_argument("--batch-size", type=BATCH, action="extend", nargs="+", metavar="N", help=about)
    parser.add_argument("--seed", type=SEED, default=0, metavar="S", help="seed of the first prompt (0)")
    about = "rounds over the prompts, in which all systems take turns: speeds are medians of their ratios in a round (3)"
    parser.add_argument("--rounds", type=count(1), default=3, metavar="N", help=about)
    parser.add_argument("--sampled-nodes", type=NODES, metavar="N", help="--nodes above temperature 0 (default: the same)")
    parser.add_argument("--sampled-width", type=WIDTH, metavar="W", help="--width above temperature 0 (default: the same)")
    about = "measure the heads also in trees of a fixed size (set by --nodes, --width and so on), without proposers"
    parser.add_argument("--include-static-tree", action="store_true", help=about)
    about = "measure the heads also without --propose, --draft-model and --early-exit"
    parser.add_argument("--include-heads-only", action="store_true", help=about)
    parser.add_argument("--prompt-lookup", action="store_true", help="measure transformers' prompt lookup decoding too")
    parser.add_argument("--assistant", metavar="MODEL", help="measure transformers' assisted decoding with this draft model too")
    add_no_compile(parser)
    add_style(parser)
    add_shared(parser)


def bench(args: argparse.Namespace) -> int:
    """Benchmark heads and write the report; the exit status is 1 if something differs by more than rounding, or was too long."""
    with waiting("importing torch and transformers"):
        from headstart.inference.bench.bench import compare
        from headstart.inference.capture.plugin import compile_lacking
    from headstart.inference.bench.judging import FAULT
    from headstart.inference.bench.table import print_report, report_page

    subject, plan = bench_subject(args), bench_plan(args)
    for _, heads in subject.heads if not args.no_compile else ():
        compile_lacking(heads, max(args.batch_size or [1]))
    report = compare(subject.heads, subject.prompts, plan, subject.prompter, subject.others)
    report |= {"backbone": subject.name, "prompts_files": args.prompts}
    if args.html is not None:
        write_text(args.html, report_page(report))
    write_json(args.json, report)
    print_report(report, sys.stdout)
    return 1 if report["verdict"] == FAULT or (report["dropped_prompts"] and not args.skip_long) else 0


@dataclass(frozen=True)
class Subject:
    """What a benchmark measures."""

    name: str
    """The backbone's."""
    heads: list[tuple[str, SpeculativeModel]]
    prompts: list[Prompt]
    prompter: Prompter
    others: list[TransformersSystem]
    """Transformers' assisted decoding methods."""


def bench_subject(args: argparse.Namespace) -> Subject:
    """Load what the arguments of ``bench`` name."""
    from headstart.chat.prompts import read_prompts
    from headstart.cli.loading import backbone_name, backbone_of, drafts_untrained, heads_of, prompter_of, quiet

    batches = args.batch_size or [1]
    if (args.prompt_lookup or args.assistant) and 1 not in batches:
        assisted = "transformers' assisted decoding (--prompt-lookup, --assistant) takes one sequence at a time"
        raise UserError(f"{assisted}, and --batch-size is {' '.join(map(str, batches))}; add 1 to --batch-size or leave them out")
    if args.image and args.images:
        raise UserError("--images asks each row with its own images, --image FILE all with the same; give one of them")
    if (args.image or args.images) and (batches != [1] or args.prompt_lookup or args.assistant):
        others = "--batch-size, --prompt-lookup and --assistant"  # transformers' prompt lookup drafts tokens of images, and fails
        raise UserError(f"prompts with images are measured one at a time, without transformers' assisted decoding; leave out {others}")
    trained = args.heads or []
    if args.include_heads_only and not (trained and drafts_untrained(args)):
        others = "--propose, --draft-model or --early-exit"
        raise UserError(f"--include-heads-only measures heads without what {others} adds; give --heads and one of these, or leave it out")
    if not trained and not drafts_untrained(args):
        raise UserError("no heads and no drafts to measure; give --heads DIR, or --propose, --draft-model or --early-exit")
    quiet()
    name = backbone_name(args.backbone, trained)
    if sys.stderr.isatty():
        print(f"loading {name}", file=sys.stderr, flush=True)
    prompter = prompter_of(name, trained, args, args.chat, args.prompt_tokens)
    prompts = [prompt for file in args.prompts for prompt in read_prompts(file, prompter, args.limit, args.per_task)]
    backbone = backbone_of(name, args)
    heads = [(path or UNTRAINED, heads_of(path, backbone, prompter.tokenizer, args)) for path in trained or [None]]
    return Subject(name, heads, prompts, prompter, _assisted(args, backbone))


def bench_plan(args: argparse.Namespace) -> Plan:
    """The settings that the arguments of ``bench`` ask for."""
    from headstart.cli.loading import tree_of
    from headstart.inference.bench.bench import Plan
    from headstart.inference.engine.tree import TreeShape

    tree = tree_of(args.nodes, args.width, args.depth)
    sampled = tree_of(args.sampled_nodes or args.nodes, args.sampled_width or args.width, args.depth)
    fixed = [shape if isinstance(shape, TreeShape) else TreeShape() for shape in (tree, sampled)]
    return Plan(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(dict.fromkeys(args.temperature or [0.0])),
        seed=args.seed,
        tree="auto" if args.include_static_tree else tree,
        sampled="auto" if args.include_static_tree else sampled,
        fixed_trees=(fixed[0], fixed[1]) if args.include_static_tree else None,
        also_alone=args.include_heads_only,
        batches=tuple(dict.fromkeys(args.batch_size or [1])),
        rounds=args.rounds,
    )


def _assisted(args: argparse.Namespace, backbone: Backbone) -> list[TransformersSystem]:
    """Return transformers' own assisted decoding methods, as requested."""
    from headstart.inference.bench.systems import LOOKUP, LOOKUP_TOKENS, TransformersSystem, load_assistant

    systems = [TransformersSystem(LOOKUP, backbone, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})] if args.prompt_lookup else []
    if args.assistant:
        assistant = load_assistant(args.assistant, backbone, args.trust_remote_code)
        systems.append(TransformersSystem(f"assistant {args.assistant}", backbone, {"assistant_model": assistant}))
    return systems


COMPARE_EXAMPLE = """examples:
  headstart compare before.json after.json --html compared.html
  headstart compare out/eagle3 out/medusa"""


def add_compare(parser: argparse.ArgumentParser) -> None:
    about = "two reports of bench --json (before, after), or the folders of training runs"
    parser.add_argument("what", nargs="+", metavar="REPORT|RUN", help=about)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the tables as a self-contained page")


def compare(args: argparse.Namespace) -> int:
    """Compare two reports of ``bench``, or any number of training runs. Raises UserError for what cannot be compared."""
    from headstart.inference.bench.compare import comparison_page, print_comparison, read_comparison
    from headstart.training.run.runs import print_runs, read_runs

    folders = [as_path("report", path).is_dir() for path in args.what]
    if len(args.what) < 2 and not all(folders):
        raise UserError("one thing alone cannot be compared; give two reports of bench --json, or folders of training runs")
    if all(folders):
        if len(set(args.what)) < len(args.what):
            raise UserError("the same folder was given twice; give different runs")
        if args.html is not None:
            raise UserError("--html shows reports of bench; for the curves of runs, train with log.tensorboard=true or log.wandb")
        print_runs(read_runs(args.what), sys.stdout)
    elif any(folders) or len(args.what) > 2:
        raise UserError("these cannot be compared with each other; give two reports of bench --json, or folders of training runs")
    else:
        both = read_comparison(*args.what)
        print_comparison(both, sys.stdout)
        if args.html is not None:
            write_text(args.html, comparison_page(both))
    return 0
