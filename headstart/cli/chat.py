"""``headstart chat``; libraries are imported when it runs."""

from __future__ import annotations

import argparse
import secrets

from headstart.cli.arguments import add_one_text, add_shared, add_template_arguments

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
    """Chat in a terminal or through a pipe."""
    from headstart.cli.conversation import Chat, converse, require_template
    from headstart.cli.loading import backbone_of, drafting_heads, grammar_of, heads_of, model_of, quiet, settings_of
    from headstart.support.files import write_json

    quiet()
    name, prompter = model_of(args, None)
    require_template(prompter)
    backbone = backbone_of(name, args)
    heads = heads_of(drafting_heads(args, backbone), backbone, prompter.tokenizer, args)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    talk = Chat(heads, prompter, settings_of(args), seed, args.system, grammar_of(args, backbone, prompter.tokenizer))
    converse(talk)
    write_json(args.json, {"backbone": name, "heads": None if args.no_draft else args.heads, **talk.report()})
    return 0
