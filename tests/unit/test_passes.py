"""Our own compiler passes: each module before a pass, and the expected module after it."""

import dataclasses
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.s_tir import dlight
from tvm.script import tirx as T

from nearfar.build.program import operators
from nearfar.build.program.passes import NamedPass, run_flow
from nearfar.build.program.passes.elementwise import RowSchedule
from nearfar.build.program.passes.fuse import FuseGate, FuseNorm, FuseResidual
from nearfar.build.program.passes.lower import KernelTable, LowerOperators
from nearfar.build.program.passes.project import FuseProjection
from nearfar.build.program.passes.split import CombineInMatmul
from nearfar.build.program.plan import plan_of, share_workspace
from nearfar.kernels.contract import SHARED_FROM, Stage, Staged
from nearfar.kernels.jobs import Attend, GraphJob, Linear, Norm, Project, RopeAppend, Rows, Split
from nearfar.kernels.program import LoweredPlan
from nearfar.kernels.quantized import Matrix, PackedArray
from nearfar.step.operation import Activation
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.codegen import llvm_target, native
from nearfar.targets.cpu.units import UNITS
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import DISCRETE
from nearfar.targets.llvm.objects import compile_object
from nearfar.targets.llvm.passes import PIPELINE

M, N, K = 4, 8, 16
JOB = Linear(m=M, matrix=Matrix(N, K, 32), x_dtype="float32", out_dtype="float32", x_rows=M)
NORM = Norm(M, K, 1e-5)
CPU = CpuKernels(UNITS["avx2"])

Body = Callable[[relax.BlockBuilder], relax.Var]


def tensor(name: str, *shape: int) -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), "float32"))


def module(params: list[relax.Var], body: Body) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(body(builder))
        builder.emit_func_output(out)
    return builder.get()


def check(before: tvm.IRModule, fusion: tvm.transform.Pass, expected: tvm.IRModule) -> None:
    after = relax.transform.DeadCodeElimination()(fusion(before))
    tvm.ir.assert_structural_equal(after, expected, map_free_vars=True)


def test_jobs_survive_being_written_into_the_module() -> None:
    job = Attend(
        1, 4, 2, 16, 16, 16, 10, "float16", "float16", scale=0.25, window=8, softcap=50.0, sinks=True
    )
    tensors = [tensor(name, 4) for name in job.inputs()]
    found = operators.parse(operators.call(job, tensors))
    assert found is not None
    assert found.job == job
    assert list(found.named) == list(job.inputs())
    for inner in (Project(PROJECTED, PAGED), Rows.of(dataclasses.replace(PAGED, q_scale=(0.1, 64.0)))):
        again = operators.parse(operators.call(inner, [tensor(name, 4) for name in inner.inputs(1)]))
        assert again is not None
        assert again.job == inner
    linear = dataclasses.replace(JOB, bias=True, norm=1e-6)
    named = operators.parse(operators.call(linear, [tensor(name, 4) for name in linear.inputs(2)]))
    assert named is not None
    assert list(named.named) == ["x", "norm", "w0", "w1", "bias"]


def _added(tensors: list[relax.Var], job: GraphJob, flip: bool) -> Body:
    """residual + job, or job + residual; the residual is the last tensor."""
    *inputs, residual = tensors

    def body(b: relax.BlockBuilder) -> relax.Var:
        y = b.emit(operators.call(job, inputs))
        return b.emit(relax.op.add(y, residual) if flip else relax.op.add(residual, y))

    return body


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("job", [JOB, NORM], ids=["linear", "norm"])
def test_fuse_residual_takes_the_other_addend_as_last_tensor(job: GraphJob, flip: bool) -> None:
    def tensors() -> list[relax.Var]:
        if isinstance(job, Norm):
            return [tensor("x", M, K), tensor("w", K), tensor("r", M, K)]
        return [tensor("x", M, K), tensor("w", N, K), tensor("r", M, N)]

    first, second = tensors(), tensors()
    fused = dataclasses.replace(job, residual=True)
    expected = module(second, lambda b: b.emit(operators.call(fused, second)))
    check(module(first, _added(first, job, flip)), FuseResidual(), expected)


def test_fuse_residual_fuses_once_and_leaves_a_second_add() -> None:
    x, w, r, s = tensor("x", M, K), tensor("w", N, K), tensor("r", M, N), tensor("s", M, N)
    before = module(
        [x, w, r, s],
        lambda b: b.emit(relax.op.add(b.emit(relax.op.add(b.emit(operators.call(JOB, [x, w])), r)), s)),
    )
    x2, w2, r2, s2 = tensor("x", M, K), tensor("w", N, K), tensor("r", M, N), tensor("s", M, N)
    fused = dataclasses.replace(JOB, residual=True)
    expected = module(
        [x2, w2, r2, s2], lambda b: b.emit(relax.op.add(b.emit(operators.call(fused, [x2, w2, r2])), s2))
    )
    check(before, FuseResidual(), expected)


