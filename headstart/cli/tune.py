"""``headstart tune``; libraries are imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headstart.cli.arguments import BATCH, TUNED_NODES, add_limits, add_model, add_proposers, add_style, count

TUNE_EXAMPLE = """examples:
  headstart tune --heads out/eagle3 --prompts prompts.jsonl
  headstart tune --backbone Qwen/Qwen3-0.6B --batch-size 1 8 --contexts 512 4096"""


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart tune``."""
    parser.add_argument("--heads", metavar="DIR", help="heads to tune for (default: proposers alone)")
    sets = "prompts to measure acceptance rates on, as for bench (default: measure latency only)"
    parser.add_argument("--prompts", action="extend", nargs="+", metavar="FILE", help=sets)
    parser.add_argument("--limit", type=count(1), default=16, metavar="N", help="the first N prompts of each file only (16)")
    parser.add_argument("--prompt-tokens", type=count(1), default=64, metavar="N", help="tokens of a plain text that are the prompt (64)")
    parser.add_argument("--batch-size", type=BATCH, action="extend", nargs="+", metavar="N", help="sequences decoded together (1 4)")
    parser.add_argument("--contexts", type=count(1), action="extend", nargs="+", metavar="T", help="tokens before the tree (256 1024)")
    parser.add_argument("--max-nodes", type=TUNED_NODES, default=256, metavar="N", help="nodes of the largest tree measured (256)")
    add_style(parser)
    add_proposers(parser)
    add_limits(parser)
    add_model(parser)
    parser.add_argument("--max-new-tokens", type=count(2), default=64, metavar="N", help="tokens to generate after each prompt (64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements as JSON too")


def tune(args: argparse.Namespace) -> int:
    """Measure step latency, calibrate draft scores, and write both to the file that is loaded with the heads."""
    from headstart.cli.loading import backbone_of, heads_of, model_of, quiet
    from headstart.inference.bench.tune import TunePlan, contexts_of, summary
    from headstart.inference.bench.tune import tune as measure_machine
    from headstart.inference.engine.request import require_room
    from headstart.inference.engine.tree import TUNED_SIZES
    from headstart.inference.speculation.tuned import key, write_tuned
    from headstart.support.chat.prompts import read_prompts
    from headstart.support.files import write_json

    quiet()
    name, prompter = model_of(args, args.chat, args.prompt_tokens)
    backbone = backbone_of(name, args)
    heads = heads_of(args.heads, backbone, prompter.tokenizer, args)
    prompts = [prompt.ids_T for file in args.prompts or [] for prompt in read_prompts(file, prompter, args.limit)]
    for number, prompt_T in enumerate(prompts, 1):
        require_room(f"prompt {number}", len(prompt_T), args.max_new_tokens, backbone)
    nodes = tuple(size for size in TUNED_SIZES if size <= args.max_nodes)
    contexts = contexts_of(args.contexts, args.max_nodes, backbone)
    plan = TunePlan(tuple(args.batch_size or (1, 4)), contexts, nodes, max_new_tokens=args.max_new_tokens)
    tuned = measure_machine(heads, prompts, plan, say=lambda line: print(line, file=sys.stderr))
    file = write_tuned(args.heads, backbone, tuned)
    write_json(args.json, {"backbone": name, "heads": args.heads, "machine": key(backbone), **vars(tuned)})
    print(f"{summary(tuned)}\n\nwritten to {file}: heads loaded from there use it on this machine")
    return 0
