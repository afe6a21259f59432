"""Headstart beside transformers, vLLM, llama.cpp, OpenVINO and economize: one model, its heads, prompts and threads, in one race.

    python benchmarks/peers.py                                                    # the heads that ship for SmolLM2, prompts of seven tasks
    python benchmarks/peers.py --heads DIR --prompts FILE --vllm .venv-engines/bin/python --llama out/llama --html peers.html

Measured by what `headstart bench` is made of, and with its arguments: transformers' `generate` and its prompt lookup, Headstart without
drafts, with the heads alone, and with n-gram drafts too. With --vllm vLLM 0.32 (CPU build, `make engines`), without drafts and with each
of the heads as `headstart export --to vllm` writes them, in a chain. With --llama llama.cpp (node-llama-cpp, `npm install --prefix FOLDER
node-llama-cpp`), where the model is a GGUF file. With --openvino OpenVINO GenAI (docs/serving.md says what its environment holds), without
drafts and with each of the heads in a chain, greedily and one prompt at a time; export's own lines convert model and heads. With
--economize economize 0.3 (`pip install economize`), without drafts and with each of the heads, as for vLLM. All decode batch by batch in
turn; a batch begins when the one before has ended. Conversations end after the first answer. Temperatures 0 and 1, batches of 1 and 8 and
96 tokens, unless others are given.

Prints Markdown: acceptance (tau), tokens per second after each text's first token and with prefill, in how many prompts the whole text is
that of the same engine without drafts, and that of Headstart without drafts; then the speed by task. --json writes the report of `bench`,
in which the other engines are further baselines; --html a page of it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers_engines import DRIVERS, ECONOMIZE, LLAMA, OPENVINO, VLLM, Engine, job

from headstart.cli.bench import Subject, add_measured, bench_plan, bench_subject
from headstart.cli.loading import backbone_name
from headstart.cli.main import Guard
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.inference.bench.bench import Plan, compare, those_that_fit
from headstart.inference.bench.judging import FAULT, name, sentence
from headstart.inference.bench.systems import AR
from headstart.inference.bench.table import report_page, rows_at, settings_of
from headstart.serving.export import Request, export
from headstart.serving.verify import vllm
from headstart.support.devices import NAMES, dtype_name
from headstart.support.errors import UserError, cause
from headstart.support.files import require_writable, write_json, write_text
from headstart.support.hub import find_folder, resolve

ROOT = Path(__file__).parents[1]
HEADS, PROMPTS = "smollm2", ROOT / "recipes" / "smollm2" / "measure.jsonl"
GGUF = Path("out/real/SmolLM2-135M-Instruct.Q4_1.gguf")
"""Their model, where `tests/real/fetch.py` has fetched it; else the hub's."""
VERSION = "0.32."
MAKE = "`make engines` makes one in .venv-engines"
INSTALL = "`npm install --prefix FOLDER node-llama-cpp` installs it"
TITLES = ("T", "batch", "system", "tau", "tokens/s", "x Headstart without drafts", "with prefill", "same text as its engine without drafts",
          "as Headstart without drafts")  # fmt: skip
COUNTS = (
    "tau: tokens per forward pass, the model's own included. tokens/s: after each text's first token, over all prompts. Same text: prompts"
    " whose whole text is the same; llama.cpp computes with the quantised weights, and in bf16 engines round differently."
)
Row = dict[str, Any]


def main(args: argparse.Namespace) -> int:
    """Measure, print and write the report; the exit status is 1 if Headstart's tokens differ where they must not."""
    require_writable("--json", args.json)
    require_writable("--html", args.html)
    require_engines(args)
    subject, plan = bench_subject(args), bench_plan(args)
    asked = [replace(prompt, later=()) for prompt in subject.prompts]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        longest = max(len(prompt.ids_T) for prompt in those_that_fit(asked, plan, subject.heads[0][1].backbone)[0])
        engines = [stack.enter_context(one) for one in engines_of(args, subject, plan, longest, Path(folder))]
        report = compare(subject.heads, asked, plan, None, [*subject.others, *engines])
        versions: dict[str, str | None] = dict.fromkeys(DRIVERS) | {one.job["engine"]: one.version for one in engines}
    report |= {"backbone": subject.name, "prompts_files": args.prompts, "versions": report["versions"] | versions}
    write_json(args.json, report)
    if args.html is not None:
        write_text(args.html, report_page(report))
    print(markdown(report))
    print(sentence(report), file=sys.stderr)
    return 1 if report["verdict"] == FAULT else 0


