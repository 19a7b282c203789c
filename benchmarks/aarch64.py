"""Instructions and cycles that a line of codes takes on aarch64, by llvm-mca: no such processor is needed.

A line is 64 bytes of 4-bit codes, 128 weights, times one row of x. For each vector unit the innermost loop of
our matmul is found in the disassembly of its object, and given to llvm-mca for each processor that it knows.
docs/kernel-figures.md has llama.cpp's beside them, counted from its source.

Ours multiplies codes by 16 bits of x, as two bytes on units with products of bytes; llama.cpp's by 8 bits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm

from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.codegen import compile_objects
from nearfar.targets.cpu.platforms import PLATFORMS
from nearfar.targets.cpu.units import UNITS

PLATFORM = PLATFORMS["aarch64-linux"]
JOB = Linear(m=1, matrix=Matrix(2048, 2048, 4, 64), x_dtype="float32", out_dtype="float32")
PRODUCTS = {"smlal": 4, "smlal2": 4, "sdot": 16, "usmmla": 32, "smmla": 32}
"""Products that an instruction makes."""
PROCESSORS = ("neoverse-n1", "neoverse-v1", "apple-m1")
ATTRIBUTES = "--mattr=+dotprod,+i8mm,+fullfp16,+bf16"


@dataclass(frozen=True)
class Loop:
    """An innermost loop: its instructions, and how many lines of codes one turn takes."""

    name: str
    code: tuple[str, ...]
    lines: float


def main() -> None:
    """Print a table."""
    print(f"| kernel | instructions a line | {' | '.join(f'cycles, {name}' for name in PROCESSORS)} |")
    print("|---|---|" + "---|" * len(PROCESSORS))
    with tempfile.TemporaryDirectory() as folder:
        for loop in loops(Path(folder)):
            cycles = [f"{cycles_of(loop.code, name) / loop.lines:.1f}" for name in PROCESSORS]
            print(f"| {loop.name} | {len(loop.code) / loop.lines:.1f} | {' | '.join(cycles)} |")


def loops(folder: Path) -> Iterator[Loop]:
    """Our loops, by unit."""
    for unit in (each for each in UNITS.values() if each.architecture == PLATFORM.architecture):
        (stage,) = CpuKernels(unit).stages(JOB).stages
        module = tvm.IRModule({"linear": stage.func.with_attr("global_symbol", "linear")})
        objects = compile_objects(module, unit, PLATFORM.triple, folder).files
        # products for each weight: with inputs of 16 bits, or with two bytes
        bits = 1 if unit.dot == "smlal" else 2
        yield innermost(unit.name, objects, bits)


def innermost(name: str, objects: Sequence[Path], products: int) -> Loop:
    """The loop that has most of the products: of the instructions between a branch back and its aim."""
    best: tuple[str, ...] = ()
    for file in objects:
        command = ["llvm-objdump", "-d", "--no-show-raw-insn", ATTRIBUTES, str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for block in re.split(r"\n(?=[0-9a-f]{16} <)", said):
            best = max(best, *_loops(block), key=_products)
    made = _products(best)
    return Loop(name, best, made / (128 * products))


def _loops(block: str) -> Iterator[tuple[str, ...]]:
    """Straight runs of code that end in a branch back to their beginning."""
    yield ()
    code = [(int(at, 16), text.strip()) for at, text in re.findall(r"^ *([0-9a-f]+): *\t?(.*)$", block, re.M)]
    index = {at: i for i, (at, _) in enumerate(code)}
    for i, (at, text) in enumerate(code):
        aim = re.match(r"(?:b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+,\s*#\d+,)\s*(?:#)?0x([0-9a-f]+)", text)
        if aim and int(aim[1], 16) <= at and int(aim[1], 16) in index:
            run = [text for _, text in code[index[int(aim[1], 16)] : i]]
            if not any(re.match(r"(b|cbn?z|tbn?z)\b", each) for each in run):
                yield (*run, text)


def _products(code: Sequence[str]) -> int:
    return sum(PRODUCTS.get(each.split()[0].split(".")[0], 0) for each in code)


def cycles_of(code: Sequence[str], processor: str) -> float:
    """Cycles of one turn in the steady state, as llvm-mca models it; the branch is left out."""
    lines = [re.sub(r"\s*<.*>", "", text) for text in code[:-1]]
    command = [
        "llvm-mca",
        "-mtriple=aarch64",
        f"-mcpu={processor}",
        ATTRIBUTES.replace("--", "-"),
        "-iterations=200",
    ]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]) / 200


if __name__ == "__main__":
    main()
