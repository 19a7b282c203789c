"""Matrices that are too large for one binding are stored in pieces: their bytes, launches and plans."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import tvm

from nearfar.build import manifest
from nearfar.build.program.compile import Compilation, compile_program
from nearfar.build.synth import published
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS
from nearfar.errors import BuildError
from nearfar.format.scales import OF_GGUF, PAIRS, SYMMETRIC, Scales
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Precision
from nearfar.kernels.emission import EmitContext
from nearfar.kernels.jobs import Embed, Experts, Linear
from nearfar.kernels.quantized import Matrix, QuantTensor
from nearfar.step.reading import read_model
from nearfar.targets.gpu import packing, variant
from nearfar.targets.gpu.classes import CLASSES, DISCRETE, SOFTWARE
from nearfar.targets.gpu.emit import largest_buffer
from nearfar.targets.gpu.pieces import BINDING, COLUMNS, pack, parts, pieces
from tests.support.job_reference import random_matrix

KERNELS = variant(DISCRETE, "f16", vectors=False).kernels
SMALL = 64 * 256


@pytest.mark.parametrize(
    ("matrix", "count"),
    [
        (Matrix(128_256, 2048, 4, 64), 1),  # 131.3 MB, just under the limit
        (Matrix(151_936, 2560, 4, 64), 2),
        (Matrix(151_936, 5120, 8, 64), 6),
        (Matrix(256_128, 2304, 16), 9),
        (Matrix(28_672, 4096, 16), 2),
    ],
    ids=str,
)
def test_no_piece_is_larger_than_every_device_binds_and_there_are_no_more_than_that_takes(
    matrix: Matrix, count: int
) -> None:
    whole = matrix.n * matrix.k * matrix.bits // 8
    assert max(part.bytes for part in parts(matrix)) <= BINDING
    assert count == 1 or whole > BINDING * (count - 1)
    found = pieces(matrix)
    assert len(found) == count
    assert sum(piece.matrix.n for piece in found) == matrix.n
    assert [piece.first for piece in found] == list(range(0, matrix.n, found[0].matrix.n))
    assert {piece.matrix.n for piece in found[:-1]} <= {found[0].matrix.n}
    assert count == 1 or found[0].matrix.n % COLUMNS == 0


@pytest.mark.parametrize(
    ("scales", "name"), [(PAIRS, "scale_bias"), (SYMMETRIC, "scales"), (OF_GGUF["Q4_K"], "levels")]
)
def test_a_matrix_that_fits_is_stored_as_ever_and_others_piece_by_piece(scales: Scales, name: str) -> None:
    matrix = Matrix(200, 256, 4, 32, scales=scales)
    tensor, _ = random_matrix(np.random.default_rng(1), matrix)
    assert parts(matrix) == packing.parts(matrix)
    assert [part.name for part in parts(matrix, SMALL)] == [
        "codes.0", f"{name}.0", "codes.1", f"{name}.1",
    ]  # fmt: skip
    whole, cut = packing.pack(matrix, tensor), pack(matrix, tensor, SMALL)
    for part, array in zip(parts(matrix, SMALL), cut, strict=True):
        assert part.shape == array.shape
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate(cut[i::2], axis=1), whole[i])


@pytest.mark.parametrize("n", [40, 41])
def test_scales_without_biases_take_two_bytes_each(n: int) -> None:
    matrix = Matrix(n, 256, 8, 32, scales=SYMMETRIC)
    tensor, _ = random_matrix(np.random.default_rng(1), matrix)
    assert isinstance(tensor, QuantTensor)
    _, scales = packing.pack(matrix, tensor)
    assert [part.bytes for part in parts(matrix)] == [n * 256, (n + 1) // 2 * 2 * 8 * 2]
    np.testing.assert_array_equal(scales.view(np.float16)[:, :n], tensor.scales.T)


@pytest.mark.parametrize("superblocks", [2, 3])
@pytest.mark.parametrize("kind", OF_GGUF)
def test_scales_of_two_levels_take_the_bytes_of_the_file(kind: str, superblocks: int) -> None:
    """One factor is in half a word: of an odd number of superblocks the last half is empty."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    scheme = BLOCKS[kind].scheme(superblocks * block)
    assert scheme is not None
    matrix = Matrix(41, superblocks * block, scheme.bits, scheme.group_size, scales=scheme.scales)
    empty = 0 if scheme.scales.offsets else superblocks % 2 * 2
    assert matrix.bytes == 41 * superblocks * size
    assert sum(part.bytes for part in parts(matrix)) == matrix.bytes + 41 * empty


def test_rows_that_are_too_long_for_any_piece_are_refused_by_name() -> None:
    with pytest.raises(BuildError, match=r"64 rows of a matrix \[200, 256\] take 8,192 bytes.*than 8,000"):
        pieces(Matrix(200, 256, 4, 64), 8000)


