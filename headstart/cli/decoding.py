"""The commands ``headstart generate``, ``chat``, ``bench`` and ``tune``; `arguments` defines their arguments."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer

from headstart.cli.chat import Chat, converse, require_template
from headstart.cli.loading import backbone_name, backbone_of, drafts_untrained, heads_of, prompter_of, quiet, tree_of
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.end_tokens import end_tokens
from headstart.heads.checkpoint import require_adapter
from headstart.inference.bench.bench import Plan, compare, require_room
from headstart.inference.bench.judging import FAULT
from headstart.inference.bench.page import report_page
from headstart.inference.bench.prompts import Prompt, Prompter, read_prompts
from headstart.inference.bench.systems import LOOKUP, LOOKUP_TOKENS, TransformersSystem, load_assistant
from headstart.inference.bench.table import print_report
from headstart.inference.bench.tune import TunePlan, contexts_of, summary
from headstart.inference.bench.tune import tune as measure_machine
from headstart.inference.engine.sizes import TUNED_SIZES
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.generate import SpeculativeModel
from headstart.inference.grammar import grammar
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.inference.speculation.tuned import key, write_tuned
from headstart.support.errors import UserError
from headstart.support.files import require_writable, write_json, write_text
from headstart.support.page import require_charts
from headstart.support.streams import read_input
from headstart.support.text import read_text
from headstart.support.visible import visible

UNTRAINED = "untrained"
"""Name of a system without heads in reports."""


def bench(args: argparse.Namespace) -> int:
    """Benchmark heads and write the report; the exit status is 1 if tokens or logits differ by more than rounding."""
    require_writable("--json", args.json)
    require_writable("--html", args.html)
    if args.html is not None:
        require_charts("--html")
    subject, plan = bench_subject(args), replace(bench_plan(args), replay=args.html is not None)
    report = compare(subject.heads, subject.prompts, plan, subject.prompter, subject.others)
    report |= {"backbone": subject.name, "prompts_files": args.prompts}
    if args.html is not None:
        write_text(args.html, report_page(report))
        del report["replays"]   # for the page only
    write_json(args.json, report)
    print_report(report, sys.stdout)
    return 1 if report["verdict"] == FAULT else 0


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
    batches = args.batch_size or [1]
    if (args.prompt_lookup or args.assistant) and 1 not in batches:
        assisted = "transformers' assisted decoding (--prompt-lookup, --assistant) takes one sequence at a time"
        raise UserError(f"{assisted}, and --batch-size is {' '.join(map(str, batches))}; add 1 to --batch-size or leave them out")
    trained = args.heads or []
    if args.also_alone and not (trained and drafts_untrained(args)):
        others = "--propose, --draft-model or --early-exit"
        raise UserError(f"--also-alone measures heads without what {others} adds; give --heads and one of these, or leave it out")
    if not trained and not drafts_untrained(args):
        raise UserError("nothing to measure; give --heads DIR, or what drafts without training: --propose, --draft-model, --early-exit")
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
    tree = tree_of(args.nodes, args.width, args.depth)
    sampled = tree_of(args.sampled_nodes or args.nodes, args.sampled_width or args.width, args.depth)
    return Plan(
        max_new_tokens=args.max_new_tokens,
        temperatures=tuple(dict.fromkeys(args.temperature or [0.0])),
        seed=args.seed,
        tree="auto" if args.also_fixed_tree else tree,
        sampled="auto" if args.also_fixed_tree else sampled,
        fixed_trees=(_fixed(tree), _fixed(sampled)) if args.also_fixed_tree else None,
        also_alone=args.also_alone,
        batches=tuple(dict.fromkeys(args.batch_size or [1])),
        skip_long=args.skip_long,
    )


def _assisted(args: argparse.Namespace, backbone: Backbone) -> list[TransformersSystem]:
    """Return transformers' own assisted decoding methods, as requested."""
    systems = [TransformersSystem(LOOKUP, backbone, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})] if args.prompt_lookup else []
    if args.assistant:
        assistant = load_assistant(args.assistant, backbone, args.trust_remote_code)
        systems.append(TransformersSystem(f"assistant {args.assistant}", backbone, {"assistant_model": assistant}))
    return systems


def tune(args: argparse.Namespace) -> int:
    """Measure step latency, calibrate draft scores, and write both to the file that is loaded with the heads."""
    require_writable("--json", args.json)
    quiet()
    name, prompter = _model(args, args.chat, args.prompt_tokens)
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


