"""Browser: a shape with random weights (SmolLM2-135M's by default), beside wllama (llama.cpp in WebAssembly)
and Transformers.js (ONNX Runtime in WebAssembly), in one Chromium.

All runtimes answer the same 256-token prompt in fresh tabs, in turn, several times; the table shows medians,
and how many times better the first is. All have the same shape and the same bits a weight: nearfar's own
artifacts, a GGUF file (Q4_0), and what `nearfar build --target onnx` writes for Transformers.js. With
`--same-bytes` the artifacts are built of the GGUF file itself. WebLLM is not among them: it needs a library
that is compiled for the model, and a GPU with f16. A tab with an empty profile loads over the network (its
requests, its bytes, and what the browser's processes have grown by after an answer), a second one in the same
profile from what the first has kept. On a machine without a GPU, nearfar's webgpu runs on Chromium's software
device. `--gguf FILE --tokens 1` compares how a real file loads: nearfar's artifact of it beside wllama with
the file itself, in private windows or, with `--disk`, in ordinary ones.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import BrowserContext, Playwright, sync_playwright

from nearfar.cli.page_server import PageServer, Site, open_server

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).parent / "web"
PACKAGES = ROOT / "web" / "node_modules"
TARGETS = {"wasm": "wasm", "webgpu": "webgpu", "wllama": None, "transformers": "onnx"}
"""The runtimes, with the target that `nearfar build` writes for each. The first two are nearfar's."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SOFTWARE_DEVICE = ["--use-webgpu-adapter=swiftshader"]
MEASURES = (
    "load_ms",
    "ready_ms",
    "requests",
    "megabytes",
    "memory_mb",
    "cpu_s",
    "ttft_ms",
    "decode_tokens_per_s",
    "second_ttft_ms",
    "second_of_first",
    "launches_per_token",
    "warm_load_ms",
    "warm_ready_ms",
    "warm_requests",
    "warm_megabytes",
    "warm_cpu_s",
)
HIGHER_IS_BETTER = {"decode_tokens_per_s"}
TIMEOUT_MS = 600_000


def folder(work: Path, quant: str, target: str) -> Path:
    """The path of a build's OUT folder."""
    return work / f"artifact-{quant}-{target}"


def prepare(arguments: argparse.Namespace) -> None:
    """Write the checkpoint, what each runtime loads, where it is not there yet, and install the peers."""
    work, gguf = arguments.work, arguments.gguf
    checkpoint, model = work / "checkpoint", work / "model.gguf"
    nearfar = [sys.executable, "-m", "nearfar"]
    if gguf and not model.exists():
        model.symlink_to(gguf.resolve())
    if not gguf and not checkpoint.exists():
        subprocess.run([*nearfar, "synth", arguments.shape, "-o", str(checkpoint)], check=True)
    if not model.exists() and (arguments.same_bytes or "wllama" in arguments.runtimes):
        sys.path.insert(0, str(ROOT))
        from benchmarks.peers.gguf_model import write_gguf

        write_gguf(checkpoint, model)
    same = gguf is not None or arguments.same_bytes
    source = [str(model)] if same else [str(checkpoint), "--quant", arguments.quant]
    for target in filter(None, (TARGETS[name] for name in arguments.runtimes)):
        if not (out := folder(work, arguments.quant, target)).exists():
            subprocess.run([*nearfar, "build", *source, "--target", target, "-o", str(out)], check=True)
    if not (HERE / "node_modules").exists():
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=HERE, check=True)


@dataclass
class Traffic:
    """The number of requests to the server, and the bytes of the bodies that it sent."""

    requests: int = 0
    bytes: int = 0


def counting(server: PageServer) -> Traffic:
    """Have the server count from now on."""
    traffic, handler = Traffic(), server.RequestHandlerClass

    class Counting(handler):  # type: ignore[valid-type,misc]
        def send_response(self, code: int, message: str | None = None) -> None:
            traffic.requests += 1
            super().send_response(code, message)

        def send_header(self, keyword: str, value: str) -> None:
            if keyword == "Content-Length" and self.command == "GET":
                traffic.bytes += int(value)
            super().send_header(keyword, value)

    server.RequestHandlerClass = Counting
    return traffic


def browser_processes() -> dict[int, float]:
    """Chromium's processes, each with the CPU seconds that it has taken (Linux)."""
    parents, seconds = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def below(process: int) -> bool:
        above = process
        while above in parents and above != os.getpid():
            above = parents[above]
        return above == os.getpid() != process

    return {process: seconds[process] for process in parents if below(process)}


def browser_memory() -> int:
    """Bytes of memory that Chromium's processes have, what they share counted once (Linux)."""
    total = 0
    for process in browser_processes():
        with suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines()
                         if line.startswith("Pss:"))  # fmt: skip
    return total


@contextmanager
def served(work: Path, quant: str, runtimes: Sequence[str]) -> Iterator[tuple[str, Traffic]]:
    """Serve all files under one origin, isolated so that WebAssembly may use threads; gives its address."""
    with TemporaryDirectory() as temporary:
        site = Path(temporary)
        for name in ("index.html", "bench.js"):
            shutil.copy(HERE / name, site)
        shutil.copytree(ROOT / "web" / "dist", site / "nearfar")
        if "wllama" in runtimes:
            shutil.copytree(HERE / "node_modules" / "@wllama" / "wllama" / "esm", site / "wllama")
            shutil.copy(work / "model.gguf", site)
        if "transformers" in runtimes:
            shutil.copytree(PACKAGES / "@huggingface" / "transformers" / "dist", site / "transformers")
            shutil.copytree(PACKAGES / "onnxruntime-web" / "dist", site / "onnxruntime")
        targets = filter(None, (TARGETS[name] for name in runtimes))
        artifacts = {target: folder(work, quant, target) / target for target in targets}
        with open_server("127.0.0.1", 0, Site(site, artifacts, guarded=False)) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield server.url, counting(server)
            server.shutdown()


