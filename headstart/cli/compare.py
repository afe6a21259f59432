"""``headstart compare``; libraries are imported when it runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

COMPARE_EXAMPLE = """examples:
  headstart compare before.json after.json --html compared.html
  headstart compare out/eagle3 out/medusa --html runs.html"""


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart compare``."""
    about = "two reports of bench --json (before, after), or the folders of training runs"
    parser.add_argument("what", nargs="+", metavar="REPORT|RUN", help=about)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page with plots")


def compare(args: argparse.Namespace) -> int:
    """Compare two reports of ``bench``, or any number of training runs. Raises UserError for what cannot be compared."""
    from headstart.inference.bench.compare import comparison_page, print_comparison, read_comparison
    from headstart.support.errors import UserError
    from headstart.support.files import as_path, write_text
    from headstart.support.page import require_charts
    from headstart.training.log.runs import print_runs, read_runs, runs_page

    folders = [as_path("report", path).is_dir() for path in args.what]
    if args.html is not None:
        require_charts("--html")
    if len(args.what) < 2 and not all(folders):
        raise UserError("one thing alone cannot be compared; give two reports of bench --json, or folders of training runs")
    if all(folders):
        if len(set(args.what)) < len(args.what):
            raise UserError("the same folder was given twice; give different runs")
        logs = read_runs(args.what)
        print_runs(logs, sys.stdout)
        page = runs_page(logs) if args.html is not None else ""
    elif any(folders) or len(args.what) > 2:
        raise UserError("these cannot be compared with each other; give two reports of bench --json, or folders of training runs")
    else:
        both = read_comparison(*args.what)
        print_comparison(both, sys.stdout)
        page = comparison_page(both) if args.html is not None else ""
    if args.html is not None:
        write_text(args.html, page)
    return 0
