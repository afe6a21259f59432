"""Do imported heads draft what the trainer's own files say?

    python benchmarks/import_peer.py HEADS --backbone MODEL --prompts prompts.jsonl [--rounds other.jsonl]

HEADS is a folder that another trainer wrote, such as one of speculators. It is imported, and the drafts of the imported heads are compared,
token by token, with those that the reference engine reads from HEADS itself, which shares no code with the heads. Prompts are the first
tokens of each row's ``ids`` or ``text``. ``--rounds`` compares with a third decoder: JSON lines of ``ids`` (the prompt), ``text`` (what
follows) and ``rounds`` (the drafts kept in each). The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.inference.generate import load
from headstart.inference.serving.importing import Wishes, import_heads
from headstart.inference.serving.layouts.files import read_files
from headstart.inference.serving.layouts.reader.base import Target
from headstart.inference.serving.verify import decode
from headstart.inference.serving.verify.drafts import EngineSettings, Transcript, acceptance_rate_per_position, mean_acceptance_length, tau
from headstart.support.jsonl import read_jsonl


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", metavar="HEADS")
    parser.add_argument("--backbone", required=True, metavar="MODEL")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=40, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--depth", type=int, default=5, metavar="K")
    parser.add_argument("--rounds", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = load_backbone(args.backbone, dtype="fp32", device="cpu")
    prompts = _prompts(args)
    settings = EngineSettings(args.depth, args.new_tokens, _ends(backbone))
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "imported"
        report = import_heads(args.heads, args.backbone, out, lambda: backbone, Wishes(new_tokens=16))
        ours = decode.headstart_drafts(load(out, backbone), prompts, settings)
    theirs = decode.reference_drafts(decode.read_heads(read_files(args.heads), backbone), Target(backbone.model), prompts, settings)
    for who, transcripts in (("imported", ours), (report["layout"], theirs)):
        print(f"{who}: {_figures(transcripts)}")
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    print(f"drafts and texts equal, token by token: {same} of {len(ours)}")
    agree = args.rounds is None or _agree(ours, args.rounds)
    return 0 if same == len(ours) and agree else 1


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    """Read the prompts; a row's text is encoded with the beginning-of-text token before it."""
    tokenizer, found = load_tokenizer(args.backbone), []
    for _, row in read_jsonl(args.prompts):
        ids = row.get("ids")
        if ids is None:
            ids = tokenizer(row["text"])["input_ids"]
            ids = ids if tokenizer.bos_token_id in (None, *ids[:1]) else [tokenizer.bos_token_id, *ids]
        if len(ids) >= args.prompt_tokens:
            found.append(list(ids[: args.prompt_tokens]))
    return found[: args.limit]


def _ends(backbone: Backbone) -> tuple[int, ...]:
    ends: Any = backbone.model.generation_config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def _figures(transcripts: Sequence[Transcript]) -> str:
    rates = " ".join(f"{rate:.4f}" for rate in acceptance_rate_per_position(transcripts))
    passes = sum(len(one.rounds) for one in transcripts)
    kept, written = mean_acceptance_length(transcripts), tau(transcripts)
    return f"mean acceptance length {kept:.4f}, tau {written:.4f}, {passes} passes, per position {rates}"


def _agree(ours: Sequence[Transcript], file: Path) -> bool:
    """Compare with another decoder's rounds of the same prompts."""
    rows = {tuple(row["ids"]): row for _, row in read_jsonl(file)}
    shared = [one for one in ours if one.prompt in rows]
    texts = sum(list(one.written) == rows[one.prompt]["text"] for one in shared)
    rounds = sum([each.kept for each in one.rounds] == rows[one.prompt]["rounds"] for one in shared)
    passes = sum(len(rows[one.prompt]["rounds"]) for one in shared)
    print(f"{file.name}: {texts} of {len(shared)} texts equal, {rounds} with equal rounds ({passes} passes)")
    return bool(shared) and texts == rounds == len(shared)


if __name__ == "__main__":
    sys.exit(main())
