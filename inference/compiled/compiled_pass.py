"""Functions that run a model's layers, compiled as soon as their code is there.

    verify = CompiledPass(read, shapes, Where(backbone.layers, [backbone.model], depends), wait=False)
    verify.begin()                       # at the start of every text: a text is finished as it was begun
    found = verify(held, *inputs)        # None: not compiled, run the function itself

During the first text that lasts a copy of the process traces the function, and one of their own compiles its regions; texts that begin
later use them. Later processes load what is there. At its first use a program is run beside the function: their results must agree up to
rounding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.inference.capture.backend import Call, Flat, all_nearly_equal, is_out_of_memory, sizes_of_one
from headstart.inference.capture.capture import Compiling
from headstart.inference.capture.stopwatch import void_running
from headstart.inference.compiled import beside, store
from headstart.inference.compiled.loaded import Loaded
from headstart.inference.compiled.program import NotCompiled, Program, named_weights
from headstart.inference.compiled.sizes import Inputs, Shape
from headstart.inference.compiled.weights import NoMemory, Weights
from headstart.inference.compiled.whole import Damaged
from headstart.support.pytree import builder, flatten

MOST_SHAPES = 4096
"""Exact shapes of calls that are remembered."""
PATIENCE, SHORT_PATIENCE = 24, 1
"""Calls before a function is traced, which takes as long as some tens of them; the second once something of the model is compiled: what
is not is slow beside it, so that it may not be called often."""
logger = logging.getLogger(__name__)
Shapes = Callable[[Call], list[Shape] | None]
"""The sizes of a call's tensors, with names for those that change between calls; None: such a call is not compiled."""
Agree = Callable[[Sequence[Tensor], Sequence[Tensor]], bool]


@dataclass(frozen=True)
class Where:
    """What a function runs: decoder layers, the modules that have its weights, and what its operations depend on beside.

    ``others``: what of the model is compiled; the pass joins them.
    """

    layers: Sequence[nn.Module]
    modules: Sequence[nn.Module]
    depends: Any
    others: list[Compiling]


