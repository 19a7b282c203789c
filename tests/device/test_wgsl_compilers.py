"""Every kind of kernel must pass Chrome's compiler, which is stricter than naga: uniformity, reserved words.

Chromium's own device (SwiftShader) has no float16: kernels of f16 programs go through Dawn, which is the same
compiler, on its null device. That device has exactly the limits that WebGPU guarantees.

Chromium compiles all sources, which takes seconds. Making machine code of all pipelines would take minutes on
its device, and show nothing about other devices. So for kernels that this device never gets (those for
classes of GPUs), it makes only one pipeline of each kind, and a run makes a third of its pipelines. Dawn
makes all pipelines.
"""

from __future__ import annotations

import http.server
import itertools
import json
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tvm

from nearfar.kernels.contract import Precision, Staged
from nearfar.kernels.jobs import Attend, Embed, Greedy, Job, Linear, Logprobs, RopeAppend, Rows, Sample
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES, SOFTWARE
from nearfar.targets.gpu.packing import HELD
from nearfar.targets.webgpu import shaders
from tests.support import gguf_rows, gpu_checks, gpu_jobs, int8_jobs, project_jobs
from tests.support.browser import browser
from tests.support.turns import share

WEB = Path(__file__).resolve().parents[2] / "web"
COMPILE = """async (sources) => {
  const device = await (await navigator.gpu.requestAdapter()).requestDevice();
  const complaints = {};
  await Promise.all(Object.entries(sources).map(async ([name, [code, entryPoint, whole]]) => {
    const module = device.createShaderModule({ code });
    const { messages } = await module.getCompilationInfo();
    const said = messages.map((m) => `${m.type} line ${m.lineNum}: ${m.message}`);
    if (whole) {
      const pipeline = device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint } });
      await pipeline.catch((error) => said.push(String(error)));
    }
    if (said.length) complaints[name] = said;
  }));
  return complaints;
}"""


RUN = """async ([code, entryPoint, grid, inputs, out, bytes]) => {
  const device = await (await navigator.gpu.requestAdapter()).requestDevice();
  const module = device.createShaderModule({ code });
  const compute = { module, entryPoint };
  const pipeline = await device.createComputePipelineAsync({ layout: "auto", compute });
  const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC;
  const buffers = inputs.map((words) => {
    const data = new Uint32Array(words);
    const buffer = device.createBuffer({ size: data.byteLength, usage });
    device.queue.writeBuffer(buffer, 0, data);
    return buffer;
  });
  const uniform = device.createBuffer({ size: 16, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
  device.queue.writeBuffer(uniform, 0, new Uint32Array([grid[0] - 1]));
  const entries = [...buffers, uniform].map((buffer, binding) => ({ binding, resource: { buffer } }));
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  pass.setPipeline(pipeline);
  pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
  pass.dispatchWorkgroups(...grid);
  pass.end();
  const read = device.createBuffer({ size: bytes, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  encoder.copyBufferToBuffer(buffers[out], 0, read, 0, bytes);
  device.queue.submit([encoder.finish()]);
  await read.mapAsync(GPUMapMode.READ);
  return [...new Uint32Array(read.getMappedRange())];
}"""


