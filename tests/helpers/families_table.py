"""Write docs/families.md: every architecture through every check of family_checks.py.

python tests/helpers/families_table.py --out docs/families.md           about six minutes on one idle core
python tests/helpers/families_table.py --out docs/families.md --only gpt2 pythia-1b       these rows anew, the others as they are
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
from architectures import Architecture, chained, refused, served  # noqa: E402
from every_model import TITLE  # noqa: E402
from family_checks import CHECKS, Subject  # noqa: E402
from published import SITUATIONS, UNTRIED, shapes, tally, templates_of  # noqa: E402
from released_sizes import PASSED, SMALLEST  # noqa: E402

from headstart.heads.backbone.backbone import Backbone  # noqa: E402
from headstart.support.errors import UserError  # noqa: E402

HEAD = """# Families

Which models Headstart serves, as shown by its tests. The models are tiny and random, their configurations the published ones with
width, depth, vocabulary and context reduced; what an architecture computes is as published: grouped keys and values, tied
embeddings, sliding windows, soft-capping, experts, partial rotary embeddings, attention sinks, scaled embeddings and logits, hybrid
layers. From GLM-4 (0414) on the configuration is the default one of `transformers`. The last column names the released model with whose
published sizes all of it was done again, where a precision is named. None of it says how much faster a real model becomes. No copy of the
files of Qwen3.5-4B, Qwen3-VL-8B, Gemma-4-12B, GLM-4.7-Flash, Ministral-3, Mistral-Small-3.2 and the Qwen3 of July was at hand: theirs
are put together from what public converters, tests and notes state of them, that of Qwen3-VL-8B from a smaller model's, that of
Mistral-Small-3.2 from transformers' defaults for 3.1 and a copy of its text part.

| column | what is shown, in fp32 on a CPU |
|---|---|
"""
MEANING = {
    "contract": "EAGLE-3 and Medusa compute while drafting what they compute in training",
    "greedy": "decoding in trees gives the text of `transformers`' own `generate`, with heads that are often right and with random ones",
    "sampled": "the same for sampling, against autoregressive decoding with the same seed",
    "batch": "rows of different lengths in one batch, some waiting for others, give what each gives alone",
    "adaptive trees": "trees of adaptive size, with suffix matching as a second source, change no token",
    "train": "ten steps of `train_heads.py` lower the loss and leave the backbone as it is",
    "save, load": "trained heads are loaded, saved and loaded again with equal weights and drafts",
    "export": "`headstart export --to vllm` of EAGLE-3, read back by `headstart verify`, drafts the same tokens; no engine has run it here",
}
TOKENS = "tokens trained = tokens decoded"
"""The column that tests/training/data/test_published_templates.py shows."""
SIZES = "published sizes"
"""The last column, which tests/project/test_families.py shows."""
TOKENS_MEANING = (
    "conversations under the shape of the model's published chat template: in how many answers the prompt is what transformers' own "
    "`apply_chat_template` gives, and the labels are the tokens that the model writes after it, up to and with its first end"
)
SIZES_MEANING = (
    "a random model of this one's widths, heads, vocabulary and rotary settings, with as many layers as it has kinds, at least two, and "
    "three experts, in the precisions named: trained on, saved, loaded, decoded (greedily, sampled, three rows, adaptive trees, captured, "
    "after 8,000 tokens, 4,000 with eager attention, or as many as its context has room for), regenerated from, exported and verified"
)
TAIL = """
## Chat templates

