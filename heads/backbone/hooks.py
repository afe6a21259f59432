"""What a model computes by that is not transformers' own, and whether each token is computed by itself there; temporary changes to a model,
undone after a pass or a call: evaluation mode, outputs collected or nudged, layers recomputed.

Recomputed layers (gradient checkpointing) keep their inputs alone, and compute their activations again in the backward.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headstart.heads.backbone.adapter import tuner_state
from headstart.support.devices import holding
from headstart.support.errors import UserError

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_within: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar("what is computed again", default=nullcontext)


def recompute_within(context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Compute again, in ``context()``, what is run in here: autograd leaves the modes of the forward off in the backward."""
    return holding(_within, context)


def contexts(mode: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Contexts:
    """Return the contexts of the forward and of its repetition, as `checkpoint` asks for them; ``mode()`` is one more of the repetition."""
    return nullcontext(), _both(_within.get(), mode)


@contextmanager
def _both(outer: Callable[[], AbstractContextManager[Any]], inner: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with outer(), inner():
        yield


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call the function, which draws no random numbers; the backward calls it again."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


RECORDING = "transformers.utils.output_capturing"
"""Where hooks are from that transformers leaves on a model whose hidden states were asked for; they do nothing otherwise."""
KNOWN = ("torch", "transformers")
"""Packages whose layers compute each token by itself, as far as masks let them."""
PASSING = ("training", "max_seq_len_cached")
"""Settings of parts that calls change: the mode, and the longest text yet of rotary frequencies that depend on it."""
ROWS, LOUD = 8, 1000.0
"""Tokens beside which a linear layer computes one, and how much larger than its own their inputs are: beyond thresholds of outliers."""
DEPENDS = 1e-3
"""The share of a result's size that tokens beside it may change: in a pass of the same width 0 where each is computed by itself."""


def hooks_on(part: nn.Module) -> list[int]:
    """Return the numbers of the user's hooks on forward passes of this module, not of what is in it."""
    tables = (part._forward_hooks, part._forward_pre_hooks)
    return [number for table in tables for number, hook in table.items() if getattr(hook, "__module__", "") != RECORDING]


def hooks(modules: Iterable[nn.Module]) -> list[int]:
    """Return the numbers of the user's hooks on forward passes of these modules and of what is in them; none if there are none."""
    return [number for module in modules for part in module.modules() for number in hooks_on(part)]


def is_passing(part: nn.Module) -> bool:
    """Whether calls change the buffers of a module: rotary frequencies that depend on the length of a text."""
    kinds = getattr(part, "rope_type", None)
    return not {"dynamic", "longrope"}.isdisjoint(kinds.values() if isinstance(kinds, dict) else {kinds})


def is_foreign(part: nn.Module) -> bool:
    """Whether a module, not what is in it, computes by code that is neither torch's nor transformers'."""
    weight = part._parameters.get("weight")
    known = all(type(code).__module__.partition(".")[0] in KNOWN for code in (part, part if weight is None else weight))
    return not known or "forward" in vars(part) or bool(hooks_on(part))


def structure(model: PreTrainedModel) -> list[Any]:
    """Return what a model computes by besides its weights' values: kinds and settings of its parts, forwards, hooks."""
    found: list[Any] = [str(vars(model.config.get_text_config())), tuner_state(model)]
    for part in model.modules():
        own = vars(part)
        found += [type(part), own.get("forward"), hooks_on(part), *map(type, part._parameters.values())]
        found += [value for name, value in own.items() if type(value) in (bool, int, float, str) and name[0] != "_" and name not in PASSING]
    return found


def computes(weight: Tensor) -> bool:
    """False for torch's own tensors without data, or of which each process has a part."""
    return type(weight) in (Tensor, nn.Parameter) and not weight.is_meta or type(weight).__module__.partition(".")[0] != "torch"


@torch.no_grad()
def find_dependence(model: PreTrainedModel) -> str | None:
    """Return which layer computes a token otherwise beside other tokens, and what follows; None if none does.

    Layers of towers and plain ones are not tried. Of linear ones that quantizations have, and foreign ones of one matrix, one of each kind
    and size reads a token among copies of itself and, in the same place, among large inputs.
    """
    tried: dict[tuple[type, type, str], tuple[str, Any, int]] = {}
    reads_text = {*model.get_decoder().modules(), model.get_output_embeddings()}
    for name, module in model.named_modules():
        widths, foreign = [weight.shape[-1] for weight in module.parameters() if weight.ndim > 1], is_foreign(module)
        width = vars(module).get("in_features", widths[0] if foreign and len(widths) == 1 else None)
        tries = isinstance(width, int) and module in reads_text and (foreign or type(module) is not nn.Linear)
        if tries and all(map(computes, module.parameters())):
            tried.setdefault((type(module), type(module._parameters.get("weight")), repr(module)), (name, module, width))
    embedded = model.get_input_embeddings().weight
    for name, module, width in tried.values():
        noise_TD = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
        own_1D, among_TD = noise_TD[ROWS // 2 :][:1], LOUD * noise_TD
        among_TD[ROWS // 2] = own_1D
        found: list[Any] = []
        with suppress(TypeError, ValueError, RuntimeError, IndexError):  # of layers that read something else
            found = [module(rows_TD.expand(ROWS, -1).to(embedded)[None]) for rows_TD in (own_1D, own_1D, among_TD)]
        if not found or not all(isinstance(state, Tensor) and state.shape[:2] == (1, ROWS) for state in found):  # a router gives its choice
            continue
        alone_D, again_D, beside_D = (state[0, ROWS // 2].float().masked_fill(state[0, ROWS // 2].isinf(), 0) for state in found)
        share = float((beside_D - alone_D).norm() / alone_D.norm())
        if not share <= max(DEPENDS, 3 * float((again_D - alone_D).norm() / alone_D.norm())):
            return (
                f"{type(model).__name__} computes a token otherwise beside other tokens ({type(module).__name__} {name}: by"
                f" {share:.1%} in a test), so drafts and batches would change its text: drafts rest, and rows are decoded one at a time"
            )
    return None


_counting = threading.Lock()
"""Of all modules, since what holds one may be copied."""


class Evaluation:
    """The evaluation mode of a module: within the context no part of it is in training mode, afterwards each is as it was.

    Contexts may be nested and held by several threads; the last to leave restores the modes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._holders = 0
        self._training: list[nn.Module] = []
        """The parts that were in training mode."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the module in evaluation mode."""
        try:
            with _counting:
                self._holders += 1
                if self._holders == 1:
                    self._training = [part for part in self.module.modules() if part.training]
                    for part in self._training:  # not train(), which also sets what is below
                        part.training = False
            yield
        finally:
            with _counting:
                self._holders -= 1
                if self._holders == 0:
                    for part in self._training:
                        part.training = True


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Within this context no weight of the module requires gradients: what is captured could not hold such weights."""
    learned = [weight for weight in module.parameters() if weight.requires_grad]
    try:
        for weight in learned:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in learned:
            weight.requires_grad_(True)


def stream(layer: nn.Module, output: Any, dim: int) -> Tensor:
    """Return the residual stream ``[B, T, D]`` of what a layer returns: of several the mean, of Gemma-3n's that which it computes on."""
    hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
    if (streams := getattr(getattr(layer, "altup", None), "config", None)) is not None:
        return hidden[streams.altup_active_idx]
    if hidden.ndim == 4:
        return hidden.mean(2)
    return hidden if hidden.shape[-1] == dim else hidden.unflatten(-1, (-1, dim)).mean(2)  # Qwen-4's stand side by side


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...], shape: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the residual stream ``[B, T, D]`` after each of the ``taps`` layers (0: the embedding) in this thread. Raises UserError."""
    kept: dict[int, Tensor] = {}
    thread = threading.get_ident()

    def after(tap: int, layer: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() == thread:
            found = kept[tap] = stream(layer, output, shape[-1])
            if (*found.shape,) != (*shape,):  # as XLNet's and CPM-Ant's
                said = f"{type(layer).__name__} gives states {[*found.shape]} for {[*shape]}, so heads cannot read layers of this model"
                raise UserError(f"{said}; train heads that read none, such as medusa or hydra")

    def before(tap: int, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        after(tap, layer, args, args[0] if args else kwargs["hidden_states"])

    with ExitStack() as handles:
        for tap in taps:
            run = [layer for layer in layers[:tap] if not hasattr(layer, "cross_attn")]  # Mllama's cross attention is for images only
            if run:
                handle = run[-1].register_forward_hook(partial(after, tap))
            else:
                handle = layers[0].register_forward_pre_hook(partial(before, tap), with_kwargs=True)
            handles.callback(handle.remove)
        yield kept


@contextmanager
def nudged(layers: nn.ModuleList) -> Iterator[None]:
    """Move every value that a layer returns by a unit in the last place, up, down or not at all, while the model runs in this thread.

    What that changes is what rounding otherwise in every layer may change.
    """
    drawn: dict[torch.device, torch.Generator] = {}
    thread = threading.get_ident()

    def move(module: nn.Module, args: tuple, output: Any) -> Any:
        if threading.get_ident() != thread:
            return output
        hidden = output[0] if isinstance(output, tuple) else output
        generator = drawn.setdefault(hidden.device, torch.Generator(hidden.device).manual_seed(0))
        signs = torch.randint(-1, 2, hidden.shape, generator=generator, device=hidden.device)
        moved = hidden + hidden.abs() * torch.finfo(hidden.dtype).eps * signs
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    with ExitStack() as handles:
        for layer in layers:
            handles.callback(layer.register_forward_hook(move).remove)
        yield


@contextmanager
def recomputed_layers(layers: nn.ModuleList, mode: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Keep only the layers' inputs for the backward, which computes their activations again, in the context ``mode()``.

    transformers' own gradient checkpointing needs the model in training mode, whose dropout a backbone must not have.
    """
    with ExitStack() as changed:
        for layer in layers:
            forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=partial(contexts, mode))
            changed.enter_context(replaced_forward(layer, forward))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within this context the module's forward is another function."""
    own = vars(module).get("forward")
    try:
        module.forward = forward
        yield
    finally:
        if own is None:
            vars(module).pop("forward", None)
        else:
            module.forward = own
