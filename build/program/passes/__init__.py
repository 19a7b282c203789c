"""The compile flow: one ordered list of named passes, from the model's graph to planned kernel launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import dlight

from nearfar.build.program.passes.activations import rules
from nearfar.build.program.passes.elementwise import RowSchedule
from nearfar.build.program.passes.fuse import FuseGate, FuseNorm, FuseResidual
from nearfar.build.program.passes.lower import LowerOperators
from nearfar.build.program.passes.project import Bundled, FuseProjection
from nearfar.build.program.passes.split import CombineInMatmul
from nearfar.kernels.contract import Kernels

# TVM turns an exception that it does not know into a RuntimeError on the way through its C++ code. Ctrl-C
# inside a pass, a kernel's schedule or a code generator of ours has to stay a KeyboardInterrupt.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)


@dataclass(frozen=True)
class NamedPass:
    """One step of the flow and why it is there."""

    name: str
    why: str
    run: tvm.transform.Pass


def compile_flow(kernels: Kernels, bundled: Bundled, *, gpu: bool) -> list[NamedPass]:
    """All passes in order. At the end a function is a sequence of kernel calls over planned storage."""
    on_gpu = (dlight.gpu.Reduction(), dlight.gpu.GeneralReduction(), dlight.gpu.Fallback())
    schedule = on_gpu if gpu else (RowSchedule(),)
    return [
        NamedPass("fuse-residual", "x + linear(y), or x + norm(y), becomes one kernel", FuseResidual()),
        NamedPass("fuse-gate", "activation(gate)·up joins the matmul that makes them", FuseGate()),
        NamedPass("fuse-norm", "an RMS norm joins the matmul that reads it", FuseNorm()),
        NamedPass(
            "fuse-projection",
            "rotation and append join the projection to q, k and v",
            FuseProjection(kernels, bundled),
        ),
        NamedPass("dead-code", "drop what the fusions replaced", relax.transform.DeadCodeElimination()),
        NamedPass(
            "combine-in-matmul",
            "attention of few rows stays in parts up to the matmul that alone reads it",
            CombineInMatmul(kernels),
        ),
        NamedPass(
            "legalize",
            "whatever is left of Relax's own operators becomes TIR",
            relax.transform.LegalizeOps(rules(kernels.formulas)),
        ),
        NamedPass("annotate", "classify TIR functions for fusion", relax.transform.AnnotateTIROpPattern()),
        NamedPass("fuse-ops", "group what can run in one kernel", relax.transform.FuseOps()),
        NamedPass("fuse-tir", "merge each group's TIR", relax.transform.FuseTIR()),
        NamedPass("schedule", "schedules for TVM's own kernels", dlight.ApplyDefaultSchedule(*schedule)),
        NamedPass("lower-operators", "our operators become the target's kernels", LowerOperators(kernels)),
        NamedPass("straighten", "leave dataflow form", relax.transform.ToNonDataflow()),
        NamedPass("impure", "kernel calls write their outputs", relax.transform.RemovePurityChecking()),
        NamedPass("destination-passing", "outputs become arguments", relax.transform.CallTIRRewrite()),
        NamedPass("plan-memory", "reuse storage between tensors", relax.transform.StaticPlanBlockMemory()),
    ]


def run_flow(
    module: tvm.IRModule, flow: Sequence[NamedPass], target: tvm.target.Target, dump: Path | None = None
) -> tvm.IRModule:
    """Run the passes; with `dump`, write the module before the first and after each."""
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / "00-model.py").write_text(module.script())
    with target:
        for index, step in enumerate(flow, 1):
            module = step.run(module)
            if dump is not None:
                (dump / f"{index:02d}-{step.name}.py").write_text(module.script())
    return module
