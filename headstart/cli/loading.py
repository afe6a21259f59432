"""From a command's arguments to what it works with: tokenizer, backbone, heads."""

from __future__ import annotations

import argparse

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import read_metadata, recipe_template
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.sources.draft_model import load_draft_model
from headstart.inference.sources.early_exit import EarlyExit
from headstart.inference.sources.history import HistoryProposer
from headstart.inference.sources.proposer import Proposer
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer
from headstart.support.errors import UserError


def quiet() -> None:
    """Results on the screen, not the library's remarks; errors stay."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def backbone_name(asked: str | None, heads: list[str]) -> str:
    """What was asked for, or else what the heads were trained on."""
    if asked:
        return asked
    trained_on = {path: str(read_metadata(path)[1]["backbone"]) for path in heads}
    if not trained_on:
        raise UserError("no model named; give --heads DIR, or --backbone PATH for plain decoding")
    (first, backbone), *others = trained_on.items()
    for path, other in others:
        if other != backbone:
            raise UserError(f"{first} was trained on {backbone} and {path} on {other}; compare heads of one, or say which with --backbone")
    if not backbone:
        raise UserError(f"{first} does not say which backbone it was trained on; give --backbone PATH")
    return backbone


def tokenizer_of(name: str, heads: list[str], given: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The backbone's; with the chat template of the heads' recipe if that brought one for a tokenizer that has none."""
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=given.trust_remote_code)
        if tokenizer.chat_template is None and heads:
            tokenizer.chat_template = recipe_template(read_metadata(heads[0])[1])
        return tokenizer
    except UserError as error:
        hint = "" if given.backbone else "; the heads name it as what they were trained on, if it is elsewhere say so with --backbone"
        raise UserError(f"{error}{hint}") from None


def backbone_of(name: str, given: argparse.Namespace) -> Backbone:
    """The backbone, frozen, on the threads asked for."""
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    return load_backbone(name, dtype=given.dtype, trust_remote_code=given.trust_remote_code)


def heads_of(path: str | None, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace) -> SpeculativeModel:
    """The heads at ``path``, with the proposers asked for; None: proposers alone, or plain decoding."""
    proposers = proposers_of(backbone, tokenizer, given)
    heads = load(path, backbone, tokenizer=tokenizer, allow_finetuned=given.allow_finetuned, proposers=proposers)
    if given.draft_window is not None or given.draft_offload:
        heads.limit(window=given.draft_window, sink=given.draft_sink, offload=given.draft_offload)
    return heads


def drafts_untrained(given: argparse.Namespace) -> bool:
    """Whether something was asked for that drafts without training."""
    return bool(given.propose or given.draft_model or given.early_exit)


def proposers_of(backbone: Backbone, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace) -> list[Proposer | Drafter]:
    """Those that draft without training, fresh ones: they remember what they have seen."""
    made = {"suffix": SuffixProposer, "recycling": RecyclingProposer, "memory": HistoryProposer}
    found: list[Proposer | Drafter] = [made[name]() for name in dict.fromkeys(given.propose or [])]
    if given.draft_model:
        how = {"tokenizer": tokenizer, "dtype": given.dtype, "trust_remote_code": given.trust_remote_code}
        found.append(load_draft_model(given.draft_model, backbone, **how))
    if given.early_exit:
        found.append(EarlyExit(backbone, layers=given.early_exit))
    return found


def tree_of(nodes: int | None, width: int | None, depth: int | None) -> TreeShape | None:
    """A fixed shape if any of it was asked for; None: what the decoder chooses."""
    if nodes is None and width is None and depth is None:
        return None
    usual = TreeShape()
    return TreeShape(nodes or usual.nodes, width or usual.width, depth)
