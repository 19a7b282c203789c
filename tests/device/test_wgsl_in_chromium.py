"""Every kind of kernel must satisfy Chromium's compiler (Tint), which is stricter than naga: uniformity, reserved words."""

from __future__ import annotations

import http.server
import threading

import pytest
import tvm

from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.kernels import Staged
from nearfar.targets.quantized import Matrix
from nearfar.targets.webgpu import KERNELS, shaders
from tests.support.browser import browser

COMPILE = """async (sources) => {
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) return "no adapter";
  const device = await adapter.requestDevice();
  const complaints = {};
  for (const [name, [code, entryPoint]] of Object.entries(sources)) {
    const module = device.createShaderModule({ code });
    const messages = (await module.getCompilationInfo()).messages.map((m) => `${m.type} line ${m.lineNum}: ${m.message}`);
    await device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint } })
      .catch((error) => messages.push(String(error)));
    if (messages.length) complaints[name] = messages;
  }
  return complaints;
}"""


class Blank(http.server.BaseHTTPRequestHandler):
    """A page from a trustworthy origin: elsewhere navigator.gpu does not exist."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, *args):
        pass


def jobs() -> dict[str, Staged]:
    q4, dense, half = Matrix(200, 576, 4, 64), Matrix(86, 172, 32), Matrix(64, 171, 16)
    out: dict[str, Staged] = {}
    for m in (1, 4, 64):
        out[f"norm_gated_{m}"] = KERNELS.linear(Linear(m, q4, "float32", "float32", norm=1e-5, gated=True, bias=True))
        out[f"residual_{m}"] = KERNELS.linear(Linear(m, dense, "float32", "float32", residual=True))
        out[f"rows_{m}"] = KERNELS.linear(Linear(min(m, 16), half, "float32", "float32", rows=True, x_rows=m))
        job = Attention(m, 9, 3, 64, 16, 4, 20, "float32", "float32", 0.125)
        out[f"attention_{m}"] = KERNELS.attention(job)
        out[f"rope_{m}"] = KERNELS.rope_append(job, None)
        out[f"rope_norm_{m}"] = KERNELS.rope_append(job, 1e-6)
    out["long"] = KERNELS.linear(Linear(1, Matrix(40, 8192, 8, 32), "float32", "float32", norm=1e-5))
    for rows in (1, 16):
        out[f"greedy_{rows}"] = KERNELS.greedy(rows, 5000)
        out[f"sample_{rows}"] = KERNELS.sample(rows, 5000, 16)
        out[f"logprobs_{rows}"] = KERNELS.logprobs(rows, 5000)
    out["embed"] = KERNELS.embed(4, q4)
    return out


def test_chromium_compiles_every_kernel():
    module = tvm.IRModule(
        {f"{name}_s{i}": stage.func for name, staged in jobs().items() for i, stage in enumerate(staged.stages)}
    )
    sources = {name: [shader.source, shader.entry] for name, shader in shaders(module, "f32").items()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser() as chromium:
            page = chromium.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            complaints = page.evaluate(COMPILE, sources)
    finally:
        server.shutdown()
    if complaints == "no adapter":
        pytest.skip("Chromium offers no WebGPU adapter")
    assert complaints == {}