def engines_of(args: argparse.Namespace, subject: Subject, plan: Plan, longest: int, folder: Path) -> Iterator[Engine]:
    """Yield the other engines, none loaded yet; what they read is written below ``folder``. Raises UserError for what one cannot serve."""
    import torch

    backbone, threads = subject.heads[0][1].backbone, torch.get_num_threads()
    room = longest + plan.max_new_tokens + 1
    if args.vllm is not None:
        heads = served_heads(args, folder)
        room_v = room + max((config["num_speculative_tokens"] for config in heads.values()), default=0)
        common: Row = {
            "engine": VLLM, "dtype": NAMES[dtype_name(backbone.dtype)], "rows": max(plan.batches), "eager": args.vllm_eager,
            "max_model_len": min(room_v, backbone.max_positions or room_v),
        }  # fmt: skip
        model, command = safetensors(subject, folder), [str(args.vllm.absolute()), "-I", str(DRIVERS[VLLM])]
        plain = Engine("vLLM", backbone, command, job(model, backbone, threads, heads=None, **common))
        yield plain
        for title, config in heads.items():
            yield Engine(title, backbone, command, job(model, backbone, threads, heads=config, **common), plain)
    if args.llama is not None:
        gguf = find_gguf(subject.name)
        assert gguf is not None
        given: Row = {"engine": LLAMA, "rows": max(plan.batches), "max_model_len": room}
        command = [args.node, str(DRIVERS[LLAMA]), str(args.llama.absolute())]
        yield Engine(LLAMA, backbone, command, job(gguf.path.absolute(), backbone, threads, **given))
    if args.economize is not None:
        command = [str(args.economize.absolute()), str(DRIVERS[ECONOMIZE])]
        shared = {"engine": ECONOMIZE, "dtype": NAMES[dtype_name(backbone.dtype)]}
        plain = Engine(ECONOMIZE, backbone, command, job(safetensors(subject, folder), backbone, threads, heads=None, **shared))
        yield plain
        for number, path in enumerate(args.heads):
            exported = export(Request(path, "vllm", folder / f"economize-{number}", args.backbone))
            depth = args.depth or exported["depth"]
            given = job(safetensors(subject, folder), backbone, threads, heads=str(folder / f"economize-{number}"), depth=depth, **shared)
            yield Engine(f"{ECONOMIZE} with {path}, chain of {depth}", backbone, command, given, plain)
    if args.openvino is not None:
        precision = {"fp32": "f32", "bf16": "bf16"}[dtype_name(backbone.dtype)]
        command, shared = [str(args.openvino.absolute()), "-I", str(DRIVERS[OPENVINO])], {"engine": OPENVINO, "precision": precision}
        model, found = converted(args, subject, folder)
        plain = Engine("OpenVINO", backbone, command, job(model, backbone, threads, heads=None, **shared))
        yield plain
        for title, (heads_folder, depth) in found.items():
            given = job(model, backbone, threads, heads=str(heads_folder), depth=depth, **shared)
            yield Engine(title, backbone, command, given, plain)


