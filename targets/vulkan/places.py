"""Buffers in SPIR-V: storage buffers, workgroup arrays, and locals.

A local array whose indices are all known becomes one variable for each element. The value last stored in it
is remembered, and written only at the end of a block: straight code, such as unrolled loops, keeps its values
in ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from tvm.ir import Var
from tvm.sym import Analyzer

from nearfar.errors import BuildError

from .arithmetic import BOOL, F16, F32, I32, U32, WIDTH, Arithmetic, Dtype, dtype_of
from .conversions import Conversions
from .opcodes import NON_PRIVATE, Capability, Decoration, Opcode, Storage
from .quads import Quads, VectorSource
from .uses import Stored, Uses, width_of

_VECTORS = (F32, I32, U32, F16)


@dataclass
class Place:
    """The place of a buffer.

    `element` is the type in memory, `variable` an array or a block (0 for scalars). `vector`: numbers in an
    element; if `split`, each number is a variable. `quads`: loads may be joined into a vector's load, and
    workgroup memory is an array of vectors.
    """

    dtype: Dtype
    storage: Storage
    element: int
    variable: int = 0
    vector: int = 1
    read_only: bool = False
    scalars: dict[int, int] = field(default_factory=dict)
    split: bool = False
    quads: bool = False
    binding: int = 0


class BufferPlaces:
    """The places of all buffers of a function; see the module's docstring."""

    def __init__(self, arithmetic: Arithmetic, conversions: Conversions) -> None:
        self._arithmetic, self._conversions, self._builder = arithmetic, conversions, arithmetic.builder
        self._places: dict[Var, Place] = {}
        self._held: dict[tuple[Var, int], int] = {}
        self._dirty: dict[tuple[Var, int], None] = {}
        self._quads = Quads(arithmetic)
        self._epoch = 0
        self._vectors: dict[tuple[int, int, int], int] = {}
        self.shared_bytes = 0

    def bind(self, buffer: Var, use: Uses, binding: int) -> None:
        """Bind a buffer of the interface. `Restrict`: a plan binds no buffer twice if one of the bindings is
        written.
        """
        builder, dtype = self._builder, dtype_of(str(buffer.dtype))
        if dtype.bits == 16:
            builder.capability(Capability.STORAGE_BUFFER_16BIT)
        elif dtype.bits <= 8:
            builder.capability(Capability.STORAGE_BUFFER_8BIT)
        lanes = 1 if dtype == BOOL else use.vector or 1  # in a buffer of vectors, the number of their lanes
        element = self._stored_type(dtype)
        held = element if lanes == 1 else builder.vector_type(element, lanes)
        block = builder.buffer_type(held, dtype.bytes * lanes, use.stored)
        variable = self._bound(block, binding, str(buffer.name))
        self._places[buffer] = Place(
            dtype, Storage.STORAGE_BUFFER, element, variable, lanes, read_only=not use.stored,
            quads=lanes == 1 and not use.stored and dtype in _VECTORS and _count(buffer) % WIDTH == 0,
            binding=binding,
        )  # fmt: skip

    def _bound(self, block: int, binding: int, name: str) -> int:
        builder = self._builder
        variable = builder.global_variable(Storage.STORAGE_BUFFER, block)
        builder.decorate(variable, Decoration.DESCRIPTOR_SET, 0)
        builder.decorate(variable, Decoration.BINDING, binding)
        builder.decorate(variable, Decoration.RESTRICT)
        builder.name(variable, name)
        return variable

    def allocate(self, buffer: Var, use: Uses) -> None:
        """Allocate a buffer of the function or the workgroup; an unused one gets nothing."""
        scope, dtype = str(buffer.scope()), dtype_of(str(buffer.dtype))
        if not (use.loaded or use.stored):
            return
        element, width = self._arithmetic.computes(dtype), width_of(buffer)
        count = math.prod(int(extent) for extent in buffer.shape) * width
        if scope == "shared":
            quads = width == 1 and dtype.bits == 32 and count % WIDTH == 0 and use.quads
            quads = quads and not self._builder.vulkan_memory  # exchanged loads would be private loads
            held = WIDTH if quads else width
            kind = element if held == 1 else self._builder.vector_type(element, held)
            array = self._builder.array_type(kind, count // held)
            variable = self._builder.global_variable(Storage.WORKGROUP, array)
            self.shared_bytes += count * max(dtype.bytes, 2 if dtype == F16 else 4)
            self._places[buffer] = Place(dtype, Storage.WORKGROUP, element, variable, width, quads=quads)
        elif scope not in ("local", "global"):
            raise BuildError(f"memory of scope {scope!r} has no SPIR-V code")
        elif use.scalars:
            self._places[buffer] = Place(dtype, Storage.FUNCTION, element, vector=width, split=True)
        else:
            kind = element if width == 1 else self._builder.vector_type(element, width)
            variable = self._builder.local_variable(self._builder.array_type(kind, count // width))
            self._places[buffer] = Place(dtype, Storage.FUNCTION, element, variable, width)

    def alias(self, buffer: Var, other: Var) -> None:
        """Declare the same memory under another name."""
        place = self._places.get(other)
        if place is None or dtype_of(str(buffer.dtype)) != place.dtype:
            raise BuildError(f"buffer {buffer.name} looks at the memory of {other.name} as another dtype")
        self._places[buffer] = place

    def load(self, buffer: Var, index: int, lane: int = 0) -> int:
        """The element at an index; of a buffer of vectors, element `lane` of the vector there."""
        place = self._place(buffer)
        if place.split:
            known = int(self._arithmetic.known(index) or 0)
            return self._load_scalar(buffer, place, known * place.vector + lane)
        builder, pointer = self._builder, self._pointer(place, index)
        if place.vector > 1 and place.storage == Storage.WORKGROUP:
            return self._arithmetic.part(self._loaded(place, pointer), place.element, lane)
        read, before = builder.pure if place.read_only else builder.value, builder.position
        value = read(Opcode.LOAD, self._held_type(place), pointer, *self._access(place))
        if place.vector == 1:
            if place.quads and builder.position != before:
                self._quads.note(buffer, 0 if place.read_only else self._epoch, index, value)
            return self._widened(place, value, 1)
        value = builder.pure(
            Opcode.COMPOSITE_EXTRACT, self._wide(place), self._widened(place, value, place.vector), lane
        )
        return self._conversions.cast(F32, F16, value) if self._widens(place) else value

    def _loaded(self, place: Place, pointer: int) -> int:
        """Load a vector of workgroup memory: one load for all of its lanes, which are requested one after the
        other.
        """
        key = self._builder.block, self._epoch, pointer
        if key not in self._vectors:
            kind = self._held_type(place)
            self._vectors[key] = self._builder.value(Opcode.LOAD, kind, pointer, *self._access(place))
        return self._vectors[key]

    def store(self, buffer: Var, index: int, values: list[int]) -> None:
        """Store at an index: one value, or the lanes of a vector."""
        place = self._place(buffer)
        if place.split:
            first = int(self._arithmetic.known(index) or 0) * place.vector
            for lane, value in enumerate(values):
                self._held[buffer, first + lane] = value
                self._dirty[buffer, first + lane] = None
            return
        value = values[0]
        if place.vector > 1:
            if self._widens(place):
                values = [self._conversions.cast(F16, F32, lane) for lane in values]
            value = self._arithmetic.gathered(self._wide(place), values)
        value = self._narrowed(place, value)
        self._builder.emit(Opcode.STORE, self._pointer(place, index), value, *self._access(place))
        self.disturb()

    def _access(self, place: Place) -> tuple[int, ...]:
        """The memory operands of an access: in Vulkan's memory model barriers order only accesses that are
        not private.
        """
        shared = place.storage == Storage.WORKGROUP and self._builder.vulkan_memory
        return (NON_PRIVATE,) if shared else ()

    def shared_pointer(self, buffer: Var, index: int) -> int:
        """A pointer to an element of workgroup memory."""
        place = self._place(buffer)
        if place.storage != Storage.WORKGROUP:
            raise BuildError(f"buffer {buffer.name} is not in workgroup memory")
        return self._pointer(place, index)

    def disturb(self) -> None:
        """Forget loads of workgroup memory, which may change here."""
        self._epoch += 1

    def finish(self) -> None:
        """Replace groups of loads by loads of vectors (see quads.py). A storage buffer gets a second view, as
        vectors.
        """
        builder = self._builder
        for buffer, groups in self._quads.wanted().items():
            place = self._places[cast(Var, buffer)]
            variable = place.variable
            if place.storage == Storage.STORAGE_BUFFER:
                vector = builder.vector_type(place.element, WIDTH)
                block = builder.buffer_type(vector, WIDTH * place.dtype.bytes, False)
                variable = self._bound(block, place.binding, f"{cast(Var, buffer).name} as vectors")
            wide = builder.float_type() if place.dtype == F16 else 0
            for group in groups:
                self._quads.exchange(group, VectorSource(place.storage, variable, place.element, wide))

    def lanes(self, buffer: Var) -> int:
        """Elements of the buffer's vectors."""
        return self._place(buffer).vector

    def flush(self) -> None:
        """Write remembered values to memory, before a block ends."""
        for key in self._dirty:
            self._builder.emit(Opcode.STORE, self._scalar(*key), self._held[key])
        self._dirty.clear()

    @contextmanager
    def branch(self, lost: Stored) -> Iterator[None]:
        """A context for conditional blocks: they begin with the remembered values, and values that they store
        are unknown after them.
        """
        held, dirty = dict(self._held), dict(self._dirty)
        yield
        self._held, self._dirty = held, dirty
        self.forget(lost)

    def forget(self, lost: Stored) -> None:
        """Forget the values of `lost`."""
        self._held = {
            key: value for key, value in self._held.items() if key not in lost and (key[0], None) not in lost
        }

    def _place(self, buffer: Var) -> Place:
        if buffer not in self._places:
            raise BuildError(f"buffer {buffer.name} is used before it is declared")
        return self._places[buffer]

    def _scalar(self, buffer: Var, index: int) -> int:
        place = self._places[buffer]
        if index not in place.scalars:
            place.scalars[index] = self._builder.local_variable(place.element)
        return place.scalars[index]

    def _load_scalar(self, buffer: Var, place: Place, index: int) -> int:
        key = buffer, index
        if key not in self._held:
            self._held[key] = self._builder.value(Opcode.LOAD, place.element, self._scalar(*key))
        return self._held[key]

    def _pointer(self, place: Place, index: int) -> int:
        builder = self._builder
        pointer = builder.pointer_type(place.storage, self._held_type(place))
        if place.storage == Storage.STORAGE_BUFFER:
            return builder.pure(Opcode.ACCESS_CHAIN, pointer, place.variable, builder.u32(0), index)
        if place.quads:
            vector = self._arithmetic.binary("shr", U32, index, self._arithmetic.constant(U32, 2))
            lane = self._arithmetic.binary("and", U32, index, self._arithmetic.constant(U32, WIDTH - 1))
            return builder.pure(Opcode.ACCESS_CHAIN, pointer, place.variable, vector, lane)
        return builder.pure(Opcode.ACCESS_CHAIN, pointer, place.variable, index)

    # Storage buffers of 8 and 16 bits: without Int8, Int16 and Float16, their values can be loaded, stored
    # and converted, but not put into vectors or taken out, so a vector is converted as a whole.

    def _held_type(self, place: Place) -> int:
        return place.element if place.vector == 1 else self._builder.vector_type(place.element, place.vector)

    def _stored_type(self, dtype: Dtype) -> int:
        if dtype.kind == "f":
            return self._builder.float_type(dtype.bits)
        return self._builder.int_type(max(dtype.bits, 8))

    def _is_narrow(self, place: Place) -> bool:
        """Whether memory and registers have different types."""
        if place.storage != Storage.STORAGE_BUFFER or place.dtype.bits >= 32:
            return False
        return place.dtype.kind != "f" or place.vector > 1

    def _widens(self, place: Place) -> bool:
        """Whether elements pass through float32 on their way between a vector in memory and a register."""
        return place.dtype == F16 and self._is_narrow(place)

    def _wide(self, place: Place) -> int:
        if self._widens(place):
            return self._builder.float_type()
        return self._builder.int_type() if self._is_narrow(place) else place.element

    def _widened(self, place: Place, value: int, lanes: int) -> int:
        """Convert a value from memory to its register type."""
        if not self._is_narrow(place):
            return value
        builder, dtype = self._builder, place.dtype
        kind = self._wide(place) if lanes == 1 else builder.vector_type(self._wide(place), lanes)
        op = {"f": Opcode.F_CONVERT, "i": Opcode.S_CONVERT, "u": Opcode.U_CONVERT, "b": Opcode.U_CONVERT}[
            dtype.kind
        ]
        wide = builder.pure(op, kind, value)
        return self._arithmetic.compare("ne", U32, wide, builder.u32(0)) if dtype == BOOL else wide

    def _narrowed(self, place: Place, value: int) -> int:
        """Convert a register's value to its type in memory."""
        if not self._is_narrow(place):
            return value
        if place.dtype == BOOL:
            value = self._conversions.cast(BOOL, I32, value)
        op = Opcode.F_CONVERT if place.dtype.kind == "f" else Opcode.U_CONVERT
        return self._builder.pure(op, self._held_type(place), value)


def _count(buffer: Var) -> int:
    """A number that divides the number of a buffer's elements; for a symbolic extent, the steps in which it
    grows.
    """
    analyzer = Analyzer()
    return math.prod(
        int(extent) if isinstance(extent, int) else _steps(analyzer, extent) for extent in buffer.shape
    )


def _steps(analyzer: Analyzer, extent: object) -> int:
    found = analyzer.modular_set(extent)
    return math.gcd(int(found.coeff), int(found.base))
