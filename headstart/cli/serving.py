"""The commands for heads that are trained: ``headstart quantize``, ``export``, ``push``, ``import`` and ``verify``.

Libraries are imported when one runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cli.arguments import DEPTH, THREADS, add_precision, add_template_arguments, count
from headstart.support.errors import UserError
from headstart.support.files import write_json

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone

QUANTIZE_EXAMPLE = "example: headstart quantize out/quickstart/eagle3 --prompts prompts.jsonl --out out/quickstart/eagle3-4bit"
EXPORT_EXAMPLE = "example: headstart export --heads out/quickstart/eagle3 --to vllm --out out/served"
PUSH_EXAMPLE = """examples:
  headstart push out/eagle3 user/llama-3.1-8b-eagle3 --bench report.json
  headstart push out/eagle3 user/llama-3.1-8b-eagle3 --dry-run out/card"""
IMPORT_HEADS_EXAMPLE = """examples:
  headstart import yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --backbone meta-llama/Llama-3.1-8B-Instruct --out out/eagle3
  headstart import downloads/medusa --backbone lmsys/vicuna-7b-v1.3 --out out/medusa --prompts prompts.jsonl"""


def _add_measuring(parser: argparse.ArgumentParser, prompts: str) -> None:
    own = "the embedded backbone's own, or texts that the backbone writes itself"
    parser.add_argument("--prompts", metavar="FILE", help=f"{prompts}, as for bench (default: {own})")
    add_template_arguments(parser)
    parser.add_argument("--max-new-tokens", type=count(2), default=48, metavar="N", help="tokens to generate after each prompt (48)")
    parser.add_argument("--adapter", metavar="DIR", help="PEFT adapter to put on the backbone, as for Medusa-2")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the backbone's repository; read it first")
    add_precision(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")


def add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", metavar="DIR|HUB_ID", help="heads trained by Headstart")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder for the rounded heads")
    parser.add_argument("--backbone", metavar="M", help="folder, GGUF file, hub id or 'embedded' (default: that of the heads)")
    parser.add_argument("--limit", type=count(1), default=64, metavar="N", help="the first N prompts of the file only (64)")
    _add_measuring(parser, "prompts to round by and to measure acceptance on")


def quantize(args: argparse.Namespace) -> int:
    """Round heads to 4 bits, and say what they drafted before and after."""
    from headstart.cli.loading import backbone_name, backbone_of, chat_settings_of, quiet
    from headstart.heads.checkpoint import require_sizes
    from headstart.serving.quantize import quantize as rounding
    from headstart.serving.reading import Wishes

    quiet()
    name = backbone_name(args.backbone, [args.heads])
    require_sizes(args.heads, name, trust_remote_code=args.trust_remote_code)
    chat = chat_settings_of([args.heads], args.template_arg, ())
    wishes = Wishes(None, None, args.prompts, args.max_new_tokens, args.trust_remote_code, chat, args.limit)
    report = rounding(args.heads, args.out, lambda: backbone_of(name, args), wishes)
    write_json(args.json, report)
    was, now = report["before"]["tau"], report["after"]["tau"]
    print(f"{len(report['layers'])} layers of 4 bits; on {report['measured_on']}: tau {was:.3f} before, {now:.3f} now")
    print(f"written to {args.out}; decode with: headstart generate --heads {args.out} PROMPT", file=sys.stderr)
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", required=True, metavar="DIR|HUB_ID", help="heads trained by Headstart")
    engines = "an engine (vllm, sglang, trtllm, tgi, transformers, llama.cpp, openvino), whose layout follows from the heads' kind"
    layouts = "eagle3, eagle4, peagle, eagle, dflash, dflash-hf, speculators, medusa, mlp-speculator, mtp-stitch, draft-model"
    parser.add_argument("--to", required=True, metavar="FORMAT", help=f"{engines}, or a layout by name: {layouts}")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--backbone", metavar="M", help="backbone that engines load, a folder or hub id (default: the one of the training)")
    about = "dtype of the written weights (default: auto, as stored)"
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help=about)
    merged = "write the backbone with the adapter merged into it beside the heads (merge, the default), or the adapter as it is (keep)"
    about = f"a backbone adapter that the heads were trained with: {merged}"
    parser.add_argument("--adapter", choices=("merge", "keep"), default="merge", help=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a report")


def export(args: argparse.Namespace) -> int:
    """Write heads in the layout of a serving engine and print how the engine starts with them."""
    from headstart.cli.loading import quiet
    from headstart.serving import export as exporting

    quiet()
    report = exporting.export(exporting.Request(args.heads, args.to, args.out, args.backbone, args.dtype, args.adapter))
    print("\n".join(exporting.lines(report, args.out)))
    write_json(args.json, report)
    return 0


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("heads", type=Path, metavar="DIR", help="trained heads, or a folder that headstart export wrote")
    parser.add_argument("repo", metavar="REPO", help="repository on the hub, USER/NAME; created if needed")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--dry-run", type=Path, metavar="OUT", help="write the folder there, a new one, and upload nothing")
    about = "reports of headstart bench --json, for the model card"
    parser.add_argument("--bench", type=Path, action="extend", nargs="+", metavar="FILE", help=about)
    parser.add_argument("--base-model", metavar="HUB_ID", help="the backbone's hub id, if the heads were trained on a local copy")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="of the weights (auto: as saved)")


def push(args: argparse.Namespace) -> int:
    """Upload heads with a model card, or write the folder that would be uploaded."""
    from headstart.serving.publish import Request, publish

    where = publish(Request(args.heads, args.repo, args.private, args.dry_run, tuple(args.bench or ()), args.base_model, args.dtype))
    print(f"written to {where}, not uploaded; README.md is the model card" if args.dry_run else f"uploaded to {where}")
    return 0


def add_import_heads(parser: argparse.ArgumentParser) -> None:
    formats = "EAGLE-1 to 4, P-EAGLE, Medusa, Hydra, speculators, SpecForge, DFlash, DSpark, Domino, IBM accelerators, MTP, draft models"
    parser.add_argument("heads", metavar="DIR|HUB_ID", help=f"the heads: {formats}")
    parser.add_argument("--backbone", required=True, metavar="M", help="the backbone of their training: folder, hub id or 'embedded'")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder for the Headstart checkpoint")
    about = "what layer ids mean: states after j layers, or outputs of layer j (default: what the layout says; where it is open, measured)"
    parser.add_argument("--counting", choices=("hs", "layer"), help=about)
    parser.add_argument("--depth", type=DEPTH, metavar="K", help="tokens to draft (default: as the files say, or the method's)")
    _add_measuring(parser, "prompts to measure acceptance on")


def import_heads(args: argparse.Namespace) -> int:
    """Import heads that another trainer wrote as a Headstart checkpoint."""
    from headstart.cli.loading import backbone_of, chat_settings_of, quiet
    from headstart.serving import reading as importer

    quiet()
    chat = chat_settings_of([], args.template_arg, ())
    wishes = importer.Wishes(args.counting, args.depth, args.prompts, args.max_new_tokens, args.trust_remote_code, chat)
    report = importer.import_heads(args.heads, args.backbone, args.out, lambda: backbone_of(args.backbone, args), wishes)
    write_json(args.json, report)
    print(f"{args.heads}: {report['layout']}, as {report['kind']} heads of {report['backbone']}")
    for line in [*report["notes"], f"measured on {report['measured_on']}: {report['verdict'][0]}", *report["verdict"][1:]]:
        print(f"  {line}")
    print(f"written to {args.out}; decode with: headstart generate --heads {args.out} PROMPT", file=sys.stderr)
    print(f"train further with: headstart train RECIPE {shlex.join(report['recipe'])}", file=sys.stderr)
    return 0


VERIFY_EXAMPLE = """examples:
  headstart verify out/served --heads out/quickstart/eagle3
  headstart verify out/served --engine vllm --prompts prompts.jsonl --json verdict.json
  headstart verify someone/eagle3-heads --backbone meta-llama/Llama-3.1-8B-Instruct"""


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="heads to verify: an exported folder, a checkpoint of Headstart, or a hub id")
    parser.add_argument("--backbone", metavar="M", help="folder, hub id or 'embedded' (default: the one recorded)")
    about = "the heads that were exported (default: those that DIR records or is; their drafts are stored in it)"
    parser.add_argument("--heads", metavar="DIR", help=about)
    read_back = "reference, the default: none; the files are read back, and the backbone does not run"
    about = f"an engine whose drafts to compare too ({read_back})"
    parser.add_argument("--engine", choices=("reference", "vllm", "llama.cpp"), default="reference", help=about)
    about = "prompts for an engine, as for bench (default: some texts)"
    parser.add_argument("--prompts", action="extend", nargs="+", metavar="FILE", help=about)
    add_template_arguments(parser)
    parser.add_argument("--limit", type=count(1), default=8, metavar="N", help="the first N prompts of each file only (8)")
    parser.add_argument("--prompt-tokens", type=count(2), default=48, metavar="N", help="most tokens of a prompt, its last ones (48)")
    parser.add_argument("--max-new-tokens", type=count(2), default=32, metavar="N", help="tokens to generate after each prompt (32)")
    parser.add_argument("--depth", type=DEPTH, metavar="K", help="tokens per draft (default: as many as the heads draft)")
    parser.add_argument("--allow-finetuned", action="store_true", help="allow a fine-tune of the backbone the heads were trained on")
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON too")


def verify(args: argparse.Namespace) -> int:
    """Verify heads; the exit status is 0 if they agree and 1 if they differ."""
    import torch

    from headstart.cli.loading import backbone_name, quiet
    from headstart.serving.verify.verify import Check, recorded
    from headstart.serving.verify.verify import verify as examine
    from headstart.support.hub import find_folder

    quiet()
    folder = find_folder(args.folder, "heads")
    exported, served, stored = recorded(folder)
    heads, name = args.heads or exported, args.backbone or served
    if name is None and heads is None:
        raise UserError(f"{args.folder} does not say what its backbone is; give --backbone, or the heads that were exported with --heads")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    name = backbone_name(name, [heads] if heads else [])
    backbone, prompts, where = _subject(args, name, heads)
    check = Check(
        folder=folder,
        backbone=backbone,
        heads=None if heads == str(folder) else heads,
        engine=args.engine,
        prompts=prompts,
        new_tokens=args.max_new_tokens,
        depth=args.depth,
        allow_finetuned=args.allow_finetuned,
        where=where,
        stored=None if args.heads else stored,
    )
    verdict = examine(check)
    print("\n".join(verdict.lines()))
    write_json(args.json, verdict.report())
    return 0 if verdict.equal else 1


def _subject(args: argparse.Namespace, name: str, heads: str | None) -> tuple[Backbone, list[list[int]], str]:
    """Return the backbone, for an engine whole and with prompts, cut to fit, and where these are from.

    Raises UserError, before it is loaded for what files show.
    """
    from headstart.chat.prompts import Prompter, read_prompts, require_prompts
    from headstart.cli.loading import chat_settings_of
    from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
    from headstart.heads.backbone.model_config import end_tokens
    from headstart.heads.checkpoint import require_sizes
    from headstart.serving.layouts.layout import load_ends
    from headstart.serving.reading import Wishes, prompts_for
    from headstart.serving.verify.verify import require_engine

    for file in args.prompts or []:
        require_prompts(file)
    if heads:
        require_sizes(heads, name, whole=False)
    if args.engine == "reference":
        if args.prompts:
            raise UserError("--prompts are for an engine (--engine vllm or llama.cpp); without one no text is written")
        return load_ends(name), [], ""
    require_engine(args.engine)
    backbone = load_backbone(name, dtype="fp32", device="cpu")
    if backbone.refusal is not None:
        raise UserError(f"{backbone.refusal}: leave out --engine {args.engine}, and drafts are compared without running the backbone")
    room = min(args.prompt_tokens, (backbone.max_positions or 1 << 31) - args.max_new_tokens - 16)
    if room < 2:
        limit = f"the backbone's {backbone.max_positions} positions"
        raise UserError(f"--max-new-tokens {args.max_new_tokens} leaves no room for prompts in {limit}; lower it")
    settings = chat_settings_of([heads] if heads else [], args.template_arg, end_tokens(backbone.model.generation_config))
    if args.prompts:
        prompter = Prompter(load_tokenizer(backbone.name), settings=settings)
        found = [prompt.ids_T for file in args.prompts for prompt in read_prompts(Path(file), prompter, args.limit)]
        where = f"{len(found)} prompts of {', '.join(args.prompts)}"
    else:
        found, where = prompts_for(backbone, Wishes(chat=settings))
    return backbone, [ids_T[-room:].tolist() for ids_T in found], where
