"""Builds one SPIR-V compute module: ids, types and constants without duplicates, blocks, and words in order.

Equal pure instructions in a block, or in a block that dominates it, are one instruction: `pure` looks in the
scopes that `scope` opens and closes with the structured blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from .opcodes import (
    ADDRESSING_LOGICAL,
    GL_COMPUTE,
    LOCAL_SIZE,
    MEMORY_GLSL450,
    MEMORY_VULKAN,
    BuiltIn,
    Capability,
    Decoration,
    Glsl,
    Opcode,
    Storage,
)

EXTENSIONS = {
    Capability.DOT_PRODUCT: "SPV_KHR_integer_dot_product",
    Capability.COOPERATIVE_MATRIX: "SPV_KHR_cooperative_matrix",
}
"""The extensions of capabilities that SPIR-V 1.5 does not have."""

MAGIC = 0x07230203
VERSION = 0x00010500  # SPIR-V 1.5, the version of Vulkan 1.2
ENTRY = "main"
Size3 = tuple[int, int, int]


def text(value: str) -> list[int]:
    """A literal string: UTF-8, ended by a zero byte, padded to words."""
    data = value.encode() + b"\0"
    data += bytes(-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def instruction(op: Opcode, *operands: int) -> list[int]:
    """The words of one instruction."""
    return [(len(operands) + 1) << 16 | op, *operands]


class Builder:
    """A module with one entry point. Methods that create something return its id."""

    def __init__(self) -> None:
        self._next = 1
        self._capabilities: set[int] = {int(Capability.SHADER)}
        self._names: list[int] = []
        self._decorations: list[int] = []
        # types, constants and global variables, each after the ones that it uses
        self._globals: list[int] = []
        self._made: dict[tuple[object, ...], int] = {}
        self._interface: list[int] = []
        self._locals: list[int] = []
        self._code: list[int] = []
        self._edits: list[tuple[int, int, list[int]]] = []
        self._scopes: list[dict[tuple[int, ...], int]] = [{}]
        self._glsl = 0
        self.block = self._first = self.new_id()
        """The block that instructions go to; 0 after a branch."""

    def new_id(self) -> int:
        """A fresh id."""
        self._next += 1
        return self._next - 1

    # Declarations

    def capability(self, capability: Capability) -> None:
        """Declare a capability."""
        self._capabilities.add(int(capability))

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities declared so far."""
        return frozenset(Capability(value) for value in self._capabilities)

    @property
    def vulkan_memory(self) -> bool:
        """Whether the module has Vulkan's memory model; this must be known before memory is used."""
        return int(Capability.VULKAN_MEMORY_MODEL) in self._capabilities

    def name(self, target: int, value: str) -> None:
        """Give an id a name for debuggers."""
        self._names += instruction(Opcode.NAME, target, *text(value))

    def decorate(self, target: int, decoration: Decoration, *operands: int) -> None:
        """Decorate an id."""
        self._decorations += instruction(Opcode.DECORATE, target, decoration, *operands)

    def declare(self, op: Opcode, *operands: int) -> int:
        """A type: the same operands give the same id."""
        key = (op, *operands)
        if key not in self._made:
            self._made[key] = self.new_id()
            self._globals += instruction(op, self._made[key], *operands)
        return self._made[key]

    def int_type(self, bits: int = 32) -> int:
        """An integer type. All are unsigned: instructions decide on the sign, so no cast is needed."""
        if bits == 64:
            self.capability(Capability.INT64)
        return self.declare(Opcode.TYPE_INT, bits, 0)

    def float_type(self, bits: int = 32) -> int:
        """A float type. The capability for 16 bits depends on its use: see Arithmetic and Memory."""
        return self.declare(Opcode.TYPE_FLOAT, bits)

    def bool_type(self) -> int:
        """The boolean type."""
        return self.declare(Opcode.TYPE_BOOL)

    def vector_type(self, element: int, count: int) -> int:
        """A type of vectors of 2 to 4 elements."""
        return self.declare(Opcode.TYPE_VECTOR, element, count)

    def array_type(self, element: int, count: int) -> int:
        """A type of arrays without a layout (Function and Workgroup memory)."""
        return self.declare(Opcode.TYPE_ARRAY, element, self.u32(count))

    def pointer_type(self, storage: Storage, pointee: int) -> int:
        return self.declare(Opcode.TYPE_POINTER, storage, pointee)

    def buffer_type(self, element: int, stride: int, writable: bool) -> int:
        """The block of a storage buffer: a struct of one unbounded array."""
        array = self.declare(Opcode.TYPE_RUNTIME_ARRAY, element)
        key = ("block", element, writable)
        if key not in self._made:
            if ("stride", array) not in self._made:
                self._made["stride", array] = array
                self.decorate(array, Decoration.ARRAY_STRIDE, stride)
            made = self._made[key] = self.new_id()
            self._globals += instruction(Opcode.TYPE_STRUCT, made, array)
            self.decorate(made, Decoration.BLOCK)
            self._decorations += instruction(Opcode.MEMBER_DECORATE, made, 0, Decoration.OFFSET, 0)
            if not writable:
                self._decorations += instruction(Opcode.MEMBER_DECORATE, made, 0, Decoration.NON_WRITABLE)
        return self._made[key]

    def constant(self, kind: int, *words: int) -> int:
        """A number of type `kind` by its bits, low word first."""
        key = (Opcode.CONSTANT, kind, *words)
        if key not in self._made:
            self._made[key] = self.new_id()
            self._globals += instruction(Opcode.CONSTANT, kind, self._made[key], *words)
        return self._made[key]

    def all_of(self, kind: int, element: int) -> int:
        """A constant of a composite type whose elements are all equal."""
        key = (Opcode.CONSTANT_COMPOSITE, kind, element)
        if key not in self._made:
            self._made[key] = self.new_id()
            self._globals += instruction(Opcode.CONSTANT_COMPOSITE, kind, self._made[key], element)
        return self._made[key]

    def u32(self, value: int) -> int:
        """A 32-bit constant, signed or not."""
        return self.constant(self.int_type(), value & 0xFFFFFFFF)

    def truth(self, value: bool) -> int:
        """A boolean constant."""
        op = Opcode.CONSTANT_TRUE if value else Opcode.CONSTANT_FALSE
        kind, key = self.bool_type(), (op,)
        if key not in self._made:
            self._made[key] = self.new_id()
            self._globals += instruction(op, kind, self._made[key])
        return self._made[key]

    def global_variable(self, storage: Storage, pointee: int) -> int:
        """A variable of the module; it joins the entry point's interface."""
        pointer, made = self.pointer_type(storage, pointee), self.new_id()
        self._globals += instruction(Opcode.VARIABLE, pointer, made, storage)
        self._interface.append(made)
        return made

    def local_variable(self, pointee: int) -> int:
        """A variable of the function."""
        pointer, made = self.pointer_type(Storage.FUNCTION, pointee), self.new_id()
        self._locals += instruction(Opcode.VARIABLE, pointer, made, Storage.FUNCTION)
        return made

    def built_in(self, which: BuiltIn, kind: int) -> int:
        """The input variable of a built-in."""
        key = ("built-in", which)
        if key not in self._made:
            made = self._made[key] = self.global_variable(Storage.INPUT, kind)
            self.decorate(made, Decoration.BUILT_IN, which)
        return self._made[key]

    # Instructions

    def emit(self, op: Opcode, *operands: int) -> None:
        """Emit an instruction without a result."""
        if not self.block:
            # The code after a return or break is never reached, but still needs a block.
            self.label(self.new_id())
        self._code += instruction(op, *operands)

    def value(self, op: Opcode, kind: int, *operands: int) -> int:
        """Emit an instruction with a result of type `kind`."""
        made = self.new_id()
        self.emit(op, kind, made, *operands)
        return made

    def pure(self, op: Opcode, kind: int, *operands: int) -> int:
        """Emit an operation whose result depends only on its operands; an equal one in scope is reused."""
        key = (op, kind, *operands)
        for scope in reversed(self._scopes):
            if key in scope:
                return scope[key]
        made = self._scopes[-1][key] = self.value(op, kind, *operands)
        return made

    def glsl(self, which: Glsl, kind: int, *operands: int) -> int:
        """Emit an instruction of GLSL.std.450."""
        self._glsl = self._glsl or self.new_id()
        return self.pure(Opcode.EXT_INST, kind, self._glsl, which, *operands)

    @property
    def position(self) -> int:
        """The number of words of code so far."""
        return len(self._code)

    def replace(self, position: int, count: int, words: list[int]) -> None:
        """Replace `count` words of code from a position on, in the finished module."""
        self._edits.append((position, count, words))

    # Blocks

    def label(self, block: int) -> None:
        """Begin a block."""
        self._code += instruction(Opcode.LABEL, block)
        self.block = block

    def branch(self, block: int) -> None:
        """End the block by a branch, unless a return or break has ended it."""
        if self.block:
            self.emit(Opcode.BRANCH, block)
            self.block = 0

    def end(self, op: Opcode, *operands: int) -> None:
        """End the block by another instruction."""
        self.emit(op, *operands)
        self.block = 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A scope for blocks that are dominated by the code before, but do not dominate the code after."""
        self._scopes.append({})
        yield
        self._scopes.pop()

    # The module

    def words(self, kernel: str, workgroup: Size3) -> list[int]:
        """The whole module; its workgroup size can be set by the specialization constants 0, 1 and 2."""
        void = self.declare(Opcode.TYPE_VOID)
        signature = self.declare(Opcode.TYPE_FUNCTION, void)
        self._workgroup_size(workgroup)
        main = self.new_id()
        self.name(main, kernel)
        out = [MAGIC, VERSION, 0, self._next, 0]
        for capability in sorted(self._capabilities):
            out += instruction(Opcode.CAPABILITY, capability)
        for capability, extension in EXTENSIONS.items():
            if capability in self._capabilities:
                out += instruction(Opcode.EXTENSION, *text(extension))
        if self._glsl:
            out += instruction(Opcode.EXT_INST_IMPORT, self._glsl, *text("GLSL.std.450"))
        model = MEMORY_VULKAN if self.vulkan_memory else MEMORY_GLSL450
        out += instruction(Opcode.MEMORY_MODEL, ADDRESSING_LOGICAL, model)
        out += instruction(Opcode.ENTRY_POINT, GL_COMPUTE, main, *text(ENTRY), *self._interface)
        out += instruction(Opcode.EXECUTION_MODE, main, LOCAL_SIZE, *workgroup)
        out += self._names + self._decorations + self._globals
        out += instruction(Opcode.FUNCTION, void, main, 0, signature)
        out += instruction(Opcode.LABEL, self._first) + self._locals + self._edited()
        return out + instruction(Opcode.FUNCTION_END)

    def _edited(self) -> list[int]:
        out, at = [], 0
        for position, count, words in sorted(self._edits):
            out += self._code[at:position] + words
            at = position + count
        return out + self._code[at:]

    def _workgroup_size(self, size: Size3) -> None:
        parts = []
        for axis, extent in enumerate(size):
            part = self.new_id()
            self._globals += instruction(Opcode.SPEC_CONSTANT, self.int_type(), part, extent)
            self.decorate(part, Decoration.SPEC_ID, axis)
            parts.append(part)
        kind, made = self.vector_type(self.int_type(), 3), self.new_id()
        self._globals += instruction(Opcode.SPEC_CONSTANT_COMPOSITE, kind, made, *parts)
        self.decorate(made, Decoration.BUILT_IN, BuiltIn.WORKGROUP_SIZE)


def to_bytes(words: list[int]) -> bytes:
    """The file: words, little-endian."""
    return struct.pack(f"<{len(words)}I", *words)
