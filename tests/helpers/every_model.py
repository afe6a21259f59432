"""Every class of transformers' causal and image-text mappings, as a tiny random model: what becomes of it here, in fp32, with text alone
and, of those that read images, with an image in the prompt.

    python tests/helpers/every_model.py                          all that out/every_model.json does not hold yet; about twenty minutes
    python tests/helpers/every_model.py --only llama bloom       these anew
    python tests/helpers/every_model.py --page docs/families.md  the same, then the page's tables are written from what the file holds

It ends with 1 if a class is at fault.

A class ends in trees or in chains, every token equal; with the line that refuses it; or as a fault, which no test allows. Where
transformers itself does not build the tiny model, or does not write with it, nothing is known.
"""

import argparse
import hashlib
import json
import multiprocessing
import re
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from families import Scripted, prompts, random_drafter, say, unpadded
from image_models import IMAGE, LAST, batch_of, image_prompts, image_text_model
from tiny_models import CAUSAL, IMAGE_TEXT, KINDS, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from headstart import Backbone, SpeculativeModel, TreeShape
from headstart.inference.engine.proposer import made
from headstart.support.errors import UserError

ROOT = Path(__file__).parents[2]
LENGTH, LENGTHS = 12, (9, 14, 90)
"""Tokens written; tokens of the prompts, the longest of which passes window, chunk and original length of the tiny models."""
GREEDY: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
SEEN = " with an image"
"""Behind the name of a model type, and of a class."""
EVERY = [*KINDS, *(kind + SEEN for kind in IMAGE_TEXT)]
SECONDS = 300
"""A class that takes longer is a fault."""
TREE = TreeShape(8, 3)


@dataclass(frozen=True)
class Outcome:
    name: str
    """Of the class, or the model type where it was not built."""
    end: str
    """"trees", "chains", "line", "unknown" or "fault"."""
    text: str = ""
    """The line, or transformers' own reason, or what differed."""


def outcome(kind: str) -> Outcome:
    """What becomes of the class of a model type, whose name ``kind`` is."""
    seen, how = kind.endswith(SEEN), GREEDY
    try:
        model = image_text_model(kind.removesuffix(SEEN)) if seen else tiny_model(kind)
    except Exception as error:  # whatever transformers raises
        return Outcome(kind, "unknown", first_line(error))
    name, asked, alone, unknown = type(model).__name__ + SEEN * seen, text_prompts(), [], ""
    try:
        if seen:
            how = GREEDY | {"suppress_tokens": [*range(LAST + 1, IMAGE + 1)]}
            asked = image_prompts(model, how)
        alone = [alone_of(model, inputs, how) for inputs in asked]
    except Exception as error:
        unknown = first_line(error)
    if seen and unknown:
        return Outcome(name, "unknown", unknown)
    try:
        on = Backbone(model)
        if alone:
            same_text(on, asked, alone, how)
    except UserError as error:
        return Outcome(name, "line", str(error))
    except Exception as error:  # a fault of ours, which ends no other class
        return Outcome(name, "fault", first_line(error)) if alone else Outcome(name, "unknown", unknown)
    return Outcome(name, "unknown" if unknown else "chains" if on.no_trees else "trees", unknown)


def text_prompts() -> list[dict[str, Tensor]]:
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in prompts(LENGTHS)]


def first_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300]


def alone_of(model: PreTrainedModel, inputs: dict[str, Tensor], how: dict[str, Any]) -> list[int]:
    """The text of transformers' own greedy generate."""
    text, length = model.generate(**inputs, **how)[0].tolist(), inputs["input_ids"].shape[1]
    assert len(text) == length + LENGTH, f"generate gave {len(text)} tokens for a prompt of {length} and {LENGTH} new ones"
    return text


def same_text(on: Backbone, asked: list[dict[str, Tensor]], alone: list[list[int]], how: dict[str, Any]) -> None:
    """With n-grams and random heads of several kinds, and with drafts that are mostly right: greedy as transformers, sampled as without."""
    random = SpeculativeModel(on, random_drafter("medusa", on, depth=2), proposers=made(["suffix", "recycling"]), capture="off")
    right = SpeculativeModel(on, Scripted(on, alone, "nearly"), proposers=made(["suffix"]), capture="off")
    for seed, (inputs, text) in enumerate(zip(asked, alone, strict=True)):
        tokens, sampled = inputs["input_ids"].shape[1], how | SAMPLED
        for heads, tree in ((random, TREE), (random, "auto"), (right, TREE), (right, "auto")):
            assert say(heads, inputs, tree=tree, **how)[0].tolist() == text, f"greedy, {tokens} tokens, {tree}"
        plain = say(random, inputs, seed=seed, speculate=False, **sampled)
        assert torch.equal(say(random, inputs, seed=seed, tree=TREE, **sampled), plain), f"sampled, {tokens} tokens"
    for kind, settings in (("eagle3", {}), ("block", {"mask_token": 1}), ("hydra", {})):
        heads = SpeculativeModel(on, random_drafter(kind, on, depth=2, **settings), capture="off")
        assert say(heads, asked[0], tree=TREE, **how)[0].tolist() == alone[0], kind
    batch = batch_of(asked[:2])
    assert unpadded(say(right, batch, tree=TREE, **how), batch) == alone[:2], "two rows together"


