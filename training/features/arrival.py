"""Checks of hidden states that arrive from a server, each with the likely cause: training on wrong ones converges too.

Every sample: its own tokens, all positions and layers, finite, no row of zeros. The first samples, then one of many: our final norm and
output layer give the log-probabilities that the server states, for its most likely token after each position, or after the last one alone
where the sample is too long for a server to state all.

Shape suffixes: T positions, L layers, D width, V vocabulary, N statements.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from headstart.support.errors import UserError
from headstart.training.features.server import START, Answer

STATED_BYTES = 2**30
"""Size of the logits of a sample up to which all its log-probabilities are asked for."""
CHUNK = 64
"""Positions read out at a time."""
ULPS, LEAST = 12.0, 0.02
"""A log-probability may be off by so many units in the last place of the largest logit, and by so many nats."""
WRONG = 0.03
"""Share of positions beyond that from which on the hidden states are wrong: ties of rounding are rarer."""
RARE = 1e-3
"""A generated token is rare if tokens as probable as it or less have this probability in all: of samples at most as many are."""
Readout = Callable[[Tensor], Tensor]
"""Final hidden states ``[..., D]`` -> logits ``[..., V]``."""


class Stated(NamedTuple):
    """The server's most likely tokens after some positions."""

    at_N: Tensor
    token_N: Tensor
    log_prob_N: Tensor


def asked(length: int, vocab: int) -> dict[str, Any]:
    """Return the parameters of a request that is checked."""
    return {"logprobs": 1, **({"prompt_logprobs": 1} if length * vocab * 4 <= STATED_BYTES else {})}


def require_whole(answer: Answer, tokens: Sequence[int], layers: tuple[int, ...], table_VD: Tensor) -> None:
    """Raise UserError unless the hidden states are those of the tokens in every position and layer, finite and not zero.

    ``table_VD``: the embedding; a token that has zeros there may have them in every layer.
    """
    hidden_TLD, count, dim = answer.hidden_TLD, len(tokens), table_VD.shape[1]
    if answer.tokens[:count] != list(tokens)[: len(answer.tokens)]:
        _wrong(answer, "the file holds other tokens than were asked for: rows of another request; serve each run from a folder of its own")
    if len(answer.tokens) < count or len(hidden_TLD) < count:
        held = min(len(answer.tokens), len(hidden_TLD))
        _wrong(answer, f"{held} rows for {count} tokens: prefill in chunks has cut them; {START}, whose batches hold a whole sample")
    if hidden_TLD.shape[1:] != (len(layers), dim):
        found = " x ".join(map(str, hidden_TLD.shape[1:]))
        _wrong(answer, f"{found} (layers x width) in place of {len(layers)} x {dim}: other layers or another model; {START}")
    finite_TL, zero_TL = hidden_TLD.isfinite().all(-1), (hidden_TLD == 0).all(-1)
    if not finite_TL.all():
        kind = str(hidden_TLD.dtype).removeprefix("torch.")
        _wrong(answer, f"NaN or infinity in {_where(~finite_TL, layers)}: too large for {kind}; serve with --dtype bfloat16 or float32")
    if zero_TL.any():
        zero_TL = zero_TL & table_VD[torch.tensor(answer.tokens, device=table_VD.device)].any(-1).cpu()[:, None]
    if zero_TL.all(0).any():
        hybrid = "vLLM extracts nothing from some models with recurrent layers (its issue 46301)"
        _wrong(answer, f"zeros in {_where(zero_TL, layers)}: {hybrid}")
    if zero_TL.any():
        _wrong(answer, f"zeros in {_where(zero_TL, layers)}: prefill in chunks, or a cached prefix, has left rows out; {START}")


def check(answer: Answer, hidden_TD: Tensor, norm: Readout, readout: Readout) -> Tensor:
    """Raise UserError unless the last layer's states ``[T, D]``, normed and read out, give what the server states.

    Returns which of the generated tokens are rare. ``hidden_TD``: in the backbone's dtype, on its device.
    """
    stated = _stated(answer, hidden_TD.device)
    if stated is None:
        _wrong(answer, "the answer states no log-probabilities to check hidden states by: give vLLM 0.32 or newer")
    rows_ND, precision = hidden_TD[stated.at_N], max(torch.finfo(tensor.dtype).eps for tensor in (hidden_TD, answer.hidden_TLD))
    parts = [slice(start, start + CHUNK) for start in range(0, len(rows_ND), CHUNK)]
    compared = [_compare(readout(norm(rows_ND[part])), Stated(*(tensor[part] for tensor in stated)), precision) for part in parts]
    wrong_N, rare_N = (torch.cat(values) for values in zip(*compared, strict=True))
    if wrong_N.float().mean() > WRONG:
        _explain(answer, stated, wrong_N, (rows_ND[:CHUNK], norm, readout), precision)
    return rare_N[-len(answer.generated) :]


