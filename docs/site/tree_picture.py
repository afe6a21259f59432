"""Draws docs/tree.svg, the picture of the README: a candidate tree of a real forward pass, with the accepted path.

    python docs/site/tree_picture.py --heads out/quickstart/eagle3

Of all passes over the quickstart's held-out prompts it takes the one that accepts most drafts (of those, the first).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import headstart
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.engine.tree import TreeShape, VerifiedTree
from headstart.inference.measure import Settings, continue_text
from headstart.support.report.tree import STYLE, DrawnTree, tree_svg


def drawn(tree: VerifiedTree, own: int, tokenizer: PreTrainedTokenizerBase) -> DrawnTree:
    """The tree with its tokens as text."""
    return DrawnTree([tokenizer.decode([token]) for token in tree.tokens], tree.parents, tree.path, tokenizer.decode([own]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--prompts", default="recipes/quickstart/prompts.jsonl")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("docs/tree.svg"))
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.backbone)
    heads = headstart.load(args.heads, load_backbone(args.backbone))
    settings = Settings(48, tree=TreeShape(14, 4))
    passes: list[tuple[VerifiedTree, int]] = []
    for prompt in read_prompts(args.prompts, Prompter(tokenizer), args.limit):
        output = continue_text(heads, prompt.ids_T, settings, 0)
        assert output.trees is not None and output.accept_lengths is not None
        place = len(prompt.ids_T)
        for tree, written in zip(output.trees[0], output.accept_lengths[0], strict=True):
            place += written
            if written == len(tree.path):   # the text did not end inside the path
                passes.append((tree, int(output.sequences[0, place])))
    best = max(passes, key=lambda one: len(one[0].path))
    args.out.write_text(tree_svg(drawn(*best, tokenizer), STYLE) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(best[0].tokens)} nodes, {len(best[0].path) - 1} drafts accepted, of {len(passes)} passes")


if __name__ == "__main__":
    main()
