"""``headstart generate`` and ``headstart chat``; libraries are imported when one runs."""

import argparse
import secrets
import sys
import time
from typing import Any

from headstart.cli.arguments import add_one_text, add_shared, add_style, add_template_arguments
from headstart.support.errors import UserError, waiting
from headstart.support.files import write_json
from headstart.support.text import read_input, read_text

CAPTURED = {"compile": "compiled", "trace": "traced", "cuda-graph": "recorded", "off": "uncaptured"}
GENERATE_EXAMPLE = """examples:
  headstart generate --heads out/eagle3 "def fibonacci(n):"
  headstart generate --heads out/eagle3 --temperature 0.7 --seed 1 --file question.txt --json answer.json
  headstart generate --backbone Qwen/Qwen3-0.6B --no-draft "Why is the sky blue?" """


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue or question to answer (default: standard input)")
    parser.add_argument("--file", metavar="F", help="read the prompt from this file")
    parser.add_argument("--echo", action="store_true", help="print the prompt too")
    parser.add_argument("--stop", action="append", metavar="STRING", help="stop at this text; may be repeated")
    add_style(parser)
    add_one_text(parser)
    add_shared(parser)


def generate(args: argparse.Namespace) -> int:
    """Stream the generated text to standard output; write statistics to standard error and ``--json``."""
    with waiting("importing torch and transformers"):
        from headstart.cli.loading import SafeStreamer, backbone_of, drafting_heads, grammar_of, heads_of, model_of, quiet, settings_of
        from headstart.inference.engine.request import require_room
        from headstart.inference.measure import continue_texts, said

    text = _prompt(args.prompt, args.file)
    quiet()
    name, prompter = model_of(args, args.chat)
    prompt_T, tokenizer = prompter.ask(text), prompter.tokenizer
    if not len(prompt_T):
        raise UserError("the prompt is empty; give some text")
    backbone = backbone_of(name, args)
    require_room("the prompt", len(prompt_T), args.max_new_tokens, backbone)
    heads = heads_of(drafting_heads(args, backbone), backbone, tokenizer, args)
    settings, seed = settings_of(args, tuple(args.stop or ())), secrets.randbelow(1 << 31) if args.seed is None else args.seed
    streamer = SafeStreamer(tokenizer, skip_prompt=not args.echo, skip_special_tokens=True)
    own = {"streamer": streamer, "tokenizer": tokenizer, "logits_processor": grammar_of(args, backbone, tokenizer)}
    start = time.perf_counter()
    output = continue_texts(heads, [prompt_T], settings, [seed], **own, **prompter.beside(prompt_T, backbone.device))
    seconds = time.perf_counter() - start
    tally = output.tally
    report: dict[str, Any] = {
        "backbone": name, "heads": None if args.no_draft else args.heads, "temperature": args.temperature,
        "seed": seed if args.temperature > 0 else None,
        "text": tokenizer.decode(output.sequences[0, len(prompt_T) :], skip_special_tokens=True),
        "prompt_tokens": len(prompt_T), "tokens": tally.tokens, "passes": tally.passes, "tau": tally.tau, "rested": tally.rested_share,
        "acceptance_per_depth": tally.acceptance_per_depth, "seconds": seconds, "tokens_per_second": tally.tokens / seconds,
        **tally.milliseconds(), "capture": output.capture,
    }  # fmt: skip
    write_json(args.json, report)
    seed = f", seed {report['seed']}" if args.temperature > 0 else ""
    print(
        f"mean acceptance length (tau) {said(tally.tau, tally.rested_share)}, {report['tokens']} tokens,"
        f" {report['tokens_per_second']:.1f} tokens/s, {CAPTURED[report['capture']]} passes{seed}",
        file=sys.stderr,
    )
    return 0


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


CHAT_EXAMPLE = """examples:
  headstart chat --heads out/eagle3
  headstart chat --backbone Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7

while it runs: /reset begins anew, /exit or the end of the input leaves, /help lists these; Ctrl-C stops an answer"""


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart chat``; the chat template is always used."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_template_arguments(parser)
    add_one_text(parser)
    add_shared(parser)


def chat(args: argparse.Namespace) -> int:
    with waiting("importing torch and transformers"):
        from headstart.cli.conversation import Chat, converse
        from headstart.cli.loading import backbone_of, drafting_heads, grammar_of, heads_of, model_of, quiet, settings_of

    quiet()
    name, prompter = model_of(args, None)
    if not prompter.templated:
        named = prompter.tokenizer.name_or_path
        raise UserError(f"the tokenizer of {named} has no chat template, so it cannot chat; use headstart generate")
    backbone = backbone_of(name, args)
    heads = heads_of(drafting_heads(args, backbone), backbone, prompter.tokenizer, args)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    talk = Chat(heads, prompter, settings_of(args), seed, args.system, grammar_of(args, backbone, prompter.tokenizer))
    converse(talk)
    write_json(args.json, {"backbone": name, "heads": None if args.no_draft else args.heads, **talk.report()})
    return 0