class Blank(http.server.BaseHTTPRequestHandler):
    """Serves a page from a trustworthy origin: on other pages navigator.gpu does not exist."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, *args):
        pass


def jobs(dtype: str) -> dict[str, Job]:
    out: dict[str, Job] = {}
    for m in (1, 64):
        out |= {f"{name}_{m}": make(m) for name, make in gpu_jobs.linears(dtype).items()}
    for m, name in itertools.product((1, 16), ("plain", "all")):
        out[f"attend_{name}_{m}"] = gpu_jobs.paged(Attend, (m, 9, 3, 24), dtype, **gpu_jobs.ATTENDS[name])
    for name in ("plain", "norm_after", "norm_all", "norms", "q_norm_after"):
        out[f"rope_{name}"] = gpu_jobs.paged(RopeAppend, (4, 9, 3, 64), dtype, **gpu_jobs.ROPES[name])
    out |= {f"norm_{name}": norm for name, norm in gpu_jobs.NORMS.items()}
    out |= {f"state_{name}": job for name, job in gpu_jobs.STATES.items()}
    for name in ("q2g16", "q3g16", "q6g32"):
        out[f"embed_{name}"] = Embed(4, gpu_jobs.SCHEMES[name], 2.0)
        out[f"planes_{name}"] = Linear(16, gpu_jobs.SCHEMES[name], "float32", "float32")
    for rows in (1, 16):
        out[f"greedy_{rows}"] = Greedy(rows, 5000)
        out[f"sample_{rows}"] = Sample(rows, 5000, 16)
        out[f"logprobs_{rows}"] = Logprobs(rows, 5000)
    return out


def linears_by_class(precision: Precision, dtype: str) -> dict[str, Staged]:
    """Matmuls for classes of GPUs."""
    return {
        f"{device}_{name}": variant(CLASSES[device], precision, False).kernels.stages(
            replace(
                job,
                x_dtype="float32" if job.rows or job.norm else dtype,
                out_dtype="float32" if job.rows or job.residual else dtype,
            )
        )
        for device in gpu_jobs.GPU_CLASSES
        for name, (_, job) in gpu_jobs.class_linears(device).items()
    }


def attention_by_class(precision: Precision, dtype: str) -> dict[str, Staged]:
    made = {}
    for name, m, flags in itertools.product(("mobile", "discrete"), (1, 64), ("plain", "all")):
        for shape in ((9, 3, 24), (8, 1, 64)):
            job = gpu_jobs.paged(Attend, (m, *shape), dtype, **gpu_jobs.ATTENDS[flags])
            kernels = variant(CLASSES[name], precision, False).kernels
            made[f"attend_{name}_{flags}_{m}_{shape[-1]}"] = kernels.stages(job)
            k = shape[0] * shape[2]
            linear = Linear(m, Matrix(64, k, 32), "float32", "float32", bias=True, residual=True)
            split = kernels.split(job, linear)
            assert (split is None) == (m > 1)
            if split is not None:
                combined = replace(linear, split=split, split_heads=shape[0])
                made[f"parts_{name}_{flags}_{shape[-1]}"] = kernels.stages(
                    replace(job, split=split, sinks=False)
                )
                made[f"together_{name}_{flags}_{shape[-1]}"] = kernels.stages(combined)
    return made


def projections_by_class(precision: Precision, dtype: str) -> dict[str, Staged]:
    made = {}
    for name, flags in itertools.product(("mobile", "discrete"), ("plain", "norms", "q_norm_after")):
        linear, follows = project_jobs.FLAGS[flags]
        job = project_jobs.job((1, 4, 2, 64), dtype, linear=linear, **follows)
        kernels = variant(CLASSES[name], precision, False).kernels
        made[f"project_{name}_{flags}"] = kernels.stages(job)
        made[f"rows_{name}_{flags}"] = kernels.stages(Rows.of(job.paged))
    return made


def pieces_by_class(precision: Precision, dtype: str) -> dict[str, Staged]:
    return {
        f"{device}_pieces_{name}": variant(
            CLASSES[device], precision, False, binding=gpu_jobs.PIECE
        ).kernels.stages(job)
        for device in ("software", "discrete")
        for name, job in gpu_jobs.in_pieces(dtype).items()
    }


def linears_of_bytes(precision: Precision, dtype: str) -> dict[str, Staged]:
    """Matmuls of rows that are rounded to bytes; classes take turns."""
    return {
        f"bytes_{name}": variant(CLASSES[device], precision, False, "int8").kernels.stages(job)
        for device, (name, job) in zip(
            itertools.cycle(gpu_jobs.GPU_CLASSES), int8_jobs.jobs(dtype).items(), strict=False
        )
    }


def over_codes(precision: Precision, dtype: str) -> dict[str, Staged]:
    """Kernels that append to a quantized cache, and attend to it."""
    made = {}
    for name, kv_dtype in itertools.product(("software", "mobile", "discrete"), ("int8", "int4")):
        kernels = variant(CLASSES[name], precision, False).kernels
        for m, flags in ((1, "plain"), (64, "all")):
            attend = gpu_jobs.paged(Attend, (m, 8, 1, 64), dtype, **gpu_jobs.ATTENDS[flags])
            made[f"codes_{name}_{kv_dtype}_attend_{m}"] = kernels.stages(replace(attend, kv_dtype=kv_dtype))
        if name == "software":
            append = gpu_jobs.paged(RopeAppend, (4, 9, 3, 96), dtype)
            made[f"codes_{name}_{kv_dtype}_rope"] = kernels.stages(replace(append, kv_dtype=kv_dtype))
            continue
        linear, follows = project_jobs.FLAGS["norms"]
        project = project_jobs.job((4, 4, 2, 64), dtype, linear=linear, **follows)
        paged = replace(project.paged, kv_dtype=kv_dtype)
        made[f"codes_{name}_{kv_dtype}_project"] = kernels.stages(replace(project, paged=paged))
    return made


def states_by_class(precision: Precision, dtype: str) -> dict[str, Staged]:
    kernels = variant(CLASSES["discrete"], precision, False).kernels
    return {f"discrete_{name}": kernels.stages(job) for name, job in gpu_jobs.STATES.items()}


BY_CLASS = (
    linears_by_class, linears_of_bytes, attention_by_class, projections_by_class, pieces_by_class, over_codes,
    states_by_class,
)  # fmt: skip


@cache
def sources(precision: Precision) -> dict[str, list[str]]:
    """Shader and entry point of every second kernel: compilers take 20 CPU seconds for all."""
    dtype = {"f32": "float32", "f16": "float16"}[precision]
    software = variant(SOFTWARE, precision, False).kernels
    made = {name: software.stages(job) for name, job in jobs(dtype).items()}
    for by_class in BY_CLASS:
        made |= by_class(precision, dtype)
    chosen = share(list(made.items()), 2)
    module = tvm.IRModule(
        {f"{name}_s{i}": stage.func for name, staged in chosen for i, stage in enumerate(staged.stages)}
    )
    return {name: [shader.source, shader.entry] for name, shader in shaders(module, precision).items()}


SHAPED = re.compile(r"(bytes|codes_software|([a-z]+_)?(mobile|integrated|discrete)(_pieces)?)_")


def with_pipelines(every: dict[str, list[str]]) -> dict[str, tuple[str, str, bool]]:
    """Kernels, and whether Chromium makes their pipelines in this run: it does for a third of all software
    kernels except those over codes, which test_quantized_kv.py runs there; of the latter and of kernels for
    classes of GPUs, for a third of the shortest of each kind (job, class, few or many rows, first or later
    launch).
    """
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name in every:
        shaped = SHAPED.match(name)
        kind = (shaped[0], "_64_" in name or "_rows_s" in name, name[-1]) if shaped else (name,)
        kinds.setdefault(kind, []).append(name)
    shortest = [min(names, key=lambda name: len(every[name][0])) for names in kinds.values()]
    chosen = set(share(shortest, 3))
    return {name: (code, entry, name in chosen) for name, (code, entry) in every.items()}


@pytest.fixture(scope="module")
def page():
    """A blank page of a Chromium with WebGPU."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser() as chromium:
            page = chromium.new_page()
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            if not page.evaluate("navigator.gpu.requestAdapter().then(Boolean)"):
                pytest.skip("Chromium offers no WebGPU adapter")
            yield page
    finally:
        server.shutdown()


