"""Each class of GPUs gets what it wants of its kernels (targets/gpu/figures/wanted.py): published shapes."""

from __future__ import annotations

import pytest

from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES, DISCRETE, SOFTWARE, DeviceClass
from nearfar.targets.gpu.figures import figures_of
from nearfar.targets.gpu.figures.published import compiled, pipelines
from nearfar.targets.gpu.figures.wanted import LAUNCHES_A_LAYER, PIPELINES, WRITTEN, Kind, kind_of, wanted
from nearfar.targets.jobs import Attend

SHAPES = ("smollm2-135m", "llama-3.2-1b", "qwen3-4b")
Reached = dict[str, float]
BINDING = 194_478_080  # codes of a vocabulary of 151,936 by 2,560: its columns are not split yet
REACHED: dict[tuple[str, Kind], Reached] = {
    ("software", "matvec"): {"largest_binding": BINDING},
    ("software", "matmul"): {"largest_binding": BINDING},
    ("mobile", "matvec"): {
        "x_loads": 4.8, "operations_per_weight": 7.65, "registers": 104, "weight_reads": 1.112,
        "serial_steps": 19, "largest_binding": BINDING,
    },
    ("mobile", "gathering"): {"operations_per_weight": 9.95, "registers": 98},
    ("mobile", "matmul"): {
        "barriers_per_k": 0.0643, "registers": 90, "line_use": 0.5, "largest_binding": BINDING,
    },
    ("mobile", "prefill"): {"cache_reads": 0.127, "registers": 77},
    ("integrated", "matvec"): {
        "x_loads": 6.76, "operations_per_weight": 7.65, "registers": 136, "loads_ahead": 5,
        "weight_reads": 1.112, "serial_steps": 10, "largest_binding": BINDING,
    },
    ("integrated", "gathering"): {"operations_per_weight": 9.95, "registers": 98},
    ("integrated", "matmul"): {"barriers_per_k": 0.0643, "largest_binding": BINDING},
    ("integrated", "prefill"): {"registers": 110},
    ("discrete", "matvec"): {
        "x_loads": 6.76, "operations_per_weight": 7.65, "registers": 136, "loads_ahead": 6, "serial_steps": 5,
        "largest_binding": BINDING,
    },
    ("discrete", "gathering"): {"operations_per_weight": 9.95, "registers": 98},
    ("discrete", "matmul"): {"barriers_per_k": 0.0643, "largest_binding": BINDING},
    ("discrete", "prefill"): {"registers": 110},
}  # fmt: skip
"""Figures that miss what their class wants, and what the worst of SHAPES reaches: a line not to fall behind.
A figure that no longer misses is to be taken out.
"""
VECTOR = 8
"""Bytes of four float16."""
LEAST = {"loads_ahead", "line_use"}
"""Figures of REACHED of which more is better."""
LAUNCHES_REACHED = {"smollm2-135m": 7, "llama-3.2-1b": 7, "qwen3-4b": 8}
"""Rope and append are launches of their own, and so are norms of heads and attention's second stage …"""
PUT_TOGETHER = {
    "smollm2-135m": {"mobile", "integrated", "discrete"}, "llama-3.2-1b": {"discrete"}, "qwen3-4b": set(),
}  # fmt: skip
"""… but in these classes, where the matmul behind attention does what that does."""
WRITTEN_REACHED = 0.0152


def missed(shape: str, made_for: DeviceClass, held_to: DeviceClass, kind: Kind) -> dict[str, list[float]]:
    """Figures out of bounds, and what they are."""
    jobs = [each for each in compiled(shape, made_for).measured if kind_of(each.job) == kind]
    assert jobs or kind == "gathering", f"{shape} has no {kind}"
    found: dict[str, list[float]] = {}
    for each in jobs:
        for name in wanted(each.job, held_to, each.matrix).missed(each.figures):
            found.setdefault(name, []).append(getattr(each.figures, name))
    return found


@pytest.mark.parametrize("kind", ["matvec", "gathering", "matmul", "decode", "prefill", "other"])
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
    """A check of the check."""
    assert figures <= missed(shape, SOFTWARE, DISCRETE, kind).keys()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_token_has_few_launches_and_writes_little(name: str, shape: str) -> None:
    found = compiled(shape, CLASSES[name])
    reached = LAUNCHES_REACHED[shape] - (name in PUT_TOGETHER[shape])
    assert found.launches_a_layer <= max(LAUNCHES_A_LAYER, reached)
    assert found.written_share <= (WRITTEN_REACHED if shape == "smollm2-135m" else WRITTEN)


def test_a_program_has_few_pipelines() -> None:
    assert pipelines("llama-3.2-1b", DISCRETE) <= PIPELINES


@pytest.mark.parametrize("context", [1024, 8192])
@pytest.mark.parametrize("name", ["mobile", "integrated", "discrete"])
def test_attention_of_64_rows_fills_the_device_and_reads_a_key_once_a_tile(name: str, context: int) -> None:
    """Positions are shared out where tiles are few: of the 1B two or four, of 8 kv heads each."""
    device = CLASSES[name]
    job = Attend(64, 32, 8, 64, 16, 16, 512, "float16", "float16", scale=0.125)
    found = figures_of(variant(device, "f16", False).kernels.stages(job).stages[0].func, context)
    assert wanted(job, device).missed(found).keys() <= {"registers"}
    assert found.bytes_in_flight >= device.launched * VECTOR * found.loads_ahead
