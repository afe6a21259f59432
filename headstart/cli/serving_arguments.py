"""Arguments and examples of the commands around serving; `headstart.cli.main` lists the commands. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from headstart.cli.arguments import add_template_arguments
from headstart.cli.numbers import DEPTH, THREADS, count

PUSH_EXAMPLE = """examples:
  headstart push out/eagle3 user/llama-3.1-8b-eagle3 --bench report.json
  headstart push out/eagle3 user/llama-3.1-8b-eagle3 --dry-run out/card"""

IMPORT_EXAMPLE = """examples:
  headstart import yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --backbone meta-llama/Llama-3.1-8B-Instruct --out out/eagle3
  headstart import downloads/medusa --backbone lmsys/vicuna-7b-v1.3 --out out/medusa --prompts prompts.jsonl"""

VERIFY_EXAMPLE = """examples:
  headstart verify out/served --heads out/quickstart/eagle3
  headstart verify out/served --heads out/quickstart/eagle3 --engine vllm --prompts prompts.jsonl --json verdict.json
  headstart verify someone/eagle3-heads --backbone meta-llama/Llama-3.1-8B-Instruct"""

EXPORT_EXAMPLE = "example: headstart export --heads out/quickstart/eagle3 --to vllm --out out/served"


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``headstart export``."""
    parser.add_argument("--heads", required=True, metavar="DIR|HUB_ID", help="heads trained by Headstart")
    parser.add_argument(
        "--to", required=True, metavar="FORMAT",
        help="an engine (vllm, sglang, trtllm, tgi, transformers), whose layout follows from the heads' kind, or a layout by name: eagle3, "
        "eagle, dflash, dflash-hf, speculators, medusa, mlp-speculator, mtp-stitch, draft-model",
    )  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--backbone", metavar="M", help="the backbone, folder or hub id, as engines shall load it (default: as trained)")
    parser.add_argument(
        "--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="dtype of the written weights (default: auto, as stored)"
    )
    parser.add_argument(
        "--adapter", choices=("merge", "keep"), default="merge",
        help="a backbone adapter that the heads were trained with: write the backbone with the adapter merged into it beside the heads "
        "(merge, the default), or the adapter as it is (keep)",
    )  # fmt: skip
    parser.add_argument(
        "--quantize", choices=("int8", "fp8"), help="store the decoder layers' linear weights in 8 bits, as compressed-tensors does"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a report")


def add_push(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``headstart push``."""
    parser.add_argument("heads", type=Path, metavar="DIR", help="trained heads, or a folder that headstart export wrote")
    parser.add_argument("repo", metavar="REPO", help="repository on the hub, USER/NAME; created if needed")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--dry-run", type=Path, metavar="OUT", help="write the folder there, a new one, and upload nothing")
    parser.add_argument(
        "--bench", type=Path, action="extend", nargs="+", metavar="FILE", help="reports of headstart bench --json, for the model card"
    )
    parser.add_argument("--base-model", metavar="HUB_ID", help="the backbone's hub id, if the heads were trained on a local copy")


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``headstart import``."""
    formats = "EAGLE-1 to 3, Medusa, Hydra, speculators, SpecForge, DFlash, DSpark, Domino, IBM accelerators, MTP, draft models"
    parser.add_argument("heads", metavar="DIR|HUB_ID", help=f"the heads: {formats}")
    parser.add_argument("--backbone", required=True, metavar="M", help="the backbone of their training: folder, hub id or 'embedded'")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder for the Headstart checkpoint")
    about = "what layer ids mean: states after j layers, or outputs of layer j (default: what the layout says; where it is open, measured)"
    parser.add_argument("--counting", choices=("hs", "layer"), help=about)
    parser.add_argument("--depth", type=DEPTH, metavar="K", help="tokens to draft (default: as the files say, or the method's)")
    own = "the embedded backbone's own, or texts that the backbone writes itself"
    parser.add_argument("--prompts", metavar="FILE", help=f"prompts to measure acceptance on, as for bench (default: {own})")
    add_template_arguments(parser)
    parser.add_argument("--max-new-tokens", type=count(2), default=48, metavar="N", help="tokens to generate after each prompt (48)")
    parser.add_argument("--adapter", metavar="DIR", help="PEFT adapter to put on the backbone, as for Medusa-2")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the backbone's repository; read it first")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16", "int8", "int4"), default="auto",
                        help="of the backbone (auto: as saved; on a CPU fp32, or bf16 if saved so and the CPU has instructions for it)")
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``headstart verify``."""
    parser.add_argument("folder", metavar="DIR", help="heads to verify: an exported folder, a checkpoint of Headstart, or a hub id")
    parser.add_argument("--backbone", metavar="M", help="folder, hub id or 'embedded' (default: the one recorded)")
    parser.add_argument(
        "--heads", metavar="DIR",
        help="the heads that were exported (default: those that DIR records or is; if there are none, the files are judged by how much of "
        "the backbone's own text they draft)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", choices=("reference", "vllm", "transformers"), default="reference",
        help="whose drafts to compare with Headstart's (reference, the default: a plain reading of the files)",
    )  # fmt: skip
    parser.add_argument("--prompts", action="extend", nargs="+", metavar="FILE", help="prompts, as for bench (default: some texts)")
    add_template_arguments(parser)
    parser.add_argument("--limit", type=count(1), default=8, metavar="N", help="the first N prompts of each file only (8)")
    parser.add_argument("--prompt-tokens", type=count(2), default=48, metavar="N", help="most tokens of a prompt, its last ones (48)")
    parser.add_argument("--max-new-tokens", type=count(2), default=32, metavar="N", help="tokens to generate after each prompt (32)")
    parser.add_argument("--depth", type=DEPTH, metavar="K", help="tokens per draft (default: as many as the heads draft)")
    parser.add_argument("--allow-finetuned", action="store_true", help="allow a fine-tune of the backbone the heads were trained on")
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON too")