def test_fuse_residual_leaves_what_has_a_softcap() -> None:
    capped = dataclasses.replace(JOB, softcap=30.0)
    first, second = ([tensor("x", M, K), tensor("w", N, K), tensor("r", M, N)] for _ in range(2))
    check(
        module(first, _added(first, capped, False)),
        FuseResidual(),
        module(second, _added(second, capped, False)),
    )


def _gate(b: relax.BlockBuilder, x: relax.Var, w: relax.Var, activation: str, swap: bool) -> relax.Var:
    halves = b.emit(relax.op.split(b.emit(operators.call(JOB, [x, w])), 2, axis=1))
    gate, up = b.emit(relax.TupleGetItem(halves, 0)), b.emit(relax.TupleGetItem(halves, 1))
    gate, up = (up, gate) if swap else (gate, up)
    if activation == "relu2":
        acted = b.emit(relax.op.square(b.emit(relax.op.nn.relu(gate))))
    else:
        known = {
            "silu": relax.op.nn.silu,
            "gelu_tanh": relax.op.nn.gelu_tanh,
            "gelu_erf": relax.op.nn.gelu,
            "sigmoid": relax.op.sigmoid,
        }
        acted = b.emit(known[activation](gate))
    return b.emit(relax.op.multiply(acted, up))