class CompiledPass:
    """``function(held, *inputs)`` -> a pytree of tensors, compiled. ``wait``: compile at the first call, and do not go on before.

    ``agree``: whether the function's tensors and those of the program agree; ``lasting``: what a text begins with it keeps to its end.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        shapes: Shapes,
        where: Where,
        wait: bool = False,
        agree: Agree = all_nearly_equal,
        lasting: bool = True,
    ) -> None:
        self.function, self.shapes, self.where, self.wait, self.agree, self.lasting = function, shapes, where, wait, agree, lasting
        where.others.append(self)
        self.reason: str | None = None
        """Why it is not compiled, and will not be."""
        self.weights = Weights()
        self._chosen: bool | None = None
        """Whether the text that is being written is compiled; None: not decided, or it does not matter."""
        self._text, self._waiting = 0, False
        self._traced = False
        """True once this process has traced a function during this text: that takes seconds."""
        self._variants: dict[Hashable, _Variant] = {}
        self._by_shapes: dict[Hashable, _Variant | None] = {}

    @property
    def active(self) -> bool:
        """True while the text that is being written uses compiled code."""
        return any(one.active for one in self._variants.values())

    def begin(self) -> bool:
        """Begin a text, or a batch of them; True if what was compiled beside has become ready since the last one began."""
        self._text, self._chosen, self._traced = self._text + 1, None, False
        waited, self._waiting = self._waiting, self.pending
        return waited and not self._waiting

    def __call__(self, held: Any, *inputs: Any) -> tuple[Any] | None:
        """The result, alone in a tuple; None if the function itself is to be run."""
        if self.reason is not None:
            return None
        call = Call.of(held, inputs)
        try:
            variant = self._variant(call)
            if variant is None:
                return None
            if variant.text != self._text:
                self._choose(variant, call)
            variant.calls += 1
            patience = SHORT_PATIENCE if any(one.active for one in self.where.others) else PATIENCE
            if not variant.active and variant.calls > patience and not variant.requested and not (self._traced or beside.Copy.any_works()):
                variant.request(call)
                self._traced = variant.tracing is None
            return variant.run(call) if variant.active else None
        except Damaged as error:
            logger.warning(str(error))
        except NoMemory as error:
            self.give_up(str(error))
        except Exception as error:  # may be the function's own, which running it raises again
            if is_out_of_memory(error):
                raise
            self.give_up(store.in_a_line(error))
        return None

    def _choose(self, variant: _Variant, call: Call) -> None:
        """Decide whether this text uses a program."""
        variant.text, variant.active = self._text, False
        try:
            variant.active = self._chosen is not False and variant.available(call)
        finally:
            if self.lasting and self._chosen is None:
                self._chosen = variant.active

    def _variant(self, call: Call) -> _Variant | None:
        """The program for calls like this one; None: they are not compiled."""
        exact = (call.structure, call.shapes)
        if exact in self._by_shapes:
            return self._by_shapes[exact]
        if len(self._by_shapes) >= MOST_SHAPES:
            self._by_shapes = {}
        shapes, variant = self.shapes(call), None
        if shapes is not None and " at 0x" not in repr(call.structure):  # an object that has no name in another process
            dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in call.leaves]
            inputs = tuple(zip(dtypes, shapes, strict=True))
            key = (call.structure, inputs)
            if key not in self._variants:
                self._variants[key] = _Variant(self, call, inputs)
            variant = self._variants[key]
        self._by_shapes[exact] = variant
        return variant

    def give_up(self, reason: str) -> None:
        """Run the function itself from now on, with a line in the log."""
        if self.reason is not None:
            return
        logger.warning("layers are not compiled, which is slower: %s", reason)
        self.reason = reason
        self._variants, self._by_shapes = {}, {}

    @property
    def pending(self) -> bool:
        """True while layers are being compiled by another process."""
        return any(one.pending for one in self._variants.values())


@functools.cache
def say_waiting() -> None:
    logger.warning("compiling the model's layers and what drafts, once for this machine: one to five minutes")


class _Variant:
    """The program for arguments of one structure and of sizes with these names."""

    def __init__(self, owner: CompiledPass, call: Call, inputs: Inputs) -> None:
        self.owner, self.inputs = owner, inputs
        self.file = store.program_file((owner.where.depends, repr(call.structure), inputs))
        self.calls, self.text, self.active, self.requested = 0, -1, False, False
        self.program: Program | None = None
        self.tracing: beside.Copy | None = None
        self.loaded: Loaded | None = None
        self._builders: dict[Hashable, Callable[[Iterator[Tensor]], Any]] = {}
        """What makes the function's result of its tensors, by what was compared with the function: which sizes are 1."""
        self._fits: dict[tuple[torch.Size, ...], bool] = {}

    @property
    def pending(self) -> bool:
        """True while it is being traced or compiled."""
        if self.tracing is not None and self.tracing.works:
            return True
        if self.requested and self.program is None:
            self.program = store.read_program(self.file)
        return self.program is not None and self.loaded is None and store.lacks(self.program)

    def available(self, call: Call) -> bool:
        """True if the program is loaded, or can be now."""
        if self.loaded is None:
            if (failed := store.failure(self.file)) is not None:
                raise NotCompiled(failed)
            self.program = self.program or store.read_program(self.file)
            if self.owner.wait and (self.program is None or self.pending):
                self._compile(call)
            if self.program is not None and store.ready(self.program):
                self._load(self.program)
            elif self.program is not None and (failed := store.why_not(self.program)) is not None:
                raise NotCompiled(failed)
        return self.loaded is not None

    def request(self, call: Call) -> None:
        """Have the program traced by a copy of this process where that is possible, and compiled by one of its own."""
        self.requested = True
        if self.program is not None and not self.pending:
            return
        logger.info("the model's layers are being compiled beside, for texts that begin in a minute and for later processes")
        void_running()
        if self.program is None:
            self.tracing = beside.Copy.doing(lambda: self._request(call))
        if self.tracing is None:
            self._request(call)

    def _request(self, call: Call) -> None:
        if self.program is None:
            self._trace(call)
        beside.compile_beside(self.file)

    def _compile(self, call: Call) -> None:
        say_waiting()
        if self.program is None:
            self._trace(call)
        assert self.program is not None
        store.compile_missing(self.program)

    def _trace(self, call: Call) -> None:
        from headstart.inference.compiled.traced import traced  # which takes a second

        void_running()
        where = self.owner.where
        try:
            self.program = traced(Flat(self.owner.function, call), self.inputs, where.layers, where.modules)
        except Exception as error:  # torch's tracer raises its own kinds
            raise NotCompiled(store.note_failure(self.file, error)) from error
        store.write_program(self.file, self.program)

    def _load(self, program: Program) -> None:
        void_running()
        owner = self.owner
        held = named_weights(program, owner.where.modules)
        layers = store.load_layers(program)
        owner.weights.add(program.packed.values(), held)
        self.loaded = Loaded(program, layers, owner.weights, held)

    def run(self, call: Call) -> tuple[Any] | None:
        """The result, alone in a tuple; None if the program is not right for these sizes."""
        assert self.loaded is not None
        held = call.held_leaves
        leaves = [*call.leaves[:held], *(leaf.contiguous() for leaf in call.leaves[held:])]
        fits = self._fits.get(call.shapes)
        if fits is None:
            fits = self._fits[call.shapes] = self.loaded.program.fits(leaves)
        if not fits or not all(leaf.is_contiguous() for leaf in leaves[:held]):
            return None
        ones = sizes_of_one(call.shapes)
        build = self._builders.get(ones)
        if build is None:
            build = self._builders[ones] = self._compared(call, leaves)
        return (build(iter(self.loaded(leaves))),)

    def _compared(self, call: Call, leaves: list[Tensor]) -> Callable[[Iterator[Tensor]], Any]:
        """Compare the program with the function; returns what makes the function's result of its tensors."""
        assert self.loaded is not None
        void_running()
        results: list[Tensor] = []
        structure = flatten(self.owner.function(call.held, *call.inputs), results)
        found = self.loaded(leaves)
        if not self.owner.agree(results, found):
            raise NotCompiled("what compiled layers compute differs from what the model does")
        return builder(structure)
