"""What the commands that decode share: tokenizer, backbone, heads and settings as a command's arguments say."""

import argparse
import gc
import sys

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

from headstart.chat.prompts import Prompter, require_prompts
from headstart.chat.template import ChatSettings
from headstart.cli.arguments import NO_PROPOSERS
from headstart.heads.backbone.adapter import find_adapter
from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.backbone.model_config import WITH_IMAGES, end_tokens, read_end_tokens, read_sizes
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import chat_settings, read_metadata, require_adapter, require_sizes
from headstart.heads.methods import find_drafter
from headstart.inference.engine.proposer import Proposer
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings
from headstart.support.devices import holding
from headstart.support.errors import UserError, naming
from headstart.support.json_text import parse_json
from headstart.support.text import read_text, visible


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
    _require_files(args)
    try:
        for path in heads:
            require_sizes(path, name, trust_remote_code=args.trust_remote_code)
        tokenizer = load_tokenizer(name, trust_remote_code=args.trust_remote_code)
        ends = read_end_tokens(name, trust_remote_code=args.trust_remote_code)
    except UserError as error:
        hint = "" if args.backbone else "; the heads name it as what they were trained on, if it is elsewhere say so with --backbone"
        raise UserError(f"{error}{hint}") from None
    settings = chat_settings_of(heads, args.template_arg, ends)
    tokenizer.chat_template = settings.template_of(tokenizer)
    of_rows = bool(vars(args).get("images"))
    if not args.image and not of_rows:
        return Prompter(tokenizer, style, prompt_tokens, settings)
    from headstart.chat.images import ImagePrompter, read_image  # here, since few need it
    from headstart.heads.backbone.features import image_reader

    images = tuple(read_image(name)[0] for name in args.image or ())
    reader = image_reader(name, tokenizer, trust_remote_code=args.trust_remote_code)
    prompter = ImagePrompter(tokenizer, style, prompt_tokens, settings, of_rows, images, reader=reader)
    if of_rows and not prompter.templated:
        raise UserError("--images asks with a chat template, and there is none, or --raw; give prompts of text, or --image FILE")
    return prompter


def _require_files(args: argparse.Namespace) -> None:
    """Raise UserError for mistakes that files show, before the first tokenizer or weights are read."""
    given = vars(args)
    for file in given.get("prompts") or ():
        require_prompts(file)
    for what, model in (("draft model", args.draft_model), ("--assistant", given.get("assistant"))):
        with naming(what):
            if model:
                read_sizes(model, trust_remote_code=args.trust_remote_code)
    if args.adapter is not None:
        find_adapter(args.adapter)
    if given.get("json_schema") is not None:
        parse_json(read_text("--json-schema", args.json_schema), args.json_schema)


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
        from headstart.training.recipe.yaml_text import parse_yaml  # here, since few need it

        variables[key] = parse_yaml(value, f"--template-arg {key}")
    return ChatSettings(found.template, variables, ends)


def backbone_of(name: str, args: argparse.Namespace) -> Backbone:
    """Load the frozen backbone, with --adapter, and set the number of CPU threads."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with holding(WITH_IMAGES, bool(vars(args).get("image") or vars(args).get("images"))):
        backbone = load_backbone(name, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if args.adapter is not None:
        backbone.attach(args.adapter)
    return backbone


def heads_of(path: str | None, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> SpeculativeModel:
    """Load the heads at ``path`` with the requested proposers; None: proposers only, or autoregressive decoding."""
    if args.head_module is not None:
        find_drafter(args.head_module)
    if (sink := args.num_sink_tokens) is not None and args.draft_window is None:
        raise UserError(f"--num-sink-tokens {sink} needs --draft-window N, without which the KV cache is not limited; add it")
    adaptive = path is not None and backbone.device.type == "cpu" and tree_of(args.nodes, args.width, args.depth) == "auto"
    named = args.propose or (vars(args).get("usual", []) if adaptive else [])
    proposers: list[str | Proposer | Drafter] = [name for name in named if name != NO_PROPOSERS]
    if args.draft_model:
        from headstart.heads.draft_model import load_draft_model  # here, since few need it

        how = {"tokenizer": tokenizer, "dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
        proposers.append(load_draft_model(args.draft_model, backbone, **how))
    how = {"tokenizer": tokenizer, "allow_finetuned": args.allow_finetuned, "capture": args.capture}
    heads = load(path, backbone, proposers=proposers, early_exit=args.early_exit or None, **how)
    if args.draft_window is not None or args.offload_draft_kv:
        heads.limit(window=args.draft_window, sink=4 if sink is None else sink, offload=args.offload_draft_kv)
    gc.freeze()  # else a full collection, of every object of the libraries, stops decoding for 0.2 s now and then
    return heads


def drafts_untrained(args: argparse.Namespace) -> bool:
    """Return True if a source that drafts without training was requested."""
    return bool({*(args.propose or ())} - {NO_PROPOSERS} or args.draft_model or args.early_exit)


def tree_of(nodes: int | None, width: int | None, depth: int | None) -> TreeSize:
    """Return a fixed tree shape if any part of it was requested, else ``auto``."""
    if nodes is None and width is None and depth is None:
        return "auto"
    usual = TreeShape()
    return TreeShape(nodes or usual.nodes, width or usual.width, depth)


def drafting_heads(args: argparse.Namespace, backbone: Backbone) -> str | None:
    """Return the heads to draft with, if any; with --no-draft their adapter is put on the backbone nevertheless."""
    if args.no_draft and args.heads is not None:
        require_adapter(args.heads, backbone, args.allow_finetuned)
    return None if args.no_draft else args.heads


def model_of(args: argparse.Namespace, style: bool | None) -> tuple[str, Prompter]:
    """Return the name of the backbone for commands that take one set of heads, and what makes its prompts."""
    trained = [args.heads] if args.heads else []
    name = backbone_name(args.backbone, trained)
    return name, prompter_of(name, trained, args, style)


def settings_of(args: argparse.Namespace, stop: tuple[str, ...] = ()) -> Settings:
    """Decoding settings of the commands that write one text at a time."""
    return Settings(args.max_new_tokens, args.temperature, args.top_k, args.top_p, stop, tree_of(args.nodes, args.width, args.depth))


def grammar_of(args: argparse.Namespace, backbone: Backbone, tokenizer: PreTrainedTokenizerBase) -> LogitsProcessorList:
    """The processor that --json-schema or --regex asks for, if any."""
    if args.json_schema is None and args.regex is None:
        return LogitsProcessorList()
    from headstart.inference.grammar import grammar

    schema = None if args.json_schema is None else read_text("--json-schema", args.json_schema)
    ends = end_tokens(backbone.model.generation_config)
    if not ends:
        raise UserError(f"{backbone.name} names no token that ends a text (eos_token_id of its generation config); a grammar needs one")
    return LogitsProcessorList([grammar(tokenizer, json_schema=schema, regex=args.regex, end_tokens=ends)])


class SafeStreamer(TextStreamer):
    """Streams text to standard output; on a terminal, control characters are written out."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(visible(text) if sys.stdout.isatty() else text, stream_end)
