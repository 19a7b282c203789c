"""TVM's lowering passes for our hand-written kernels, as a named pipeline.

It differs from TVM's default (`s_tir`) where measurements or WGSL's rules demand it:
- no ThreadSync: the kernels say where their barriers are; the pass added eight to a kernel whose threads only
  touch their own slots of workgroup memory, and refuses workgroup memory in conditions;
- no StmtSimplify after common subexpressions have been named: it puts every one of them back in place, so
  that an index with divisions is computed again at each load.
"""

from __future__ import annotations

from tvm import ir, s_tir, tirx, transform

PIPELINE = "nearfar_gpu"
EXPLICIT_SYNC = "nearfar.explicit_sync"  # attribute of the functions that this pipeline is for
SELDOM = "pragma_seldom"  # attribute of statements that ordinary data does not get to; generators ignore it


def pipeline() -> tuple[transform.Pass, object, object]:
    """The passes down to host and device functions, then the passes over each side."""
    passes = [
        *_kernel_passes(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
    ]
    return ir.transform.Sequential(passes), _host_passes, _device_passes


def straightened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel as the code generators get it, still one function: flat, unrolled, with named common
    subexpressions.

    Kernels that TVM scheduled (without EXPLICIT_SYNC) go the same way, except that they get barriers.
    """
    ours = func.attrs is not None and EXPLICIT_SYNC in func.attrs
    passes = [*([] if ours else _block_passes()), *_kernel_passes()]
    return ir.transform.Sequential(passes)(ir.IRModule({"kernel": func}))["kernel"]


def _block_passes() -> list[transform.Pass]:
    return [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
    ]


def _kernel_passes() -> list[transform.Pass]:
    return [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tirx.transform.StmtSimplify(),
        tirx.transform.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
        tirx.transform.CommonSubexprElim(),
    ]


def _host_passes() -> transform.Pass:
    return ir.transform.Sequential([tirx.transform.LowerTVMBuiltin(), tirx.transform.LowerIntrin()])


def _device_passes() -> transform.Pass:
    return ir.transform.Sequential([tirx.transform.LowerWarpMemory(), tirx.transform.LowerIntrin()])


tirx.compilation_pipeline.PIPELINE_MAP[PIPELINE] = pipeline
