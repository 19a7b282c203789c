"""A program: all plans and kernels of one target in one precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

from nearfar.build.program.graph import StepGraph
from nearfar.build.program.passes import compile_flow, run_flow
from nearfar.build.program.plan import Plan, plan_of, share_workspace, staged_plan
from nearfar.format.sizes import MAX_ROWS, ROW_BUCKETS, STEP_BUCKETS, CacheLayout
from nearfar.step.config import ModelConfig
from nearfar.step.models import Architecture
from nearfar.targets.kernels import Kernels, Precision, Staged
from nearfar.targets.quantized import Matrix

SAMPLER_BUFFERS = (
    "logits", "sample_f32", "sample_i32", "logit_bias", "counts", "allowed",
    "sampled", "tokens", "logprob", "top_ids", "top_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is compiled: the shape, its architecture file, and how each matrix is stored."""

    config: ModelConfig
    architecture: Architecture
    matrices: dict[str, Matrix]
    biases: frozenset[str]
    cache: CacheLayout


@dataclass(frozen=True)
class Program:
    """Plans in the order of the manifest, the kernels they launch, and the bytes of the shared workspace."""

    precision: Precision
    plans: list[Plan]
    kernels: dict[str, tirx.PrimFunc]
    workspace: list[int]


def compile_program(
    model: Model, kernels: Kernels, precision: Precision, target: tvm.target.Target, dump: Path | None = None
) -> Program:
    """Compile every function of the artifact for one precision."""
    names: dict[str, str] = {}
    module = tvm.IRModule({})
    for m in STEP_BUCKETS:
        func, arguments = _step(model, kernels, precision, m)
        module[f"step_{m}"] = func
        names.update(arguments)
    gpu = str(target.kind.name) != "llvm"
    module = run_flow(module, compile_flow(kernels, gpu=gpu), target, dump)
    plans = [
        plan_of(module[f"step_{m}"], Plan("step", m, min(m, MAX_ROWS)), names, "buffer:logits") for m in STEP_BUCKETS
    ]
    functions = {str(gv.name_hint): func for gv, func in module.functions_items() if isinstance(func, tirx.PrimFunc)}
    for plan, name, staged in _samplers(model, kernels):
        plans.append(staged_plan(plan, name, staged, SAMPLER_BUFFERS))
        for index, stage in enumerate(staged.stages):
            functions[name if len(staged.stages) == 1 else f"{name}_s{index}"] = stage.func
    workspace = share_workspace(plans)
    used = dict.fromkeys(launch.kernel for plan in plans for launch in plan.launches)
    return Program(precision, plans, {name: functions[name] for name in used}, workspace)


def _step(model: Model, kernels: Kernels, precision: Precision, m: int) -> tuple[relax.Function, Mapping[str, str]]:
    """The step function for M rows, and the plan argument for each of its parameters."""
    graph = StepGraph(model.config, model.cache, kernels, precision, model.matrices, model.biases, m)
    model.architecture.step(graph, model.config)
    return graph.finish(), graph.arguments()


def _samplers(model: Model, kernels: Kernels) -> list[tuple[Plan, str, Staged]]:
    vocab, slots = model.config.vocab_size, model.cache.slots
    out: list[tuple[Plan, str, Staged]] = []
    for rows in ROW_BUCKETS:
        jobs: dict[str, Any] = {
            "greedy": kernels.greedy(rows, vocab),
            "sample": kernels.sample(rows, vocab, slots),
            "logprobs": kernels.logprobs(rows, vocab),
        }
        out += [(Plan(kind, rows, rows), f"{kind}_r{rows}_{vocab}", staged) for kind, staged in jobs.items()]
    return sorted(out, key=lambda item: (["greedy", "sample", "logprobs"].index(item[0].function), item[0].size))
