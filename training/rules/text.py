"""The text of a recipe: a header that says what it trains, on what and how, then its values."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.support.text import gigabytes
from headstart.training.recipe.yaml_text import dump_yaml
from headstart.training.rules.propose import Proposal

WIDTH = 136
NOT_MEASURED = "tau not measured here, and no figure of others is known for this pair."
SEVERAL = {8: "--config_file recipes/accelerate/eight_gpus.yaml"}
SHARDED = "--config_file recipes/accelerate/fsdp2.yaml"
Tree = Mapping[str, Any]


def recipe_text(proposal: Proposal, path: str, *, values: Tree, extends: Sequence[str] = (), expect: str = "", schema: str = "") -> str:
    """Return the file: ``values`` under a header. ``path`` is the recipe's own, as commands name it; ``schema`` that of the JSON schema."""
    lines = [f"# yaml-language-server: $schema={schema}"] if schema else []
    lines += [*header(proposal, path, expect)]
    if extends:
        lines.append(f"extends: [{', '.join(extends)}]")
    return "\n".join([*lines, *_sections(values, _comments(proposal))]) + "\n"


def header(proposal: Proposal, path: str, expect: str) -> list[str]:
    """Return the header's lines."""
    facts, tree = proposal.facts, proposal.tree
    sizes = f"{facts.size}, {facts.layers} layers of {facts.width:,}, vocabulary {facts.vocab:,}"
    title = f"{proposal.method.title} ({proposal.method.paper}) for {facts.path}: {sizes}."
    fields = [
        ("On", _hardware(proposal)),
        *_figures(proposal, path),
        ("Data", _data(proposal)),
        ("Expect", expect or NOT_MEASURED),
        ("Out", f"{tree['save']['dir']}: heads, a log, the resolved recipe."),
        *([("Assumed", "; ".join(proposal.assumed) + ".")] if proposal.assumed else []),
        *([("Only", f"{facts.refusal}.")] if facts.refusal is not None else []),
    ]
    lines = [f"# {line}" for line in textwrap.wrap(title, WIDTH)] + ["#"]
    for name, text in fields:
        lines += [f"# {name if i == 0 else '':<9} {line}" for i, line in enumerate(textwrap.wrap(text, WIDTH - 10))]
    return [*lines, f"# Command   {train_command(proposal)} {path}", "#", *(f"#     {line}" for line in next_commands(proposal, path))]


def train_command(proposal: Proposal) -> str:
    """Return the beginning of the command that trains; several processes need a clone's launcher script."""
    processes = proposal.machine.processes
    if processes == 1:
        return "headstart train"
    settings = SHARDED if proposal.tree["backbone"].get("shard") else SEVERAL.get(processes, f"--num_processes {processes}")
    return f"accelerate launch {settings} train_heads.py"


def _hardware(proposal: Proposal) -> str:
    machine, tree = proposal.machine, proposal.tree
    rows, length = tree["train"]["micro_batch"], tree["data"]["max_length"]
    gpus = f"{machine.processes} GPU{'s' * (machine.processes > 1)}"
    place = f"{gpus} of {round(machine.memory / 1e9)} GB" if machine.accelerator else machine.name
    sharded = ", the backbone's layers sharded over them" if tree["backbone"].get("shard") else ""
    return f"{place}{sharded}; {rows} row{'s' * (rows > 1)} of {length:,} tokens per forward."


def _figures(proposal: Proposal, path: str) -> list[tuple[str, str]]:
    """Return memory, disk and time as headstart plan computes them, or the command that does."""
    figures, steps = proposal.figures, proposal.tree["train"].get("steps")
    command = f"headstart plan {path}{_machine_arguments(proposal)}"
    if figures is None:
        return [("Takes", f"not computed yet: {command} says memory, disk and time.")]
    takes = f"{round(figures.peak / 1e9)} GB of memory at most, {gigabytes(figures.heads)} of disk for the heads and " \
        f"{gigabytes(figures.states)} for the states to resume from."  # fmt: skip
    if figures.hours is None:
        return [("Takes", f"{takes} headstart plan times its steps where model, data and hardware are.")]
    span = f"{figures.hours:,.0f} hours" if figures.hours >= 2 else f"{60 * figures.hours:,.0f} minutes"
    how = f"an estimate, not measured: full rows at 40 % of the peak of an H100 ({command})"
    return [("Takes", takes), ("Time", f"at most {span} for {steps:,} steps; {how}.")]


def _machine_arguments(proposal: Proposal) -> str:
    machine = proposal.machine
    gpus = f" --gpus {machine.processes} --memory {round(machine.memory / 1e9)} --tflops 989" if machine.accelerator else ""
    return f"{gpus} --no-calibration"


def _data(proposal: Proposal) -> str:
    about = proposal.preset.about
    if proposal.preset.own:
        return f"{about}."
    writer = "Its answers are other models'" if proposal.facts.chat else "It was written by people"
    return f"{about}, downloaded on the first run. {writer}: heads accept more on the backbone's own, which the first command below writes."


def next_commands(proposal: Proposal, path: str) -> list[str]:
    """Return the commands from regeneration to serving."""
    out, name = proposal.tree["save"]["dir"], f"data/{proposal.facts.name}.jsonl"
    reset = {"format": "auto", "column": "null", "limit": "null", "eval": "null", "eval_rows": "64"}
    given = {} if proposal.preset.own else proposal.preset.data  # answers have the rows of the prompts
    changes = " ".join(f"data.{key}={value}" for key, value in reset.items() if given.get(key) is not None)
    only = proposal.preset.data["train"]
    one = f" data.train={only[0]['path']}" if isinstance(only, list) else ""
    server, asked = "regenerate.endpoint=http://localhost:8000/v1", "features" in proposal.own
    served = [f"headstart serve-features {path}   # prints the line of the server of hidden states; --run starts it"] if asked else []
    return [
        f"headstart regenerate {path} regenerate.out={name}{one}" + (f" {server}" if asked else f"   # {server} asks a server"),
        f"headstart plan {path} data.train={name} {changes}".rstrip() + _machine_arguments(proposal),
        *served,
        f"{train_command(proposal)} {path} data.train={name} {changes}".rstrip(),
        *([] if asked else [f"headstart bench --heads {out} --prompts prompts.jsonl"]),
        f"headstart export --heads {out} --to vllm --out {out}-vllm   # prints the line that serves them",
    ]


def _comments(proposal: Proposal) -> dict[str, str]:
    """Return remarks by ``section.key``."""
    facts, train = proposal.facts, proposal.tree["train"]
    return {
        "drafter.draft_vocab_size": f"of {facts.vocab:,}: the most frequent in the answers",
        "train.steps": f"of {train['batch_size']} rows",
        "train.epochs": "passes over the data",
        "backbone.shard": "over the processes: the weights do not fit one",
        "features.endpoint": "of headstart serve-features; null: transformers runs the model here",
    }


def _sections(values: Tree, comments: Mapping[str, str]) -> list[str]:
    lines = []
    for section, keys in values.items():
        if not isinstance(keys, Mapping):
            lines += dump_yaml({section: keys}).rstrip().splitlines()
            continue
        lines.append(f"{section}:")
        for key, value in keys.items():
            first, *rest = dump_yaml({key: value}).rstrip().splitlines()
            remark = comments.get(f"{section}.{key}")
            lines += [f"  {first}" if remark is None else f"  {first:<29} # {remark}", *(f"  {line}" for line in rest)]
    return lines
