"""``headstart export``; libraries are imported when it runs."""

from __future__ import annotations

import argparse


def export(args: argparse.Namespace) -> int:
    """Write heads in the layout of a serving engine and print how the engine starts with them."""
    from headstart.cli.loading import quiet
    from headstart.inference.serving import export as exporting
    from headstart.support.files import require_writable, write_json

    require_writable("--json", args.json)
    quiet()
    report = exporting.export(exporting.Request(args.heads, args.to, args.out, args.backbone, args.dtype, args.adapter, args.quantize))
    print("\n".join(exporting.lines(report, args.out)))
    write_json(args.json, report)
    return 0
