"""``headstart compile``; libraries are imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headstart.cli.arguments import BATCH, HEADS, add_loading
from headstart.support.errors import UserError

COMPILE_LAYERS_EXAMPLE = """examples:
  headstart compile Qwen/Qwen3-0.6B
  headstart compile --heads out/eagle3
  headstart compile SmolLM2-135M-Instruct.Q4_1.gguf --heads smollm2 --batch-size 8
what is compiled is kept for later commands"""


def add_compile_layers(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart compile``."""
    parser.add_argument("backbone", nargs="?", metavar="MODEL", help="folder, GGUF file, hub id or 'embedded' (default: that of the heads)")
    parser.add_argument("--heads", metavar="DIR", help=f"compile drafts of these too: a folder, a hub id, or {', '.join(HEADS)}")
    parser.add_argument("--batch-size", type=BATCH, default=1, metavar="N", help="sequences decoded together, at most (1)")
    add_loading(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")


def compile_layers(args: argparse.Namespace) -> int:
    """Compile in the foreground, with lines about the progress on standard error."""
    from headstart.cli.loading import backbone_name, backbone_of, quiet
    from headstart.inference.capture.plugin import required
    from headstart.inference.generate import load
    from headstart.support.files import write_json

    quiet()
    plugin = required()
    if args.backbone is None and args.heads is None:
        raise UserError("no model named; give MODEL, or --heads DIR for the model that they were trained on")
    name = backbone_name(args.backbone, [args.heads] if args.heads else [])
    backbone = backbone_of(name, args)
    heads = load(args.heads, backbone, allow_finetuned=args.allow_finetuned, capture="compile")
    found = plugin.compile_model(heads, lambda line: print(line, file=sys.stderr, flush=True), args.batch_size)
    write_json(args.json, {"backbone": name, "heads": args.heads, **found})
    print(f"compiled {found['parts']} parts in {found['seconds']:.0f} s, kept in {found['folder']}", file=sys.stderr)
    return 0
