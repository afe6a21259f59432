"""Load tokenizer, backbone and heads as a command's arguments say."""

from __future__ import annotations

import argparse
import gc

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.backbone.end_tokens import read_end_tokens
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import chat_settings, read_metadata
from headstart.heads.draft_model import load_draft_model
from headstart.inference.bench.prompts import Prompter
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.sources.proposer import Proposer
from headstart.support.chat.settings import ChatSettings
from headstart.support.errors import UserError
from headstart.training.recipe.yaml_text import parse_yaml


def quiet() -> None:
    """Silence transformers' warnings and progress bars; errors are still shown."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def backbone_name(asked: str | None, heads: list[str]) -> str:
    """Return the requested backbone, or the one the heads were trained on."""
    if asked:
        return asked
    trained_on = {path: str(read_metadata(path)[1]["backbone"]) for path in heads}
    if not trained_on:
        raise UserError("no model named; give --heads DIR, or --backbone PATH for autoregressive decoding")
    (first, backbone), *others = trained_on.items()
    for path, other in others:
        if other != backbone:
            raise UserError(f"{first} was trained on {backbone} and {path} on {other}; compare heads of one, or say which with --backbone")
    if not backbone:
        raise UserError(f"{first} does not say which backbone it was trained on; give --backbone PATH")
    return backbone


def prompter_of(name: str, heads: list[str], args: argparse.Namespace, style: bool | None = None, prompt_tokens: int = 64) -> Prompter:
    """Load the backbone's tokenizer, and make prompts as the heads were trained on; see `Prompter` for ``style`` and ``prompt_tokens``."""
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=args.trust_remote_code)
        ends = read_end_tokens(name, trust_remote_code=args.trust_remote_code)
    except UserError as error:
        hint = "" if args.backbone else "; the heads name it as what they were trained on, if it is elsewhere say so with --backbone"
        raise UserError(f"{error}{hint}") from None
    settings = chat_settings_of(heads, args.template_arg, ends)
    tokenizer.chat_template = settings.template_of(tokenizer)
    return Prompter(tokenizer, style, prompt_tokens, settings)


def chat_settings_of(heads: list[str], changes: list[str] | None, ends: tuple[int, ...]) -> ChatSettings:
    """Return how conversations become tokens: as for the heads' training, with variables of --template-arg instead of theirs."""
    known = {path: chat_settings(read_metadata(path)[1]) for path in heads}
    found = next(iter(known.values()), ChatSettings())
    for path, other in known.items():
        if (other.template, other.variables) != (found.template, found.variables):
            raise UserError(f"{path} was trained with another chat template than {heads[0]}; measure them one at a time")
    variables = dict(found.variables)
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--template-arg {change!r} is no variable; write KEY=VALUE, as in enable_thinking=false")
        variables[key] = parse_yaml(value, f"--template-arg {key}")
    return ChatSettings(found.template, variables, ends)


def backbone_of(name: str, args: argparse.Namespace) -> Backbone:
    """Load the frozen backbone, with --adapter, and set the number of CPU threads."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    backbone = load_backbone(name, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if args.adapter is not None:
        backbone.attach(args.adapter)
    return backbone


def heads_of(path: str | None, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> SpeculativeModel:
    """Load the heads at ``path`` with the requested proposers; None: proposers only, or autoregressive decoding."""
    if args.draft_sink is not None and args.draft_window is None:
        raise UserError(f"--draft-sink {args.draft_sink} goes with --draft-window N, without which the KV cache is not limited; add it")
    proposers: list[str | Proposer | Drafter] = list(args.propose or [])
    if args.draft_model:
        how = {"tokenizer": tokenizer, "dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
        proposers.append(load_draft_model(args.draft_model, backbone, **how))
    how = {"tokenizer": tokenizer, "allow_finetuned": args.allow_finetuned, "capture": args.capture}
    heads = load(path, backbone, proposers=proposers, early_exit=args.early_exit or None, **how)
    if args.draft_window is not None or args.draft_offload:
        heads.limit(window=args.draft_window, sink=4 if args.draft_sink is None else args.draft_sink, offload=args.draft_offload)
    gc.freeze()   # else a full collection, of every object of the libraries, stops decoding for 0.2 s now and then
    return heads


def drafts_untrained(args: argparse.Namespace) -> bool:
    """Return True if a source that drafts without training was requested."""
    return bool(args.propose or args.draft_model or args.early_exit)


def tree_of(nodes: int | None, width: int | None, depth: int | None) -> TreeSize:
    """Return a fixed tree shape if any part of it was requested, else ``auto``."""
    if nodes is None and width is None and depth is None:
        return "auto"
    usual = TreeShape()
    return TreeShape(nodes or usual.nodes, width or usual.width, depth)
