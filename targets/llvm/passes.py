"""TVM's lowering passes for the CPU kernels, as a named pipeline: only those that hand-written code needs.

TVM's default (`s_tir`) simplifies four times, and searches for loops to hoist, software pipelines, virtual
threads and common subexpressions. LLVM does all of that again, and for wide vector code it took two thirds to
nine tenths of the time: a quantized matmul compiles in 0.17 s instead of 1.3 s, and runs no slower and with
the same results. Arrays are not cut down to the part that is accessed: ours are as large as they must be, and
the search took half of the time of all passes (2.6 of 5 s for the 1B shape on two units, most in attention);
52 of 62 objects are the same to the byte without it. Storage rewriting is left out because it drops the
annotation that keeps vec.local's arrays on the stack; every tile would then call the allocator (decode of the
gated matmul took 1.9 times as long).
"""

from __future__ import annotations

from functools import partial

from tvm import ir, s_tir, tirx, transform

from nearfar.targets.llvm.exponential import exponential

PIPELINE = "nearfar_cpu"
TRUSTING = "nearfar_cpu_trusting"
"""The pipeline for callers that write arguments as the manifest lists them: kernels do not check arguments.

The checks would be two fifths of a module's bytes as a server sends it.
"""


def pipeline(trusting: bool = False) -> tuple[transform.Pass, object, object]:
    """The passes down to host functions, then the passes on host functions, and those on device functions,
    which are empty.
    """
    passes = [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RewriteUnsafeSelect(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        *([tirx.transform.SkipAssert()] if trusting else []),
    ]
    return ir.transform.Sequential(passes), _finalize, _finalize


def _finalize() -> transform.Pass:
    return ir.transform.Sequential([tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()])


tirx.compilation_pipeline.PIPELINE_MAP[PIPELINE] = pipeline
tirx.compilation_pipeline.PIPELINE_MAP[TRUSTING] = partial(pipeline, trusting=True)


def _exp(call: tirx.Call) -> tirx.Expr:
    """e^x of a value in TVM's own kernels, as arithmetic: LLVM makes vectors of it, and of a call of libm's
    expf it cannot (silu of 256 rows of 2,048 took 0.84 ms, and takes 0.09). NaN stays NaN: its bits tell it,
    since LLVM 22 never ends on a comparison of a converted float16 with itself for WebAssembly.
    """
    bound: list[tuple[tirx.Var, tirx.Expr]] = []

    def bind(value: tirx.Expr) -> tirx.Var:
        bound.append((tirx.Var(f"value{len(bound)}", "float32"), value))
        return bound[-1][0]

    x = bind(call.args[0])
    number = (tirx.reinterpret("int32", x) & tirx.IntImm("int32", 0x7FFFFFFF)) <= tirx.IntImm(
        "int32", 0x7F800000
    )
    found = tirx.Select(number, exponential(x, bind, 1), x)
    for name, value in reversed(bound):
        found = tirx.Let(name, value, found)
    return found


tirx.register_intrin_lowering("tirx.exp", "llvm", f=_exp, level=99)  # TVM's own has level 10