def generate(args: argparse.Namespace) -> int:
    """Stream the generated text to standard output; write statistics to standard error and ``--json``."""
    require_writable("--json", args.json)
    text = _prompt(args.prompt, args.file)
    quiet()
    name, prompter = _model(args, args.chat)
    prompt_T, tokenizer = prompter.ask(text), prompter.tokenizer
    if not len(prompt_T):
        raise UserError("the prompt is empty; give some text")
    backbone = backbone_of(name, args)
    require_room("the prompt", len(prompt_T), args.max_new_tokens, backbone)
    heads = heads_of(_drafting_heads(args, backbone), backbone, tokenizer, args)
    report = {"backbone": name, "heads": None if args.no_draft else args.heads, **_write(heads, prompt_T, tokenizer, args)}
    write_json(args.json, report)
    seed = f", seed {report['seed']}" if args.temperature > 0 else ""
    print(
        f"mean acceptance length (tau) {report['tau']:.2f}, {report['tokens']} tokens,"
        f" {report['tokens_per_second']:.1f} tokens/s{seed}",
        file=sys.stderr,
    )
    return 0


def chat(args: argparse.Namespace) -> int:
    """Chat in a terminal or through a pipe."""
    require_writable("--json", args.json)
    quiet()
    name, prompter = _model(args, None)
    require_template(prompter)
    backbone = backbone_of(name, args)
    heads = heads_of(_drafting_heads(args, backbone), backbone, prompter.tokenizer, args)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    talk = Chat(heads, prompter, _settings(args), seed, args.system, _grammar(args, backbone, prompter.tokenizer))
    converse(talk)
    write_json(args.json, {"backbone": name, "heads": None if args.no_draft else args.heads, **talk.report()})
    return 0


def _drafting_heads(args: argparse.Namespace, backbone: Backbone) -> str | None:
    """Return the heads to draft with, if any; with --no-draft their adapter is put on the backbone nevertheless."""
    if args.no_draft and args.heads is not None:
        require_adapter(args.heads, backbone, args.allow_finetuned)
    return None if args.no_draft else args.heads


def _model(args: argparse.Namespace, style: bool | None, prompt_tokens: int = 64) -> tuple[str, Prompter]:
    """Return the name of the backbone for commands that take one set of heads, and what makes its prompts."""
    trained = [args.heads] if args.heads else []
    name = backbone_name(args.backbone, trained)
    return name, prompter_of(name, trained, args, style, prompt_tokens)


def _settings(args: argparse.Namespace, stop: tuple[str, ...] = ()) -> Settings:
    tree = tree_of(args.nodes, args.width, args.depth)
    return Settings(args.max_new_tokens, args.temperature, args.top_k, args.top_p, stop, tree)


def _grammar(args: argparse.Namespace, backbone: Backbone, tokenizer: PreTrainedTokenizerBase) -> LogitsProcessorList:
    """The processor that --json-schema or --regex asks for, if any."""
    if args.json_schema is None and args.regex is None:
        return LogitsProcessorList()
    schema = None if args.json_schema is None else read_text("--json-schema", args.json_schema)
    ends = end_tokens(backbone.model.generation_config)
    if not ends:
        raise UserError(f"{backbone.name} names no token that ends a text (eos_token_id of its generation config); a grammar needs one")
    return LogitsProcessorList([grammar(tokenizer, json_schema=schema, regex=args.regex, end_tokens=ends)])


def _write(
    heads: SpeculativeModel, prompt_T: torch.Tensor, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> dict[str, Any]:
    """Stream the generated text; returns its statistics."""
    settings = _settings(args, tuple(args.stop or ()))
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    streamer = SafeStreamer(tokenizer, skip_prompt=not args.echo, skip_special_tokens=True)
    start = time.perf_counter()
    processors = _grammar(args, heads.backbone, tokenizer)
    output = continue_text(heads, prompt_T, settings, seed, streamer=streamer, tokenizer=tokenizer, logits_processor=processors)
    seconds = time.perf_counter() - start
    tally = Tally()
    tally.add(output)
    return {
        "temperature": args.temperature,
        "seed": seed if args.temperature > 0 else None,
        "text": tokenizer.decode(output.sequences[0, len(prompt_T) :], skip_special_tokens=True),
        "prompt_tokens": len(prompt_T),
        "tokens": tally.tokens,
        "passes": tally.passes,
        "tau": tally.tau,
        "acceptance_per_depth": tally.acceptance_per_depth,
        "seconds": seconds,
        "tokens_per_second": tally.tokens / seconds,
        **tally.milliseconds(),
    }


class SafeStreamer(TextStreamer):
    """Streams text to standard output; on a terminal, control characters are written out."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(visible(text) if sys.stdout.isatty() else text, stream_end)


def _prompt(argument: str | None, file: str | None) -> str:
    """Read the prompt: the argument, a file or standard input, the latter two without their last line break."""
    if argument is not None and file is not None:
        raise UserError("a prompt and --file were both given; give one")
    text = argument
    if text is None:
        text = (read_input() if file is None else read_text("--file", file)).removesuffix("\n")
    if not text:
        raise UserError("the prompt is empty; give it as an argument, with --file, or on the standard input")
    return text


def _fixed(tree: TreeSize) -> TreeShape:
    return tree if isinstance(tree, TreeShape) else TreeShape()