The shapes of {count} published chat templates are written anew in `tests/helpers/published/`: {names}. Each is tried in the situations
{situations};
what a template refuses is refused in one line. [How a conversation becomes labels](train.md#2-data).

## Chains

A tree of drafted tokens needs layers that read each path as if alone, and that can drop what was not accepted. Keys and values can be
masked and dropped, and the state of a gated delta rule layer (Qwen3-Next, Qwen3.5, OLMo-Hybrid) has a closed form along every path. Other
states, and other ways of attending, have neither: these models verify one path of the drafts, a chain, and rows one at a time. The cache
before a pass is kept, and tokens of a chain that was accepted in part are read again in front of the next one. A line says so when heads
are loaded. In fp32 every token is that without drafts; in lower precision near-ties may fall the other way. There are no beams and no
early exit. On a CPU a pass of several tokens takes longer than one of a single token, with Mamba-2 layers much longer, so adaptive chains
may rest.

"""
REFUSALS = """
## Train and export only

Heads for these are trained, from a server, from a cache or with `transformers`' own forward pass here, evaluated as teacher-forced
chains, exported, and verified without running (`headstart verify`); engines decode with them. `generate`, `bench` and other commands that
decode end with this line: a check at load finds that a pass of several tokens after others does not compute what passes of one token do.

| models | class | the line |
|---|---|---|
"""
END = """
Models that read images too read them in prompts ([how](decode.md#images)); those of sound are served for text. Encoder-decoders are
refused. Every model is checked when it is loaded: whether it follows the mask of a tree, and how it makes its logits; if either is not
known, one line says so.

This page is written by `python tests/helpers/families_table.py --out docs/families.md`; tests hold every cell.
"""


def outcome(check: str, of: Subject) -> str:
    """The cell: yes, or the line of a refusal."""
    try:
        CHECKS[check](of)
    except UserError as error:
        return f"no: {error}"
    return "yes"


def refusal(architecture: Architecture) -> str:
    try:
        Backbone(architecture.model())
    except UserError as error:
        return re.sub(r"(?<=copied cache) \(.*?\)(?= \()| \(transformers [\d.]+\)", "", str(error))  # the page is for all versions
    raise AssertionError(f"{architecture.name} is not refused")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def row(values: Iterable[str]) -> str:
    return "| " + " | ".join(values) + " |\n"


def start_of(architecture: Architecture) -> list[str]:
    """The first two cells of a row."""
    return [", ".join(architecture.models), f"`{architecture.title}`"]


def tokens_of(architecture: Architecture) -> str:
    """The cell of the column of templates: how many answers are trained on as they are written."""
    names = dict.fromkeys(name for model in architecture.models for name in templates_of(model))
    found = "; ".join(f"{name}: {tally(name)[0]} of {tally(name)[1]}" for name in names)
    return found or ("not tried" if architecture.name in UNTRIED else "no chat template")


def tail() -> str:
    return TAIL.format(count=len(shapes()), names=", ".join(shapes()), situations=", ".join(SITUATIONS))


def size_of(architecture: Architecture) -> str:
    """The cell of the last column."""
    model = SMALLEST[architecture.name]
    return f"{model}: {', '.join(dtype for dtype, models in PASSED.items() if model in models) or 'not run'}"


def rows_of(text: str) -> dict[str, list[str]]:
    """First cell -> all cells of each row of the page's tables."""
    return {cells(line)[0]: cells(line) for line in text.partition(TITLE)[0].splitlines() if line.startswith("| ")}


def measured(architecture: Architecture) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(architecture, Path(folder))
        return [*start_of(architecture), *(outcome(check, subject) for check in CHECKS)]


def page(before: str, only: list[str]) -> str:
    """The whole page; with ``only``, other rows are taken from the page before."""
    known, text = rows_of(before) if only else {}, HEAD
    text += "".join(row([name, MEANING[name]]) for name in CHECKS) + row([TOKENS, TOKENS_MEANING])
    text += row([SIZES, SIZES_MEANING]) + "\n"
    text += row(["models", "class", *CHECKS, TOKENS, SIZES]) + "|" + "---|" * (4 + len(CHECKS)) + "\n"
    for architecture in served():
        kept = known.get(start_of(architecture)[0])
        shown = kept[: 2 + len(CHECKS)] if kept and not set(only) & set(architecture.models) else measured(architecture)
        text += row([*shown, tokens_of(architecture), size_of(architecture)])
        print(text.splitlines()[-1], flush=True)
    text += tail() + row(["models", "class", *CHECKS]) + "|" + "---|" * (2 + len(CHECKS)) + "\n"
    for architecture in chained():
        kept = known.get(start_of(architecture)[0])
        shown = kept[: 2 + len(CHECKS)] if kept and not set(only) & set(architecture.models) else measured(architecture)
        text += row(shown)
        print(text.splitlines()[-1], flush=True)
    return text + REFUSALS + "".join(row([*start_of(one), refusal(one)]) for one in refused()) + END


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = args.out.read_text() if args.out.exists() else ""
    args.out.write_text(page(before, args.only) + "".join(before.partition(f"\n{TITLE}")[1:]))


if __name__ == "__main__":
    main()
