"""Makes plans: a planned Relax function, or a target's staged kernels, as a sequence of launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from nearfar.kernels.contract import Staged
from nearfar.kernels.program import LoweredLaunch, LoweredPlan


def plan_of(func: relax.Function, plan: LoweredPlan, names: Mapping[str, str], output: str) -> LoweredPlan:
    """Fill `plan` from a function that has passed `plan-memory`.

    `names` gives the argument for each parameter's (sanitized) name; the returned tensor becomes `output`.
    """
    values: dict[relax.Var, str] = {param: names[param.name] for param in func.params}
    result = func.body.body
    for block in func.body.blocks:
        for binding in block.bindings:
            values[binding.var] = _value(binding.value, values, plan)
    returned = values[result]
    held = plan.tensors.get(returned, 0)
    if held != 1:
        raise AssertionError(
            f"{plan.function}.{plan.size}: the result lies in {returned}, which holds {held} tensors; the "
            f"launches of all of them would write {output}"
        )
    plan.launches = [
        LoweredLaunch(launch.kernel, tuple(output if arg == returned else arg for arg in launch.args))
        for launch in plan.launches
    ]
    return plan


def _value(expr: Any, values: Mapping[relax.Var, str], plan: LoweredPlan) -> str:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, relax.TupleGetItem):
        return values[expr.tuple_value].split(" ")[int(expr.index)]
    if isinstance(expr, relax.Tuple):
        return " ".join(values[item] for item in expr.fields)
    if not isinstance(expr, relax.Call):
        raise AssertionError(f"a plan is a straight line of calls; found {type(expr).__name__}: {expr}")
    if isinstance(expr.op, tvm.ir.GlobalVar):
        args = tuple(values[arg] for arg in expr.args)
        plan.launches.append(LoweredLaunch(str(expr.op.name_hint), args))
        return ""
    return _memory_call(expr, values, plan)


def _memory_call(call: relax.Call, values: Mapping[relax.Var, str], plan: LoweredPlan) -> str:
    name = call.op.name if isinstance(call.op, tvm.ir.Op) else str(call.op)
    if name == "relax.memory.alloc_storage":
        plan.storage.append(int(call.args[0].values[0]))
        return f"storage:{len(plan.storage) - 1}"
    if name == "relax.memory.alloc_tensor":
        return _held(values[call.args[0]], plan)
    if name == "relax.builtin.alloc_tensor":
        shape = [int(d) for d in call.args[0].values]
        plan.storage.append(int(np.prod(shape)) * np.dtype(str(call.args[1].value)).itemsize)
        return _held(f"storage:{len(plan.storage) - 1}", plan)
    raise AssertionError(f"operator {name} is left in a planned function; a pass must lower it")


def _held(storage: str, plan: LoweredPlan) -> str:
    """Count one more tensor that a storage holds, and give the storage's name."""
    plan.tensors[storage] = plan.tensors.get(storage, 0) + 1
    return storage


def staged_plan(plan: LoweredPlan, name: str, staged: Staged, buffers: Iterable[str]) -> LoweredPlan:
    """Fill `plan` with kernels outside the graph (sampling); their parameters are buffers' names."""
    known = set(buffers)
    plan.storage = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in staged.scratch]
    for kernel, stage in staged.named(name):
        unknown = [a for a in stage.args if a not in known and not a.startswith("scratch:")]
        if unknown:
            raise AssertionError(f"{kernel}: no buffers named {unknown}")
        args = (
            a.replace("scratch:", "storage:") if a.startswith("scratch:") else f"buffer:{a}"
            for a in stage.args
        )
        plan.launches.append(LoweredLaunch(kernel, tuple(args)))
    return plan


def share_workspace(plans: Iterable[LoweredPlan]) -> list[int]:
    """Give all plans one set of workspace buffers: a plan's n-th largest storage becomes workspace n. Returns
    their sizes in bytes.
    """
    sizes: list[int] = []
    for plan in plans:
        used = {arg for launch in plan.launches for arg in launch.args if arg.startswith("storage:")}
        order = sorted((int(arg.split(":")[1]) for arg in used), key=lambda i: (-plan.storage[i], i))
        names = {f"storage:{old}": f"workspace:{new}" for new, old in enumerate(order)}
        plan.launches = [
            LoweredLaunch(la.kernel, tuple(names.get(a, a) for a in la.args)) for la in plan.launches
        ]
        for new, old in enumerate(order):
            size = -(-plan.storage[old] // 256) * 256
            sizes[new : new + 1] = [max(size, sizes[new])] if new < len(sizes) else [size]
    return sizes
