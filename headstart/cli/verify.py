"""``headstart verify``; libraries are imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.arguments import DEPTH, THREADS, add_template_arguments, count

if TYPE_CHECKING:
    from headstart.heads.backbone.backbone import Backbone
    from headstart.heads.backbone.features import Features

VERIFY_EXAMPLE = """examples:
  headstart verify out/served --heads out/quickstart/eagle3
  headstart verify out/served --heads out/quickstart/eagle3 --engine vllm --prompts prompts.jsonl --json verdict.json
  headstart verify out/served --features out/features   # a backbone that does not run here
  headstart verify someone/eagle3-heads --backbone meta-llama/Llama-3.1-8B-Instruct"""
TEXTS = (
    "Once upon a time there was a little girl who lived near a river with her grandmother. One day",
    "The capital of France is Paris. The capital of Italy is",
    'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n',
    "Q: A farmer has 12 cows and buys 7 more. How many cows does he have now?\nA:",
    "Dear Ms Walker,\n\nthank you for your letter of 3 May. I am glad to tell you that",
    "To make tea, boil water, put the leaves into a pot, and",
)
"""Prompts where none are given."""
RANDOM = 6
"""Number of random prompts for a backbone without a tokenizer."""


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
    stored = (
        "draft on the held-out rows of a feature cache (headstart cache) without running the backbone: too large, or train and export only"
    )
    parser.add_argument("--features", metavar="DIR", help=stored)
    parser.add_argument("--prompts", action="extend", nargs="+", metavar="FILE", help="prompts, as for bench (default: some texts)")
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
    from headstart.inference.serving.verify.verify import Check, recorded
    from headstart.inference.serving.verify.verify import verify as examine
    from headstart.support.errors import UserError
    from headstart.support.files import require_writable, write_json
    from headstart.support.hub import find_folder

    require_writable("--json", args.json)
    quiet()
    folder = find_folder(args.folder, "heads")
    exported, served = recorded(folder)
    heads, name = args.heads or exported, args.backbone or served
    if name is None and heads is None:
        raise UserError(f"{args.folder} does not say what its backbone is; give --backbone, or the heads that were exported with --heads")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    name = backbone_name(name, [heads] if heads else [])
    backbone, texts, prompts = _running(args, name, heads) if args.features is None else _stored(args, name)
    verdict = examine(
        Check(
            folder=folder,
            backbone=backbone,
            heads=None if heads == str(folder) else heads,
            engine=args.engine,
            prompts=prompts,
            new_tokens=args.max_new_tokens,
            depth=args.depth,
            end_tokens=() if texts else _end_tokens(backbone),
            allow_finetuned=args.allow_finetuned,
            texts=texts,
            where=args.features or "",
        )
    )
    print("\n".join(verdict.lines()))
    write_json(args.json, verdict.report())
    return 0 if verdict.equal else 1


Subject = tuple["Backbone", tuple["Features", ...], list[list[int]]]
"""The backbone, stored texts with their features, if any, and the prompts."""


def _running(args: argparse.Namespace, name: str, heads: str | None) -> Subject:
    """Return the backbone to run. Raises UserError if it cannot verify trees."""
    from headstart.heads.backbone.backbone import load_backbone
    from headstart.support.errors import UserError

    backbone = load_backbone(name, dtype="fp32", device="cpu")
    if backbone.refusal is not None:
        raise UserError(f"{backbone.refusal}: give a feature cache with --features, and drafts are compared on its states")
    return backbone, (), _prompts(args, backbone, heads)


def _stored(args: argparse.Namespace, name: str) -> Subject:
    """Return the backbone without its layers, the stored texts, and of each the first half at most as a prompt."""
    from headstart.heads.backbone.head_only import load_head_only
    from headstart.support.errors import UserError
    from headstart.training.features.cached import stored_texts

    if args.prompts or args.engine != "reference":
        odd = "--prompts" if args.prompts else f"--engine {args.engine}"
        raise UserError(f"{odd} takes the backbone, which --features does not run; leave either out")
    backbone = load_head_only(name, dtype="fp32", device="cpu")
    texts = tuple(stored_texts(args.features, backbone)[: args.limit])
    return backbone, texts, [one.tokens_BT[0, : min(args.prompt_tokens, one.tokens_BT.shape[1] // 2)].tolist() for one in texts]


def _prompts(args: argparse.Namespace, backbone: Backbone, heads: str | None) -> list[list[int]]:
    """Return the token ids of the prompts, cut to fit. Without files: some texts, or random tokens if there is no tokenizer."""
    import torch

    from headstart.cli.loading import chat_settings_of
    from headstart.heads.backbone.backbone import load_tokenizer
    from headstart.support.chat.prompts import Prompter, read_prompts
    from headstart.support.errors import UserError

    room = min(args.prompt_tokens, (backbone.max_positions or 1 << 31) - args.max_new_tokens - 16)
    if room < 2:
        limit = f"the backbone's {backbone.max_positions} positions"
        raise UserError(f"--max-new-tokens {args.max_new_tokens} leaves no room for prompts in {limit}; lower it")
    settings = chat_settings_of([heads] if heads else [], args.template_arg, _end_tokens(backbone))
    try:
        tokenizer = load_tokenizer(backbone.name)
        if not tokenizer(TEXTS[0])["input_ids"]:  # transformers gives an empty one for folders of some families that have none
            raise UserError(f"{backbone.name} has no tokenizer for --prompts; save its tokenizer in that folder")
        prompter = Prompter(tokenizer, settings=settings)
    except UserError:
        if args.prompts:
            raise
        noise = torch.Generator().manual_seed(0)
        return torch.randint(backbone.vocab, (RANDOM, min(room, 12)), generator=noise).tolist()
    if args.prompts:
        found: list[Any] = [prompt.ids_T for file in args.prompts for prompt in read_prompts(Path(file), prompter, args.limit)]
    else:
        found = [prompter.begin(text) for text in TEXTS]
    return [ids_T[-room:].tolist() for ids_T in found]


def _end_tokens(backbone: Backbone) -> tuple[int, ...]:
    from headstart.heads.backbone.end_tokens import end_tokens

    return end_tokens(backbone.model.generation_config)