def test_chromium_compiles_every_kernel(page):
    assert page.evaluate(COMPILE, with_pipelines(sources("f32"))) == {}


def run_in(page):
    """What runs the one launch of a job in a page, and reads `out`."""

    def run(staged, precision, arrays):
        (stage,) = staged.stages
        (shader,) = shaders(tvm.IRModule({"kernel": stage.func}), precision).values()
        names = [stage.args[i] for i in shader.params]
        inputs = [np.ascontiguousarray(arrays[name]).view(np.uint32).ravel().tolist() for name in names]
        out = arrays["out"]
        words = page.evaluate(
            RUN, [shader.source, shader.entry, shader.grid, inputs, names.index("out"), out.nbytes]
        )
        return {"out": np.array(words, np.uint32).view(out.dtype).reshape(out.shape)}

    return run


@pytest.mark.parametrize("kind", gguf_rows.OWN_BYTES)
def test_rows_of_a_gguf_file_in_chromium_are_those_of_the_file(page, kind):
    made, job = (
        variant(SOFTWARE, "f32", False).kernels,
        gguf_rows.embed_job(kind, 3 * gguf_rows.block_size(kind), HELD),
    )
    arrays, expected = gguf_rows.embed_arrays(made, kind, job.matrix)
    arrays["out"] = np.zeros(*job.out)
    np.testing.assert_array_equal(run_in(page)(made.stages(job), "f32", arrays)["out"], expected)


def test_a_matvec_over_two_levels_in_chromium(page):
    matrix = replace(gpu_jobs.TWO_LEVELS["q6g16k8"], n=72)
    job = Linear(1, matrix, "float32", "float32", norm=1e-5)
    gpu_checks.check(variant(CLASSES["mobile"], "f32", False).kernels, run_in(page), "f32", job)


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_dawn_accepts_every_kernel_within_guaranteed_limits(precision: Precision):
    node = shutil.which("node")
    if node is None or not (WEB / "node_modules" / "webgpu").exists():
        pytest.skip("needs Node and the development packages of web/")
    done = subprocess.run(
        [node, WEB / "test" / "dawn" / "compile.mjs"],
        input=json.dumps(sources(precision)), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert {
        name: said for name, said in json.loads(done.stdout).items() if not asks_for_memory(name, said)
    } == {}


def asks_for_memory(name: str, said: list[str]) -> bool:
    """Whether a message is the allowed one about the memory of discrete float16 programs
    (docs/decisions/0015): two tiles of a matmul.
    """
    return name.startswith("discrete") and all("workgroup storage" in each for each in said)
