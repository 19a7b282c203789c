"""The kernels of each device class meet its bounds (tests.support.wanted_kernels), for published shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import Attend, Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES, DISCRETE, SOFTWARE, DeviceClass
from nearfar.targets.gpu.figures import figures_of
from nearfar.targets.gpu.kernels.attention.combine import row_bytes
from nearfar.targets.gpu.kernels.attention.flash_decode import shape_of
from nearfar.targets.gpu.kernels.linear.matvec import workgroups
from tests.support.published_kernels import compiled, pipelines
from tests.support.wanted_kernels import PIPELINES, WRITTEN, Kind, kind_of, wanted

SHAPES = ("smollm2-135m", "llama-3.2-1b", "qwen3-4b")
Reached = dict[str, float]
REACHED: dict[tuple[str, Kind], Reached] = {
    ("mobile", "matvec"): {
        "x_loads": 1.78, "operations_per_weight": 5.16, "registers": 105, "weight_reads": 1.112,
        "serial_steps": 19,
    },
    ("mobile", "project"): {"operations_per_weight": 5.07, "registers": 137},
    ("mobile", "gathering"): {"operations_per_weight": 6.64, "registers": 97},
    ("mobile", "matmul"): {"registers": 67},  # gated; of them three for rows of which a few inputs are huge
    ("mobile", "prefill"): {"cache_reads": 0.127, "registers": 77},
    ("integrated", "matvec"): {
        "x_loads": 1.78, "operations_per_weight": 5.06, "registers": 137, "loads_ahead": 5,
        "weight_reads": 1.112, "serial_steps": 10,
    },
    ("integrated", "project"): {"operations_per_weight": 5.07, "registers": 137},
    ("integrated", "gathering"): {"operations_per_weight": 6.64, "registers": 97},
    ("integrated", "prefill"): {"registers": 110},
    ("discrete", "matvec"): {
        "x_loads": 1.78, "operations_per_weight": 5.16, "registers": 137, "loads_ahead": 6, "serial_steps": 5,
    },
    ("discrete", "project"): {
        "operations_per_weight": 5.07, "registers": 137, "serial_steps": 5,
        "threads": 12_288, "bytes_in_flight": 1_769_472,  # 48 heads by the 256 threads of a workgroup
    },
    ("discrete", "gathering"): {"operations_per_weight": 6.64, "registers": 97},
    ("discrete", "prefill"): {"registers": 110},
}  # fmt: skip
"""Figures that miss what their class wants, and what the worst of SHAPES reaches: a line not to fall behind.
A figure that no longer misses is to be taken out.

A matvec's `x_loads`: to one load of words belong 8 inputs, two loads, which the lanes beside make too. Rows
that are normalized and float16 already would be one, and are not worth the launch that makes them.

