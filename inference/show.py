"""Generated text in a notebook: coloured by forward pass, and the tree that a pass verified.

out = model.generate(**inputs, custom_generate=heads.generate, return_dict_in_generate=True)
headstart.show(out, tokenizer)          # the text
headstart.show(out, tokenizer).tree()   # the tree of the pass that wrote most
"""

from dataclasses import dataclass
from html import escape
from itertools import accumulate

from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from headstart.inference.engine.tree import VerifiedTree
from headstart.inference.generate import GenerateOutput
from headstart.support.errors import UserError
from headstart.support.text import token_texts, visible

COLOURS = ("37 99 201", "208 106 0", "19 135 106", "178 58 134")
"""Colours of the passes, in rotation, as red, green and blue."""
LONGEST = 14
"""Characters of a token that a tree shows."""
VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"})


@dataclass(frozen=True)
class DecodedText:
    """One row's text: ``prompt``, and the texts of the tokens that each pass wrote; the first entry is what the prefill wrote.

    A notebook shows it coloured by pass; ``str`` puts the tokens of a pass in brackets.
    """

    prompt: str
    passes: list[list[str]]
    trees: list[VerifiedTree]
    tokenizer: PreTrainedTokenizerBase

    def __str__(self) -> str:
        return self.prompt + "".join(f"[{''.join(tokens)}]" for tokens in self.passes)

    def _repr_html_(self) -> str:
        spans = [
            f'<span style="background: rgb({COLOURS[i % len(COLOURS)]} / 20%); border-radius: 3px" title="pass {i}: {len(tokens)}">'
            f"{escape(''.join(tokens))}</span>"
            for i, tokens in enumerate(self.passes)
        ]
        return f'<pre style="white-space: pre-wrap"><span style="opacity: .6">{escape(self.prompt)}</span>{"".join(spans)}</pre>'

    def tree(self, number: int | None = None) -> Tree:
        """The tree of pass ``number``, counted from 1, for a notebook or ``rich.print``; None: of the pass that wrote most.

        Raises UserError if there is no such pass.
        """
        if not self.trees:
            raise UserError("no pass was made after the prefill; generate more tokens")
        if number is None:
            number = max(range(1, len(self.passes)), key=lambda number: len(self.passes[number]))
        if not 1 <= number < len(self.passes):
            raise UserError(f"there is no pass {number}; passes are numbered from 1 to {len(self.passes) - 1}")
        return drawn_tree(self.trees[number - 1], self.passes[number], self.tokenizer)


def drawn_tree(tree: VerifiedTree, written: list[str], tokenizer: PreTrainedTokenizerBase) -> Tree:
    """A candidate tree as text below its root; ``written``: the texts of the pass, of which the last is the backbone's own token.

    Accepted drafts are marked with ✓. A path past the end of the text is cut, since its last token counts as the backbone's own.
    """
    path = tree.path[: len(written)]
    branches = [Tree(Text(label(tokenizer.decode([tree.tokens[0]]))))]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        kept = len(branches) in path
        text = label(tokenizer.decode([token]))
        branches.append(branches[parent].add(Text(f"✓ {text}" if kept else text, "green" if kept else "dim")))
    branches[path[-1]].add(Text(f"→ {label(written[-1])}", "bold green"))
    return branches[0]


def label(text: str) -> str:
    """The token with spaces and line ends made visible, cut to `LONGEST` characters."""
    shown = visible(text.translate(VISIBLE))
    return (shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…") or "∅"


def show(output: GenerateOutput, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> DecodedText:
    """One row of an output as a `DecodedText`, for a notebook or ``print``.

    ``output``: of ``model.generate(..., custom_generate=heads.generate, return_dict_in_generate=True)``, without beams.
    Raises UserError for another output and for a row that it does not have.
    """
    if not isinstance(output, GenerateOutput) or output.trees is None:
        raise UserError("nothing to show: give the output of heads.generate with return_dict_in_generate=True, without beams")
    if not 0 <= row < len(output.trees):
        raise UserError(f"there is no row {row}; the output has {len(output.trees)}")
    lengths = [1, *output.accept_lengths[row]]
    longest = max(1 + sum(lengths) for lengths in output.accept_lengths)
    start = output.sequences.shape[1] - longest  # the longest row ends where the sequences end
    ids = output.sequences[row].tolist()
    texts = token_texts(tokenizer, ids[start : start + sum(lengths)])
    ends = list(accumulate(lengths))
    passes = [texts[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    prompt = tokenizer.decode([token for token in ids[:start] if token != tokenizer.pad_token_id], skip_special_tokens=False)
    return DecodedText(prompt, passes, output.trees[row], tokenizer)
