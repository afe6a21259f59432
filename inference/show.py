"""Generated text in a notebook: coloured by forward pass, and the tree that a pass verified.

    out = model.generate(**inputs, custom_generate=heads.generate, return_dict_in_generate=True)
    headstart.show(out, tokenizer)          # the text
    headstart.show(out, tokenizer).tree()   # the tree of the pass that wrote most
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from headstart.inference.engine.tree import VerifiedTree
from headstart.inference.generate import GenerateOutput
from headstart.support.errors import UserError
from headstart.support.report.tree import STYLE, DrawnTree, tree_svg
from headstart.support.token_text import token_texts

COLOURS = ("37 99 201", "208 106 0", "19 135 106", "178 58 134")
"""Colours of the passes, in rotation, as red, green and blue."""


@dataclass(frozen=True)
class Picture:
    """An SVG that notebooks show."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


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

    def tree(self, number: int | None = None) -> Picture:
        """The tree of pass ``number``, counted from 1; None: of the pass that wrote most. Raises UserError if there is no such pass."""
        if not self.trees:
            raise UserError("no pass was made after the prefill; generate more tokens")
        if number is None:
            number = max(range(1, len(self.passes)), key=lambda one: len(self.passes[one]))
        if not 1 <= number < len(self.passes):
            raise UserError(f"there is no pass {number}; passes are numbered from 1 to {len(self.passes) - 1}")
        tree, written = self.trees[number - 1], self.passes[number]
        texts = [self.tokenizer.decode([token]) for token in tree.tokens]
        return Picture(str(tree_svg(DrawnTree(texts, tree.parents, tree.path[: len(written)], written[-1]), STYLE)))


def show(output: GenerateOutput, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> DecodedText:
    """One row of an output as a `DecodedText`, for a notebook or ``print``.

    ``output``: of ``model.generate(..., custom_generate=heads.generate, return_dict_in_generate=True)``, without beams.
    Raises UserError for another output and for a row that it does not have.
    """
    if not isinstance(output, GenerateOutput) or output.trees is None or output.accept_lengths is None:
        raise UserError("nothing to show: give the output of heads.generate with return_dict_in_generate=True, without beams")
    if not 0 <= row < len(output.trees):
        raise UserError(f"there is no row {row}; the output has {len(output.trees)}")
    lengths = [1, *output.accept_lengths[row]]
    longest = max(1 + sum(lengths) for lengths in output.accept_lengths)
    start = output.sequences.shape[1] - longest   # the longest row ends where the sequences end
    ids = output.sequences[row].tolist()
    texts = token_texts(tokenizer, ids[start : start + sum(lengths)])
    ends = list(accumulate(lengths))
    passes = [texts[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    prompt = tokenizer.decode([token for token in ids[:start] if token != tokenizer.pad_token_id], skip_special_tokens=False)
    return DecodedText(prompt, passes, output.trees[row], tokenizer)
