"""`nearfar serve` over HTTP beside its HTTP peer, `transformers serve` with continuous batching, on a CPU.

    python benchmarks/server.py [--model DIR] [--concurrency 1,4,16,32,64] [--requests N] [--scale 0.15]
    [--threads 2]
        [--skip transformers] [--json FILE]

Each server is started in its own process over the same checkpoint, in float32 and with as many threads, and
gets the same requests of `nearfar bench serve`: chat completions, closed loops, lengths of real traffic
(shared/data/traffic/azure-llm-2023) times `--scale`. The client runs beside the server and takes some of the
machine, from both alike. transformers' server cannot be asked to go on after the end token: rates are in
tokens that were made. Engines without HTTP are compared in server_engine.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console

from nearfar.fallback_server.bench.bench import BenchReport, run
from nearfar.fallback_server.bench.options import BenchOptions, Workload
from nearfar.fallback_server.bench.table import LevelBars, view

DATA = Path(os.environ.get("NEARFAR_SHARED", Path(__file__).parents[2] / "shared" / "data"))
TRACE = DATA / "traffic" / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"
RUNNING = 64
START_SECONDS = 180.0


def commands(model: Path, threads: int, port: int) -> dict[str, list[str]]:
    """The command that starts each server, by name."""
    ours = ["-m", "nearfar", "serve", model, "--engine", "torch", "--dtype", "float32", "--threads", threads,
            "--max-running", RUNNING, "--port", port, "--log-level", "warning"]  # fmt: skip
    peer = [
        "-m",
        "transformers.cli.transformers",
        "serve",
        model,
        "--continuous-batching",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--cb-block-size",
        32,
        "--cb-num-blocks",
        RUNNING * 32,
        "--cb-max-batch-tokens",
        256,
        "--port",
        port,
        "--host",
        "127.0.0.1",
    ]
    return {
        name: [sys.executable, *map(str, made)] for name, made in (("nearfar", ours), ("transformers", peer))
    }


@contextlib.contextmanager
def server(command: list[str], port: int, threads: int) -> Iterator[str]:
    """Start a server and wait until it answers; gives its address."""
    # transformers' server cannot list models without the hub's cache folder, even an empty one.
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(tempfile.gettempdir()) / "empty-hub-cache"))
    cache.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_CACHE": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} does not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Measure one server after the other and print ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DATA / "models" / "classics-7M")
    parser.add_argument("--concurrency", default="1,4,16,32,64")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--scale", type=float, default=0.15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    console, reports = Console(), dict[str, BenchReport]()
    for name in ("nearfar", "transformers"):
        if name in given.skip:
            continue
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = BenchOptions(
            concurrency=tuple(map(int, given.concurrency.split(","))),
            requests=given.requests,
            api="chat",
            ignore_eos=False,
            model=None if name == "nearfar" else str(given.model),
            # transformers tells no context length: both servers have the same bound, so that both get the
            # same requests.
            work=Workload(trace=TRACE, scale=given.scale, max_prompt=600, max_output=200),
        )
        bars = LevelBars(console)
        with (
            server(commands(given.model, given.threads, port)[name], port, given.threads) as url,
            bars.progress,
        ):
            reports[name] = run(url, options, bars)
        console.print(f"\n[bold]{name}[/]", view(reports[name]))
    for ours, theirs in (
        zip(*(report.levels for report in reports.values()), strict=False) if len(reports) == 2 else ()
    ):
        rate = ours.output_tokens_per_second / max(theirs.output_tokens_per_second, 1e-9)
        console.print(
            f"{ours.name}: {rate:.2f}x transformers' tokens/s; TTFT p50 {ours.ttft.p50 * 1e3:.0f} against "
            f"{theirs.ttft.p50 * 1e3:.0f} ms, p99 {ours.ttft.p99 * 1e3:.0f} against "
            f"{theirs.ttft.p99 * 1e3:.0f} ms"
        )
    if given.json:
        given.json.write_text(
            json.dumps({name: report.record() for name, report in reports.items()}, indent=1)
        )


if __name__ == "__main__":
    main()
