"""The texts of one call, on the host: their prompts, the tokens written for each, and where they end.

transformers writes a token to every row at each step, asks the stopping criteria about all rows, and hands the tokens to the streamer. Here
rows have different numbers of tokens after a pass; a step is taken once every row has its token. Where each row is judged by itself,
nothing waits for the others, and sequences may be added.

Shape suffixes: B batch, T positions, P tokens of a run, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.heads.backbone.features import Features, Images
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.engine.inputs import Continued, require_text
from headstart.inference.engine.processing import History
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.request import Request, require_side
from headstart.inference.engine.tree import TREE_SIZES
from headstart.support.pytree import map_tensors


class Prompts:
    """The prompts of a call, without padding; a prompt is identified by the number of its sequence."""

    def __init__(self, request: Request, reader: Reader) -> None:
        self.reader, self.continued = reader, Continued(request, reader)
        self.rows = {number: ids_T[pad:] for number, (ids_T, pad) in enumerate(zip(request.ids_BT, request.pads_B, strict=True))}
        self.limits = {number: request.limit - pad for number, pad in enumerate(request.pads_B)}
        """The length at which each sequence ends, its prompt included."""
        self.images: dict[int, Images | None] = dict(enumerate(request.images))
        self.placeholders = {*reader.backbone.placeholders.values()}
        self.again: dict[int, int] = {}
        """The sequences to be read again with other rotary frequencies -> tokens written that count as prompt then."""
        self._start(request.limit)

    def put(self, number: int, ids_T: Tensor, limit: int, images: Images | None = None) -> None:
        """Add a prompt, or replace that of a sequence which has ended."""
        self.rows[number], self.limits[number], self.images[number] = ids_T, limit, images
        self.again.pop(number, None)
        self._start(limit)

    def _start(self, limit: int) -> None:
        self.reader.start(min(limit, self.reader.backbone.max_positions or limit) + TREE_SIZES[-1])

    def length(self, number: int) -> int:
        """The number of tokens of one prompt."""
        return len(self.rows[number])

    def end(self, number: int, written: int) -> int:
        """The length of a text of so many written tokens."""
        return self.length(number) + written - self.again.get(number, 0)

    def is_before(self, number: int) -> bool:
        """True if a sequence is read with the rotary frequencies of short texts."""
        return number not in self.again and self.length(number) <= (self.reader.backbone.rope_limit or 0)

    def turns(self, number: int, written: list[int]) -> bool:
        """True if the last token is the first one beyond a change of rotary frequencies: the text is to be read again, up to that token.

        Raises UserError where that does not help.
        """
        end, backbone = self.end(number, len(written)), self.reader.backbone
        if not self.is_before(number) or end <= (backbone.rope_limit or 0):
            return False
        require_side(backbone, end, turning=True)
        self.rows[number] = torch.cat([self.rows[number], self.rows[number].new_tensor(written[:-1])])
        self.again[number] = len(written) - 1
        return True

    def read_again(self, numbers: list[int], roots: list[int]) -> tuple[Features, RaggedCache]:
        """Prefill texts that `turns`, which are equally long; the roots are read too, since the last position decides, and forgotten."""
        texts_BT = torch.stack([torch.cat([self.rows[n], self.rows[n].new_tensor([root])]) for n, root in zip(numbers, roots, strict=True)])
        lengths_B = torch.full((len(numbers),), texts_BT.shape[1] - 1, device=texts_BT.device)
        features, cache = self.reader.prompts(texts_BT, lengths_B)
        return map_tensors(lambda value_BT: value_BT[:, :-1], features), cache

    def tokens(self, number: int) -> list[int]:
        """The tokens of one prompt that are text."""
        return [token for token in self.rows[number].tolist() if token not in self.placeholders]

    def prefill(self, numbers: list[int]) -> tuple[Features, RaggedCache, Tensor]:
        """Prefill some prompts, padded on the right: returns their features, their cache, and the logits ``[B, 1, V]`` after each."""
        rows = [self.rows[number] for number in numbers]
        lengths_B = torch.tensor([*map(len, rows)], device=rows[0].device)
        images = [self.images.get(number) for number in numbers]
        known = None if any(images) else self.continued.prefill(rows[0])
        for row_T, own in zip(rows, images, strict=True) if known is None else ():
            if own is None:
                require_text(self.reader.backbone, row_T)
        features, cache = known or self.reader.prompts(pad_sequence(rows, batch_first=True), lengths_B, images)
        self.continued.note(features)
        last_BD = features.hidden_BTD[torch.arange(len(numbers), device=lengths_B.device), lengths_B - 1]
        return features, cache, self.reader.backbone.readout(last_BD)[:, None]

    def remaining(self, number: int, written: int, past_limit: bool = False) -> int:
        """The number of tokens that may follow ``written`` tokens, by the length limit and the model's maximum number of positions.

        ``past_limit``: by the latter alone, unless rotary frequencies depend on the length.
        """
        backbone = self.reader.backbone
        most = backbone.max_positions or 1 << 31
        if not past_limit or backbone.rope_limit is not None:
            most = min(most, self.limits[number])
        if self.is_before(number):  # no drafts beyond the change
            most = min(most, backbone.rope_limit or 0)
        return most - self.end(number, written)


@dataclass
class Text:
    """One sequence. Lengths include padding, as transformers passes it to stopping criteria."""

    prompt_T: Tensor
    limit: int
    """The length at which it ends."""
    eos: frozenset[int]
    written: list[int] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """Processed scores and logits ``[V]`` of each token, if the call asks for them."""
    ended: bool = False
    """True if it needs no more tokens."""
    done: bool = False
    """True if a step has ended it; it may need more tokens, where rows go on together."""

    @property
    def ids_T(self) -> Tensor:
        """The prompt and the tokens written."""
        return torch.cat([self.prompt_T, self.prompt_T.new_tensor(self.written)])

    def ends(self, written: list[int]) -> bool:
        """True if the text ends with these tokens, by an end token or its length."""
        return written[-1] in self.eos or len(self.prompt_T) + len(written) >= self.limit

    def cut(self, length: int) -> None:
        """End it after so many tokens."""
        self.ended = True
        for kept in (self.written, self.scores, self.logits):
            del kept[length:]


class Texts:
    """The texts of one call, by the numbers of their sequences."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.of = {number: Text(prompt_T, request.limit, request.eos) for number, prompt_T in enumerate(request.ids_BT)}
        self.ids_BT = request.ids_BT
        """The ids after the steps taken, as transformers passes them on; kept where `Request.in_steps`."""
        self._steps = 0
        self._step_scores: tuple[Tensor, ...] | None = () if request.scores else None

    def put(self, number: int, prompt_T: Tensor, limit: int) -> None:
        """Add a sequence, or replace one that has ended."""
        assert not self.request.in_steps
        self.of[number] = Text(prompt_T, limit, self.request.eos)

    def history(self, number: int) -> History:
        text = self.of[number]
        return History(text.prompt_T, list(text.written), number, text.ends)

    def goes_on(self, number: int) -> bool:
        """True if the sequence is to be decoded further."""
        return not all(text.ended for text in self.of.values()) if self.request.in_order else not self.of[number].ended

    def write(self, numbers: Sequence[int], runs: list[list[int]], scores: list[Tensor], logits: list[Tensor]) -> list[list[int]]:
        """Add a run of tokens to each of these sequences, with their scores and logits ``[P, V]`` (empty lists: not asked for).

        Returns the tokens that were kept: those up to the end of each.
        """
        before = [len(self.of[number].written) for number in numbers]
        for b, (number, run) in enumerate(zip(numbers, runs, strict=True)):
            text, count = self.of[number], self._append(self.of[number], run)
            for kept, given in ((text.scores, scores), (text.logits, logits)):
                if given:
                    kept.extend(given[b][: len(run) if self.request.in_order else count].float())
        while self.request.in_steps and self._step():
            pass
        return [self.of[number].written[start:] for number, start in zip(numbers, before, strict=True)]

    def _append(self, text: Text, run: list[int]) -> int:
        """Add tokens until one ends the text; returns the number added."""
        if text.done and self.request.padded:
            return 0
        for count, token in enumerate(run, 1):
            text.written.append(token)
            text.ended = text.ends(text.written)
            if not self.request.in_steps and self.request.criteria:
                text.ended |= bool(self.request.criteria(text.ids_T[None], None).any())
            if text.ended:
                return count
        return len(run)

    def _step(self) -> bool:
        """Take a step if every row has a token for it; returns False if one has none, or if all rows have ended."""
        request, rows = self.request, list(self.of.values())
        padded = [text.done and request.padded for text in rows]
        if all(text.done for text in rows) or any(
            len(text.written) <= self._steps and not pad for text, pad in zip(rows, padded, strict=True)
        ):
            return False
        tokens = [request.pad_token if pad else text.written[self._steps] for text, pad in zip(rows, padded, strict=True)]
        self._steps += 1
        self._judge(rows, torch.tensor(tokens, device=self.ids_BT.device))
        if all(text.done for text in rows) or request.padded:
            for text in rows:
                if text.done and not (text.ended and len(text.written) <= self._steps):
                    text.cut(self._steps)
        return True

    def _judge(self, rows: list[Text], tokens_B: Tensor) -> None:
        """Mark the rows that end with these tokens, and hand the tokens to the streamer."""
        request = self.request
        ends = [text.ends([*text.written[: self._steps - 1], token]) for text, token in zip(rows, tokens_B.tolist(), strict=True)]
        if request.criteria or request.processing.unknown:
            self.ids_BT = torch.cat([self.ids_BT, tokens_B.to(self.ids_BT.dtype)[:, None]], 1)
        if request.criteria:
            if self._step_scores is not None:
                self._step_scores += (self._scores_of_step(rows),)
            asked = request.criteria(self.ids_BT, self._step_scores).tolist()
            ends = [one or other for one, other in zip(ends, asked, strict=True)]
        for text, end in zip(rows, ends, strict=True):
            text.done = text.done or end
        if request.streamer is not None:
            request.streamer.put(tokens_B.cpu())

    def _scores_of_step(self, rows: list[Text]) -> Tensor:
        """The scores ``[B, V]`` of the last step; zeros for rows that had ended."""
        own = [text.scores[self._steps - 1] if len(text.scores) >= self._steps else None for text in rows]
        like = next(scores for scores in own if scores is not None)
        return torch.stack([torch.zeros_like(like) if scores is None else scores for scores in own])

    def sequences(self) -> Tensor:
        """All rows as ``generate`` returns them: the input ids, the tokens written, and padding on the right."""
        longest = max(len(text.written) for text in self.of.values())
        written = [text.written + [self.request.pad_token] * (longest - len(text.written)) for text in self.of.values()]
        return torch.cat([self.request.ids_BT, self.request.ids_BT.new_tensor(written)], 1)
