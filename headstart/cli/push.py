"""The command ``headstart push``."""

from __future__ import annotations

import argparse


def push(args: argparse.Namespace) -> int:
    """Upload heads with a model card, or write the folder that would be uploaded."""
    from headstart.inference.serving.publish import Request, publish

    where = publish(Request(args.heads, args.repo, args.private, args.dry_run, tuple(args.bench or ()), args.base_model))
    print(f"written to {where}, not uploaded; README.md is the model card" if args.dry_run else f"uploaded to {where}")
    return 0
