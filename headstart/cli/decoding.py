"""What ``headstart generate``, ``chat``, ``bench`` and ``tune`` do, given their parsed arguments (see `arguments`)."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from headstart.cli.chat import Chat, converse, require_template
from headstart.cli.loading import backbone_name, backbone_of, drafts_untrained, heads_of, quiet, tokenizer_of, tree_of
from headstart.inference.bench.bench import Plan, compare, require_room
from headstart.inference.bench.curve import cost_curve
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.bench.report import page
from headstart.inference.bench.systems import LOOKUP, LOOKUP_TOKENS, TransformersSystem, load_assistant
from headstart.inference.bench.table import table, verdict
from headstart.inference.bench.tune import NODES, TunePlan, contexts_of, summary
from headstart.inference.bench.tune import tune as measure_machine
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import Settings, Tally, continue_text
from headstart.inference.speculation.tuned import key, write_tuned
from headstart.support.errors import UserError
from headstart.support.files import require_writable, write_json, write_text

UNTRAINED = "untrained"
"""The name in reports of proposers without heads."""


def bench(given: argparse.Namespace) -> int:
    """The report to the screen and the files; 1 if tokens differ that must not."""
    require_writable("--json", given.json)
    require_writable("--html", given.html)
    batches = tuple(dict.fromkeys(given.batch or [1]))
    if (given.prompt_lookup or given.assistant) and 1 not in batches:
        one = "transformers' assisted decoding (--prompt-lookup, --assistant) takes one text at a time"
        raise UserError(f"{one}, and --batch-size is {' '.join(map(str, batches))}; add 1 to --batch-size or leave them out")
    trained = given.heads or []
    if not trained and not drafts_untrained(given):
        raise UserError("nothing to measure; give --heads DIR, or what drafts without training: --propose, --draft-model, --early-exit")
    quiet()
    name = backbone_name(given.backbone, trained)
    tokenizer = tokenizer_of(name, trained, given)
    prompter = Prompter(tokenizer, given.chat, given.prompt_tokens)
    prompts = [prompt for file in given.prompts for prompt in read_prompts(file, prompter, given.limit, given.per_task)]
    backbone = backbone_of(name, given)
    heads = [(path or UNTRAINED, heads_of(path, backbone, tokenizer, given)) for path in trained or [None]]
    others = [TransformersSystem(LOOKUP, backbone, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})] if given.prompt_lookup else []
    if given.assistant:
        assistant = load_assistant(given.assistant, backbone, given.trust_remote_code)
        others.append(TransformersSystem(f"assistant {given.assistant}", backbone, {"assistant_model": assistant}))
    tree = tree_of(given.nodes, given.width, given.depth)
    sampled = tree_of(given.sampled_nodes or given.nodes, given.sampled_width or given.width, given.depth)
    plan = Plan(
        max_new_tokens=given.max_new_tokens,
        temperatures=tuple(dict.fromkeys(given.temperature or [0.0])),
        seed=given.seed,
        tree=None if given.also_fixed_tree else tree,
        sampled=None if given.also_fixed_tree else sampled,
        beside=(tree or TreeShape(), sampled or TreeShape()) if given.also_fixed_tree else None,
        batches=batches,
        skip_long=given.skip_long,
    )
    report = compare(heads, prompts, plan, prompter, others) | {"backbone": name, "prompts_files": given.prompts}
    if given.html is not None:
        shortest = min(prompts, key=lambda prompt: len(prompt.ids_T))
        report["costs"] = [{"head": path, "points": cost_curve(one, shortest.ids_T, given.max_new_tokens)} for path, one in heads]
        write_text(given.html, page(report))
    write_json(given.json, report)
    fine, sentence = verdict(report)
    print(f"{table(report)}\n\n{sentence}")
    return 0 if fine else 1


def tune(given: argparse.Namespace) -> int:
    """The cost curve and the worth of scores, into the file that loading the heads reads."""
    require_writable("--json", given.json)
    quiet()
    name, tokenizer = _model(given)
    backbone = backbone_of(name, given)
    heads = heads_of(given.heads, backbone, tokenizer, given)
    prompter = Prompter(tokenizer, given.chat, given.prompt_tokens)
    prompts = [prompt.ids_T for file in given.prompts or [] for prompt in read_prompts(file, prompter, given.limit)]
    for number, prompt_T in enumerate(prompts, 1):
        require_room(f"prompt {number}", len(prompt_T), given.max_new_tokens, backbone)
    nodes = tuple(size for size in NODES if size <= given.most)
    contexts = contexts_of(given.contexts, given.most, backbone)
    plan = TunePlan(tuple(given.rows or (1, 4)), contexts, nodes, max_new_tokens=given.max_new_tokens)
    tuned = measure_machine(heads, prompts, plan, say=lambda line: print(line, file=sys.stderr))
    file = write_tuned(given.heads, backbone, tuned)
    write_json(given.json, {"backbone": name, "heads": given.heads, "machine": key(backbone), **vars(tuned)})
    print(f"{summary(tuned)}\n\nwritten to {file}: heads loaded from there use it on this machine")
    return 0


def generate(given: argparse.Namespace) -> int:
    """The text to the screen as it is accepted, how it came about to the standard error and the file."""
    require_writable("--json", given.json)
    text = _prompt(given.prompt, given.file)
    quiet()
    name, tokenizer = _model(given)
    prompt_T = Prompter(tokenizer, given.chat).ask(text)
    if not len(prompt_T):
        raise UserError("the prompt is empty; give some text")
    backbone = backbone_of(name, given)
    require_room("the prompt", len(prompt_T), given.max_new_tokens, backbone)
    heads = heads_of(None if given.plain else given.heads, backbone, tokenizer, given)
    report = {"backbone": name, "heads": None if given.plain else given.heads, **_write(heads, prompt_T, tokenizer, given)}
    write_json(given.json, report)
    drawn = f", seed {report['seed']}" if given.temperature > 0 else ""
    print(
        f"tau {report['tau']:.2f} (tokens per backbone pass, its own included), {report['tokens']} tokens,"
        f" {report['tokens_per_second']:.1f} tokens/s{drawn}",
        file=sys.stderr,
    )
    return 0


def chat(given: argparse.Namespace) -> int:
    """A conversation on the screen, or from a pipe."""
    require_writable("--json", given.json)
    quiet()
    name, tokenizer = _model(given)
    require_template(tokenizer)
    heads = heads_of(None if given.plain else given.heads, backbone_of(name, given), tokenizer, given)
    seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    talk = Chat(heads, Prompter(tokenizer), _settings(given), seed, given.system)
    converse(talk)
    write_json(given.json, {"backbone": name, "heads": None if given.plain else given.heads, **talk.report()})
    return 0


def _model(given: argparse.Namespace) -> tuple[str, PreTrainedTokenizerBase]:
    """The backbone to decode one text with, by name, and its tokenizer."""
    trained = [given.heads] if given.heads else []
    name = backbone_name(given.backbone, trained)
    return name, tokenizer_of(name, trained, given)


def _settings(given: argparse.Namespace, stop: tuple[str, ...] = ()) -> Settings:
    tree = tree_of(given.nodes, given.width, given.depth)
    return Settings(given.max_new_tokens, given.temperature, given.top_k, given.top_p, stop, tree)


def _write(
    heads: SpeculativeModel, prompt_T: torch.Tensor, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace
) -> dict[str, Any]:
    """Stream the text; what there is to report of it."""
    settings = _settings(given, tuple(given.stop or ()))
    seed = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    streamer = TextStreamer(tokenizer, skip_prompt=not given.echo, skip_special_tokens=True)
    start = time.perf_counter()
    output = continue_text(heads, prompt_T, settings, seed, streamer=streamer, tokenizer=tokenizer)
    seconds = time.perf_counter() - start
    tally = Tally()
    tally.add(output)
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
