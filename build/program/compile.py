"""Compiles a program: all plans and kernels of one variant of a target."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import tirx

from nearfar.build.program.compiled import Compiled
from nearfar.build.program.function import identifier
from nearfar.build.program.lowering import lower_step
from nearfar.build.program.operators import calls
from nearfar.build.program.passes import compile_flow, run_flow
from nearfar.build.program.plan import plan_of, share_workspace, staged_plan
from nearfar.format.buffers import SAMPLER_BUFFERS
from nearfar.format.kv import ROUNDED, KvDtype
from nearfar.format.manifest import Cache
from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Kernels, Variant
from nearfar.kernels.emission import Emit, EmitContext
from nearfar.kernels.jobs import Greedy, Logprobs, Sample, SamplerJob
from nearfar.kernels.jobs import Job as KernelJob
from nearfar.kernels.program import LoweredPlan, LoweredProgram, Precisions
from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model


@dataclass(frozen=True)
class Compilation:
    """The input of a compilation: the model, how each matrix is stored, the cache's geometry, the buckets."""

    model: Model
    matrices: dict[str, Matrix]
    cache: Cache
    buckets: Buckets


def check_supported(job: Compilation, variants: Iterable[Variant]) -> None:
    """Raise BuildError where a variant has no kernel for an operation of the model.

    Only the smallest and the largest step are lowered to jobs, and no kernel is made, which takes 0.1 s a
    step. Passes fuse jobs only where the kernels have one for the fused job.
    """
    asked: dict[Precisions, tuple[KernelJob, ...]] = {}
    for variant in variants:
        dtypes = _dtypes(variant)
        if dtypes not in asked:
            asked[dtypes] = (*_jobs(job, variant.kernels, dtypes), *_samplers(job))
        for each in asked[dtypes]:
            variant.kernels.check(each)


def _jobs(job: Compilation, kernels: Kernels, dtypes: Precisions) -> Iterator[KernelJob]:
    """The distinct jobs of the smallest and the largest step, before passes fuse them."""
    sizes = {min(job.buckets.step), max(job.buckets.step)}
    functions = [
        lower_step(job.model, job.cache, kernels, dtypes, job.matrices, m).function for m in sorted(sizes)
    ]
    yield from dict.fromkeys(found.job for function in functions for found in calls(function))


def _dtypes(variant: Variant) -> Precisions:
    kv: KvDtype = variant.kv or ("float16" if variant.precision == "f16" else "float32")
    return Precisions(variant.kernels.activations, kv)


def compile_program(
    job: Compilation, variant: Variant, target: tvm.target.Target, dump: Path | None = None
) -> LoweredProgram:
    """Compile every function of the artifact for one variant."""
    kernels, dtypes = variant.kernels, _dtypes(variant)
    names: dict[str, str] = {}
    module = tvm.IRModule({})
    for m in job.buckets.step:
        lowered = lower_step(job.model, job.cache, kernels, dtypes, job.matrices, m)
        module[f"step_{m}"] = lowered.function
        names.update(lowered.arguments)
    bundles = kernels.bundles(job.model.step, rounds_keys=dtypes.kv in ROUNDED)
    names |= {identifier(name): f"weight:{name}" for name in bundles}
    bundled = {tuple(map(identifier, held)): identifier(name) for name, held in bundles.items()}
    gpu = str(target.kind.name) != "llvm"
    module = run_flow(module, compile_flow(kernels, bundled, gpu=gpu), target, dump)
    output = "logits" if job.model.embedding is None else "embedding"
    plans = [
        plan_of(module[f"step_{m}"], LoweredPlan("step", m, min(m, MAX_ROWS)), names, f"buffer:{output}")
        for m in job.buckets.step
    ]
    functions = {
        str(gv.name_hint): func for gv, func in module.functions_items() if isinstance(func, tirx.PrimFunc)
    }
    for sampler in _samplers(job):
        staged = kernels.stages(sampler)
        plans.append(
            staged_plan(
                LoweredPlan(sampler.kind, sampler.rows, sampler.rows), sampler.label, staged, SAMPLER_BUFFERS
            )
        )
        functions |= {kernel: stage.func for kernel, stage in staged.named(sampler.label)}
    workspace = share_workspace(plans)
    used = dict.fromkeys(launch.kernel for plan in plans for launch in plan.launches)
    return LoweredProgram(variant, dtypes, plans, {name: functions[name] for name in used}, workspace)


def compiled(
    job: Compilation,
    variant: Variant,
    target: tvm.target.Target,
    emit: Emit,
    context: EmitContext,
    dump: Path | None = None,
) -> Compiled:
    """Compile a variant's program without writing to the artifact; the folder of `context` does not matter.

    This module, those of `emit` and those of the variant's classes import, directly or not, all code that
    decides what is in a program: the kernel cache depends on that (build/program/makers.py).
    """
    program = compile_program(job, variant, target, dump)
    with tempfile.TemporaryDirectory(prefix="nearfar-program-") as folder:
        record = emit(program, dataclasses.replace(context, root=Path(folder)))
        return Compiled.of(dataclasses.replace(record, device_class=variant.device_class), Path(folder))


def _samplers(job: Compilation) -> Iterator[SamplerJob]:
    if job.model.embedding is not None:
        return
    vocab, slots = job.model.vocab_size, job.cache.slots
    for rows in job.buckets.rows:
        yield Greedy(rows, vocab)
    for rows in job.buckets.rows:
        yield Sample(rows, vocab, slots)
    for rows in job.buckets.rows:
        yield Logprobs(rows, vocab)