@pytest.mark.parametrize("name", CLASSES)
def test_each_launch_binds_one_piece_and_all_write_one_output(name: str) -> None:
    kernels = variant(CLASSES[name], "f16", vectors=False).kernels
    matrix = Matrix(151_936, 2560, 4, 64)
    logits = Linear(1, matrix, "float32", "float32", norm=1e-6, rows=True, x_rows=1)
    assert [stage.args for stage in kernels.stages(logits).stages] == [
        ("x", "logit_rows", "norm", "w0", "w1", "out"),
        ("x", "logit_rows", "norm", "w2", "w3", "out"),
    ]
    assert [stage.args for stage in kernels.stages(Embed(1, matrix)).stages] == [
        ("tokens", "w0", "w1", "out"), ("tokens", "w2", "w3", "out"),
    ]  # fmt: skip


def test_gate_and_up_of_pieces_meet_in_a_scratch_buffer() -> None:
    job = Linear(4, Matrix(28_672, 4096, 16), "float32", "float16", norm=1e-5, gate="silu", residual=True)
    staged = KERNELS.stages(job)
    assert [stage.args for stage in staged.stages] == [
        ("x", "norm", "w0", "scratch:0"),
        ("x", "norm", "w1", "scratch:0"),
        ("scratch:0", "residual", "out"),
    ]
    assert staged.scratch == (((4, 28_672), "float32"),)


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_a_shape_of_4b_asks_for_no_larger_binding_than_every_device_has(precision: Precision) -> None:
    """All launches over pieces write one buffer, which nothing else uses meanwhile."""
    model = read_model({**published("qwen3-4b").config, "num_hidden_layers": 2}).model
    matrices = {p.name: Matrix(p.n, p.k, 4, 64) for p in model.step.params if p.is_matrix}
    made = variant(SOFTWARE, precision, vectors=False)
    job = Compilation(model, matrices, manifest.CACHE, Buckets((1, 256), (1,)))
    program = compile_program(job, made, tvm.target.Target("webgpu"))
    tensors = {
        f"{name}.{part.name}": part.bytes
        for name, matrix in matrices.items()
        for part in made.kernels.parts(matrix)
    }
    buffers = {buffer.name: buffer for buffer in manifest.buffers(model)}
    assert largest_buffer(program, EmitContext(Path(), buffers, max(tensors.values()))) <= BINDING
    for plan in program.plans:
        used = {arg for launch in plan.launches for arg in launch.args if arg.startswith("weight:")}
        if plan.function == "step":
            assert {arg.removeprefix("weight:") for arg in used} >= tensors.keys()
            first, second, *_, last_but_one, last = plan.launches
            assert first.args == (
                "buffer:tokens",
                "weight:embed.codes.0",
                "weight:embed.scale_bias.0",
                first.args[-1],
            )
            assert second.args[-1] == first.args[-1]
            assert last_but_one.args[-1] == last.args[-1] == "buffer:logits"
            assert sum("buffer:logits" in launch.args for launch in plan.launches) == 2


def test_rounded_rows_of_pieces_are_written_before_they_are_read() -> None:
    """Gate and up rows are written to one buffer of their own; the rounded rows of a piece are not shared."""
    kernels = variant(CLASSES["discrete"], "f16", False, "int8", binding=1 << 14).kernels
    job = Linear(16, Matrix(512, 256, 4, 64), "float32", "float16", gate="silu", norm=1e-5)
    known = set(job.inputs(len(kernels.parts(job.matrix))))
    stages = kernels.stages(job).stages
    assert len(stages) > 4
    for stage in stages:
        new = [arg for arg in stage.args if arg not in known]
        assert list(stage.args[len(stage.args) - len(new) :]) == new
        assert "w0" not in stage.args or len(new) <= 1
        known.update(new)
    assert stages[-1].args[-1] == "out"


def test_experts_that_no_device_binds_at_once_are_cut_between_experts() -> None:
    """64 experts of 4 bits: codes of 262,144 bytes in the first stack, and half as many in the second."""
    job = Experts(1, Matrix(64 * 128, 64, 4, 64, 64), Matrix(64 * 64, 64, 4, 64, 64), 2, "silu")

    def launches(binding: int) -> list[tuple[str, ...]]:
        return [
            stage.args
            for stage in variant(SOFTWARE, "f32", False, binding=binding).kernels.stages(job).stages
        ]

    hidden, products = "scratch:0", "scratch:1"
    assert launches(262_144) == [
        ("x", "route", "w0", "w1", hidden), (hidden, "route", "w2", "w3", "out"),
    ]  # fmt: skip
    assert launches(262_143)[:2] == [("x", "route", f"w{i}", f"w{i + 1}", hidden) for i in (0, 2)]
    assert launches(100_000) == [
        *(("x", "route", f"w{i}", f"w{i + 1}", hidden) for i in (0, 2, 4)),
        *((hidden, "route", f"w{i}", f"w{i + 1}", products) for i in (6, 8)),
        (products, "route", "out"),
    ]
    assert [piece.matrix.stack for piece in pieces(job.gate_up, 100_000)] == [22, 22, 20]


def test_an_expert_that_no_device_binds_is_refused_by_its_shape() -> None:
    said = r"128 rows of one expert in a matrix \[512, 64\] take 4,096 bytes.*than 4,095"
    with pytest.raises(BuildError, match=said):
        pieces(Matrix(4 * 128, 64, 4, 64, 4), 4095)
