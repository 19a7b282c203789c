"""Building the 1B shape to 4 bits: seconds and peak memory, beside mlx_lm.convert and llama.cpp.

Each tool runs as its own process on the same bfloat16 checkpoint; peak memory is the process's largest
resident set. llama.cpp needs two steps, as its users take them: safetensors to a GGUF file, then the
quantizer. Its converter script is in no Python package, so the first step here writes the same float16
tensors with llama.cpp's `gguf` package.

    python benchmarks/build.py [--shape llama-3.2-1b] [--repeat 1] [--only mlx] [--json FILE]

mlx_lm.convert is beside `nearfar (mlx)`, which writes the same layout at the same size, and hashes it and its
source.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Measure:
    """One tool's build: medians over the runs."""

    tool: str
    seconds: float
    peak_gb: float
    output_gb: float


def run(command: list[str]) -> tuple[float, float]:
    """Seconds and peak resident gigabytes of one process."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return time.monotonic() - start, usage.ru_maxrss * 1024 / 1e9


def size_gb(path: Path) -> float:
    """Bytes below a path, in gigabytes."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e9


def tools(checkpoint: Path, work: Path) -> dict[str, tuple[list[list[str]], Path]]:
    """The commands of each installed tool, in order, and the path that they write."""
    python, source = sys.executable, str(checkpoint)
    nearfar = [python, "-m", "nearfar", "build", source, "--quant", "q4", "--group-size", "64"]
    out: dict[str, tuple[list[list[str]], Path]] = {
        "nearfar (mlx)": ([[*nearfar, "--target", "mlx", "-o", str(work / "ours")]], work / "ours"),
        "nearfar (cpu)": ([[*nearfar, "--target", "cpu", "-o", str(work / "cpu")]], work / "cpu"),
        "nearfar (cpu and webgpu)": (
            [[*nearfar, "--target", "cpu,webgpu", "-o", str(work / "both")]],
            work / "both",
        ),
    }
    if importlib.util.find_spec("mlx_lm"):
        convert = [python, "-m", "mlx_lm", "convert", "--hf-path", source, "--mlx-path", str(work / "mlx")]
        out["mlx_lm.convert"] = ([[*convert, "-q", "--q-bits", "4", "--q-group-size", "64"]], work / "mlx")
    if importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"):
        steps = [python, str(HERE / "peers" / "llama_convert.py")]
        full, small = str(work / "f16.gguf"), str(work / "q4_0.gguf")
        out["llama.cpp"] = (
            [[*steps, "convert", source, full], [*steps, "quantize", full, small]],
            work / "q4_0.gguf",
        )
    return out


def measure(tool: str, commands: list[list[str]], output: Path, repeat: int) -> Measure:
    """Medians over `repeat` runs; the steps' seconds add up, their peak is the largest."""
    seconds, peaks = [], []
    for _ in range(repeat):
        shutil.rmtree(output, ignore_errors=True)
        steps = [run(command) for command in commands]
        seconds.append(sum(step[0] for step in steps))
        peaks.append(max(step[1] for step in steps))
    return Measure(tool, statistics.median(seconds), statistics.median(peaks), size_gb(output))


def main() -> None:
    """Run what is installed, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b", help="a shape that `nearfar synth` knows")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", help="only the tools whose name holds one of these words, e.g. mlx", nargs="+"
    )
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="nearfar-bench-") as folder:
        work = Path(folder)
        checkpoint = work / "checkpoint"
        run([sys.executable, "-m", "nearfar", "synth", args.shape, "-o", str(checkpoint)])
        found = {
            name: tool
            for name, tool in tools(checkpoint, work).items()
            if not args.only or any(word in name for word in args.only)
        }
        rows = [measure(tool, commands, output, args.repeat) for tool, (commands, output) in found.items()]
    table = Table("tool", "seconds", "peak GB", "output GB", title=f"{args.shape} to 4 bits")
    for row in rows:
        table.add_row(row.tool, f"{row.seconds:.1f}", f"{row.peak_gb:.2f}", f"{row.output_gb:.2f}")
    console.print(table)
    for name, module in (("mlx_lm.convert", "mlx_lm"), ("llama.cpp", "llama_cpp")):
        if name not in found and not args.only:
            console.print(
                f"{name} was not measured: {module} is not installed (pip install mlx-lm "
                "llama-cpp-python gguf)"
            )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
