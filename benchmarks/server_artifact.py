"""`nearfar serve` of a CPU artifact beside llama.cpp's `llama-server`: one shape in 4 bits, the same threads.

    python benchmarks/server_artifact.py [--llama-server PATH] [--peer-python PYTHON] [--shape smollm2-135m]
        [--concurrency 1,4,16] [--rounds 3] [--threads 2] [--prompt-tokens 256] [--output-tokens 64]
        [--json FILE]

Each round starts one server, sends it the requests of `nearfar bench serve` (closed loops, all answers of
full length), and then the other. The table gives medians and the median of the rounds' ratios. The client
runs beside the server and takes some of the machine, from both alike. `--peer-python` is an interpreter that
has `gguf`, which writes the peer's model. Where there is no `llama-server`, nearfar is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
from pathlib import Path

from cpu import GGUF_MODEL, in_process, prepare
from rich.console import Console
from rich.table import Table
from server import server

from nearfar.fallback_server.bench.bench import run
from nearfar.fallback_server.bench.options import BenchOptions, Workload
from nearfar.fallback_server.bench.table import LevelBars

CONTEXT = 1024
"""Tokens that a request may have, on both servers."""


def commands(artifact: Path, model: Path, options: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """The command that starts each server, by name."""
    most = max(map(int, options.concurrency.split(",")))
    ours = [sys.executable, "-m", "nearfar", "serve", artifact, "--engine", "artifact", "--device", "cpu",
            "--threads", options.threads, "--port", port, "--log-level", "warning"]  # fmt: skip
    peer = [options.llama_server, "-m", model, "-t", options.threads, "-tb", options.threads, "-fa", "on",
            "-np", most, "-c", most * CONTEXT, "--port", port, "--host", "127.0.0.1", "--no-webui",
            "--log-disable"]  # fmt: skip
    return {"nearfar": list(map(str, ours)), "llama-server": list(map(str, peer))}


def measure(command: list[str], port: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens/s and times to the first token of each level, by its name."""
    wanted = BenchOptions(
        concurrency=tuple(map(int, options.concurrency.split(","))),
        requests=options.requests,
        work=Workload(
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            max_prompt=CONTEXT * 5 // 8,
            max_output=CONTEXT // 4,
        ),
    )
    with server(command, port, options.threads) as url:
        bars = LevelBars(Console(stderr=True))
        with bars.progress:
            report = run(url, wanted, bars)
    return {
        level.name: {
            "tokens/s": level.output_tokens_per_second,
            "TTFT p50, ms": level.ttft.p50 * 1e3,
        }
        for level in report.levels
    }


def report(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> None:
    """Print the table; `rounds` gives figures by server, level and name."""
    table = Table("level", "figure", *rounds[0], *(["nearfar's share"] if len(rounds[0]) == 2 else []))
    for level, figures in rounds[0]["nearfar"].items():
        for figure in figures:
            found = [[server[level][figure] for server in each.values()] for each in rounds]
            medians = [statistics.median(side) for side in zip(*found, strict=True)]
            shares = [pair[0] / pair[1] for pair in found if len(pair) == 2]
            share = [f"{statistics.median(shares):.2f}"] if shares else []
            table.add_row(level, figure, *(f"{each:.1f}" for each in medians), *share)
    Console().print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--shape", default="smollm2-135m", help="a shape of `nearfar synth`, built to q4")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, artifact = prepare(Path(folder), options.shape)
        model = Path(folder) / "model.gguf"
        if options.llama_server:
            in_process(options.peer_python, str(GGUF_MODEL), str(checkpoint), str(model))
        for _ in range(options.rounds):
            found = {}
            for name in ("nearfar", "llama-server") if options.llama_server else ("nearfar",):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                found[name] = measure(commands(artifact, model, options, port)[name], port, options)
            rounds.append(found)
    report(rounds)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    main()
