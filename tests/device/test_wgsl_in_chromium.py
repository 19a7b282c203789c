"""Every kind of kernel must satisfy Chromium's compiler, stricter than naga: uniformity, reserved words."""

from __future__ import annotations

import http.server
import itertools
import threading
from dataclasses import replace

import pytest
import tvm

from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES, SOFTWARE
from nearfar.targets.jobs import Attend, Embed, Greedy, Job, Linear, Logprobs, RopeAppend, Sample
from nearfar.targets.kernels import Staged
from nearfar.targets.webgpu import shaders
from tests.support import gpu_jobs, int8_jobs
from tests.support.browser import browser

COMPILE = """async (sources) => {
  const adapter = await navigator.gpu.requestAdapter(); if (!adapter) return "no adapter"; const device =
  await adapter.requestDevice(); const complaints = {}; for (const [name, [code, entryPoint]] of
  Object.entries(sources)) { const module = device.createShaderModule({ code }); const messages = (await
  module.getCompilationInfo()).messages.map((m) => `${m.type} line ${m.lineNum}: ${m.message}`); await
  device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint } }) .catch((error) =>
  messages.push(String(error))); if (messages.length) complaints[name] = messages; } return complaints;
}"""


class Blank(http.server.BaseHTTPRequestHandler):
    """A page from a trustworthy origin: elsewhere navigator.gpu does not exist."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, *args):
        pass


def jobs() -> dict[str, Job]:
    out: dict[str, Job] = {}
    for m in (1, 64):
        out |= {f"{name}_{m}": make(m) for name, make in gpu_jobs.linears("float32").items()}
    for m, name in itertools.product((1, 16), ("plain", "all")):
        out[f"attend_{name}_{m}"] = gpu_jobs.paged(Attend, (m, 9, 3, 24), "float32", **gpu_jobs.ATTENDS[name])
    for name in ("plain", "norm_after", "norm_all", "norms", "q_norm_after"):
        out[f"rope_{name}"] = gpu_jobs.paged(RopeAppend, (4, 9, 3, 64), "float32", **gpu_jobs.ROPES[name])
    out |= {f"norm_{name}": norm for name, norm in gpu_jobs.NORMS.items()}
    for name in ("q2g16", "q3g16", "q6g32"):
        out[f"embed_{name}"] = Embed(4, gpu_jobs.SCHEMES[name], 2.0)
        out[f"planes_{name}"] = Linear(16, gpu_jobs.SCHEMES[name], "float32", "float32")
    for rows in (1, 16):
        out[f"greedy_{rows}"] = Greedy(rows, 5000)
        out[f"sample_{rows}"] = Sample(rows, 5000, 16)
        out[f"logprobs_{rows}"] = Logprobs(rows, 5000)
    return out


def linears_by_class() -> dict[str, Staged]:
    """Matmuls shaped for classes of GPUs, in float32: the browser that tests them has no float16."""
    return {
        f"{device}_{name}": variant(CLASSES[device], "f32", False).kernels.stages(
            replace(job, x_dtype="float32", out_dtype="float32")
        )
        for device in gpu_jobs.GPU_CLASSES
        for name, (_, job) in gpu_jobs.class_linears(device).items()
    }


def linears_of_bytes() -> dict[str, Staged]:
    """Matmuls of rows that are rounded to bytes; classes take turns."""
    return {
        name: variant(CLASSES[device], "f32", False, "int8").kernels.stages(job)
        for device, (name, job) in zip(
            itertools.cycle(gpu_jobs.GPU_CLASSES), int8_jobs.jobs("float32").items(), strict=False
        )
    }


def attention_by_class() -> dict[str, Staged]:
    made = {}
    for name, m, flags in itertools.product(("mobile", "discrete"), (1, 64), ("plain", "all")):
        for shape in ((9, 3, 24), (8, 1, 64)):
            job = gpu_jobs.paged(Attend, (m, *shape), "float32", **gpu_jobs.ATTENDS[flags])
            kernels = variant(CLASSES[name], "f32", False).kernels
            made[f"attend_{name}_{flags}_{m}_{shape[-1]}"] = kernels.stages(job)
    return made


def pieces_by_class() -> dict[str, Staged]:
    made = {
        device: variant(CLASSES[device], "f32", False, binding=gpu_jobs.PIECE).kernels
        for device in ("software", "discrete")
    }
    return {
        f"{device}_pieces_{name}": made[device].stages(job)
        for device in made
        for name, job in gpu_jobs.in_pieces("float32").items()
    }


def test_chromium_compiles_every_kernel():
    software = variant(SOFTWARE, "f32", False).kernels
    made = {name: software.stages(job) for name, job in jobs().items()}
    made |= linears_by_class() | attention_by_class() | pieces_by_class()
    assert complaints(made) == {}


def test_chromium_compiles_products_of_bytes():
    assert complaints(linears_of_bytes()) == {}


def complaints(made: dict[str, Staged]) -> dict[str, list[str]]:
    """What the browser says of the kernels, by their names."""
    module = tvm.IRModule(
        {f"{name}_s{i}": stage.func for name, staged in made.items() for i, stage in enumerate(staged.stages)}
    )
    sources = {name: [shader.source, shader.entry] for name, shader in shaders(module, "f32").items()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser() as chromium:
            page = chromium.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            found = page.evaluate(COMPILE, sources)
    finally:
        server.shutdown()
    if found == "no adapter":
        pytest.skip("Chromium offers no WebGPU adapter")
    return dict(found)
