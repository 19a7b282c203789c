"""Each reader of a list, and each target's kernels, have a function for each record, or reject it by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from importlib import import_module

import pytest

from nearfar.kernels import jobs
from nearfar.kernels.jobs import GraphJob, Job, SamplerJob
from nearfar.step import operation, ops
from nearfar.step.model import KvCache
from nearfar.step.operation import (
    Activation,
    Op,
    caches_of,
    looked_up_in,
    multiplied_by,
    problems_of,
    reads,
    weights_of,
)
from nearfar.step.ops import OPS
from nearfar.step.params import Param, TensorPiece
from nearfar.step.shapes import Shapes

READERS = {
    "Relax": "nearfar.build.program.operations",
    "NumPy": "nearfar.build.calibration.operations",
    "MLX": "nearfar.edge_runtime.executors.mlx.operations",
    "ONNX": "nearfar.targets.onnx.operations",
}
KERNELS = {"cpu": "nearfar.targets.cpu", "gpu": "nearfar.targets.gpu"}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_has_a_function_for_each_operation(reader: str) -> None:
    module = import_module(READERS[reader])
    refused: Mapping[type[Op], str] = getattr(module, "REFUSED", {})
    assert set(OPS.values()) - module.OPERATIONS.keys() == refused.keys()
    assert module.OPERATIONS.keys() <= set(OPS.values())
    for kind, function in module.OPERATIONS.items():
        taken = typing.get_type_hints(function)["op"]
        assert taken is kind, (
            f"{reader}: {function.__name__} takes {taken.__name__}, listed for {kind.__name__}"
        )


@pytest.mark.parametrize(
    "module",
    [
        *(READERS[reader] for reader in ("Relax", "ONNX")),
        "nearfar.build.calibration.arithmetic",
        "nearfar.edge_runtime.executors.mlx.elementwise",
        "tests.support.job_reference",
    ],
)
def test_a_reader_has_a_formula_for_each_activation(module: str) -> None:
    assert import_module(module).ACTIVATIONS.keys() == set(typing.get_args(Activation))


@pytest.mark.parametrize("target", KERNELS)
def test_a_target_has_a_kernel_for_each_job(target: str) -> None:
    module = import_module(KERNELS[target])
    known = {*typing.get_args(GraphJob), *typing.get_args(SamplerJob)}
    assert known - module.STAGES.keys() == {
        *getattr(module, "NOT_ASKED", ()),
        *getattr(module, "REFUSED", ()),
    }
    assert module.STAGES.keys() <= known


def test_each_job_of_a_step_has_a_reference_and_a_record_in_the_graph() -> None:
    from nearfar.build.program import operators
    from tests.support.job_reference import REFERENCES

    assert REFERENCES.keys() == set(typing.get_args(GraphJob))
    assert set(operators._RECORDS.values()) == set(typing.get_args(GraphJob))
    assert set(typing.get_args(Job)) == {*typing.get_args(GraphJob), *typing.get_args(SamplerJob)}
    assert {kind.__module__.rpartition(".")[0] for kind in typing.get_args(Job)} == {jobs.__name__}


def test_what_an_operation_names_is_told_by_its_fields() -> None:
    """A field with any text must declare whether it names a value, a weight or a rotation."""
    for kind in OPS.values():
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            hint, told = hints[field.name], operation._role(hints[field.name])
            plain = [each for each in (hint, *typing.get_args(hint)) if each is str]
            assert field.name == "out" or not plain or told, (
                f"{kind.__name__}.{field.name} is text without a role"
            )
    turn = ops.RopeAppend("q", "x", 1, 2, rope="far", q_norm="a", k_norm="b")
    assert (reads(turn), weights_of(turn), caches_of(turn)) == (("x",), ("a", "b"), (1,))
    assert weights_of(ops.Linear("y", "x", "w")) == ("w",)
    assert (multiplied_by(ops.Logits("y", "x", "w", "b")), looked_up_in(ops.Embed("y", "t"))) == (
        ("w",),
        ("t",),
    )


def shapes() -> Shapes:
    params = [
        Param("w", (TensorPiece("w", 12),), 8),
        Param("b", (TensorPiece("b", 12),)),
        Param("v", (TensorPiece("v", 4),)),
        Param("three", (TensorPiece("three", 24),)),
        Param("one", (TensorPiece("one", 1),)),
        Param("gate_up", (TensorPiece("gate_up", 36),), 8, stack=3),
        Param("down", (TensorPiece("down", 24),), 6, stack=3),
        Param("downs", (TensorPiece("downs", 24),), 6, stack=2),
    ]
    return Shapes(
        {param.name: param for param in params},
        [KvCache(2, 4), KvCache(1, 8, 3, "k"), KvCache(4, 2, parts="state", depth=2)],
        {"rope"},
        {"x": 8, "y": 16, "odd": 7, "d": 4, "column": 1},
    )


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (ops.Linear("o", "x", "w", "b"), None),
        (ops.Linear("o", "y", "w"), "multiplies y, of 16 columns, by w, of 8 inputs"),
        (ops.Logits("o", "x", "w", "v"), "reads v of 4 values, and needs 12"),
        (ops.Linear("o", "x", "b"), "takes b for a matrix, which it is not"),
        (ops.Norm("o", "x", "w", 1e-6), "takes w for a vector, which it is not"),
        (ops.Norm("o", "x", "v", 1e-6, groups=2), None),
        (ops.Norm("o", "x", "v", 1e-6, 2, True), "reads v of 4 values, and needs 8"),
        (ops.Norm("o", "d", "v", 1e-6, 2, True), None),
        (ops.Norm("o", "odd", "v", 1e-6, 2), "normalizes 2 groups of odd, which has 7 columns"),
        (ops.Norm("o", "x", "v", 1e-6), "reads v of 4 values, and needs 8"),
        (ops.RopeAppend("o", "y", 0, 4, append=False), None),
        (ops.RopeAppend("o", "y", 0, 4), "reads y of 16 columns, and needs 32"),
        (ops.RopeAppend("o", "y", 0, 4, q_norm="b", append=False), "reads b of 12 values, and needs 4"),
        (ops.RopeAppend("o", "y", 0, 4, rope="far"), "turns by 'far', which is not among ropes"),
        (ops.Attend("o", "y", 0, 3, 1.0), "has 3 heads for 2 heads of keys"),
        (ops.Attend("o", "y", 3, 4, 1.0), "uses cache 3, there are 3"),
        (ops.Attend("o", "y", 0, 4, 1.0, sinks="b"), "reads b of 12 values, and needs 4"),
        (ops.Attend("o", "y", 1, 1, 1.0), "uses cache 1, which keeps k, and needs kv"),
        (ops.Conv("o", "x", 1, "three", 3), None),
        (ops.Conv("o", "x", 0, "three", 3), "uses cache 0, which keeps kv, and needs k"),
        (ops.Conv("o", "y", 1, "three", 3), "reads y of 16 columns, and needs 8"),
        (ops.Conv("o", "x", 1, "three", 2), "reads three of 24 values, and needs 8 · 2"),
        (ops.Conv("o", "x", 1, "three", 3, None, "v"), "reads v of 4 values, and needs 8"),
        (ops.Delta("o", "y", "x", 2, 2, "v", "v"), None),
        (ops.Delta("o", "y", "x", 2, 3, "v", "v"), "has 4 heads of values for 3 heads of keys"),
        (ops.Delta("o", "x", "x", 2, 2, "v", "v"), "reads x of 8 columns, and needs 16"),
        (ops.Delta("o", "y", "y", 2, 2, "v", "v"), "reads y of 16 columns, and needs 8"),
        (ops.Delta("o", "y", "x", 2, 2, "b", "v"), "reads b of 12 values, and needs 4"),
        (ops.Ssm("o", "y", "d", 2, 2, "b"), None),
        (ops.Ssm("o", "y", "d", 2, 3, "b"), "has 4 heads for 3 groups"),
        (ops.Ssm("o", "x", "d", 2, 1, "b"), "reads x of 8 columns, and needs 12"),
        (ops.Ssm("o", "y", "x", 2, 2, "b"), "reads x of 8 columns, and needs 4"),
        (ops.Ssm("o", "y", "d", 2, 2, "v"), "reads v of 4 values, and needs 12"),
        (ops.Glu("o", "odd", "silu"), "halves odd, which has 7 columns"),
        (ops.Add("o", "x", "y"), "reads y of 16 columns, and needs 8"),
        (ops.Mul("o", "x", "z"), "reads z, which nothing before it makes"),
        (ops.Scale("o", "x", factor=2.0), None),
        (ops.Mul("o", "x", "column"), None),
        (ops.Mul("o", "column", "x"), "reads x of 8 columns, and needs 1"),
        (ops.Scale("o", "x", "v"), "reads v of 4 values, and needs 1"),
        (ops.Scale("o", "x", "u"), "names the weight 'u', which is not a parameter"),
        (ops.Columns("o", "x", 4, 8), "takes columns 4 to 12 of x, which has 8"),
        (ops.Route("o", "x", 9), "chooses 9 of 8 experts"),
        (ops.Route("o", "x", 2, bias="v"), "reads v of 4 values, and needs 8"),
        (ops.Route("o", "x", 2, factors="v"), "reads v of 4 values, and needs 8"),
        (ops.Experts("o", "x", "y", "gate_up", "down", "silu"), None),
        (ops.Experts("o", "y", "y", "gate_up", "down", "silu"),
         "multiplies y, of 16 columns, by gate_up, of 8 inputs"),
        (ops.Experts("o", "x", "y", "gate_up", "down", "silu", down_bias="b"),
         "reads b of 12 values, and needs 24"),
        (ops.Experts("o", "x", "y", "gate_up", "downs", "silu"), "has 3 experts in gate_up and 2 in downs"),
        (ops.Experts("o", "x", "y", "down", "down", "silu"),
         "multiplies x, of 8 columns, by down, of 6 inputs"),
        (ops.Experts("o", "x", "y", "gate_up", "down", "silu", gated=False),
         "has 12 rows for each expert in gate_up, and 6 inputs in down"),
        (ops.Experts("o", "x", "odd", "gate_up", "down", "silu"),
         "reads odd of 7 columns: numbers, and as many weights"),
        (ops.Embedding("o", "x", 16), "reads x of 8 columns, and needs 16"),
    ],
    ids=lambda value: value.op if isinstance(value, Op) else "",
)  # fmt: skip
def test_what_does_not_fit_is_told(op: Op, problem: str | None) -> None:
    assert problems_of(op, shapes())[:1] == ([] if problem is None else [problem])
