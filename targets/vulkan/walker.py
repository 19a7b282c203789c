"""Writes the statements of a lowered device function as structured blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Call, Var

from nearfar.errors import BuildError

from .arithmetic import I32, Arithmetic
from .conversions import Conversions
from .cooperative import PREFIX, Cooperative, cooperates
from .expressions import Expressions, dtype, lanes
from .opcodes import (
    LOOP_UNROLL,
    SCOPE_SUBGROUP,
    SCOPE_WORKGROUP,
    SEMANTICS_ACQUIRE_RELEASE,
    SEMANTICS_AVAILABLE_VISIBLE,
    SEMANTICS_STORAGE_BUFFER,
    SEMANTICS_WORKGROUP,
    BuiltIn,
    Capability,
    Opcode,
)
from .places import BufferPlaces
from .spirv import Builder, Size3
from .uses import Stored, Uses, nodes, stored, uses

MAX_GRID_X = 65535
"""Workgroups along x that every Vulkan device supports; further ones are folded into z."""

_SILENT = (
    "pragma_",
    "storage_alignment",
    "reduce_scope",
    "realize_scope",
    "extern_scope",
    "compute_scope",
    "device_scope",
)
_BARRIERS = {
    "shared": (SCOPE_WORKGROUP, SEMANTICS_WORKGROUP),
    "global": (SCOPE_WORKGROUP, SEMANTICS_WORKGROUP | SEMANTICS_STORAGE_BUFFER),
    "warp": (SCOPE_SUBGROUP, SEMANTICS_WORKGROUP),
}
_UNROLLED = 3  # TVM's ForKind.kUnrolled


@dataclass(frozen=True)
class Interface:
    """The facts that a plan needs: the function's parameters by name, in the order of their bindings, and
    sizes.
    """

    names: tuple[str, ...]
    access: tuple[str, ...]
    grid: Size3
    workgroup: Size3
    shared_bytes: int
    subgroup_size: int


@dataclass(frozen=True)
class LoopBlocks:
    """The blocks to which break and continue branch."""

    merge: int
    step: int


class Walker:
    """Writes one function; `interface` is complete after `walk`."""

    def __init__(self, name: str, func: tirx.PrimFunc, builder: Builder) -> None:
        self._name, self._func, self._builder = name, func, builder
        if cooperates(nodes(func.body)):
            builder.capability(Capability.VULKAN_MEMORY_MODEL)
        self._arithmetic = Arithmetic(builder)
        self._memory = BufferPlaces(self._arithmetic, Conversions(self._arithmetic))
        self._expressions = Expressions(self._arithmetic, self._memory)
        self._cooperative = Cooperative(self._arithmetic, self._memory)
        self._uses: dict[Var, Uses] = uses(func.body)
        self._extents: dict[str, int] = {}
        self._parameters: dict[Var, int] = {}
        self._bound: dict[int, Var] = {}
        self._loops: list[LoopBlocks] = []
        self._by_class: dict[str, Callable[[Any], None]] = {
            "SeqStmt": self._sequence, "AttrStmt": self._attribute, "DeclBuffer": self._declare,
            "AllocBuffer": self._allocate, "Bind": self._bind, "BufferStore": self._store, "For": self._for,
            "While": self._while, "IfThenElse": self._if, "Evaluate": self._evaluate,
            "Break": lambda _: self._leave(self._loops[-1].merge),
            "Continue": lambda _: self._leave(self._loops[-1].step), "AssertStmt": lambda _: None,
            "Return": self._return,
        }  # fmt: skip

    def walk(self) -> Interface:
        """Write the function; returns its interface."""
        for i, parameter in enumerate(self._func.params):
            if "handle" not in str(parameter.ty.dtype if hasattr(parameter.ty, "dtype") else "handle"):
                raise BuildError(
                    f"parameter {parameter.name} is a number: kernels take buffers of known shapes only"
                )
            self._parameters[parameter] = i
        self._collect_extents(self._func.body)
        x = self._extents.get("blockIdx.x", 1)
        if x > MAX_GRID_X:
            self._fold(x)
        else:
            self._statement(self._func.body)
        self._builder.end(Opcode.RETURN)
        self._memory.finish()
        return self._interface()

    def _interface(self) -> Interface:
        buffers = [self._bound.get(i) for i in range(len(self._parameters))]
        extents = self._extents
        x = extents.get("blockIdx.x", 1)
        folds = -(-x // MAX_GRID_X)
        return Interface(
            names=tuple(str(parameter.name).removesuffix("_ptr") for parameter in self._func.params),
            access=tuple("read_write" if b is not None and self._uses[b].stored else "read" for b in buffers),
            grid=(min(x, MAX_GRID_X), extents.get("blockIdx.y", 1), extents.get("blockIdx.z", 1) * folds),
            workgroup=(
                extents.get("threadIdx.x", 1),
                extents.get("threadIdx.y", 1),
                extents.get("threadIdx.z", 1),
            ),
            shared_bytes=self._memory.shared_bytes,
            subgroup_size=self._expressions.intrinsics.subgroup_size,
        )

    # Threads

    def _collect_extents(self, body: Any) -> None:
        while True:
            if isinstance(body, tirx.AttrStmt):
                if str(body.attr_key) == "thread_extent":
                    self._extents.setdefault(str(body.node.thread_tag), int(body.value))
                body = body.body
            elif isinstance(body, tirx.SeqStmt):
                nested = [s for s in body.seq if isinstance(s, tirx.AttrStmt | tirx.SeqStmt)]
                if len(nested) != 1:
                    return
                body = nested[0]
            else:
                return

    def _thread(self, tag: str) -> int:
        """The index of the workgroup in the grid or of the thread in the workgroup; 0 if there is
        only one.
        """
        builder = self._builder
        if self._extents[tag] == 1:
            return self._arithmetic.constant(I32, 0)
        axis = "xyz".index(tag[-1])
        which = BuiltIn.WORKGROUP_ID if tag.startswith("blockIdx") else BuiltIn.LOCAL_INVOCATION_ID
        index = self._component(which, axis)
        if tag != "blockIdx.x" or self._extents[tag] <= MAX_GRID_X:
            return index
        fold = self._arithmetic.binary("mul", I32, self._component(which, 2), builder.u32(MAX_GRID_X))
        return self._arithmetic.binary("add", I32, fold, index)

    def _component(self, which: BuiltIn, axis: int) -> int:
        builder, kind = self._builder, self._builder.int_type()
        vector = builder.vector_type(kind, 3)
        loaded = builder.pure(Opcode.LOAD, vector, builder.built_in(which, vector))
        return builder.pure(Opcode.COMPOSITE_EXTRACT, kind, loaded, axis)

    def _fold(self, extent: int) -> None:
        """Fold workgroups that x cannot hold into z; those past the last skip all code, barriers included."""
        if self._extents.get("blockIdx.z", 1) != 1:
            raise BuildError(
                f"a grid of {extent} along x and more than one along z has no room for its folds"
            )
        inside = self._arithmetic.compare("lt", I32, self._thread("blockIdx.x"), self._builder.u32(extent))
        self._branches(inside, lambda: self._statement(self._func.body), None)

    # Statements

    def _statement(self, node: Any) -> None:
        made = self._by_class.get(type(node).__name__)
        if made is None:
            raise BuildError(f"statement {type(node).__name__} has no SPIR-V code: {str(node)[:200]}")
        made(node)

    def _sequence(self, node: Any) -> None:
        for child in node.seq:
            self._statement(child)

    def _attribute(self, node: Any) -> None:
        key = str(node.attr_key)
        if key == "thread_extent":
            tag, extent = str(node.node.thread_tag), int(node.value)
            if self._extents.setdefault(tag, extent) != extent or tag.split(".")[0] not in (
                "blockIdx",
                "threadIdx",
            ):
                raise BuildError(f"{tag} has the extent {extent} here and {self._extents[tag]} elsewhere")
            index = self._arithmetic_cast(self._thread(tag), node.node.var)
            self._expressions.define(node.node.var, (index,))
        elif not key.removeprefix("tirx.").startswith(_SILENT):
            raise BuildError(f"attribute {key} has no SPIR-V code")
        self._statement(node.body)

    def _arithmetic_cast(self, index: int, variable: Any) -> int:
        return self._expressions.conversions.cast(I32, dtype(variable), index)

    def _declare(self, node: Any) -> None:
        """Declare a buffer of the interface by its pointer, or another name of an existing buffer."""
        buffer, use = node.buffer, self._uses.get(node.buffer)
        if use is None:
            return
        if not isinstance(node.data, Var):
            self._memory.alias(buffer, node.data.args[0])
            return
        place = self._parameters.get(node.data)
        if place is None:
            raise BuildError(f"buffer {buffer.name} lies at {node.data.name}, which is not a parameter")
        if place in self._bound:
            self._merge(self._bound[place], buffer)
            return
        self._bound[place] = buffer
        self._memory.bind(buffer, use, place)

    def _merge(self, first: Any, second: Any) -> None:
        if self._uses[second].stored and not self._uses[first].stored:
            raise BuildError(f"buffer {second.name} is written, but first declared where it is only read")
        self._memory.alias(second, first)

    def _allocate(self, node: Any) -> None:
        if node.buffer in self._uses:
            self._memory.allocate(node.buffer, self._uses[node.buffer])

    def _bind(self, node: Any) -> None:
        self._expressions.define(node.var, self._expressions.values(node.value))

    def _store(self, node: Any) -> None:
        index = self._expressions.only_index(node)
        values = self._expressions.values(node.value)
        width = max(lanes(index), len(values))
        values = values * width if len(values) == 1 else values
        if self._memory.lanes(node.buffer) > 1:
            self._memory.store(node.buffer, self._expressions.vector_index(index), list(values))
            return
        for lane, value in enumerate(values):
            self._memory.store(node.buffer, self._expressions.value(index, lane if width > 1 else 0), [value])

    def _evaluate(self, node: Any) -> None:
        if not isinstance(node.value, Call):
            return  # a number or variable as a statement has no effect
        name = str(node.value.op.name).split(".")[-1]
        if name == "tvm_storage_sync":
            kind = str(node.value.args[0].value)
            if kind not in _BARRIERS:
                raise BuildError(f"barrier {kind!r} has no SPIR-V code")
            scope, semantics = _BARRIERS[kind]
            u32 = self._builder.u32
            semantics |= SEMANTICS_ACQUIRE_RELEASE
            if self._builder.vulkan_memory:
                semantics |= SEMANTICS_AVAILABLE_VISIBLE
            self._memory.disturb()
            self._builder.emit(Opcode.CONTROL_BARRIER, u32(scope), u32(scope), u32(semantics))
        elif name == "call_extern" and str(node.value.args[0].value).startswith(PREFIX):
            self._cooperate(str(node.value.args[0].value), list(node.value.args[1:]))
        elif name == "ret":
            self._return(node)
        elif name in ("break_loop", "continue_loop"):
            self._leave(self._loops[-1].merge if name == "break_loop" else self._loops[-1].step)
        else:
            # A call without a result has no lanes, but its operation must be supported all the same.
            self._expressions.value(node.value)

    def _cooperate(self, name: str, args: list[Any]) -> None:
        """Write a cooperative-matrix call; see Cooperative."""
        numbers = [int(arg.value) for arg in args if isinstance(arg, tirx.IntImm)]
        places = [arg.args[0] for arg in args if not isinstance(arg, tirx.IntImm)]
        pointers = [
            self._memory.shared_pointer(
                place.source, self._expressions.value(self._expressions.only_index(place))
            )
            for place in places
        ]
        self._cooperative.call(name, numbers, pointers)

    def _return(self, _node: Any) -> None:
        self._builder.end(Opcode.RETURN)

    def _leave(self, block: int) -> None:
        self._memory.flush()
        self._builder.branch(block)

    # Blocks

    def _if(self, node: Any) -> None:
        condition = self._expressions.value(node.condition)
        known = self._arithmetic.known(condition)
        if known is not None:
            case = node.then_case if known else node.else_case
            if case is not None:
                self._statement(case)
            return
        otherwise = node.else_case
        self._branches(
            condition,
            lambda: self._statement(node.then_case),
            None if otherwise is None else lambda: self._statement(otherwise),
            stored(node),
        )

    def _branches(
        self,
        condition: int,
        then: Callable[[], None],
        otherwise: Callable[[], None] | None,
        lost: Stored | None = None,
    ) -> None:
        builder, memory = self._builder, self._memory
        memory.flush()
        yes, merge = builder.new_id(), builder.new_id()
        no = merge if otherwise is None else builder.new_id()
        builder.emit(Opcode.SELECTION_MERGE, merge, 0)
        builder.end(Opcode.BRANCH_CONDITIONAL, condition, yes, no)
        for block, write in ((yes, then), (no, otherwise)):
            if write is not None:
                builder.label(block)
                with builder.scope(), memory.branch(lost or set()):
                    write()
                    self._leave(merge)
        builder.label(merge)
        memory.forget(lost or set())

    def _for(self, node: Any) -> None:
        """Write a counting loop: header (the counter, the test), body, step."""
        builder, arithmetic, kind = self._builder, self._arithmetic, dtype(node.loop_var)
        if int(node.kind) not in (0, _UNROLLED):
            raise BuildError(
                f"a loop of kind {node.kind} has no SPIR-V code: the lowering makes it serial or unrolled"
            )
        start, extent = self._expressions.value(node.min), self._expressions.value(node.extent)
        by = arithmetic.constant(kind, 1) if node.step is None else self._expressions.value(node.step)
        end = arithmetic.binary("add", kind, start, extent)
        self._memory.flush()
        before, (header, body, step, merge) = builder.block, (builder.new_id() for _ in range(4))
        counter, following = builder.new_id(), builder.new_id()
        lost = stored(node)
        self._memory.forget(lost)
        builder.branch(header)
        builder.label(header)
        register = arithmetic.type_of(kind)
        builder.emit(Opcode.PHI, register, counter, start, before, following, step)
        with builder.scope(), self._memory.branch(lost):
            inside = arithmetic.compare("lt", kind, counter, end)
            builder.emit(Opcode.LOOP_MERGE, merge, step, LOOP_UNROLL if int(node.kind) == _UNROLLED else 0)
            builder.end(Opcode.BRANCH_CONDITIONAL, inside, body, merge)
            builder.label(body)
            self._expressions.define(node.loop_var, (counter,))
            self._inside(node.body, LoopBlocks(merge, step))
            builder.label(step)
            builder.emit(Opcode.I_ADD, register, following, counter, by)
            builder.branch(header)
        builder.label(merge)

    def _while(self, node: Any) -> None:
        """Write a while loop. The test may need blocks of its own, so it follows the header."""
        builder = self._builder
        self._memory.flush()
        header, test, body, step, merge = (builder.new_id() for _ in range(5))
        lost = stored(node)
        self._memory.forget(lost)
        builder.branch(header)
        builder.label(header)
        builder.emit(Opcode.LOOP_MERGE, merge, step, 0)
        builder.branch(test)
        builder.label(test)
        with builder.scope(), self._memory.branch(lost):
            condition = self._expressions.value(node.condition)
            builder.end(Opcode.BRANCH_CONDITIONAL, condition, body, merge)
            builder.label(body)
            self._inside(node.body, LoopBlocks(merge, step))
            builder.label(step)
            builder.branch(header)
        builder.label(merge)

    def _inside(self, body: Any, loop: LoopBlocks) -> None:
        self._loops.append(loop)
        with self._builder.scope():
            self._statement(body)
            self._leave(loop.step)
        self._loops.pop()
