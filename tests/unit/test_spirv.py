"""The SPIR-V builder and the walker over TIR, without a device."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import dlight
from tvm.script import tirx as T

from nearfar.errors import BuildError
from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import select
from nearfar.targets.gpu.kernels.linear.choice import cooperative
from nearfar.targets.vulkan import VARIANTS, Module, modules
from nearfar.targets.vulkan.arithmetic import BOOL, F16, F32, I32, U32, Arithmetic, Dtype, dtype_of
from nearfar.targets.vulkan.conversions import Conversions
from nearfar.targets.vulkan.opcodes import NON_PRIVATE, BuiltIn, Capability, Decoration, Glsl, Opcode
from nearfar.targets.vulkan.spirv import Builder, instruction, text, to_bytes
from tests.support.spirv import count, instructions, validate

SECTIONS = [
    {Opcode.CAPABILITY}, {Opcode.EXT_INST_IMPORT}, {Opcode.MEMORY_MODEL}, {Opcode.ENTRY_POINT},
    {Opcode.EXECUTION_MODE}, {Opcode.NAME}, {Opcode.DECORATE, Opcode.MEMBER_DECORATE},
]  # fmt: skip


def compiled(func: tirx.PrimFunc) -> Module:
    """The module of a function whose parameters are bound in their order."""
    ours = select(func, [str(param.name) for param in func.params], "kernel")
    return modules(tvm.IRModule({"kernel": ours}))["kernel"]


# The builder


def test_strings_end_with_a_zero_and_fill_words() -> None:
    assert text("main") == [0x6E69616D, 0]
    assert text("abc") == [0x00636261]
    assert instruction(Opcode.STORE, 7, 8) == [3 << 16 | 62, 7, 8]


def test_types_and_constants_exist_once() -> None:
    builder = Builder()
    assert builder.int_type() == builder.int_type()
    assert builder.int_type() != builder.int_type(64)
    assert builder.u32(-1) == builder.u32(0xFFFFFFFF) != builder.u32(1)
    assert builder.truth(True) == builder.truth(True) != builder.truth(False)
    vector = builder.vector_type(builder.float_type(), 2)
    assert (
        vector == builder.vector_type(builder.float_type(), 2) != builder.vector_type(builder.int_type(), 2)
    )
    blocks = [builder.buffer_type(builder.float_type(), 4, writable) for writable in (True, True, False)]
    assert blocks[0] == blocks[1] != blocks[2]
    code = to_bytes(builder.words("kernel", (1, 1, 1)))
    strides = [
        i for i in instructions(code) if i.op == Opcode.DECORATE and i.operands[1] == Decoration.ARRAY_STRIDE
    ]
    assert len(strides) == 1


def test_sections_come_in_the_order_of_the_specification() -> None:
    builder = Builder()
    builder.capability(Capability.INT64)
    builder.capability(Capability.FLOAT16)
    builder.local_variable(builder.float_type())
    builder.built_in(BuiltIn.WORKGROUP_ID, builder.vector_type(builder.int_type(), 3))
    builder.end(Opcode.RETURN)
    code = to_bytes(builder.words("a kernel", (8, 4, 1)))
    listed = instructions(code)
    places = [next((n for n, ops in enumerate(SECTIONS) if i.op in ops), len(SECTIONS)) for i in listed]
    assert places == sorted(places)
    assert [i.operands[0] for i in listed if i.op == Opcode.CAPABILITY] == [1, 9, 11]
    first = next(n for n, i in enumerate(listed) if i.op == Opcode.LABEL)
    assert listed[first + 1].op == Opcode.VARIABLE  # variables of the function begin its first block
    specs = [i.operands[2] for i in listed if i.op == Opcode.SPEC_CONSTANT]
    assert specs == [8, 4, 1]
    assert [
        i.operands[2] for i in listed if i.op == Opcode.DECORATE and i.operands[1] == Decoration.SPEC_ID
    ] == [
        0,
        1,
        2,
    ]
    validate(code)


def test_equal_pure_instructions_are_shared_where_one_dominates_the_other() -> None:
    builder = Builder()
    kind, one = builder.int_type(), builder.u32(1)
    outer = builder.pure(Opcode.I_ADD, kind, one, one)
    with builder.scope():
        assert builder.pure(Opcode.I_ADD, kind, one, one) == outer
        inner = builder.pure(Opcode.I_MUL, kind, one, one)
        assert builder.pure(Opcode.I_MUL, kind, one, one) == inner
    with builder.scope():
        assert builder.pure(Opcode.I_MUL, kind, one, one) != inner


# Arithmetic that is done now


def test_known_integers_are_computed() -> None:
    arithmetic = Arithmetic(Builder())

    def known(name: str, dtype: Dtype, a: int, b: int) -> Any:
        return arithmetic.known(
            arithmetic.binary(name, dtype, arithmetic.constant(dtype, a), arithmetic.constant(dtype, b))
        )

    assert known("add", I32, 2**31 - 1, 1) == -(2**31)
    assert known("shr", I32, -8, 1) == -4
    assert known("floordiv", I32, -7, 2) == -4
    assert known("floormod", I32, -7, 2) == 1
    assert known("div", I32, -7, 2) == -3
    assert known("mod", I32, -7, 2) == -1
    assert known("div", U32, 2**32 - 1, 2) == 2**31 - 1
    assert known("mul", Dtype("i", 8), 100, 3) == 44
    assert known("add", Dtype("u", 8), 255, 2) == 1
    zero, one = arithmetic.constant(I32, 0), arithmetic.constant(I32, 1)
    assert arithmetic.binary("add", I32, one, zero) == one
    assert arithmetic.known(arithmetic.compare("lt", U32, arithmetic.constant(U32, -1), one)) is False
    assert arithmetic.known(arithmetic.compare("lt", I32, arithmetic.constant(I32, -1), one)) is True
    assert arithmetic.select(I32, arithmetic.constant(BOOL, True), one, zero) == one


def test_known_conversions_are_computed() -> None:
    arithmetic = Arithmetic(Builder())
    conversions = Conversions(arithmetic)
    word = arithmetic.constant(I32, 0x3FC00000)
    assert conversions.reinterpret(I32, F32, word) == arithmetic.constant(F32, 1.5)
    assert arithmetic.known(conversions.cast(I32, Dtype("u", 8), arithmetic.constant(I32, -1))) == 255
    assert conversions.cast(U32, F32, arithmetic.constant(U32, 2**32 - 1)) == arithmetic.constant(
        F32, 2.0**32
    )


def test_sums_that_differ_by_a_number_are_seen_to() -> None:
    """(i * 4 + 1) + (j * 8 + 2) is (i * 4 + j * 8) + 3, of which the first part is a multiple of 4."""
    builder = Builder()
    arithmetic = Arithmetic(builder)
    i, j = (
        builder.value(Opcode.LOAD, builder.int_type(), builder.local_variable(builder.int_type()))
        for _ in "ij"
    )

    def number(value: int) -> int:
        return arithmetic.constant(I32, value)

    rows = arithmetic.binary("add", I32, arithmetic.binary("mul", I32, i, number(4)), number(1))
    columns = arithmetic.binary("add", I32, arithmetic.binary("shl", I32, j, number(3)), number(2))
    base, offset = arithmetic.split(arithmetic.binary("add", I32, rows, columns))
    assert (offset, arithmetic.factor(base)) == (3, 4)
    assert arithmetic.split(arithmetic.binary("sub", I32, rows, number(5)))[1] == -4
    assert arithmetic.factor(arithmetic.binary("min", I32, base, number(12))) == 4
    assert arithmetic.factor(i) == 1


def test_dtypes() -> None:
    assert dtype_of("float16") == F16
    assert dtype_of("uint8x4") == Dtype("u", 8)
    assert dtype_of("bool").bytes == 1
    with pytest.raises(BuildError, match="float64 has no SPIR-V code"):
        dtype_of("float64")
    with pytest.raises(BuildError, match="bfloat16 has no SPIR-V code"):
        dtype_of("bfloat16")


# The walker


def test_arrays_at_known_indices_stay_in_ids() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float32"), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            part = T.alloc_local((4,), "float32")
            for i in T.unroll(4):
                part[i] = a[tx] * T.float32(0.5)
            for i in T.unroll(4):
                part[i] = part[i] + part[3 - i]
            out[tx] = part[0] + part[1]

    made = compiled(kernel)
    validate(made.code)
    assert count(made.code, Opcode.TYPE_ARRAY) == 0
    assert count(made.code, Opcode.STORE) == 1
    assert count(made.code, Opcode.F_MUL) == 1  # four equal products


def test_a_value_that_lives_through_a_loop_is_a_variable() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float32"), out: T.Buffer((4,), "float32")):
        for tx in T.thread_binding(4, thread="threadIdx.x"):
            total = T.alloc_local((1,), "float32")
            total[0] = T.float32(0)
            for i in T.serial(16):
                total[0] = total[0] + a[i * 4 + tx]
            out[tx] = total[0]

    made = compiled(kernel)
    validate(made.code)
    assert [count(made.code, op) for op in (Opcode.LOOP_MERGE, Opcode.PHI)] == [1, 1]
    variables = [i for i in instructions(made.code) if i.op == Opcode.VARIABLE and i.operands[2] == 7]
    assert len(variables) == 1


@pytest.mark.parametrize(("dtype", "features"), [
    ("float32", ()), ("int32", ()), ("int64", ("shaderInt64",)), ("int16", ("storageBuffer16BitAccess",)),
    ("uint8", ("storageBuffer8BitAccess",)), ("float16", ("shaderFloat16", "storageBuffer16BitAccess")),
])  # fmt: skip
def test_features_are_those_that_the_code_needs(dtype: str, features: tuple[str, ...]) -> None:
    """Small integers are computed in 32 bits, so they need only the feature of their storage."""

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), dtype), out: T.Buffer((64,), dtype)):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            out[tx] = a[tx] + a[63 - tx]

    made = compiled(kernel)
    validate(made.code)
    assert made.features == features
    assert (made.params, made.access) == ((0, 1), ("read", "read_write"))
    assert (made.grid, made.workgroup) == ((1, 1, 1), (64, 1, 1))


def test_float16_that_is_only_stored_needs_no_arithmetic() -> None:
    job = Linear(1, Matrix(64, 64, 4, 32), "float16", "float16", norm=1e-5)
    made = modules(tvm.IRModule({"kernel": VARIANTS[0].kernels.stages(job).stages[0].func}))["kernel"]
    assert made.features == ("storageBuffer16BitAccess",)
    job = Linear(1, Matrix(64, 64, 16), "float32", "float32")
    assert (
        modules(tvm.IRModule({"kernel": VARIANTS[0].kernels.stages(job).stages[0].func}))["kernel"].features
        == ()
    )


def test_whole_vectors_are_loaded_at_once() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((256,), "float32"), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            part = T.alloc_local((4,), "float32")
            for i in T.vectorized(4):
                part[i] = a[tx * 4 + i]
            out[tx] = part[0] + part[1] + part[2] + part[3]

    made = compiled(kernel)
    validate(made.code)
    assert sorted(i.operands[2] for i in instructions(made.code) if i.op == Opcode.TYPE_VECTOR) == [3, 4]
    assert count(made.code, Opcode.TYPE_ARRAY) == 0
    from_buffer = [i for i in instructions(made.code) if i.op == Opcode.ACCESS_CHAIN and len(i.operands) == 5]
    assert len(from_buffer) == 2  # one vector load of `a`, one store of an element of `out`


def test_buffers_of_vectors_are_loaded_and_stored_as_such() -> None:
    """A load has 16 bytes, in storage and in workgroup memory; a local array of vectors stays in ids."""

    @T.prim_func(check_well_formed=False)
    def kernel(
        a: T.Buffer((64,), "uint32x4"), h: T.Buffer((64,), "float16x4"), out: T.Buffer((32,), "float32x4")
    ):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            part = T.alloc_shared((32,), "float32x4")
            held = T.alloc_local((2,), "float32x4")
            for i in T.unroll(2):
                held[i] = T.Cast("float32x4", a[tx * 2 + i]) * T.Cast("float32x4", h[tx * 2 + i])
            part[tx] = held[0] + held[1]
            T.tvm_storage_sync("shared")
            out[tx] = part[31 - tx]

    made = compiled(kernel)
    validate(made.code)
    assert made.shared_bytes == 32 * 16
    assert made.features == ("storageBuffer16BitAccess",)  # float16 passes through float32
    kinds = {i.operands[0]: i.operands[1:] for i in instructions(made.code) if i.op == Opcode.TYPE_VECTOR}
    loads = [i.operands[0] for i in instructions(made.code) if i.op == Opcode.LOAD]
    assert sum(kinds.get(kind, (0, 0))[1] == 4 for kind in loads) == 2 + 2 + 1
    stores = [i for i in instructions(made.code) if i.op == Opcode.STORE]
    assert len(stores) == 2  # whole stores of `part` and `out`
    assert count(made.code, Opcode.TYPE_ARRAY) == 1  # the array of `part`


def test_packed_dot_products_are_one_instruction_each() -> None:
    """A packed dot product takes two words of four signed bytes; the module declares the extension."""

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "uint32"), b: T.Buffer((64,), "uint32x4"), out: T.Buffer((64,), "int32x4")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            out[tx] = T.Shuffle(
                [
                    T.call_pure_extern("int32", "dot4I8Packed", a[tx], T.Shuffle([b[tx]], [i]))
                    for i in range(4)
                ],
                [0, 1, 2, 3],
            )

    made = compiled(kernel)
    validate(made.code)
    assert count(made.code, Opcode.S_DOT) == 4
    assert count(made.code, Opcode.EXTENSION) == 1
    assert made.features == ("shaderIntegerDotProduct",)


def test_products_of_float16_are_vectors() -> None:
    """Two products are one instruction if they are named together and multiplied and added at once."""

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float16x4"), out: T.Buffer((32,), "float16x4")):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            part = T.alloc_shared((32,), "float16x4")
            chain = T.alloc_local((1,), "float16x4")
            part[tx] = a[tx]
            T.tvm_storage_sync("shared")
            chain[0] = part[tx] * part[31 - tx]
            for i in T.unroll(3):
                chain[0] = chain[0] + part[tx ^ i] * T.Broadcast(T.Shuffle([part[tx]], [i]), 4)
            out[tx] = chain[0]

    made = compiled(kernel)
    validate(made.code)
    vectors = {
        i.operands[0] for i in instructions(made.code) if i.op == Opcode.TYPE_VECTOR and i.operands[2] == 4
    }
    fused = [i for i in instructions(made.code) if i.op == Opcode.EXT_INST and i.operands[3] == Glsl.FMA]
    assert len(fused) == 3
    assert {i.operands[0] for i in fused} <= vectors
    assert (count(made.code, Opcode.F_MUL), count(made.code, Opcode.F_ADD)) == (1, 0)
    # Composites are made of broadcast inputs and of what passes through float32 to and from storage, and of
    # nothing else.
    assert count(made.code, Opcode.COMPOSITE_CONSTRUCT) == 3 + 2


def test_the_same_kernel_gives_the_same_bytes() -> None:
    job = Linear(4, Matrix(96, 128, 4, 32), "float32", "float16", norm=1e-5, gate="silu")
    first, second = (
        modules(tvm.IRModule({"kernel": VARIANTS[0].kernels.stages(job).stages[0].func}))["kernel"]
        for _ in range(2)
    )
    assert first == second
    validate(first.code)


def test_equal_kernels_keep_the_names_of_their_own_parameters() -> None:
    """TVM names parameters by the values of a model: another model has the kernel with other names."""

    def made(name: str) -> Module:
        x = te.placeholder((64,), "float32", name=name)
        func = te.create_prim_func([x, te.compute((64,), lambda i: x[i] + T.float32(1), name="y")])
        with tvm.target.Target("vulkan"):
            module = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(tvm.IRModule({"kernel": func}))
        return modules(module)["kernel"]

    assert sorted(made("norm_4").params) == sorted(made("norm_17").params) == [0, 1]


def test_an_unknown_intrinsic_names_the_kernel_and_itself() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float32"), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            out[tx] = T.call_pure_extern("float32", "frobnicate", a[tx])

    with pytest.raises(BuildError, match="kernel kernel: intrinsic frobnicate has no SPIR-V code"):
        compiled(kernel)


def test_an_unknown_call_without_a_result_is_not_passed_over() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float32"), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            T.evaluate(T.call_extern("void", "frobnicate", a[tx]))
            out[tx] = a[tx]

    with pytest.raises(BuildError, match="kernel kernel: intrinsic frobnicate has no SPIR-V code"):
        compiled(kernel)


def test_an_unknown_dtype_names_the_kernel() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float64"), out: T.Buffer((64,), "float64")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            out[tx] = a[tx]

    with pytest.raises(BuildError, match="kernel kernel: dtype float64 has no SPIR-V code"):
        compiled(kernel)


def test_a_number_as_a_parameter_is_refused() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a_h: T.handle, out: T.Buffer((64,), "float32")):
        rows = T.int32()
        a = T.match_buffer(a_h, (rows, 64), "float32")
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            out[tx] = a[rows - 1, tx]  # TVM passes the row's offset

    with pytest.raises(BuildError, match="kernel kernel: parameter cse_v1 is a number"):
        compiled(kernel)


def test_barriers_order_workgroup_memory() -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float32"), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            part = T.alloc_shared((64,), "float32")
            part[tx] = a[tx]
            T.tvm_storage_sync("shared")
            out[tx] = part[63 - tx]

    made = compiled(kernel)
    validate(made.code)
    listed = instructions(made.code)
    constants = {i.operands[1]: i.operands[2] for i in listed if i.op == Opcode.CONSTANT}
    barrier = next(i for i in listed if i.op == Opcode.CONTROL_BARRIER)
    assert [constants[operand] for operand in barrier.operands] == [2, 2, 0x108]
    assert made.shared_bytes == 256


def vector_loads(code: bytes, storage: int) -> int:
    """Loads of four numbers from a storage class."""
    listed = instructions(code)
    vectors = {i.operands[0] for i in listed if i.op == Opcode.TYPE_VECTOR and i.operands[2] == 4}
    pointers = {i.operands[0] for i in listed if i.op == Opcode.TYPE_POINTER and i.operands[1] == storage}
    chains = {i.operands[1] for i in listed if i.op == Opcode.ACCESS_CHAIN and i.operands[0] in pointers}
    return sum(i.op == Opcode.LOAD and i.operands[0] in vectors and i.operands[2] in chains for i in listed)


@pytest.mark.parametrize(("dtype", "offset", "length", "loads"), [
    ("float32", 0, 256, 1), ("float16", 0, 256, 1), ("int32", 8, 264, 1),
    ("float32", 1, 260, 0),  # not aligned
    ("float32", 0, 257, 0),  # the last vector would reach beyond the buffer
    ("int8", 0, 256, 0),
])  # fmt: skip
def test_neighbours_are_loaded_at_once(dtype: str, offset: int, length: int, loads: int) -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((length,), dtype), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            total = T.alloc_local((1,), "float32")
            total[0] = T.float32(0)
            for e in T.unroll(4):
                total[0] = total[0] + T.Cast("float32", a[tx * 4 + e + offset])
            out[tx] = total[0]

    made = compiled(kernel)
    validate(made.code)
    assert vector_loads(made.code, 12) == loads
    assert made.features == {
        "float16": ("storageBuffer16BitAccess",),
        "int8": ("storageBuffer8BitAccess",),
    }.get(dtype, ())


@pytest.mark.parametrize(("barrier_between", "loads"), [(False, 2), (True, 0)])
def test_loads_of_workgroup_memory_stay_between_barriers(barrier_between: bool, loads: int) -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((64,), "float32"), out: T.Buffer((64,), "float32")):
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            part = T.alloc_shared((64,), "float32")
            total = T.alloc_local((1,), "float32")
            part[tx] = a[tx]
            T.tvm_storage_sync("shared")
            total[0] = part[0] + part[1] + part[4] + part[5]
            if barrier_between:
                T.tvm_storage_sync("shared")
            total[0] = total[0] + part[2] + part[3] + part[6] + part[7]
            out[tx] = total[0]

    made = compiled(kernel)
    validate(made.code)
    assert vector_loads(made.code, 4) == loads


def test_cooperative_matrices_come_with_vulkans_memory_model() -> None:
    """In this memory model each access and barrier must say which memory threads share."""
    job = Linear(64, Matrix(64, 64, 4, 64), "float32", "float16", norm=1e-5)
    made = modules(tvm.IRModule({"kernel": cooperative.matmul(job)}))["kernel"]
    validate(made.code)
    assert {"cooperativeMatrix", "vulkanMemoryModel"} <= set(made.features)
    assert made.workgroup == (256, 1, 1)
    listed = instructions(made.code)
    assert next(i for i in listed if i.op == Opcode.MEMORY_MODEL).operands == (0, 3)
    pointers = {i.operands[0] for i in listed if i.op == Opcode.TYPE_POINTER and i.operands[1] == 4}
    shared = {i.operands[1] for i in listed if i.op == Opcode.ACCESS_CHAIN and i.operands[0] in pointers}
    for op, pointer, flags in (
        (Opcode.LOAD, 2, 3), (Opcode.STORE, 0, 2), (Opcode.COOPERATIVE_LOAD, 2, 5),
        (Opcode.COOPERATIVE_STORE, 0, 4),
    ):  # fmt: skip
        found = [i.operands for i in listed if i.op == op and i.operands[pointer] in shared]
        assert found
        assert all(operands[flags:] == (NON_PRIVATE,) for operands in found)
    constants = {i.operands[1]: i.operands[2] for i in listed if i.op == Opcode.CONSTANT}
    barriers = [i.operands for i in listed if i.op == Opcode.CONTROL_BARRIER]
    assert barriers
    assert {constants[operands[2]] for operands in barriers} == {0x6108}
