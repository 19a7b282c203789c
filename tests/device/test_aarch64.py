"""Programs for aarch64 Linux, run under qemu by a C program: texts and sums equal those of x86."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from nearfar.build.pipeline import BuildOptions, build  # noqa: E402
from nearfar.edge_runtime import Engine  # noqa: E402
from nearfar.edge_runtime.executors.cpu.library import DlTensor, Library, aligned  # noqa: E402
from nearfar.errors import DeviceError  # noqa: E402
from nearfar.kernels.buckets import Buckets  # noqa: E402
from nearfar.kernels.jobs import Linear  # noqa: E402
from nearfar.kernels.quantized import Matrix  # noqa: E402
from nearfar.targets.cpu import CpuKernels, packing  # noqa: E402
from nearfar.targets.cpu.codegen import compile_library  # noqa: E402
from nearfar.targets.cpu.platforms import host  # noqa: E402
from nearfar.targets.cpu.units import BASELINE, UNITS  # noqa: E402
from tests.shared_data import shared_data  # noqa: E402
from tests.support.cpu_jobs import OBJECTS  # noqa: E402
from tests.support.foreign import PLATFORM, Foreign, Memory, open_foreign, require_emulator  # noqa: E402
from tests.support.job_reference import random_inputs, random_matrix  # noqa: E402
from tests.support.scales import STORED_AS  # noqa: E402
from tests.support.turns import paired  # noqa: E402

pytestmark = pytest.mark.skipif(
    host().architecture != "x86_64", reason="what runs under an emulator is compared with x86"
)
CPUS = {"neon": "cortex-a53", "dotprod": "neoverse-n1", "i8mm": "max"}
"""For each unit, qemu's name of a processor that has this unit and none of the following ones."""

