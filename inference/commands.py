"""What ``headstart generate`` and ``headstart bench`` do, given their parsed arguments (see `cli`)."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

from headstart.heads.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.checkpoint import read_card, recipe_template
from headstart.heads.errors import UserError
from headstart.inference.bench import Plan, compare, require_room, table, verdict
from headstart.inference.heads import Heads, load
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.inference.prompts import Prompter, read_prompts
from headstart.inference.tree import TreeShape


def bench(given: argparse.Namespace) -> int:
    """The report to the screen and the file; 1 if tokens differ that must not."""
    _require_writable(given.json)
    _quiet()
    name = _backbone_name(given.backbone, given.heads)
    tokenizer = _tokenizer(name, given.heads, given)
    prompts = read_prompts(given.prompts, Prompter(tokenizer, given.chat, given.prompt_tokens), given.limit)
    backbone = _backbone(name, given)
    heads = [(path, _heads(path, backbone, tokenizer, given)) for path in given.heads]
    sampled = TreeShape(given.sampled_nodes or given.nodes, given.sampled_width or given.width, given.depth)
    plan = Plan(given.max_new_tokens, tuple(dict.fromkeys(given.temperature or [0.0])), given.seed, _tree(given), sampled)
    report = compare(heads, prompts, plan) | {"backbone": name, "prompts_file": given.prompts}
    _write_json(given.json, report)
    fine, sentence = verdict(report)
    print(f"{table(report)}\n\n{sentence}")
    return 0 if fine else 1


def generate(given: argparse.Namespace) -> int:
    """The text to the screen as it is accepted, how it came about to the standard error and the file."""
    _require_writable(given.json)
    text = _prompt(given.prompt, given.file)
    _quiet()
    trained = [given.heads] if given.heads else []
    name = _backbone_name(given.backbone, trained)
    tokenizer = _tokenizer(name, trained, given)
    prompt_T = Prompter(tokenizer, given.chat).ask(text)
    if not len(prompt_T):
        raise UserError("the prompt is empty; give some text")
    backbone = _backbone(name, given)
    require_room("the prompt", len(prompt_T), given.max_new_tokens, backbone)
    heads = _heads(None if given.plain else given.heads, backbone, tokenizer, given)
    report = {"backbone": name, "heads": None if given.plain else given.heads, **_write(heads, prompt_T, tokenizer, given)}
    _write_json(given.json, report)
    drawn = f", seed {report['seed']}" if given.temperature > 0 else ""
    print(
        f"tau {report['tau']:.2f} (tokens per backbone pass, its own included), {report['tokens']} tokens,"
        f" {report['tokens_per_second']:.1f} tokens/s{drawn}",
        file=sys.stderr,
    )
    return 0


def _write(heads: Heads, prompt_T: torch.Tensor, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace) -> dict[str, Any]:
    """Stream the text; what there is to report of it."""
    settings = Settings(given.max_new_tokens, given.temperature, given.top_k, given.top_p, tuple(given.stop or ()), _tree(given))
    seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    streamer = TextStreamer(tokenizer, skip_prompt=not given.echo, skip_special_tokens=True)
    start = time.perf_counter()
    output = continue_text(heads, prompt_T, settings, seed, streamer=streamer, tokenizer=tokenizer)
    seconds = time.perf_counter() - start
    tally = Tally()
    tally.add(output, prompt_T)
    return {
        "temperature": given.temperature,
        "seed": seed if given.temperature > 0 else None,
        "text": tokenizer.decode(output.sequences[0, len(prompt_T) :], skip_special_tokens=True),
        "prompt_tokens": len(prompt_T),
        "tokens": tally.tokens,
        "passes": tally.passes,
        "tau": tally.tau,
        "acceptance_per_depth": tally.acceptance_per_depth,
        "seconds": seconds,
        "tokens_per_second": tally.tokens / seconds,
        **tally.milliseconds(),
    }


def _prompt(argument: str | None, file: str | None) -> str:
    """The prompt: the argument, a file, or what comes in; the last line break of a file or a pipe is its own, not the prompt's."""
    if argument is not None and file is not None:
        raise UserError("a prompt and --file were both given; give one")
    text = argument
    try:
        if text is None:
            text = (sys.stdin.read() if file is None else Path(file).read_text(encoding="utf-8")).removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the prompt cannot be read from {file or 'the standard input'}: {error}") from None
    if not text:
        raise UserError("the prompt is empty; give it as an argument, with --file, or on the standard input")
    return text


def _quiet() -> None:
    """Results on the screen, not the library's remarks; errors stay."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _backbone_name(asked: str | None, heads: list[str]) -> str:
    """What was asked for, or else what the heads were trained on."""
    if asked:
        return asked
    trained_on = {path: str(read_card(path)[1]["backbone"]) for path in heads}
    if not trained_on:
        raise UserError("no model named; give --heads DIR, or --backbone PATH for plain decoding")
    (first, backbone), *others = trained_on.items()
    for path, other in others:
        if other != backbone:
            raise UserError(f"{first} was trained on {backbone} and {path} on {other}; compare heads of one, or say which with --backbone")
    if not backbone:
        raise UserError(f"{first} does not say which backbone it was trained on; give --backbone PATH")
    return backbone


def _tokenizer(name: str, heads: list[str], given: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The backbone's; with the chat template of the heads' recipe if that brought one for a tokenizer that has none."""
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=given.trust_remote_code)
        if tokenizer.chat_template is None and heads:
            tokenizer.chat_template = recipe_template(read_card(heads[0])[1])
        return tokenizer
    except UserError as error:
        hint = "" if given.backbone else "; the heads name it as what they were trained on, if it is elsewhere say so with --backbone"
        raise UserError(f"{error}{hint}") from None


def _backbone(name: str, given: argparse.Namespace) -> Backbone:
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    return load_backbone(name, dtype=given.dtype, trust_remote_code=given.trust_remote_code)


def _heads(path: str | None, backbone: Backbone, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace) -> Heads:
    return load(path, backbone, tokenizer=tokenizer, other_backbone=given.other_backbone)


def _tree(given: argparse.Namespace) -> TreeShape:
    return TreeShape(nodes=given.nodes, width=given.width, depth=given.depth)


def _require_writable(file: Path | None) -> None:
    """Before the work, not after it."""
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"--json {file} is a folder; give the name of a file")
    above = next(folder for folder in file.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--json {file} cannot be written: {above} is not a folder that you may write to")


def _write_json(file: Path | None, report: dict[str, Any]) -> None:
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".report-") as folder:
        whole = Path(folder) / file.name
        whole.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(whole, file)
