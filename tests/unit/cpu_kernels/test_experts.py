"""The CPU target's routing to experts, and their gated MLPs, against NumPy."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("tvm")

from nearfar.kernels.jobs import Experts, Route
from tests.support.cpu_jobs import CpuJobs, inputs_of
from tests.support.gpu_jobs import experts
from tests.support.job_reference import PLAIN
from tests.support.turns import share

ROUTES = [
    Route(1, 4, 2), Route(4, 64, 8, normalize=0.0), Route(16, 37, 5, "sigmoid", 1e-6, bias=True, scale=2.5),
    Route(64, 128, 1, factors=True), Route(4, 6, 6, bias=True),
    Route(1, 16, 4, normalize=0.0, scale=0.5), Route(4, 19, 3, normalize=0.0, scale=0.5, factors=True),
]  # fmt: skip


ALIKE = [experts(m, 8, 2, (128, 64, 128), 4, 64, activation="gelu_tanh") for m in (1, 4, 64)]
EXPERTS = [*ALIKE, *share([
    *(experts(m, 6, 2, (48, 20, 44), bits) for bits in (16, 32) for m in (1, 4, 64)),
    *(experts(m, 5, 3, (64, 96, 40), 4, 32, gate_up_bias=True, down_bias=True, clamp=(1.702, 1.0))
      for m in (1, 16)),
    experts(4, 3, 3, (32, 32, 19), 5, 32, down_bias=True), experts(16, 2, 1, (64, 64, 32), 8, 32),
    experts(1, 40, 8, (32, 33, 16), 32, gate_up_bias=True, activation="relu2"),
    experts(4, 5, 2, (64, 96, 40), 4, 32, gate_up_bias=True, activation="relu2", gated=False),
], 2)]  # fmt: skip
LARGE = experts(1, 12, 3, (512, 640, 512), 4, 64)
"""Experts of many pages of memory each."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> CpuJobs:
    return CpuJobs(tmp_path_factory.mktemp("experts"), [*ROUTES, *EXPERTS, LARGE])


@pytest.mark.parametrize("job", ROUTES, ids=lambda job: job.label)
def test_route(jobs: CpuJobs, job: Route) -> None:
    inputs = inputs_of(job, np.random.default_rng(job.experts))
    inputs["positions"][: job.m] = 5
    if job.m > 1:
        inputs["positions"][1] = -1
    jobs.check(job, inputs, 1e-6)


def test_of_equal_experts_the_first_are_chosen(jobs: CpuJobs) -> None:
    job = ROUTES[1]
    inputs = inputs_of(job, np.random.default_rng(0)) | {"positions": np.zeros(256, np.int32)}
    inputs["x"][...] = 1.5
    inputs["x"][:, 40] = 2
    assert jobs.compute(job, inputs)["out"][:, :8].tolist() == [[40, 0, 1, 2, 3, 4, 5, 6]] * job.m


@pytest.mark.parametrize("job", EXPERTS, ids=lambda job: job.label)
def test_experts(jobs: CpuJobs, job: Experts) -> None:
    """The rows have random experts, then all the same experts, then no experts."""
    inputs = inputs_of(job, np.random.default_rng(job.m))
    tolerance = 6e-4 if job.down.quantized or job.gate_up.quantized else 5e-6  # two products, see test_linear
    jobs.check(job, inputs, tolerance)
    inputs["route"] = np.tile(inputs["route"][:1], (job.m, 1))
    jobs.check(job, inputs, tolerance)
    inputs["route"][:, : job.top] = -1
    jobs.check(job, inputs, tolerance)


def test_a_row_is_the_same_alone_and_among_others(jobs: CpuJobs) -> None:
    """Results are equal to the last bit: a text does not depend on rows of other sequences."""
    one, _, many = ALIKE
    inputs = inputs_of(many, np.random.default_rng(3))
    whole = jobs.compute(many, inputs)["out"]
    for row in (0, 17, 63):
        alone = inputs | {name: inputs[name][row : row + 1] for name in ("x", "route")}
        assert (jobs.compute(one, alone)["out"][0] == whole[row]).all()


def forget_reads() -> None:
    """Make the kernel forget which pages of this process were read or written."""
    try:
        Path("/proc/self/clear_refs").write_text("1", encoding="ascii")
    except OSError as error:
        pytest.skip(f"this system does not tell which pages a process reads ({error})")


def pages_read(names: Sequence[str]) -> dict[str, int]:
    """Bytes of the pages of mapped files that this process has read since, by the file's name."""
    found = dict.fromkeys(names, 0)
    current = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            current = next((name for name in names if line.endswith(f"/{name}")), None)
        elif current is not None and line.startswith("Referenced:"):
            found[current] += 1024 * int(line.split()[1])
    return found


def test_decode_reads_the_chosen_experts_alone(jobs: CpuJobs, tmp_path: Path) -> None:
    """Within 10 % of the bytes of the chosen matrices; the others stay in the file."""
    forget_reads()
    inputs = inputs_of(LARGE, np.random.default_rng(5))
    arrays = {name: array for name, array in inputs.items() if name not in PLAIN}
    arrays["out"] = np.zeros(LARGE.out[0], np.float32)
    placed: list[str] = []

    def place(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        placed.append(f"array{len(placed)}")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        file = os.open(tmp_path / placed[-1], os.O_RDWR | os.O_CREAT)
        os.truncate(file, size)
        area = mmap.mmap(file, size)
        os.close(file)
        return np.frombuffer(area, dtype).reshape(shape)

    held = jobs.run(LARGE, arrays, place, forget_reads)
    names = [name for name, file in zip(arrays, placed, strict=True) if re.fullmatch(r"w\d+", name)]
    read = pages_read([file for name, file in zip(arrays, placed, strict=True) if name in names])
    assert held["out"].any()
    wanted = LARGE.top * (LARGE.gate_up.each.bytes + LARGE.down.each.bytes)
    assert wanted <= sum(read.values()) <= 1.1 * wanted
    assert sum(arrays[name].nbytes for name in names) > 3.5 * wanted
