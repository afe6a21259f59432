"""Draws docs/tree.svg, the picture of the README: a candidate tree of a real forward pass, with the accepted path.

    python docs/site/tree_picture.py --heads out/quickstart/eagle3

Of all passes over the quickstart's held-out prompts it takes the one that accepts most drafts (of those, the first).
"""

import argparse
from dataclasses import dataclass
from html import escape
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import headstart
from headstart.chat.prompts import Prompter, read_prompts
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.inference.engine.tree import TreeShape, VerifiedTree
from headstart.inference.measure import Settings, continue_text
from headstart.inference.show import label

CHARACTER, PADDING, ROW, BOX, GAP = 8.0, 18, 34, 24, 28
"""Pixels: width of a character, space beside a text, height of a row and of a box, distance between levels."""
STYLE = """<style>
  .tree text { font: 13px ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; fill: #1d2126 }
  .tree path { fill: none; stroke: #c3c9d1; stroke-width: 1.5 } .tree path.kept, .tree path.own { stroke: #13876a; stroke-width: 2.5 }
  .tree rect { fill: #eef0f3; stroke: #c3c9d1 } .tree rect.root { fill: #dbe7fb; stroke: #2563c9 }
  .tree rect.kept { fill: #cfeee3; stroke: #13876a } .tree rect.own { fill: none; stroke: #13876a; stroke-dasharray: 4 3 }
  .tree text.lost { fill: #8a94a0 }
  @media (prefers-color-scheme: dark) {
    .tree text { fill: #e6e9ec } .tree path { stroke: #434b55 } .tree path.kept, .tree path.own { stroke: #4fd0a6 }
    .tree rect { fill: #22272e; stroke: #434b55 } .tree rect.root { fill: #1d3358; stroke: #6fa8ff }
    .tree rect.kept { fill: #14463a; stroke: #4fd0a6 } .tree rect.own { fill: none; stroke: #4fd0a6 }
    .tree text.lost { fill: #7d8793 }
  }
</style>"""


@dataclass(frozen=True)
class DrawnTree:
    """The nodes of a tree: the text and the parent of each (node 0 is the root), the accepted ``path`` from the root, and the text of
    the token ``own`` that the backbone chose after it."""

    texts: list[str]
    parents: list[int]
    path: list[int]
    own: str

    @property
    def labels(self) -> list[str]:
        """The texts of all boxes; the last box is the backbone's own token."""
        return [label(text) for text in (*self.texts, self.own)]

    @property
    def above(self) -> list[int]:
        """The parent of each box."""
        return [*self.parents, self.path[-1]]

    @property
    def kinds(self) -> list[str]:
        """What each box is: ``root``, ``kept``, ``lost`` (a rejected draft) or ``own``."""
        kept = set(self.path)
        return ["root", *("kept" if node in kept else "lost" for node in range(1, len(self.texts))), "own"]

    @property
    def levels(self) -> list[int]:
        """The level of each box; 0 for the root."""
        levels = [0]
        for parent in self.above[1:]:
            levels.append(levels[parent] + 1)
        return levels

    @property
    def rows(self) -> list[int]:
        """The row of each box: that of its first child. The accepted child comes first, so the path is in the top row."""
        above, kinds = self.above, self.kinds
        children: list[list[int]] = [[] for _ in above]
        for box in sorted(range(1, len(above)), key=lambda box: (kinds[box] == "lost", box)):
            children[above[box]].append(box)
        rows, free = [0] * len(above), 0
        waiting = [0]
        while waiting:  # depth first; a box without children takes the next free row
            box = waiting.pop()
            waiting += reversed(children[box])
            if not children[box]:
                rows[box], free = free, free + 1
        for box in reversed(range(len(above) - 1)):  # a parent has a smaller number than its children
            if children[box]:
                rows[box] = rows[children[box][0]]
        return rows


def tree_svg(tree: DrawnTree) -> str:
    """Draw boxes from the root on the left, the accepted path straight along the top."""
    labels, levels, kinds = tree.labels, tree.levels, tree.kinds
    widths = [0.0] * (max(levels) + 1)
    for level, text in zip(levels, labels, strict=True):
        widths[level] = max(widths[level], len(text) * CHARACTER + PADDING)
    lefts = [sum(widths[:level]) + GAP * level + 2 for level in range(len(widths))]
    boxes = [
        (lefts[level], 2.0 + ROW * row, len(text) * CHARACTER + PADDING) for level, row, text in zip(levels, tree.rows, labels, strict=True)
    ]
    lines = [_line(boxes[parent], boxes[box], kinds[box]) for box, parent in enumerate(tree.above) if box]
    drawn = [_box(*parts) for parts in zip(boxes, labels, kinds, strict=True)]
    wide, high = lefts[-1] + widths[-1] + 2, ROW * max(tree.rows) + BOX + 4
    about = f"a tree of {len(tree.texts)} nodes, {len(tree.path) - 1} drafts accepted"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="tree" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" role="img">'
    return f"{head}<title>{about}</title>{STYLE}{''.join(lines)}{''.join(drawn)}</svg>"


def _line(start: tuple[float, float, float], end: tuple[float, float, float], kind: str) -> str:
    x1, y1, x2, y2 = start[0] + start[2], start[1] + BOX / 2, end[0], end[1] + BOX / 2
    middle = (x1 + x2) / 2
    return f'<path class="{kind}" d="M{x1:.0f} {y1:.0f}C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"/>'


def _box(box: tuple[float, float, float], text: str, kind: str) -> str:
    x, y, width = box
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="6"/>'
        f'<text class="{kind}" x="{x + width / 2:.0f}" y="{y + 16:.0f}" text-anchor="middle">{escape(text)}</text>'
    )


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
        assert output.trees is not None
        place = len(prompt.ids_T)
        for tree, written in zip(output.trees[0], output.accept_lengths[0], strict=True):
            place += written
            if written == len(tree.path):  # the text did not end inside the path
                passes.append((tree, int(output.sequences[0, place])))
    best = max(passes, key=lambda drawn: len(drawn[0].path))
    args.out.write_text(tree_svg(drawn(*best, tokenizer)) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(best[0].tokens)} nodes, {len(best[0].path) - 1} drafts accepted, of {len(passes)} passes")


if __name__ == "__main__":
    main()