@pytest.mark.parametrize("activation", get_args(Activation))
def test_fuse_gate_halves_the_output(activation: str) -> None:
    x, w = tensor("x", M, K), tensor("w", N, K)
    before = module([x, w], lambda b: _gate(b, x, w, activation, swap=False))
    x2, w2 = tensor("x", M, K), tensor("w", N, K)
    fused = dataclasses.replace(JOB, gate=activation)
    assert fused.out == ((M, N // 2), "float32")
    expected = module([x2, w2], lambda b: b.emit(operators.call(fused, [x2, w2])))
    check(before, FuseGate(), expected)


def test_fuse_gate_needs_the_gate_in_the_first_half() -> None:
    x, w = tensor("x", M, K), tensor("w", N, K)
    before = module([x, w], lambda b: _gate(b, x, w, "silu", swap=True))
    x2, w2 = tensor("x", M, K), tensor("w", N, K)
    check(before, FuseGate(), module([x2, w2], lambda b: _gate(b, x2, w2, "silu", swap=True)))


def _normed(b: relax.BlockBuilder, x: relax.Var, g: relax.Var, w: relax.Var, norm: Norm) -> relax.Var:
    return b.emit(operators.call(JOB, [b.emit(operators.call(norm, [x, g])), w]))


def test_fuse_norm_puts_its_weight_before_the_matrix() -> None:
    x, g, w = tensor("x", M, K), tensor("g", K), tensor("w", N, K)
    before = module([x, g, w], lambda b: _normed(b, x, g, w, NORM))
    x2, g2, w2 = tensor("x", M, K), tensor("g", K), tensor("w", N, K)
    fused = dataclasses.replace(JOB, norm=1e-5)
    expected = module([x2, g2, w2], lambda b: b.emit(operators.call(fused, [x2, g2, w2])))
    check(before, FuseNorm(), expected)


def test_fuse_norm_leaves_norms_of_groups() -> None:
    grouped = dataclasses.replace(NORM, groups=2)
    x, g, w = tensor("x", M, K), tensor("g", K // 2), tensor("w", N, K)
    before = module([x, g, w], lambda b: _normed(b, x, g, w, grouped))
    x2, g2, w2 = tensor("x", M, K), tensor("g", K // 2), tensor("w", N, K)
    check(before, FuseNorm(), module([x2, g2, w2], lambda b: _normed(b, x2, g2, w2, grouped)))


PAGED = RopeAppend(M, 2, 1, 2, 16, 2, 4, "float32", "float32", norm_eps=1e-6)
"""A job over four heads of two values each: the columns of JOB."""
PAGED_SHAPES = {
    "positions": (256,), "slots": (256,), "page_table": (2, 4), "rope": (64, 2), "q_norm": (2,),
    "k_norm": (2,), "k_cache": (8, 1, 16, 2), "v_cache": (8, 1, 16, 2),
}  # fmt: skip
PROJECTED = dataclasses.replace(JOB, norm=1e-5)
BUNDLED = {("norm", "q_norm", "k_norm"): "qkv_vectors"}


class Projects:
    """Kernels that can do everything in one launch."""

    def projects(self, job: Project) -> bool:
        return True


class ProjectsNothing:
    def projects(self, job: Project) -> bool:
        return False


def _paged_tensors() -> dict[str, relax.Var]:
    made = {"x": tensor("x", M, K), "norm": tensor("norm", K), "w0": tensor("w0", N, K)}
    made |= {name: tensor(name, *shape) for name, shape in PAGED_SHAPES.items()}
    return made


def _layers(have: dict[str, relax.Var], layers: int = 1, read_twice: bool = False) -> tvm.IRModule:
    """Projections and the operations after them, all with one input."""

    def body(b: relax.BlockBuilder) -> relax.Var:
        outs = []
        for _ in range(layers):
            qkv = b.emit(operators.rebuilt(PROJECTED, have))
            outs.append(b.emit(operators.rebuilt(PAGED, {**have, "x": qkv})))
            if read_twice:
                outs.append(qkv)
        return b.emit(relax.op.concat(outs, axis=1))

    return module(list(have.values()), body)


def test_fuse_projection_describes_the_rows_once_and_reads_one_tensor_of_vectors() -> None:
    have, vectors = _paged_tensors(), tensor("qkv_vectors", K + 2 + 2)

    def body(b: relax.BlockBuilder) -> relax.Var:
        rows = b.emit(operators.rebuilt(Rows.of(PAGED), have))
        given = {**have, "rows": rows, "vectors": vectors}
        outs = [b.emit(operators.rebuilt(Project(PROJECTED, PAGED), given)) for _ in range(2)]
        return b.emit(relax.op.concat(outs, axis=1))

    expected = module([*have.values(), vectors], body)
    check(_layers(_paged_tensors(), 2), FuseProjection(Projects(), BUNDLED), expected)


@pytest.mark.parametrize("why", ["no kernel", "no tensor of vectors", "read twice"])
def test_fuse_projection_leaves_what_it_cannot_fuse(why: str) -> None:
    kernels = ProjectsNothing() if why == "no kernel" else Projects()
    bundled = {} if why == "no tensor of vectors" else BUNDLED
    twice = why == "read twice"
    before, same = (_layers(_paged_tensors(), read_twice=twice) for _ in range(2))
    check(before, FuseProjection(kernels, bundled), same)


def test_a_single_vector_is_read_where_it_lies() -> None:
    plain = dataclasses.replace(PAGED, norm_eps=None)
    have, same = _paged_tensors(), _paged_tensors()

    def before(b: relax.BlockBuilder) -> relax.Var:
        qkv = b.emit(operators.rebuilt(PROJECTED, have))
        return b.emit(operators.rebuilt(plain, {**have, "x": qkv}))

    def after(b: relax.BlockBuilder) -> relax.Var:
        given = {**same, "rows": b.emit(operators.rebuilt(Rows.of(plain), same)), "vectors": same["norm"]}
        return b.emit(operators.rebuilt(Project(PROJECTED, plain), given))

    fused = module(list(same.values()), after)
    check(module(list(have.values()), before), FuseProjection(Projects(), {}), fused)


ATTEND = Attend(1, 4, 2, 32, 16, 16, 64, "float32", "float32", scale=0.25, sinks=True)
BEHIND = Linear(1, Matrix(32, 128, 32), "float32", "float32", residual=True, x_rows=1)


def _attended(attend: Attend, linear: Linear, twice: bool = False) -> tvm.IRModule:
    """Attention and the matmul after it, which also takes the outputs of the split."""
    names = dict.fromkeys((*ATTEND.inputs(), *BEHIND.inputs(1)))
    have = {name: tensor(name, 4) for name in names if name != "x"}
    have["residual"] = tensor("residual", 1, 32)

    def body(b: relax.BlockBuilder) -> relax.Var:
        attended = b.emit(operators.call(attend, [have[name] for name in attend.inputs()]))
        held = have | {"x": attended, "partial": attended}
        y = b.emit(operators.call(linear, [held[name] for name in linear.inputs(1)]))
        return b.emit(relax.op.concat([y, attended], axis=1)) if twice else y

    return module(list(have.values()), body)


def test_combine_leaves_attention_in_parts_to_the_matmul_behind_it() -> None:
    kernels = variant(DISCRETE, "f32", vectors=False).kernels
    split = Split(16, 64, sinks=True)
    expected = _attended(
        dataclasses.replace(ATTEND, split=split, sinks=False),
        dataclasses.replace(BEHIND, split=split, split_heads=4),
    )
    check(_attended(ATTEND, BEHIND), CombineInMatmul(kernels), expected)


def test_combine_leaves_attention_whole_where_it_is_read_twice_or_the_target_says_so() -> None:
    discrete, cpu = variant(DISCRETE, "f32", vectors=False).kernels, CPU
    many = dataclasses.replace(ATTEND, m=64), dataclasses.replace(BEHIND, m=64, residual=False)
    large = (
        dataclasses.replace(ATTEND, heads=32, head_dim=128),
        dataclasses.replace(BEHIND, matrix=Matrix(4096, 4096, 4, 64), residual=False),
    )
    assert discrete.split(ATTEND, BEHIND) is not None
    assert discrete.split(*many) is None
    assert discrete.split(*large) is None
    assert cpu.split(ATTEND, BEHIND) is None
    # Two of each: the pass changes the module that it is given.
    for twice, kernels in ((True, discrete), (False, cpu)):
        before, same = (_attended(ATTEND, BEHIND, twice) for _ in range(2))
        check(before, CombineInMatmul(kernels), same)


@T.prim_func
def _scale(x: T.Buffer((M, K), "float32"), out: T.Buffer((M, K), "float32")):
    for i, j in T.grid(M, K):
        out[i, j] = x[i, j] * T.float32(2)


@T.prim_func
def _matmul(x: T.Buffer((M, K), "float32"), w: T.Buffer((N, K), "float32"), out: T.Buffer((M, N), "float32")):
    for i, j in T.grid(M, N):
        out[i, j] = T.float32(0)
        for k in range(K):
            out[i, j] = out[i, j] + x[i, k] * w[j, k]


@T.prim_func
def _more(w: T.Buffer((N, K), "float32"), out: T.Buffer((M, N), "float32")):
    for i in T.serial(M):
        out[i, 0] = w[i, 0]


class TwoStages:
    """Kernels whose linear has two launches with a scratch buffer between them."""

    def parts(self, matrix):
        return (PackedArray("w", (matrix.n, matrix.k), "float32"),)

    def stages(self, job):
        return Staged(
            (Stage(_scale, ("x", "scratch:0")), Stage(_matmul, ("scratch:0", "w0", "out"))),
            (((M, K), "float32"),),
        )


def _planned(kernels: TwoStages | None = None) -> tuple[tvm.IRModule, LoweredPlan]:
    x, w = tensor("x", M, K), tensor("w", N, K)

    def body(b):
        first = b.emit(operators.call(JOB, [x, w]))
        padded = b.emit(relax.op.concat([first, first], axis=1))
        return b.emit(operators.call(JOB, [padded, w]))

    mod = LowerOperators(kernels or TwoStages())(module([x, w], body))
    steps = [
        relax.transform.LegalizeOps(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
    ]
    mod = tvm.transform.Sequential(steps)(mod)
    plan = plan_of(
        mod["main"], LoweredPlan("step", M, M), {"x": "buffer:x", "w": "weight:w"}, "buffer:logits"
    )
    return mod, plan


def test_lowering_makes_a_plan_of_shared_kernels() -> None:
    mod, plan = _planned()
    name = "linear_m4_8x16_f32"
    assert [launch.kernel for launch in plan.launches] == [
        f"{name}_s0", f"{name}_s1", "concatenate", f"{name}_s0", f"{name}_s1"
    ]  # fmt: skip
    assert plan.launches[0].args[0] == "buffer:x"
    assert plan.launches[1].args[1] == "weight:w"
    assert plan.launches[-1].args[-1] == "buffer:logits"
    kernels = [gv.name_hint for gv, f in mod.functions_items() if not isinstance(f, relax.Function)]
    assert sorted(kernels) == ["concatenate", f"{name}_s0", f"{name}_s1"]


def test_a_launch_never_writes_what_it_reads() -> None:
    _, plan = _planned()
    for launch in plan.launches:
        assert launch.args[-1] not in launch.args[:-1]


class InPieces(TwoStages):
    """The second launch of a linear writes another part of the first launch's output."""

    def stages(self, job):
        return Staged((Stage(_matmul, ("x", "w0", "out")), Stage(_more, ("w0", "out"))))


def test_a_result_that_is_written_in_pieces_has_its_buffer_for_itself() -> None:
    """Earlier tensors of the same size share workspace with each other, and never with this buffer."""
    _, plan = _planned(InPieces())
    assert [la.args for la in plan.launches if "buffer:logits" in la.args] == [
        (plan.launches[-2].args[0], "weight:w", "buffer:logits"), ("weight:w", "buffer:logits"),
    ]  # fmt: skip
    assert plan.launches[-2].args[0].startswith("storage:")


def test_a_result_in_memory_that_other_tensors_have_too_is_no_plan() -> None:
    """The result's buffer need not have the size of these tensors, and others read it."""
    mod, _ = _planned()
    func = mod["main"]
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    shared = [b.var for b in bindings if "R.memory.alloc_tensor" in str(b.value)][-1]
    body = relax.SeqExpr(func.body.blocks, shared)
    func = relax.Function(func.params, body, shared.ty, func.is_pure, func.attrs)
    with pytest.raises(AssertionError, match="storage:1, which holds 2 tensors"):
        plan_of(func, LoweredPlan("step", M, M), {"x": "buffer:x", "w": "weight:w"}, "buffer:logits")


def test_plans_share_workspace_by_size() -> None:
    _, small = _planned()
    _, large = _planned()
    large.storage = [4096 * (i + 1) for i in range(len(large.storage))]
    sizes = share_workspace([small, large])
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % 256 == 0 for size in sizes)
    for plan in (small, large):
        for launch in plan.launches:
            assert not any(arg.startswith("storage:") for arg in launch.args)


def test_jobs_of_one_name_get_kernels_of_their_own() -> None:
    # The label of a kernel leaves out the epsilon of the norm, and the scale of attention.
    table = KernelTable(CPU)
    attend = Attend(1, 4, 2, 16, 16, 16, 10, "float32", "float32", scale=0.25)
    pairs: list[tuple[GraphJob, GraphJob]] = [
        (dataclasses.replace(JOB, norm=1e-6), dataclasses.replace(JOB, norm=1e-2)),
        (attend, dataclasses.replace(attend, scale=1.0)),
        (attend, dataclasses.replace(attend, softcap=20.0)),
        (NORM, dataclasses.replace(NORM, eps=1e-3)),
    ]
    for job, other in pairs:
        (first, staged), (second, others), again = (table.get(each) for each in (job, other, job))
        assert first != second
        assert again == (first, staged)
        assert [stage.func.script() for stage in staged.stages] != [
            stage.func.script() for stage in others.stages
        ]


def test_ctrl_c_inside_a_pass_stays_ctrl_c() -> None:
    """TVM's C++ code lies between a pass of ours and the caller, and turns unknown exceptions into errors."""

    def interrupted(mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        raise KeyboardInterrupt

    stop = tvm.transform.module_pass(interrupted, opt_level=0)
    with pytest.raises(KeyboardInterrupt):
        run_flow(tvm.IRModule(), [NamedPass("stop", "it is interrupted", stop)], tvm.target.Target("llvm"))


def _gated(rows: int) -> tvm.IRModule:
    """a·b with a and b in the columns of one tensor, as TVM fuses it: each with an array of its own."""
    x = te.placeholder((rows, 2 * K), "float32")
    a = te.compute((rows, K), lambda i, j: x[i, j])
    b = te.compute((rows, K), lambda i, j: x[i, j + K])
    out = te.compute((rows, K), lambda i, j: a[i, j] * b[i, j])
    return tvm.IRModule({"main": te.create_prim_func([x, out])})


def test_kernels_of_tvm_have_no_arrays_on_a_processor_and_threads_share_many_rows() -> None:
    for rows, kind in ((SHARED_FROM - 1, tirx.ForKind.SERIAL), (SHARED_FROM, tirx.ForKind.PARALLEL)):
        with tvm.target.Target("llvm"):
            (func,) = dlight.ApplyDefaultSchedule(RowSchedule())(_gated(rows)).functions.values()
        assert not func.body.block.alloc_buffers
        outer = func.body.block.body
        assert (outer.extent, outer.kind) == (rows, kind)
        assert isinstance(outer.body, tirx.For)
        assert not isinstance(outer.body.body, tirx.For)


def test_exponentials_in_kernels_of_tvm_are_exact_and_keep_nan() -> None:
    x = te.placeholder((1, 512), "float32")
    func = te.create_prim_func([x, te.compute((1, 512), lambda i, j: tirx.exp(x[i, j]))])
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    kernel = tvm.tirx.build(module, target=llvm_target(native()), pipeline=PIPELINE)["main"]
    values = np.linspace(-86, 87, 512, dtype=np.float32)[None]
    values[0, 7] = np.nan
    found = tvm.runtime.tensor(np.zeros_like(values))
    kernel(tvm.runtime.tensor(values), found)
    np.testing.assert_allclose(found.numpy(), np.exp(values.astype(np.float64)), rtol=3e-7)
    assert b"expf" not in compile_object(
        func.with_attr("global_symbol", "main"), llvm_target(native()), PIPELINE
    )