def converted(args: argparse.Namespace, subject: Subject, folder: Path) -> tuple[Path, dict[str, tuple[Path, int]]]:
    """The model and each of the heads as OpenVINO reads them, with the tokens of a chain. Raises UserError for what it cannot."""
    model = safetensors(subject, folder)
    if find_gguf(subject.name) is not None:
        load_tokenizer(subject.name).save_pretrained(model)
    found, environment = {}, os.environ | {"PATH": f"{args.openvino.absolute().parent}:{os.environ['PATH']}"}
    for number, path in enumerate(args.heads):
        report = export(Request(path, OPENVINO, folder / f"openvino-{number}", str(model)))
        lines = report["launch"][OPENVINO]["line"].split(" && ")[:3]  # the model, the heads, the layers that they read
        if (folder / "backbone-ov").exists():
            lines = lines[1:]
        for line in lines:
            done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise UserError(f"{line.split()[0]} ended with status {done.returncode}: {' '.join(done.stderr.splitlines()[-2:])[:400]}")
        place, depth = (folder / "heads-ov").rename(folder / f"heads-ov-{number}"), args.depth or report["depth"]
        found[f"OpenVINO with {path}, chain of {depth}"] = (place, depth)
    return folder / "backbone-ov", found


def served_heads(args: argparse.Namespace, folder: Path) -> dict[str, Row]:
    """vLLM's speculative configuration of each of the heads, by the name of the system. Raises UserError for heads that it cannot serve."""
    found = {}
    for number, path in enumerate(args.heads):
        exported = export(Request(path, "vllm", folder / f"heads-{number}", args.backbone))
        if exported["adapter"] is not None:
            raise UserError(f"{path} come with an adapter on the backbone, and vLLM is measured without; leave them or --vllm out")
        config = vllm.speculative_config(folder / f"heads-{number}", args.depth or exported["depth"])
        config["model"] = str(Path(config["model"]).resolve())
        found[f"vLLM with {path}, chain of {config['num_speculative_tokens']}"] = config
    return found


def safetensors(subject: Subject, folder: Path) -> Path:
    """A folder with the backbone for vLLM: its own, or its weights written there if it is a GGUF file."""
    if find_gguf(subject.name) is None:
        return find_folder(resolve(subject.name), "backbone").resolve()
    subject.heads[0][1].backbone.model.save_pretrained(folder / "model")
    return folder / "model"


def require_engines(args: argparse.Namespace) -> None:
    """Raise UserError unless --vllm and --llama are what they are to be, and the other arguments what these engines can do."""
    engines = [option for option in ("--vllm", "--llama", "--openvino", "--economize") if getattr(args, option[2:]) is not None]
    if args.openvino is not None and (any(args.temperature) or not args.openvino.is_file() or args.dtype not in ("fp32", "bf16")):
        raise UserError("--openvino is the Python of an environment with openvino-genai, greedy: --temperature 0, --dtype fp32 or bf16")
    if engines and args.adapter is not None:
        raise UserError(f"other engines are measured without an adapter; leave --adapter or {' and '.join(engines)} out")
    if args.vllm is not None:
        require_vllm(args.vllm)
        if args.dtype not in ("auto", *NAMES):
            rule = f"not in {args.dtype}; give one of them with --dtype, or leave --vllm out"
            raise UserError(f"vLLM is measured in {', '.join(NAMES)}, {rule}")
    if args.llama is not None:
        if not (args.llama / "node_modules" / "node-llama-cpp" / "package.json").is_file():
            raise UserError(f"--llama {args.llama} has no node-llama-cpp; {INSTALL}")
        model = backbone_name(args.backbone, args.heads)
        if find_gguf(model) is None:
            raise UserError(f"llama.cpp reads GGUF files, and the model is {model}; leave --llama out, or give heads on a GGUF file")


