"""The passes of a model through its compiled layers, as soon as these are there.

    verify = CompiledPass(read, shapes, backbone.layers, [backbone.model], depends, wait=False)
    verify.begin()                       # at the start of every text: a text is finished as it was begun
    found = verify(held, *inputs)        # None: not compiled, run the function itself

The first text that lasts traces the function and has its layers compiled by a process of their own; texts that begin later use them. Later
processes load what is there. At its first use a program is run beside the function: their results must agree up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.inference.capture.backend import Call, Flat, is_out_of_memory, nearly_equal, sizes_of_one
from headstart.inference.capture.stopwatch import void_running
from headstart.inference.compiled import store
from headstart.inference.compiled.loaded import Loaded
from headstart.inference.compiled.program import NotCompiled, Program, named_weights
from headstart.inference.compiled.sizes import Shape
from headstart.inference.compiled.weights import MEMORY_SHARE, Weights, free_memory
from headstart.support.pytree import builder, flatten
from headstart.support.units import gigabytes

PATIENCE = 24
"""Passes before the function is traced, which takes as long as some tens of them."""
logger = logging.getLogger(__name__)
Shapes = Callable[[Call], list[Shape]]
"""The sizes of a call's tensors, with names for those that change between calls."""


class CompiledPass:
    """``function(held, *inputs)`` -> a pytree of tensors, compiled.

    ``layers``: the decoder layers that the function runs; ``modules``: where its weights are. ``depends``: what its operations depend on
    beside the tensors' sizes. ``wait``: compile at the first call, and do not go on before.
    """

    def __init__(
        self, function: Callable[..., Any], shapes: Shapes, layers: Sequence[nn.Module], modules: Sequence[nn.Module], depends: Any,
        wait: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.shapes, self.layers, self.modules, self.depends, self.wait = function, shapes, layers, modules, depends, wait
        self.reason: str | None = None
        """Why it is not compiled, and will not be."""
        self.active = False
        """True while the text that is being written uses compiled layers."""
        self.weights = Weights()
        self._decided = False
        self._calls = 0
        self._variants: dict[Hashable, _Variant] = {}

    def begin(self) -> None:
        """Begin a text, or a batch of them."""
        self._decided = False

    def __call__(self, held: Any, *inputs: Any) -> tuple[Any] | None:
        """The result, alone in a tuple; None if the function itself is to be run."""
        if self.reason is not None or (self._decided and not self.active and self._calls > PATIENCE):
            return None
        call = Call.of(held, inputs)
        variant = self._variants.get(call.structure)
        if variant is None:
            variant = self._variants[call.structure] = _Variant(self, call)
        self._calls += 1
        try:
            if not self._decided:
                self.active, self._decided = variant.available(call), True
            elif not self.active and self._calls > PATIENCE:
                variant.request(call)
            return variant.run(call) if self.active and variant.available(call) else None
        except Exception as error:   # may be the function's own, which running it raises again
            if is_out_of_memory(error):
                raise
            self.give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}")
            return None

    def give_up(self, reason: str) -> None:
        """Run the function itself from now on, with a line in the log."""
        logger.warning("layers are not compiled, which is slower: %s", reason)
        self.reason, self.active = reason, False
        self._variants = {}

    @property
    def pending(self) -> bool:
        """True while layers are being compiled by another process."""
        return any(one.pending for one in self._variants.values())


class _Variant:
    """The program for arguments of one structure."""

    def __init__(self, owner: CompiledPass, call: Call) -> None:
        self.owner = owner
        dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in call.leaves]
        self.inputs = tuple(zip(dtypes, owner.shapes(call), strict=True))
        self.file = store.program_file((owner.depends, repr(call.structure), self.inputs))
        self.program: Program | None = None
        self.loaded: Loaded | None = None
        self._builders: dict[Hashable, Callable[[Iterator[Tensor]], Any]] = {}
        """What makes the function's result of its tensors, by what was compared with the function: which sizes are 1."""
        self._fits: dict[tuple[torch.Size, ...], bool] = {}

    @property
    def pending(self) -> bool:
        """True while it is being compiled."""
        program = self.program
        return program is not None and self.loaded is None and not store.ready(program) and not any(map(store.failure, program.regions))

    def available(self, call: Call) -> bool:
        """True if the program is loaded, or can be now."""
        if self.loaded is None:
            self.program = self.program or store.read_program(self.file)
            if self.owner.wait and (self.program is None or self.pending):
                self._compile(call)
            if self.program is not None and store.ready(self.program):
                self._load(self.program)
            elif self.program is not None and (failed := next(filter(None, map(store.failure, self.program.regions)), None)):
                raise NotCompiled(failed)
        return self.loaded is not None

    def request(self, call: Call) -> None:
        """Have the program compiled by a process of its own."""
        if self.program is None:
            self._trace(call)
        if self.pending:
            logger.info("the model's layers are being compiled beside, for texts that begin in a minute and for later processes")
            store.compile_beside(self.file)

    def _compile(self, call: Call) -> None:
        logger.warning("compiling the model's layers, once for this machine: about a minute")
        if self.program is None:
            self._trace(call)
        assert self.program is not None
        store.compile_missing(self.program)

    def _trace(self, call: Call) -> None:
        from headstart.inference.compiled.traced import traced  # which takes a second

        void_running()
        owner = self.owner
        self.program = traced(Flat(owner.function, call), self.inputs, owner.layers, owner.modules)
        store.write_program(self.file, self.program)

    def _load(self, program: Program) -> None:
        void_running()
        owner = self.owner
        held = named_weights(program, owner.modules)
        needed, free = owner.weights.missing(program.packed.values(), held), free_memory()
        if needed > MEMORY_SHARE * free:
            raise NotCompiled(f"the packed weights take {gigabytes(needed)}, more than a third of the {gigabytes(free)} of free memory")
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
        if len(found) != len(results) or not all(nearly_equal(one, other) for one, other in zip(found, results, strict=True)):
            raise NotCompiled("what compiled layers compute differs from what the model does")
        return builder(structure)
