"""Functions that run a model's layers, as compiled code where that is kept.

    verify = CompiledPass(read, shapes, backbone.layers, [backbone.model], depends, hint)
    found = verify(held, *inputs)        # None: not compiled, run the function itself

Compiled code has other last bits in 16 bits than the function. So a process goes on as it began: whether a program is used is decided at
its first call and remembered (`BEGUN`), whatever other processes compile later. At its first use a program is run beside the function, and
the results must agree up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.inference.capture.captured import MOST_SHAPES, void_running, warn_once
from headstart.inference.capture.plugin import Call, Flat, all_nearly_equal, is_out_of_memory, sizes_of_one
from headstart.support.pytree import builder, flatten
from headstart_cpu import store
from headstart_cpu.kernels import Damaged
from headstart_cpu.program import SPACE, Inputs, NotCompiled, Program, Shape, named_weights
from headstart_cpu.store import Layer
from headstart_cpu.weights import packed_weights

BEGUN: dict[Path, bool] = {}
"""The programs that this process has come to, by their files, and whether it uses them."""
logger = logging.getLogger(__name__)
Shapes = Callable[[Call], list[Shape] | None]
"""The sizes of a call's tensors, with names for those that change between calls; None: such a call is not compiled."""
Agree = Callable[[Sequence[Tensor], Sequence[Tensor]], bool]
Missing = Callable[[Path, Program], object] | None
"""What is done about a program that is not compiled, given its file; None: nothing, and it is not used."""


@dataclass(eq=False)
class CompiledPass:
    """``function(held, *inputs)`` -> a pytree of tensors, compiled."""

    function: Callable[..., Any]
    shapes: Shapes
    layers: Sequence[nn.Module]
    """The decoder layers that it runs."""
    modules: Sequence[nn.Module]
    """Those that have its weights."""
    depends: Any
    """What its operations depend on beside."""
    hint: Callable[[Call], str]
    """Of a call, what is said once if its program is not kept."""
    missing: Missing = None
    agree: Agree = all_nearly_equal
    """Whether the function's tensors and those of the program agree."""
    reason: str | None = None
    """Why it is not compiled, and will not be."""
    _variants: dict[Hashable, _Variant] = field(default_factory=dict)
    _by_shapes: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """True if compiled code is used."""
        return any(variant.loaded is not None for variant in self._variants.values())

    def __call__(self, held: Any, *inputs: Any) -> tuple[Any] | None:
        """The result, alone in a tuple; None if the function itself is to be run."""
        if self.reason is not None:
            return None
        call = Call.of(held, inputs)
        try:
            variant = self._variant(call)
            return variant.run(call) if variant is not None and variant.used(call) else None
        except Damaged as error:
            logger.warning(str(error))
            return self(held, *inputs) if self.missing is not None else None  # compiled again
        except Exception as error:  # may be the function's own, which running it raises again
            if is_out_of_memory(error):
                raise
            self.give_up(store.in_a_line(error))
        return None

    def _variant(self, call: Call) -> _Variant | None:
        """The program for calls like this one; None: they are not compiled."""
        exact = (call.structure, call.shapes)
        if (known := self._by_shapes.get(exact, ...)) is not ...:  # hashed once, since that takes time
            return known
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
        BEGUN.update({variant.file: False for variant in self._variants.values()})
        self._variants, self._by_shapes = {}, {}


class _Variant:
    """The program for arguments of one structure and of sizes with these names."""

    def __init__(self, owner: CompiledPass, call: Call, inputs: Inputs) -> None:
        self.owner, self.inputs = owner, inputs
        self.file = store.program_file((owner.depends, repr(call.structure), inputs))
        self.loaded: Loaded | None = None
        self._asked = False
        """True once something was done about code that lacked."""
        self._builders: dict[Hashable, Callable[[Iterator[Tensor]], Any]] = {}
        """What makes the function's result of the program's tensors, by what was compared with the function: which sizes are 1."""
        self._known: dict[tuple[torch.Size, ...], Any] = {}
        """The same by exact sizes; None: the program is not right for them."""

    def used(self, call: Call) -> bool:
        """True if the program is used in this process: decided at its first call, unless it is to be compiled now."""
        lacks = self.owner.missing is not None and not self._asked
        if self.loaded is None and (lacks or BEGUN.get(self.file, True)):
            BEGUN[self.file] = False  # if the program is damaged
            BEGUN[self.file], self._asked = self._load(call), True
        return BEGUN[self.file]

    def _load(self, call: Call) -> bool:
        """Load the program if it is kept whole, or can be made."""
        program = store.read_program(self.file)
        if (failed := store.failure(self.file)) is not None:
            raise NotCompiled(failed)
        if self.owner.missing is not None and (program is None or store.lacks(program)):
            program = program or self._trace(call)
            self.owner.missing(self.file, program)
        if program is None or not store.ready(program):
            if program is not None and (failed := store.why_not(program)) is not None:
                raise NotCompiled(failed)
            if self.owner.missing is None and (hint := self.owner.hint(call)):
                warn_once(hint)
            return False
        void_running()
        self.loaded = Loaded(program, self.owner.modules)
        return True

    def _trace(self, call: Call) -> Program:
        from headstart_cpu.traced import traced  # which takes a second

        void_running()
        try:
            program = traced(Flat(self.owner.function, call), self.inputs, self.owner.layers, self.owner.modules)
        except Exception as error:  # torch's tracer raises its own kinds
            raise NotCompiled(store.note_failure(self.file, error)) from error
        store.write_program(self.file, program)
        return program

    def run(self, call: Call) -> tuple[Any] | None:
        """The result, alone in a tuple; None if the program is not right for these sizes."""
        assert self.loaded is not None
        held = call.held_leaves
        leaves = [*call.leaves[:held], *(leaf.contiguous() for leaf in call.leaves[held:])]
        if (build := self._known.get(call.shapes, ...)) is ...:
            build = self._known[call.shapes] = self._builder(call, leaves)
        if build is None or not all(leaf.is_contiguous() for leaf in leaves[:held]):
            return None
        return (build(iter(self.loaded(leaves))),)

    def _builder(self, call: Call, leaves: list[Tensor]) -> Callable[[Iterator[Tensor]], Any] | None:
        """What makes the function's result of the program's tensors, compared with the function; None: it is not right for these sizes."""
        assert self.loaded is not None
        if not self.loaded.program.fits(leaves):
            return None
        ones = sizes_of_one(call.shapes)
        if ones not in self._builders:
            void_running()
            results: list[Tensor] = []
            structure = flatten(self.owner.function(call.held, *call.inputs), results)
            if not self.owner.agree(results, self.loaded(leaves)):
                raise NotCompiled("what compiled layers compute differs from what the model does")
            self._builders[ones] = builder(structure)
        return self._builders[ones]


class Loaded:
    """A program with its compiled layers and its weights."""

    def __init__(self, program: Program, modules: Sequence[nn.Module]) -> None:
        self.program = program
        layers, self.weights = store.load_layers(program), named_weights(program, modules)
        self.weights |= packed_weights(program.packed, self.weights)
        calls = ((layers[region], [self.weights[name] for name in names]) for region, names in program.calls)
        self._held = SimpleNamespace(**self.weights, **{f"call_{number}": partial(_run, *call) for number, call in enumerate(calls)})
        space = dict(SPACE)
        exec(program.text, space)  # written by `traced`
        self._forward: Any = space["forward"]

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._forward(self._held, *tensors)
        return found


def _run(layer: Layer, weights: list[Tensor], inputs: list[Tensor]) -> Sequence[Tensor]:
    return layer([*inputs, *weights])
