"""The command ``headstart import``. Libraries are imported when it runs."""

from __future__ import annotations

import argparse
import shlex
import sys


def import_heads(args: argparse.Namespace) -> int:
    """Import heads that another trainer wrote as a Headstart checkpoint."""
    from headstart.cli.loading import backbone_of, chat_settings_of, quiet
    from headstart.inference.serving import importing as importer
    from headstart.support.files import require_writable, write_json

    require_writable("--json", args.json)
    quiet()
    variables = chat_settings_of([], args.template_arg, ()).variables
    wishes = importer.Wishes(args.counting, args.depth, args.prompts, args.max_new_tokens, args.trust_remote_code, variables)
    report = importer.import_heads(args.heads, args.backbone, args.out, lambda: backbone_of(args.backbone, args), wishes)
    write_json(args.json, report)
    print(f"{args.heads}: {report['layout']}, as {report['kind']} heads of {report['backbone']}")
    for line in [*report["notes"], f"measured on {report['measured_on']}: {report['verdict'][0]}", *report["verdict"][1:]]:
        print(f"  {line}")
    print(f"written to {args.out}; decode with: headstart generate --heads {args.out} PROMPT", file=sys.stderr)
    print(f"train further with: headstart train RECIPE {shlex.join(report['recipe'])}", file=sys.stderr)
    return 0