@contextmanager
def windows(playwright: Playwright, flags: list[str], disk: bool) -> Iterator[BrowserContext]:
    """A browser with an empty profile: on the disk, as an ordinary window has, or of a private window."""
    launch: dict[str, Any] = {"executable_path": CHROMIUM, "args": flags}
    if not disk:
        browser = playwright.chromium.launch(**launch)
        yield browser.new_context()
        browser.close()
        return
    with TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(profile, **launch)
        yield context
        context.close()


def measure(
    context: BrowserContext, address: str, traffic: Traffic, runtime: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure one run in a tab with an empty profile, and one in a second tab with the same profile."""
    cold = visit(context, address, traffic, runtime, options)
    warm = visit(context, address, traffic, runtime, options)
    return {**cold, **{f"warm_{name}": value for name, value in warm.items()}}


def visit(
    context: BrowserContext, address: str, traffic: Traffic, runtime: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure one run in a new tab."""
    tab = context.new_page()
    tab.set_default_timeout(TIMEOUT_MS)
    tab.goto(address)
    tab.wait_for_function("document.body.dataset.state === 'ready'")
    requests, sent, before = traffic.requests, traffic.bytes, browser_memory()
    cpu = sum(browser_processes().values())
    result: dict[str, Any] = tab.evaluate(
        "([name, options]) => window.bench[name](options)", [runtime, options]
    )
    result["cpu_s"] = sum(browser_processes().values()) - cpu
    result["requests"], result["megabytes"] = traffic.requests - requests, (traffic.bytes - sent) / 1e6
    result["memory_mb"] = (browser_memory() - before) / 1e6
    tab.close()
    return result


def medians(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """The median of each measure over the runs."""
    return {
        name: None if runs[0].get(name) is None else statistics.median(float(run[name]) for run in runs)
        for name in MEASURES
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Medians beside each other, and how many times better the first runtime is than each other."""
    found = {name: medians(runs) for name, runs in results.items()}
    lines = [f"{'':22}" + "".join(f"{name:>20}" for name in found)]
    for measure in MEASURES:
        cells = []
        ours: float | None = None
        for place, values in enumerate(found.values()):
            value = values[measure]
            ours = value if place == 0 else ours
            ratio = ""
            if place and ours and value:
                ratio = f" ({ours / value if measure in HIGHER_IS_BETTER else value / ours:.2f})"
            cells.append(f"{'–' if value is None else f'{value:,.1f}'}{ratio}")
        lines.append(f"{measure:22}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Prepare, run in turn, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument(
        "--shape", default="smollm2-135m", help="a shape of `nearfar synth`; give each its own --work"
    )
    parser.add_argument(
        "--same-bytes", action="store_true",
        help="build nearfar's artifacts of the GGUF file that wllama reads; give these their own --work",
    )  # fmt: skip
    parser.add_argument("--quant", default="q4")
    parser.add_argument(
        "--runtimes", nargs="+", choices=TARGETS, default=["wasm", "wllama", "transformers"],
        help="which, the first being what the others are compared with; wasm and webgpu are nearfar's",
    )  # fmt: skip
    parser.add_argument(
        "--second-turn", action="store_true", help="then continue the conversation (not in transformers)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of all but webgpu")
    parser.add_argument("--gpu", action="store_true", help="use the machine's GPU, not the software device")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "bench-browser", help="for the models made here"
    )
    parser.add_argument(
        "--gguf", type=Path, help="a real model instead of the made one; give it its own --work"
    )
    parser.add_argument("--disk", action="store_true", help="ordinary windows instead of private ones")
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("error: needs Chromium (apt-get install chromium)")
    arguments.work.mkdir(parents=True, exist_ok=True)
    prepare(arguments)
    flags = ["--no-sandbox", "--enable-unsafe-webgpu", *([] if arguments.gpu else SOFTWARE_DEVICE)]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.runtimes}
    site = served(arguments.work, arguments.quant, arguments.runtimes)
    with site as (address, traffic), sync_playwright() as playwright:
        for run in range(arguments.runs):
            for runtime, runs in results.items():
                # The synthetic tokenizer makes one token of each byte. Each run has its own text: none finds
                # it cached.
                text = (f"{run} the quick brown fox " * arguments.prompt_tokens)[: arguments.prompt_tokens]
                options = {
                    "prompt": text, "tokens": arguments.tokens, "threads": arguments.threads,
                    "second": arguments.second_turn, "context": arguments.prompt_tokens + 1024,
                }  # fmt: skip
                paths = {"artifact": f"artifact/{TARGETS[runtime]}/", "model": "model.gguf"}
                page = "nearfar" if runtime in ("wasm", "webgpu") else runtime
                with windows(playwright, flags, arguments.disk) as context:
                    runs.append(measure(context, address, traffic, page, {**options, **paths}))
                print(f"run {run + 1}, {runtime}: {runs[-1]}", file=sys.stderr, flush=True)
    print(json.dumps(results, indent=2) if arguments.json else table(results))


if __name__ == "__main__":
    main()