def require_samples(answer: Answer, rare: Sequence[Tensor]) -> None:
    """Raise UserError unless what was generated may be samples at a temperature of 1 or less. ``rare``: of each answer, by `check`."""
    rare_G = torch.cat(list(rare))
    if (found := int(rare_G.sum())) > 4 + 5 * RARE * len(rare_G):
        what = f"{found} of {len(rare_G)} generated tokens are so improbable as samples are once in {1 / RARE:,.0f}"
        _wrong(answer, f"{what}: it samples wrongly while it extracts (as vLLM 0.32's CPU build does); set regenerate.temperature=0")


def _explain(answer: Answer, stated: Stated, wrong_N: Tensor, read: tuple[Tensor, Readout, Readout], precision: float) -> NoReturn:
    """Raise the UserError with the likely cause. ``read``: the first rows, the norm and the readout."""
    if not wrong_N.all() and (block := _block(wrong_N)) is not None:
        first, last = (int(stated.at_N[i]) for i in block)
        cut = "prefill in chunks, or a cached prefix, has cut them"
        _wrong(answer, f"rows {first} to {last} are wrong and the others right: {cut}; {START}")
    (rows_ND, norm, readout), stated = read, Stated(*(tensor[:CHUNK] for tensor in stated))
    if _compare(readout(rows_ND), stated, precision)[0].float().mean() <= WRONG:
        twice = "the last layer's rows are normed already, and would be twice: a wrong final norm"
        _wrong(answer, f"{twice}; {START}, whose last layer comes before it")
    log_p_NV = readout(norm(rows_ND)).float().log_softmax(-1)
    own, others = (float(log_p_NV.gather(1, stated.token_N.roll(by)[:, None]).mean()) for by in (0, max(1, len(rows_ND) // 2)))
    if len(rows_ND) > 8 and own < others + 0.25 * abs(others - float(stated.log_prob_N.mean())):
        _wrong(answer, "the rows have nothing to do with the tokens: rows of another request; serve without other users and newest vLLM")
    near = "the last layer's rows nearly give the server's own tokens: a layer off by one, or the final norm of another checkpoint"
    _wrong(answer, f"{near}; {START}, with this backbone")


def _stated(answer: Answer, device: torch.device) -> Stated | None:
    """Return the statements of an answer: after each position of the prompt, if they were asked for, and after the last one."""
    found: list[tuple[int, int, float]] = []
    for i, one in enumerate(answer.choice.get("prompt_logprobs") or []):
        if i and isinstance(one, Mapping) and one:
            token, entry = max(one.items(), key=lambda item: item[1]["logprob"])
            found.append((i - 1, int(token), float(entry["logprob"])))
    stated = answer.choice.get("logprobs") or {}
    log_probs = stated.get("token_logprobs") or [entry["logprob"] for entry in stated.get("content") or []]  # completions, chat completions
    if answer.generated and log_probs:
        first = len(answer.tokens) - len(answer.generated)  # all but the last token generated have rows
        pairs = zip(answer.generated, log_probs, strict=False)
        found += [(first + i, token, float(log_prob)) for i, (token, log_prob) in enumerate(pairs)]
    found = [entry for entry in found if entry[0] < len(answer.hidden_TLD)]
    if not found:
        return None
    at, tokens, values = zip(*found, strict=True)
    return Stated(torch.tensor(at, device=device), torch.tensor(tokens, device=device), torch.tensor(values, device=device))


def _compare(logits_NV: Tensor, stated: Stated, precision: float) -> tuple[Tensor, Tensor]:
    """Return for each statement whether the logits give another log-probability than rounding explains, and whether its token is rare."""
    p_NV = logits_NV.float().softmax(-1)
    p_N1 = p_NV.gather(1, stated.token_N[:, None])
    allowed_N = LEAST + ULPS * precision * logits_NV.float().abs().amax(-1)
    rare_N = p_NV.where(p_NV <= p_N1, 0).sum(-1) < RARE
    return (p_N1[:, 0].clamp(min=1e-38).log() - stated.log_prob_N).abs() > allowed_N, rare_N


def _block(wrong_N: Tensor) -> tuple[int, int] | None:
    """Return the first and last of the wrong positions if they lie together and the others are right, but for a few."""
    at = wrong_N.nonzero().flatten()
    for share in (0.0, 0.02):  # strays at either end are ties
        cut = round(share * len(at))
        first, last = int(at[cut]), int(at[-1 - cut])
        inside = wrong_N[first : last + 1].float().mean()
        outside = (len(at) - wrong_N[first : last + 1].sum()) / max(1, len(wrong_N) - (last + 1 - first))
        if inside >= 0.8 and last + 1 - first < 0.95 * len(wrong_N) and outside <= 2 * WRONG:
            return first, last
    return None


def _where(bad_TL: Tensor, layers: tuple[int, ...]) -> str:
    at, named = bad_TL.any(1).nonzero().flatten(), [layer for layer, bad in zip(layers, bad_TL.any(0).tolist(), strict=True) if bad]
    which = f"layer{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
    return f"{which}, rows {int(at[0])} to {int(at[-1])} of {len(bad_TL)}"


def _wrong(answer: Answer, cause: str) -> NoReturn:
    raise UserError(f"{answer.url} sent hidden states that cannot be trained on: {cause}")
