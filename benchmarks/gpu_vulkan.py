"""What a Vulkan GPU gives: copy bandwidth, and for each shape decode, prefill and the time to the first
token.

    python benchmarks/gpu_vulkan.py [--device vulkan:0] [--shapes smollm2-135m,qwen3-0.6b,llama-3.2-1b]
    [--rounds 5] [--json FILE]
    python benchmarks/gpu_vulkan.py --folder DIR          keeps what is built: DIR/<shape>/artifact/vulkan
    python benchmarks/gpu_vulkan.py --llama-bench FILE    beside llama.cpp, which has been built with
    -DGGML_VULKAN=ON: Q4_0 of the same shape, of which it takes llama shapes alone (pip install gguf)
    python benchmarks/gpu_vulkan.py --kv-bits 16,8,4 --prefill 8192      each cache, at a long context

Weights are random, q4; speed does not depend on them. A decoded token reads all weights but an embedding of
its own, and the keys and values before it: those bytes over the time of a token, as a part of the copy
bandwidth (bytes read plus bytes written), say how much of the memory's speed decoding uses. All figures are
medians of the rounds; prompts are new in each, so that no prefix is in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.budget import kv_bytes
from nearfar.edge_runtime.devices import parse_device
from nearfar.edge_runtime.executors.vulkan.device import gpus, select
from nearfar.format.manifest import Manifest, Program

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import artifact_of, rates

SHAPES = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b")
PREFILL, DECODE = 512, 128
COPY_BYTES, COPIES = 1 << 30, 20


COPY = """
@group(0) @binding(0) var<storage, read> source : array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> made : array<vec4<u32>>;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) at : vec3<u32>, @builtin(num_workgroups) all : vec3<u32>) {
    for (var i = at.x; i < arrayLength(&made); i += all.x * 256u) { made[i] = source[i]; }
}
"""


def copy_bandwidth(name: str, rounds: int, size: int) -> float:
    """Bytes per second, read plus written, that a kernel copies at within the memory of the GPU of that name.

    Through wgpu, where it takes few lines. A driver's own copies (vkCmdCopyBuffer) do not measure memory:
    on an H200 they were a fifth as fast.
    """
    import wgpu

    # Of one device Vulkan's adapter comes before OpenGL's.
    adapter = next(each for each in wgpu.gpu.enumerate_adapters_sync() if each.info["device"] == name)
    wanted = {"max-buffer-size": size, "max-storage-buffer-binding-size": size}
    device = adapter.request_device_sync(required_limits=wanted)
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    source, target = (device.create_buffer(size=size, usage=usage) for _ in range(2))
    shader = {"module": device.create_shader_module(code=COPY), "entry_point": "main"}
    pipeline = device.create_compute_pipeline(layout="auto", compute=shader)
    entries = [
        {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": size}}
        for i, buffer in enumerate((source, target))
    ]
    group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    seconds = []
    for _ in range(rounds + 1):
        encoder = device.create_command_encoder()
        for _ in range(COPIES):
            work = encoder.begin_compute_pass()
            work.set_pipeline(pipeline)
            work.set_bind_group(0, group)
            work.dispatch_workgroups(min(size // 4096, 65535))
            work.end()
        start = time.perf_counter()
        device.queue.submit([encoder.finish()])
        device.queue.read_buffer(target, size=4)  # waits for the device
        seconds.append(time.perf_counter() - start)
    # the first copy touches the memory and does not count
    return 2 * size * COPIES / statistics.median(seconds[1:])


def bytes_per_token(manifest: Manifest, program: Program, position: float) -> float:
    """Bytes that decoding one token at a position reads: weights, but of an untied embedding only a row;
    keys and values.
    """
    tensors = manifest.weights.tensors
    untied = any(tensor.name.startswith("lm_head.") for tensor in tensors)
    weights = sum(tensor.bytes for tensor in tensors if not (untied and tensor.name.startswith("embed.")))
    return weights + kv_bytes(manifest, program, round(position))


def measure(
    artifact: Path, options: dict[str, Any], rounds: int, prefill: int, decode: int
) -> dict[str, Any]:
    """Medians of one model."""
    with Engine.load(artifact, verify=False, **options) as engine:
        rates(engine, 0, prefill, decode)  # this run compiles the kernels
        seen = [rates(engine, seed, prefill, decode) for seed in range(1, rounds + 1)]
        executor = engine.asynchronous.core.executor
        ttft = statistics.median(prefill / one["prefill"] for one in seen)
        rate = statistics.median(one["decode"] for one in seen)
        program = next(p for p in engine.manifest.programs if p.name == executor.program_name)
        per_token = bytes_per_token(engine.manifest, program, prefill + decode / 2)
        return {
            "program": executor.program_name,
            "memory": executor.memory_used(),
            "decode": rate,
            "ttft": ttft,
            "prefill": prefill / ttft,
            "bytes_per_token": per_token,
            "bytes_per_second": per_token * rate,
        }


def by_llama_bench(
    tool: Path, checkpoint: Path, rounds: int, prefill: int, decode: int
) -> dict[str, float] | None:
    """llama.cpp's medians, in tokens/s, on a GGUF file beside `checkpoint`; None for others than llama."""
    if json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"] != "llama":
        return None
    from benchmarks.peers.gguf_model import write_gguf

    model = checkpoint.parent / "q4_0.gguf"
    if not model.exists():
        write_gguf(checkpoint, model)
    work = ["-p", str(prefill), "-n", str(decode), "-d", f"0,{prefill}", "-r", str(rounds)]
    command = [str(tool), "-m", str(model), "-ngl", "99", "-fa", "1", *work, "-o", "json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    (prompt,) = (each for each in found if each["n_prompt"] and not each["n_depth"])
    (answer,) = (each for each in found if each["n_gen"] and each["n_depth"])
    return {
        "prefill": statistics.median(prompt["samples_ts"]),
        "decode": statistics.median(answer["samples_ts"]),
    }


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    bandwidth = result["copy_bytes_per_second"]
    print(f"{result['device']}: copies {bandwidth / 1e9:.1f} GB/s (read and written)")
    print(
        f"{'':20}{'decode':>10}{'GB/s':>8}{'of copy':>9}{'prefill':>10}{'TTFT':>9}   tokens/s; "
        f"{result['prefill']} tokens; ms"
    )
    for shape, one in result["shapes"].items():
        part = one["bytes_per_second"] / bandwidth
        print(
            f"{shape:20}{one['decode']:10.1f}{one['bytes_per_second'] / 1e9:8.1f}"
            f"{part:9.0%}{one['prefill']:10.1f}"
            f"{one['ttft'] * 1e3:9.1f}   {one['program']}"
        )
        if peer := one.get("llama.cpp"):
            print(
                f"{'  llama.cpp':20}{peer['decode']:10.1f}{'':17}{peer['prefill']:10.1f}{'':9}"
                f"   ours: {one['decode'] / peer['decode']:.2f} of its decode, "
                f"{one['prefill'] / peer['prefill']:.2f} of its prefill"
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="vulkan", help="vulkan:N or vulkan:NAME")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--precision", choices=["f16", "f32"])
    parser.add_argument("--kv-bits", default="16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=PREFILL)
    parser.add_argument("--decode", type=int, default=DECODE)
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = select(parse_device(args.device)[1], gpus())
    result: dict[str, Any] = {
        "device": gpu.name,
        "driver": gpu.driver,
        "prefill": args.prefill,
        "shapes": {},
        "copy_bytes_per_second": copy_bandwidth(gpu.name, args.rounds, args.copy_bytes),
    }
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.folder / shape if args.folder else Path(temporary)
            artifact = folder / "artifact"
            if not artifact.exists():
                artifact_of(folder, shape, "vulkan", "--kv-bits", args.kv_bits)
            work = (args.rounds, args.prefill, args.decode)
            for bits in map(int, args.kv_bits.split(",")):
                options = {"device": args.device, "precision": args.precision, "kv_bits": bits}
                found = measure(artifact, options, *work)
                if args.llama_bench and bits == 16:
                    found["llama.cpp"] = by_llama_bench(args.llama_bench, folder / "checkpoint", *work)
                result["shapes"][shape if bits == 16 else f"{shape}, kv {bits}"] = found
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
