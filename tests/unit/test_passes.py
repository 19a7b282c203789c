"""Own passes: the module before, the module expected after."""

import dataclasses
from collections.abc import Callable

import tvm
from tvm import relax
from tvm.script import tirx as T

from nearfar.build.program import operators as ops
from nearfar.build.program.passes.fuse import FuseNorm, FuseResidual, FuseSiluGate
from nearfar.build.program.passes.lower import KernelTable, LowerOperators
from nearfar.build.program.plan import Plan, plan_of, share_workspace
from nearfar.targets.cpu import KERNELS
from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.kernels import Stage, Staged
from nearfar.targets.quantized import Matrix, Part

M, N, K = 4, 8, 16
JOB = Linear(m=M, matrix=Matrix(N, K, 32), x_dtype="float32", out_dtype="float32", x_rows=M)


def tensor(name: str, *shape: int) -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), "float32"))


def module(params: list[relax.Var], body: Callable[[relax.BlockBuilder], relax.Var]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(body(builder))
        builder.emit_func_output(out)
    return builder.get()


def linear(tensors: list[relax.Var], job: Linear, n: int = N) -> relax.Call:
    return ops.call(ops.LINEAR, tensors, job, (M, n), job.out_dtype)


def check(before: tvm.IRModule, fusion: tvm.transform.Pass, expected: tvm.IRModule) -> None:
    after = relax.transform.DeadCodeElimination()(fusion(before))
    tvm.ir.assert_structural_equal(after, expected, map_free_vars=True)


def test_fuse_residual_takes_the_other_addend_as_last_tensor() -> None:
    for flip in (False, True):
        x, w, r = tensor("x", M, K), tensor("w", N, K), tensor("r", M, N)

        def body(b, x=x, w=w, r=r, flip=flip):
            y = b.emit(linear([x, w], JOB))
            return b.emit(relax.op.add(y, r) if flip else relax.op.add(r, y))

        before = module([x, w, r], body)
        x, w, r = tensor("x", M, K), tensor("w", N, K), tensor("r", M, N)
        fused = dataclasses.replace(JOB, residual=True)
        expected = module([x, w, r], lambda b, t=(x, w, r), job=fused: b.emit(linear(list(t), job)))
        check(before, FuseResidual(), expected)


def test_fuse_residual_fuses_once_and_leaves_a_second_add() -> None:
    x, w, r, s = tensor("x", M, K), tensor("w", N, K), tensor("r", M, N), tensor("s", M, N)
    before = module(
        [x, w, r, s], lambda b: b.emit(relax.op.add(b.emit(relax.op.add(b.emit(linear([x, w], JOB)), r)), s))
    )
    x, w, r, s = tensor("x", M, K), tensor("w", N, K), tensor("r", M, N), tensor("s", M, N)
    fused = dataclasses.replace(JOB, residual=True)
    expected = module([x, w, r, s], lambda b: b.emit(relax.op.add(b.emit(linear([x, w, r], fused)), s)))
    check(before, FuseResidual(), expected)


def _gate(b, x, w, swap):
    halves = b.emit(relax.op.split(b.emit(linear([x, w], JOB)), 2, axis=1))
    gate, up = b.emit(relax.TupleGetItem(halves, 0)), b.emit(relax.TupleGetItem(halves, 1))
    gate, up = (up, gate) if swap else (gate, up)
    return b.emit(relax.op.multiply(b.emit(relax.op.nn.silu(gate)), up))


def test_fuse_silu_gate_halves_the_output() -> None:
    x, w = tensor("x", M, K), tensor("w", N, K)
    before = module([x, w], lambda b: _gate(b, x, w, swap=False))
    x2, w2 = tensor("x", M, K), tensor("w", N, K)
    expected = module([x2, w2], lambda b: b.emit(linear([x2, w2], dataclasses.replace(JOB, gated=True), N // 2)))
    check(before, FuseSiluGate(), expected)


def test_fuse_silu_gate_needs_the_gate_in_the_first_half() -> None:
    x, w = tensor("x", M, K), tensor("w", N, K)
    before = module([x, w], lambda b: _gate(b, x, w, swap=True))
    x2, w2 = tensor("x", M, K), tensor("w", N, K)
    check(before, FuseSiluGate(), module([x2, w2], lambda b: _gate(b, x2, w2, swap=True)))


def test_fuse_norm_puts_its_weight_before_the_matrix() -> None:
    x, g, w = tensor("x", M, K), tensor("g", K), tensor("w", N, K)
    before = module(
        [x, g, w], lambda b: b.emit(linear([b.emit(relax.op.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)), w], JOB))
    )
    x2, g2, w2 = tensor("x", M, K), tensor("g", K), tensor("w", N, K)
    expected = module([x2, g2, w2], lambda b: b.emit(linear([x2, g2, w2], dataclasses.replace(JOB, norm=1e-5))))
    check(before, FuseNorm(), expected)


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


class TwoStages:
    """Kernels whose linear has two launches with a scratch buffer between them."""

    def parts(self, matrix):
        return (Part("w", (matrix.n, matrix.k), "float32"),)

    def linear(self, job):
        return Staged(
            (Stage(_scale, ("x", "scratch:0")), Stage(_matmul, ("scratch:0", "w0", "out"))), (((M, K), "float32"),)
        )


def _planned() -> tuple[tvm.IRModule, Plan]:
    x, w = tensor("x", M, K), tensor("w", N, K)

    def body(b):
        first = b.emit(linear([x, w], JOB))
        padded = b.emit(relax.op.concat([first, first], axis=1))
        return b.emit(linear([padded, w], JOB))

    mod = LowerOperators(TwoStages())(module([x, w], body))
    steps = [
        relax.transform.LegalizeOps(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
    ]
    mod = tvm.transform.Sequential(steps)(mod)
    plan = plan_of(mod["main"], Plan("step", M, M), {"x": "buffer:x", "w": "weight:w"}, "buffer:logits")
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
    # The name of a kernel leaves out the epsilon of the norm, and the scale of attention.
    table = KernelTable(KERNELS)
    attention = Attention(1, 4, 2, 16, 16, 16, 10, "float32", "float32", 0.25)
    for kind, job, other in (
        (ops.LINEAR, dataclasses.replace(JOB, norm=1e-6), dataclasses.replace(JOB, norm=1e-2)),
        (ops.ATTENTION, attention, dataclasses.replace(attention, scale=1.0)),
    ):
        made = [table.get(ops.OpCall(kind, [], each), each.m) for each in (job, other, job)]
        (first, staged), (second, others), again = made
        assert first != second
        assert again == (first, staged)
        assert [stage.func.script() for stage in staged.stages] != [stage.func.script() for stage in others.stages]
