"""Joins four loads of neighbours into one load of a vector.

Unrolled kernels load x[i], x[i + 1], x[i + 2], x[i + 3] in one block, with i known to be a multiple of 4.
GPUs fetch 16 bytes as fast as 4, and Mesa's lavapipe, which handles lanes one by one at each load, does so
once instead of four times. Loads are noted as they are written and replaced at the end. They may move within
their block because nothing writes the memory that they read: buffers that the kernel does not write, and
workgroup memory between two stores or barriers (`epoch`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .arithmetic import U32, WIDTH, Arithmetic
from .opcodes import Opcode, Storage
from .spirv import instruction

LOAD_WORDS = 4


@dataclass(frozen=True)
class VectorSource:
    """The memory from which vectors are loaded: an array of vectors (workgroup memory) or a block with one
    (storage buffers).

    `wide`: 0, or the type through which elements are extracted, which float16 needs without the capability
    Float16. A driver removes the conversion of float16 to float32 and back.
    """

    storage: Storage
    variable: int
    element: int
    wide: int = 0


@dataclass
class _Group:
    """Loads of one aligned vector: by their place in it, their position in the code and their id."""

    base: int
    first: int
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)


class Quads:
    """Notes loads; see the module's docstring."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic, self._builder = arithmetic, arithmetic.builder
        self._groups: dict[tuple[object, ...], _Group] = {}

    def note(self, source: object, epoch: int, index: int, value: int) -> None:
        """Note the load just written, of the element at an index."""
        base, offset = self._arithmetic.split(index)
        if self._arithmetic.factor(base) % WIDTH:
            return
        first = offset - offset % WIDTH
        key = (self._builder.block, source, epoch, base, first)
        group = self._groups.setdefault(key, _Group(base, first))
        group.loads.setdefault(offset % WIDTH, (self._builder.position - LOAD_WORDS, value))

    def wanted(self) -> dict[object, list[_Group]]:
        """The complete groups, by their source."""
        out: dict[object, list[_Group]] = {}
        for (_, source, *_), group in self._groups.items():
            if len(group.loads) == WIDTH:
                out.setdefault(source, []).append(group)
        return out

    def exchange(self, group: _Group, source: VectorSource) -> None:
        """Replace the four loads; the vector's load comes where the first of them was."""
        builder = self._builder
        vector = builder.vector_type(source.element, WIDTH)
        kind, made = builder.int_type(), [builder.new_id() for _ in range(4)]
        known = self._arithmetic.known(group.base)
        words: list[int] = []
        if known is not None:
            index = builder.u32((int(known) + group.first) // WIDTH)
        else:
            words += instruction(Opcode.SHIFT_RIGHT_LOGICAL, kind, made[0], group.base, builder.u32(2))
            words += instruction(
                Opcode.I_ADD, kind, made[1], made[0], self._arithmetic.constant(U32, group.first // WIDTH)
            )
            index = made[1]
        pointer = builder.pointer_type(source.storage, vector)
        path = (builder.u32(0), index) if source.storage == Storage.STORAGE_BUFFER else (index,)
        words += instruction(Opcode.ACCESS_CHAIN, pointer, made[2], source.variable, *path)
        words += instruction(Opcode.LOAD, vector, made[3], made[2])
        taken = made[3]
        if source.wide:
            taken = builder.new_id()
            words += instruction(Opcode.F_CONVERT, builder.vector_type(source.wide, WIDTH), taken, made[3])
        for place, (_, value) in sorted(group.loads.items()):
            if source.wide:
                extracted = builder.new_id()
                words += instruction(Opcode.COMPOSITE_EXTRACT, source.wide, extracted, taken, place)
                words += instruction(Opcode.F_CONVERT, source.element, value, extracted)
            else:
                words += instruction(Opcode.COMPOSITE_EXTRACT, source.element, value, taken, place)
        first = min(position for position, _ in group.loads.values())
        for position, _ in group.loads.values():
            builder.replace(position, LOAD_WORDS, words if position == first else [])