BUILT = tuple(unit for _, unit in paired(("q4",), tuple(CPUS)))
"""The unit that a whole q4 artifact and the kernels are built for in this run: the next run takes another."""
PROMPT = "Once upon a time there was a little girl who lived in a house by the sea, and"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Programs for this machine and for aarch64 over one set of weights: floats, and q4."""
    require_emulator()
    root, made = tmp_path_factory.mktemp("aarch64"), {}
    for quant, model, units in (("none", "stories260K", ("baseline",)), ("q4", "classics-1M", BUILT)):
        options = BuildOptions(
            checkpoint=str(shared_data("models", model)),
            out=root / quant,
            targets=("cpu",),
            quant=quant,
            cpu=("aarch64-linux",) if quant == "q4" else ("host", "aarch64-linux"),
            cpu_features=units,
            buckets=Buckets(step=(1, 16), rows=(1,)),
        )
        (made[quant],) = build(options)
    return made


def text(engine: Engine, **options: object) -> str:
    """An answer to a prompt whose computation takes several buckets."""
    answer = engine.completions.create(PROMPT, max_tokens=32, **options)
    return answer.choices[0].text


def test_an_artifact_has_a_program_for_each_platform_over_the_same_weights(
    artifacts: dict[str, Path],
) -> None:
    with Engine.load(artifacts["none"], threads=1, kv_memory="8MB") as engine:
        programs = engine.asynchronous.core.manifest.programs
        assert engine.asynchronous.core.executor.program_name == f"{host().name}-{BASELINE['x86_64'].name}"
    needs = [(each.requires.arch, each.requires.system, each.library) for each in programs]
    assert needs == [
        ("x86_64", host().system, f"kernels/{programs[0].name}/{host().library}"),
        ("aarch64", "linux", "kernels/aarch64-linux-neon/model.so"),
    ]
    with pytest.raises(DeviceError, match="aarch64-linux-neon is for aarch64-linux"):
        Engine.load(artifacts["none"], program="aarch64-linux-neon", kv_memory="8MB")


def test_an_artifact_for_other_machines_is_refused_and_says_what_to_do(artifacts: dict[str, Path]) -> None:
    with pytest.raises(
        DeviceError,
        match=rf"-{BUILT[0]} is for aarch64-linux.* The device is {host().name} and has .*: build it, on any "
        f"machine, with nearfar build --target cpu --cpu {host().name}",
    ):
        Engine.load(artifacts["q4"], kv_memory="8MB")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_text_is_that_of_x86(
    artifacts: dict[str, Path], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(artifacts["none"], threads=threads, kv_memory="8MB") as engine:
        greedy, drawn = text(engine, temperature=0), text(engine, temperature=1.0, seed=7)
    with open_foreign(
        artifacts["none"], "aarch64-linux-neon", threads, tmp_path, CPUS["neon"], monkeypatch
    ) as engine:
        assert text(engine, temperature=0) == greedy
        assert text(engine, temperature=1.0, seed=7) == drawn


JOBS = (
    Linear(m=1, matrix=Matrix(96, 256, 4, 64), x_dtype="float32", out_dtype="float32", norm=1e-5),
    Linear(m=8, matrix=Matrix(96, 256, 4, 32), x_dtype="float32", out_dtype="float32"),
    Linear(m=5, matrix=Matrix(48, 256, 8, 64), x_dtype="float32", out_dtype="float32"),
    Linear(m=2, matrix=Matrix(48, 256, 3, 64), x_dtype="float32", out_dtype="float32"),
    *(
        Linear(m, Matrix(24, 256, bits, group, scales=how), "float32", "float32")
        for bits, group, how in STORED_AS[::2]
        for m in (1, 8)
    ),
)


class Compiled:
    """Jobs as libraries, for x86 and for each unit of aarch64, and their inputs: random bits, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._libraries: dict[str, Path] = {}
        self.arrays: list[dict[str, np.ndarray]] = []
        rng = np.random.default_rng(12)
        for job in JOBS:
            tensor, _ = random_matrix(rng, job.matrix)
            packed = packing.pack(job.matrix, tensor)
            self.arrays.append(random_inputs(job, rng) | {f"w{i}": part for i, part in enumerate(packed)})

    def library(self, unit: str) -> Path:
        """The library of the jobs for a unit of this machine or of aarch64."""
        if unit not in self._libraries:
            kernels = CpuKernels(UNITS[unit])
            functions = {}
            for i, job in enumerate(JOBS):
                for name, stage in kernels.stages(job).named(f"job{i}"):
                    functions[name] = stage.func.with_attr("global_symbol", name)
            path = self._root / f"{unit}.so"
            where = PLATFORM if UNITS[unit].architecture == PLATFORM.architecture else host()
            compile_library(tvm.IRModule(functions), path, UNITS[unit], where, keep=OBJECTS)
            self._libraries[unit] = path
        return self._libraries[unit]

    def run(
        self, unit: str, library: Library | Foreign, hold: Callable[[np.ndarray], np.ndarray]
    ) -> list[bytes]:
        """The results of the jobs on two threads. `hold`: copies an array to where the library reads it."""
        pool, made = library.pool(2), []
        for i, job in enumerate(JOBS):
            staged = CpuKernels(UNITS[unit]).stages(job)
            held = {name: hold(array) for name, array in self.arrays[i].items()}
            held["out"] = hold(np.zeros(job.out[0], job.out[1]))
            held |= {f"scratch:{j}": hold(np.zeros(*scratch)) for j, scratch in enumerate(staged.scratch)}
            stages = staged.named(f"job{i}")
            pool.replay(
                library.bind([(name, [DlTensor(held[arg]) for arg in each.args]) for name, each in stages])
            )
            made.append(held["out"].tobytes())
        pool.close()
        return made


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("units"))


def held_here(array: np.ndarray) -> np.ndarray:
    held = aligned(array.shape, array.dtype)
    held[...] = array
    return held


@pytest.mark.parametrize("unit", BUILT)
def test_quantized_matrices_give_the_bits_that_x86_gives(
    compiled: Compiled, unit: str, tmp_path: Path
) -> None:
    """Integer sums are exact on all units, and floats are added in the same order."""
    require_emulator()
    expected = compiled.run("avx2", Library(compiled.library("avx2")), held_here)
    memory = Memory(tmp_path / "memory", 1 << 24)
    assert compiled.run(unit, Foreign(compiled.library(unit), memory, CPUS[unit]), memory.array) == expected
    assert len(set(expected)) == len(JOBS)


@pytest.mark.parametrize("unit", BUILT)
def test_products_are_summed_by_the_instruction_of_the_unit(compiled: Compiled, unit: str) -> None:
    tool = shutil.which("llvm-objdump") or pytest.skip("there is no llvm-objdump (Debian: llvm)")
    command = [tool, "-d", "--no-show-raw-insn", "--mattr=+dotprod,+i8mm", str(compiled.library(unit))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = Counter(line.split()[1] for line in done.stdout.splitlines() if len(line.split()) > 1)
    assert found[UNITS[unit].dot] + found[f"{UNITS[unit].dot}2"] > 16
