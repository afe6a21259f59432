"""Headstart, transformers and vLLM beside one another: the same backbone, heads, prompts and number of threads.

    python benchmarks/peers.py --heads embedded --prompts recipes/quickstart/prompts.jsonl --vllm .venv-engines/bin/python --table

Headstart and transformers are measured by what `headstart bench` is made of, with its arguments: decoding without drafts, the heads in
fixed trees and with adaptive trees and proposers; transformers' `generate`, its prompt lookup and, with --assistant, its assisted decoding.
Then vLLM 0.32 (CPU build), in a process of its own (`peers_vllm.py`): without drafts, and with each of the heads as `headstart export --to
vllm` writes them, in a chain, greedily. Everywhere a batch begins when the one before has ended. Conversations end after the first answer.

Prints JSON, or with --table Markdown: tokens per second, mean acceptance length (tau, and as vLLM counts it), and in how many prompts the
whole text is that of the same engine without drafts, and that of Headstart without drafts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.cli import arguments
from headstart.cli.decoding import Subject, bench_plan, bench_subject
from headstart.cli.failures import guarded
from headstart.heads.backbone.embedded import resolve
from headstart.inference.bench.bench import Plan, compare, those_that_fit
from headstart.inference.bench.judging import FAULT
from headstart.inference.bench.systems import AR, AR_TRANSFORMERS, HeadstartSystem
from headstart.inference.bench.verdict import name, sentence
from headstart.inference.generate import SpeculativeModel
from headstart.inference.serving.export.export import Request, export
from headstart.inference.serving.verification import vllm
from headstart.support.dtypes import NAMES
from headstart.support.errors import UserError, cause
from headstart.support.files import require_writable, write_json
from headstart.support.hub import find_folder

DRIVER = Path(__file__).with_name("peers_vllm.py")
VERSION = "0.32."
MAKE = "`make engines` makes one in .venv-engines"
PLAIN = "without drafts"
TREE, SAMPLED = (12, 4), (24, 8)
"""Nodes and width of fixed trees, greedy and sampled."""
NOT_MEASURED = f"vLLM was not measured: give --vllm PYTHON, of an environment with the CPU build of vLLM 0.32 ({MAKE})"
COUNTS = (
    "tau: tokens per forward pass, the model's own included. Acceptance as vLLM counts it: over passes with drafts, those past the end of a"
    " text included. Identical: prompts whose whole text is the same."
)
"""Below the table."""
DIFFERING = ("prompts_differing", "prompts_differing_from_headstart")
"""From the same engine without drafts (or, of that, from its first batch size), and from Headstart without drafts."""
TITLES = ["temperature", "batch", "engine", "system", "tokens/s", "x Headstart without drafts", "tau", "as vLLM counts it",
          "identical: to the engine without drafts", "to Headstart without drafts"]  # fmt: skip
Row = dict[str, Any]


def main(args: argparse.Namespace) -> int:
    """Measure, print and write the report; the exit status is 1 if Headstart's tokens differ where they must not."""
    require_writable("--json", args.json)
    if args.vllm is not None:
        require_vllm(args)
    subject, plan = bench_subject(args), bench_plan(args)
    asked = [replace(prompt, later=()) for prompt in subject.prompts]
    prompts = [prompt.ids_T.tolist() for prompt in those_that_fit(asked, plan, subject.heads[0][1].backbone)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {} if args.vllm is None else vllm_jobs(args, subject, prompts, Path(folder))   # first: it refuses what vLLM does not serve
        report = compare(subject.heads, asked, plan, None, subject.others) | {"backbone": subject.name, "prompts_files": args.prompts}
        rows, versions = own_rows(report), {"vllm": None}
        if jobs:
            texts = own_texts(subject, prompts, plan)
            served = {one: run(args, one, job) for one, job in jobs.items()}
            rows += vllm_rows(served, texts)
            versions = {"vllm": served[PLAIN]["version"]}
    report |= {"vllm_eager": args.vllm_eager} if jobs else {}
    report |= {"versions": report["versions"] | versions, "peers": sorted(rows, key=lambda row: (row["temperature"], row["batch"]))}
    write_json(args.json, report)
    print(table(report) if args.table else json.dumps(report, indent=2))
    print(sentence(report) if jobs else f"{sentence(report)}\n{NOT_MEASURED}", file=sys.stderr)
    return 1 if report["verdict"] == FAULT else 0


def own_rows(report: Row) -> list[Row]:
    """What `bench` measured: Headstart and transformers."""
    rows = []
    for one in (*report["baselines"], *report["results"]):
        theirs = "head" not in one and name(one) != AR
        from_headstart = one["prompts_differing_from_headstart"] if theirs else one["prompts_differing"]
        rows.append(
            {
                "engine": "transformers" if theirs else "headstart",
                "system": system(one),
                **{key: one[key] for key in ("temperature", "batch", "tokens", "tokens_per_second", "tau", "prompts_differing")},
                "mean_acceptance_length": one.get("mean_acceptance_length"),
                "prompts_differing_from_headstart": from_headstart,
            }
        )
    return rows


def system(row: Row) -> str:
    """How an entry of a report of `bench` is called here."""
    if name(row) in (AR, AR_TRANSFORMERS):
        return PLAIN
    if "head" not in row:
        return name(row)
    return f"{name(row)} of {row['nodes']}" if row["nodes"] else f"{name(row)}, adaptive trees, {row['kind'].replace('+', ' + ')}"


def vllm_rows(served: dict[str, Row], texts: list[list[int]]) -> list[Row]:
    """What vLLM did, by system. ``texts``: Headstart's."""
    rows, first = [], served[PLAIN]["runs"][0]["texts"]
    for title, result in served.items():
        for run, plain in zip(result["runs"], served[PLAIN]["runs"], strict=True):
            tokens, drafts = sum(map(len, run["texts"])), run["counters"].get("num_drafts", 0)
            beside = (first if run is not result["runs"][0] else None) if title == PLAIN else plain["texts"]
            rows.append(
                {
                    "engine": "vllm", "system": title, "temperature": 0.0, "batch": run["batch"], "tokens": tokens,
                    "tokens_per_second": tokens / run["seconds"],
                    "tau": None if drafts else 1.0,
                    "prompts_differing": None if beside is None else differing(run["texts"], beside),
                    "mean_acceptance_length": 1 + run["counters"]["num_accepted_tokens"] / drafts if drafts else None,
                    "prompts_differing_from_headstart": differing(run["texts"], texts),
                }
            )  # fmt: skip
    return rows


def differing(texts: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    """In how many prompts the texts differ."""
    return sum(one != other for one, other in zip(texts, others, strict=True))


def own_texts(subject: Subject, prompts: list[list[int]], plan: Plan) -> list[list[int]]:
    """What Headstart writes without drafts, greedily; in fp32 what all its systems write."""
    import torch

    first, batch = subject.heads[0][1], max(plan.batches)
    system = HeadstartSystem(AR, SpeculativeModel(first.backbone, capture=first.capture))
    groups = [[torch.tensor(prompt) for prompt in prompts[i : i + batch]] for i in range(0, len(prompts), batch)]
    written = [system.write(group, plan.settings(0.0), [0] * len(group)) for group in groups]
    return [row_T.tolist() for one in written for row_T in one.sequences]


def require_vllm(args: argparse.Namespace) -> None:
    """Raise UserError unless --vllm is the Python of an environment with vLLM 0.32, and the other arguments are what vLLM can do."""
    remedy = f"give the Python of an environment with vLLM 0.32 ({MAKE})"
    if not args.vllm.is_file():
        raise UserError(f"--vllm {args.vllm}: there is no such file; {remedy}")
    command = [str(args.vllm.absolute()), "-I", "-c", "import vllm; print(vllm.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UserError(f"--vllm {args.vllm} cannot be run ({cause(error)}); {remedy}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"--vllm {args.vllm} has no vLLM ({said}); {remedy}")
    version = (done.stdout.split() or ["none"])[-1]
    if not version.startswith(VERSION):
        raise UserError(f"--vllm {args.vllm} has vLLM {version}, and this compares with 0.32; {MAKE}")
    if args.dtype not in NAMES:
        raise UserError(f"vLLM is measured in {', '.join(NAMES)}, not in {args.dtype}; give one of them with --dtype, or leave --vllm out")
    if args.temperature and 0.0 not in args.temperature:
        raise UserError("vLLM is measured at temperature 0, where texts can be compared; add 0 to --temperature, or leave --vllm out")
    if args.adapter is not None:
        raise UserError("vLLM is measured without an adapter; leave --adapter or --vllm out")


def vllm_jobs(args: argparse.Namespace, subject: Subject, prompts: list[list[int]], folder: Path) -> dict[str, Row]:
    """The jobs of `peers_vllm.py` by system; heads are exported below ``folder``. Raises UserError for heads that vLLM does not serve."""
    backbone, heads = subject.heads[0][1].backbone, {}
    for number, path in enumerate(args.heads or []):
        exported = export(Request(path, "vllm", folder / f"heads-{number}", args.backbone))
        if exported["adapter"] is not None:
            raise UserError(f"{path} come with an adapter on the backbone, and vLLM is measured without; leave them or --vllm out")
        config = vllm.speculative_config(folder / f"heads-{number}", args.depth or exported["depth"])
        config["model"] = str(vllm.fitting(Path(config["model"]), folder / f"wide-{number}"))
        heads[f"{path}, {config['method']}, chain of {config['num_speculative_tokens']}"] = config
    longest = max((config["num_speculative_tokens"] for config in heads.values()), default=0)
    room = max(map(len, prompts)) + args.max_new_tokens + longest + 1
    end = backbone.model.generation_config.eos_token_id
    job = {
        "model": str(vllm.fitting(find_folder(resolve(subject.name), "backbone"), folder / "wide")),
        "prompts": prompts,
        "new_tokens": args.max_new_tokens,
        "stop": [end] if isinstance(end, int) else end or [],
        "dtype": NAMES[args.dtype],
        "batches": list(bench_plan(args).batches),
        "max_model_len": min(room, backbone.max_positions or room),
        "eager": args.vllm_eager,
    }
    return {title: job | {"heads": config} for title, config in {PLAIN: None, **heads}.items()}


def run(args: argparse.Namespace, title: str, job: Row) -> Row:
    """Run a job in vLLM. Raises UserError if vLLM fails, or runs on another number of threads."""
    print(f"vLLM, {title}: batch {', '.join(map(str, job['batches']))}", file=sys.stderr)
    result = vllm.run_driver(args.vllm.absolute(), DRIVER, job, args.threads)
    if result["threads"] != args.threads:
        raise UserError(f"vLLM ran on {result['threads']} threads, not on {args.threads}; unset what sets them in the environment")
    return result


def table(report: Row) -> str:
    """The report as Markdown."""
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items() if version)
    about = (
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to"
        f" {report['max_new_tokens']} tokens each; {versions}" + (", which compiles nothing" if report.get("vllm_eager") else "")
    )
    plain = {(row["temperature"], row["batch"]): row for row in report["peers"] if (row["engine"], row["system"]) == ("headstart", PLAIN)}
    lines = [TITLES, ["---:", "---:", "---", "---", *["---:"] * 6]]
    for row in report["peers"]:
        ratio = row["tokens_per_second"] / plain[row["temperature"], row["batch"]]["tokens_per_second"]
        lengths = [cell(row[key], ".2f") for key in ("tau", "mean_acceptance_length")]
        same = [f"{report['prompts'] - row[key]} of {report['prompts']}" if row[key] is not None else "" for key in DIFFERING]
        system = [f"{row['temperature']:g}", str(row["batch"]), row["engine"], row["system"]]
        lines.append([*system, f"{row['tokens_per_second']:.1f}", f"{ratio:.2f}", *lengths, *same])
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([about, rows, COUNTS, *([] if report["versions"]["vllm"] else [NOT_MEASURED])])


def cell(value: float | None, form: str) -> str:
    """A number, or nothing."""
    return "" if value is None else format(value, form)


def parser() -> argparse.ArgumentParser:
    """`bench`'s arguments, with other defaults, and vLLM's."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    arguments.add_measured(options)
    options.add_argument("--vllm", type=Path, metavar="PYTHON", help="the Python of an environment with vLLM 0.32 (default: without vLLM)")
    options.add_argument("--vllm-eager", action="store_true", help="have vLLM compile nothing")
    options.add_argument("--table", action="store_true", help="print Markdown instead of JSON")
    options.set_defaults(also_fixed_tree=True, prompt_lookup=True, threads=1, dtype="fp32")
    return options


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with the proposers and fixed trees of `make demo`, and batch sizes 1 and 8, where none are given."""
    args = parser().parse_args(words)
    args.propose = args.propose or ["suffix", "recycling"]
    args.batch_size = args.batch_size or [1, 8]
    if args.nodes is None and args.width is None:
        args.nodes, args.width = TREE
        args.sampled_nodes, args.sampled_width = args.sampled_nodes or SAMPLED[0], args.sampled_width or SAMPLED[1]
    return args


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(parsed())))