def require_vllm(python: Path) -> None:
    """Raise UserError unless it is the Python of an environment with vLLM 0.32."""
    remedy = f"give the Python of an environment with vLLM 0.32 ({MAKE})"
    if not python.is_file():
        raise UserError(f"--vllm {python}: there is no such file; {remedy}")
    try:
        command = [str(python.absolute()), "-I", "-c", "import vllm; print(vllm.__version__)"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UserError(f"--vllm {python} cannot be run ({cause(error)}); {remedy}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"--vllm {python} has no vLLM ({said}); {remedy}")
    version = (done.stdout.split() or ["none"])[-1]
    if not version.startswith(VERSION):
        raise UserError(f"--vllm {python} has vLLM {version}, and this compares with 0.32; {MAKE}")


def markdown(report: Row) -> str:
    """The report as Markdown: all systems, then speeds by task."""
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items() if version)
    about = (
        f"{report['backbone']}, {report['dtype']}, {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to"
        f" {report['max_new_tokens']} tokens each; {versions}"
    )
    missing = [engine for engine in DRIVERS if report["versions"][engine] is None]
    lines, tasks = [TITLES, ("---:", "---:", "---", *["---:"] * 6)], [*report["tasks"]]
    by_task: list[Sequence[str]] = [("T", "batch", "system, tokens/s", *tasks), ("---:", "---:", "---", *["---:"] * len(tasks))]
    for temperature, batch in settings_of(report):
        rows = list(rows_at(report, temperature, batch))
        plain = next(row for row in rows if name(row) == AR)["decode_tokens_per_second"]
        for row in rows:
            setting, speed = (f"{temperature:g}", str(batch), name(row)), row["decode_tokens_per_second"]
            ratio = speed / plain if speed and plain else None
            own = "head" in row or name(row) == AR
            differing = (None, row["prompts_differing"]) if own else (row["prompts_differing"], row["prompts_differing_from_headstart"])
            same = ["" if one is None else f"{report['prompts'] - one} of {report['prompts']}" for one in differing]
            lines.append((*setting, f"{row['tau']:.2f}", cell(speed), cell(ratio, ".2f"), cell(row["tokens_per_second"]), *same))
            by_task.append((*setting, *(cell(row["tasks"][task]["decode_tokens_per_second"]) for task in tasks)))
    tables = ["\n".join(f"| {' | '.join(line)} |" for line in one) for one in ([lines, by_task] if len(tasks) > 1 else [lines])]
    return "\n\n".join([about, *tables, COUNTS, *([f"Not measured: {', '.join(missing)}"] if missing else [])])


def cell(value: float | None, form: str = ".1f") -> str:
    """A number, or nothing."""
    return "" if value is None else format(value, form)


def parser() -> argparse.ArgumentParser:
    """`bench`'s arguments, with other defaults, and those of the other engines."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add_measured(options, prompts_required=False)
    options.add_argument("--html", type=Path, metavar="FILE", help="write a page of it")
    options.add_argument("--vllm", type=Path, metavar="PYTHON", help="the Python of an environment with vLLM 0.32 (default: without vLLM)")
    options.add_argument("--vllm-eager", action="store_true", help="have vLLM compile nothing")
    options.add_argument("--llama", type=Path, metavar="FOLDER", help="where node-llama-cpp is installed (default: without llama.cpp)")
    about = "the Python of an environment with openvino-genai and optimum-intel (default: without OpenVINO)"
    options.add_argument("--openvino", type=Path, metavar="PYTHON", help=about)
    about = "the Python of an environment with economize (default: without it)"
    options.add_argument("--economize", type=Path, metavar="PYTHON", help=about)
    options.add_argument("--node", default="node", metavar="PROGRAM", help="what runs it (node)")
    options.set_defaults(include_heads_only=True, prompt_lookup=True, max_new_tokens=96)
    return options


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with defaults for those that may be given several times."""
    args = parser().parse_args(words)
    if args.heads is None and args.backbone is None and GGUF.is_file():
        args.backbone = str(GGUF)
    args.heads, args.prompts = args.heads or [HEADS], args.prompts or [str(PROMPTS)]
    args.propose = args.propose or ["suffix", "recycling"]
    args.temperature, args.batch_size = args.temperature or [0.0, 1.0], args.batch_size or [1, 8]
    args.prompt_lookup = 1 in args.batch_size
    return args


if __name__ == "__main__":
    with Guard() as guard:
        guard.status = main(parsed())
    sys.exit(guard.status)