def in_a_child(kind: str) -> Outcome:
    """The outcome by a process of its own, so that nothing ends the sweep."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(kind, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else Outcome(kind, "fault", f"no answer in {SECONDS} s")
    except EOFError:
        child.join()
        return Outcome(kind, "fault", f"the process ended with {child.exitcode}")
    finally:
        child.kill()
        child.join()


def answer(kind: str, to: Connection) -> None:
    torch.set_num_threads(1)
    to.send(outcome(kind))


def digest() -> str:
    """Of transformers' release and of what decodes: results of another state are made anew."""
    files = sorted(path for folder in ("heads", "inference") for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join([transformers.__version__.encode(), *(path.read_bytes() for path in files)])).hexdigest()[:16]


def sweep(out: Path, only: list[str]) -> dict[str, Outcome]:
    """Model type -> outcome, by what ``out`` holds; every new outcome is written at once, so that a run that was stopped goes on."""
    held = json.loads(out.read_text()) if out.is_file() else {}
    if held.get("of") != digest():
        held = {"of": digest(), "outcomes": {}}
    for kind in only or [kind for kind in EVERY if kind not in held["outcomes"]]:
        held["outcomes"][kind] = asdict(in_a_child(kind))
        print(kind, *held["outcomes"][kind].values(), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(held, indent=1))
    return {kind: Outcome(**fields) for kind, fields in held["outcomes"].items()}


TITLE = "## Every class of transformers"
"""Of the last section of docs/families.md, whose tables are written from here."""
LOOKING = "### With an image in the prompt"
TABLE = re.compile(r"^transformers [\d.]+: .*\n\n\| \| classes \|\n(?:\|.*\n)*", re.M)
"""Of texts, and behind ``LOOKING`` of images."""
MEANS = {
    "trees": "trees, every token equal",
    "chains": "chains, every token equal",
    "line": "one line",
    "unknown": "not known: transformers does not build the tiny model, or does not write with it",
}


def page(before: str, outcomes: dict[str, Outcome]) -> str:
    """docs/families.md with the tables of its last section made anew."""
    seen = {kind: found for kind, found in outcomes.items() if kind.endswith(SEEN)}
    tables = [table({kind: found for kind, found in outcomes.items() if kind not in seen}), table(seen)]
    return TABLE.sub(lambda match: tables.pop(0), before)


def table(outcomes: dict[str, Outcome]) -> str:
    text = f"transformers {transformers.__version__}: {counts(outcomes)}.\n\n| | classes |\n|---|---|\n"
    for end, meaning in MEANS.items():
        groups: dict[str, list[str]] = {}
        for kind in sorted(outcomes):
            if outcomes[kind].end == end:
                groups.setdefault(reason(outcomes[kind]), []).append(outcomes[kind].name.removesuffix(SEEN))
        for why, names in sorted(groups.items()):
            classes = ", ".join(f"`{name}`" for name in sorted(set(names)))
            text += f"| {meaning}{f': {why}' if why else ''} | {classes} |\n"
    return text


def counts(outcomes: dict[str, Outcome]) -> str:
    """How many classes of each mapping are equal."""
    said = []
    for title, kinds in (("causal", CAUSAL), ("image-text", IMAGE_TEXT), ("image-text", [kind + SEEN for kind in IMAGE_TEXT])):
        if ends := [outcomes[kind].end for kind in kinds if kind in outcomes]:
            said.append(f"of {len(ends)} {title} classes {ends.count('trees')} in trees and {ends.count('chains')} in chains")
    return ", ".join(said)


def reason(of: Outcome) -> str:
    """The text without what differs from class to class."""
    text = re.sub(rf"\b{re.escape(of.name.removesuffix(SEEN))}\b", "the class", of.text).replace("|", "/")
    text = re.sub(r" \(\w*DecoderLayer\)|(?<=copied cache) \(.*?\)(?= \()| \(transformers [\d.]+\)|(?<=its )\d+ ", "", text)
    text = re.sub(r"(?<=width )\w+(?= and)", "one number", re.sub(r"(?<=width )\w+(?=;)", "another", text))
    return text if of.end == "line" else "" if of.name.endswith(SEEN) else text[:120]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "every_model.json", metavar="FILE")
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE", choices=EVERY)
    parser.add_argument("--page", type=Path, metavar="FILE")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    outcomes = sweep(args.out, args.only)
    if args.page:
        args.page.write_text(page(args.page.read_text(), outcomes))
    faults = [f"{kind}: {found.text}" for kind, found in outcomes.items() if found.end == "fault"]
    print(f"transformers {transformers.__version__}: {counts(outcomes)}", *faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