Its operations: of rows of float32 each weight is masked out of its word, made a number, and multiplied: 3,
and half a one for what all codes of a word share, so that the bound of 2.5 is out of reach; what a lane does
to an input for its norm and for biases is shared by its four columns, about 0.75. Float16 would take 2.4 and
what brings blocks of inputs to one length, 0.4 to 0.8 less in all (halves.py, which rows of float16 take): it
drowned small inputs beside huge ones. 4.4 for a weight of q4 are 7.8 for a byte; devices compute 18 for each
byte that they read (phones of 1.4 T/s and 77 GB/s, integrated GPUs of 1.1 and 60) to 29 (a card of 14.5 and
504), all assumed: a matvec waits for memory, not for these.
Scales of parts of groups, where k has few groups (576: 9), are the rest.
"""
FLOAT32_OPERATIONS = 4.4
"""Operations for a weight of the 1B shape in float32 programs; other bounds are for float16."""
VECTOR = 8
"""Bytes of a vector of four float16 numbers."""
LEAST = {"loads_ahead", "line_use", "threads", "bytes_in_flight"}
"""Figures of REACHED for which larger is better."""
LAUNCHES_REACHED = {"smollm2-135m": 7, "llama-3.2-1b": 7, "qwen3-4b": 8}
"""Launches of a layer with software kernels: rope and append, norms of heads, and attention's second stage
are separate launches.
"""
PUT_TOGETHER = {
    "smollm2-135m": {"mobile", "integrated", "discrete"}, "llama-3.2-1b": {"discrete"}, "qwen3-4b": set(),
}  # fmt: skip
"""Classes in which the matmul after attention also does attention's second stage: 5 launches a layer. In
other classes that would cost more than a launch, however few parts there are: see
test_a_sixth_launch_costs_less_than_what_it_spares.
"""
HEADS = {"smollm2-135m": (9, 3, 64, 576), "llama-3.2-1b": (32, 8, 64, 2048), "qwen3-4b": (32, 8, 128, 2560)}
"""Heads, kv heads, head size, and the number of outputs of `o`."""
WRITTEN_REACHED = 0.0228


def missed(shape: str, made_for: DeviceClass, held_to: DeviceClass, kind: Kind) -> dict[str, list[float]]:
    """Figures that are out of bounds, with their values."""
    jobs = [each for each in compiled(shape, made_for).measured if kind_of(each.job) == kind]
    optional = kind == "gathering" or (made_for is SOFTWARE and kind == "project")
    assert jobs or optional, f"{shape} has no {kind}"
    found: dict[str, list[float]] = {}
    for each in jobs:
        for name in wanted(each.job, held_to, each.matrix).missed(each.figures):
            found.setdefault(name, []).append(getattr(each.figures, name))
    return found


@pytest.mark.parametrize("kind", ["matvec", "project", "gathering", "matmul", "decode", "prefill", "other"])
@pytest.mark.parametrize("name", CLASSES)
def test_kernels_are_what_their_class_wants(name: str, kind: Kind) -> None:
    found: dict[str, list[float]] = {}
    for shape in SHAPES:
        for figure, values in missed(shape, CLASSES[name], CLASSES[name], kind).items():
            found.setdefault(figure, []).extend(values)
    reached = REACHED.get((name, kind), {})
    assert found.keys() == reached.keys()
    for figure, values in found.items():
        worst = min(values) if figure in LEAST else -max(values)
        assert worst >= (reached[figure] if figure in LEAST else -reached[figure]), figure


@pytest.mark.parametrize(
    ("kind", "figures"),
    [
        ("matvec", {"bytes_in_flight", "threads", "loads_per_byte", "serial_steps"}),
        ("matmul", {"weight_reads", "barriers_per_k", "flop_per_byte"}),
        ("prefill", {"cache_reads"}),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_software_kernels_are_not_what_a_discrete_gpu_wants(
    shape: str, kind: Kind, figures: set[str]
) -> None:
    """Tests that the check can fail."""
    assert figures <= missed(shape, SOFTWARE, DISCRETE, kind).keys()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_token_has_few_launches_and_writes_little(name: str, shape: str) -> None:
    found = compiled(shape, CLASSES[name])
    reached = LAUNCHES_REACHED[shape] if CLASSES[name] is SOFTWARE else 6 - (name in PUT_TOGETHER[shape])
    assert found.launches_a_layer == reached
    assert found.written_share <= (WRITTEN_REACHED if shape == "smollm2-135m" else WRITTEN)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["mobile", "integrated", "discrete"])
def test_a_sixth_launch_costs_less_than_what_it_spares(name: str, shape: str) -> None:
    """With as few parts as keep the threads of the class busy, reading them again in all workgroups of `o`
    takes longer than a launch in classes with six launches a layer, and no longer in classes with five.
    """
    device, (heads, kv_heads, dim, width) = CLASSES[name], HEADS[shape]
    attend = Attend(1, heads, kv_heads, dim, 16, 16, 512, "float16", "float16", scale=0.125)
    o = Linear(1, Matrix(width, heads * dim, 4, 64), "float16", "float32", residual=True)
    laid = shape_of(attend, device)
    parts = math.ceil(device.launched / (heads // laid.heads * laid.threads))
    again = (parts - 1) * row_bytes(o) * workgroups(o)
    assert (again > device.read_again) is (name not in PUT_TOGETHER[shape])


@pytest.mark.parametrize("name", ["mobile", "integrated", "discrete"])
def test_products_of_float16_take_fewer_operations(name: str) -> None:
    """Compares programs with many rows, where products are most of the work; an operation on a vector of two
    float16 numbers counts as one.
    """

    def operations(precision: Precision) -> float:
        found = compiled(SHAPES[0], CLASSES[name], precision).measured
        counts = [each.figures.operations_per_weight for each in found if kind_of(each.job) == "matmul"]
        return max(count for count in counts if count is not None)

    assert operations("f16") < 0.8 * operations("f32")


@pytest.mark.parametrize("m", [5, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 2048), (2048, 8192)])
def test_a_card_reads_small_matrices_again_rather_than_wait(m: int, n: int, k: int) -> None:
    """For projections of the 1B shape, tiles of a matmul would have only 2,048 or 3,072 of the 16,384 threads
    wanted.
    """
    job = Linear(m, Matrix(n, k, 4, 64), "float16", "float32", residual=True)
    kernels = variant(DISCRETE, "f16", False).kernels
    found, four = (figures_of(kernels.stages(each).stages[0].func) for each in (job, replace(job, m=4)))
    assert wanted(job, DISCRETE, n * k * 9 // 16).missed(found).keys() == {"registers"}
    assert found.registers <= four.registers + 2
    assert found.threads >= DISCRETE.launched
    assert found.weight_reads == math.ceil(m / 4)


@pytest.mark.parametrize(
    ("name", "n", "m"),
    [("discrete", 8192, 16), ("discrete", 2048, 17), ("integrated", 2048, 16), ("mobile", 2048, 5)],
)
def test_a_matmul_reads_a_matrix_once_where_it_waits_no_longer(name: str, n: int, m: int) -> None:
    device = CLASSES[name]
    job = Linear(m, Matrix(n, 2048, 4, 64), "float16", "float32", residual=True)
    found = figures_of(variant(device, "f16", False).kernels.stages(job).stages[0].func)
    assert not wanted(job, device, n * 2048 * 9 // 16).missed(found)
    assert found.weight_reads is not None
    assert found.weight_reads < 1.2


def test_a_program_has_few_pipelines() -> None:
    assert pipelines("llama-3.2-1b", DISCRETE) <= PIPELINES


def test_float32_programs_need_few_operations_too() -> None:
    measured = compiled("llama-3.2-1b", DISCRETE, "f32").measured
    jobs = [each for each in measured if kind_of(each.job) == "matvec"]
    assert jobs
    for each in jobs:
        assert (each.figures.operations_per_weight or 0) <= FLOAT32_OPERATIONS, each.job.label


@pytest.mark.parametrize("context", [1024, 8192])
@pytest.mark.parametrize("name", ["mobile", "integrated", "discrete"])
def test_attention_of_64_rows_fills_the_device_and_reads_a_key_once_a_tile(name: str, context: int) -> None:
    """Positions are distributed if there are few tiles: the 1B shape has two or four for each of 8
    kv heads.
    """
    device = CLASSES[name]
    job = Attend(64, 32, 8, 64, 16, 16, 512, "float16", "float16", scale=0.125)
    found = figures_of(variant(device, "f16", False).kernels.stages(job).stages[0].func, context)
    assert wanted(job, device).missed(found).keys() <= {"registers"}
    assert found.bytes_in_flight >= device.launched * VECTOR * found.loads_ahead
