"""An onnx artifact on ONNX Runtime's CPU beside our cpu target and onnxruntime-genai.

    python benchmarks/onnx_runtime.py [--shape smollm2-135m] [--quant q4] [--threads 2] [--rounds 5]

All run the same weights, quantized once. Each round measures each in a process of its own, one after the
other: what else the machine does falls on all. The table gives medians, and their ratios to the cpu target.
With `--products` it times instead one product by MatMulNBits in the forms of docs/decisions/0022.

  cpu     our cpu target in our engine, products in float
  onnx    the onnx artifact in our engine
  int8    the same, built with --products int8 (MatMulNBits with accuracy_level 4)
  genai   the files of `onnx` in onnxruntime-genai
  genai8  the files of `int8` in onnxruntime-genai
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

import numpy as np

PREFILL, DECODE = 256, 48
"""Tokens of the prompt, and of the answer."""
INSTALL = (
    "onnxruntime-genai is not installed: pip install onnxruntime-genai, in any environment (--genai-python)"
)


def engine(root: Path, threads: int) -> dict[str, float]:
    """Tokens per second of a prompt and of an answer, in our engine."""
    from nearfar.edge_runtime import Engine
    from nearfar.edge_runtime.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=DECODE + 1, ignore_eos=True)
    with Engine.load(root, kv_memory="256MB", threads=threads) as loaded:
        for seed in range(2):  # the first run warms up; each run has other tokens, so that no prefix is known
            prompt = np.random.default_rng(seed).integers(3, 1000, PREFILL).tolist()
            start, stamps = time.perf_counter(), []
            for _ in loaded.generate(prompt, params):
                stamps.append(time.perf_counter())
    return {"prefill": PREFILL / (stamps[0] - start), "decode": DECODE / (stamps[-1] - stamps[0])}


def genai(root: Path, threads: int) -> dict[str, float]:
    """Measure the model in onnxruntime-genai."""
    import onnxruntime_genai as og

    config = og.Config(str(root))
    options = {"session_options": {"intra_op_num_threads": threads, "provider_options": []}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = og.Model(config)
    for seed in range(2):
        prompt = np.random.default_rng(seed).integers(3, 1000, PREFILL).tolist()
        params = og.GeneratorParams(model)
        length = PREFILL + DECODE + 1
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, params)
        start = time.perf_counter()
        generator.append_tokens(prompt)
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(DECODE):
            generator.generate_next_token()
        end = time.perf_counter()
    return {"prefill": PREFILL / (first - start), "decode": DECODE / (end - first)}


def prepare(folder: Path, shape: str, quant: str) -> dict[str, Path]:
    """Artifacts of a shape with random weights."""
    nearfar, checkpoint = [sys.executable, "-m", "nearfar"], folder / "checkpoint"
    subprocess.run([*nearfar, "synth", shape, "-o", str(checkpoint)], check=True)
    build = [*nearfar, "build", str(checkpoint), "--quant", quant]
    subprocess.run(
        [*build, "--target", "cpu,onnx", "--cpu-features", "native", "-o", str(folder / "out")], check=True
    )
    int8 = ["--target", "onnx", "--products", "int8", "-o", str(folder / "int8")]
    subprocess.run([*build, *int8], check=True)
    onnx = folder / "out" / "onnx"
    rounded = folder / "int8" / "onnx"
    cpu = folder / "out" / "cpu"
    return {"cpu": cpu, "onnx": onnx, "int8": rounded, "genai": onnx, "genai8": rounded}


def in_process(python: str, *args: object) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    done = subprocess.run(
        [python, __file__, "one", *map(str, args)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{args} failed ({INSTALL}):\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(shape: str, quant: str, threads: int, rounds: int, genai_python: str) -> None:
    """Measure in rounds and print the table."""
    with tempfile.TemporaryDirectory() as name:
        artifacts = prepare(Path(name), shape, quant)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in artifacts}
        for _ in range(rounds):
            for kind, root in artifacts.items():
                python = genai_python if kind.startswith("genai") else sys.executable
                found[kind].append(in_process(python, kind, root, threads))
    print(f"{shape} {quant}, {threads} threads, medians of {rounds} rounds; beside the cpu target")
    medians = {
        kind: {what: statistics.median(row[what] for row in rows) for what in rows[0]}
        for kind, rows in found.items()
    }
    for kind, rates in medians.items():
        told = (
            f"{what} {rate:8.1f} tokens/s {rate / medians['cpu'][what]:6.2f}" for what, rate in rates.items()
        )
        print(f"{kind:8}", "   ".join(told))


def products(n: int = 1536, k: int = 576, repeat: int = 40) -> None:
    """Time one product x·Wᵀ, W [n, k], with a zero point in float, a second term, or neither; by rows, bits
    and groups.
    """
    print(f"W [{n}, {k}], milliseconds of a product on two threads, and its largest error")
    for bits, group in ((4, 32), (4, 64), (8, 64)):
        for level in (0, 4):
            for rows in (1, 64):
                told = []
                for form in ("none", "second", "float"):
                    try:
                        seconds, error = _timed(n, k, bits, group, level, rows, form, repeat)
                        told.append(f"{form} {seconds * 1e3:7.3f} ({error:.0e})")
                    except Exception as refusal:  # ONNX Runtime's errors have no common class
                        told.append(f"{form} refused ({str(refusal)[-70:].strip()})")
                print(f"bits {bits} group {group} accuracy_level {level} rows {rows:3}: ", "  ".join(told))


def _timed(
    n: int, k: int, bits: int, group: int, level: int, rows: int, form: str, repeat: int
) -> tuple[float, float]:
    """Seconds of a product, and its largest error beside the largest value."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.001, 0.01, (n, k // group)).astype(np.float32)
    half = float(1 << (bits - 1))
    zeros = np.full_like(scales, half) if form == "none" else rng.uniform(0, 2 * half, scales.shape)
    bytes_of = np.unpackbits(codes[..., None], axis=2, bitorder="little")[..., :bits].reshape(
        n, k // group, -1
    )
    tensors: dict[str, Any] = {"w": np.packbits(bytes_of, axis=2, bitorder="little"), "s": scales}
    inputs, out = ["x", "w", "s"], "y"
    if form == "float":
        tensors["z"] = zeros.astype(np.float32)
        inputs.append("z")
    attributes = {"K": k, "N": n, "bits": bits, "block_size": group, "accuracy_level": level}
    nodes = [helper.make_node("MatMulNBits", inputs, ["y0"], domain="com.microsoft", **attributes)]
    if form == "second":
        tensors["d"] = ((half - zeros) * scales).astype(np.float32)
        tensors["shape"], tensors["last"] = np.array([-1, k // group, group]), np.array([-1])
        nodes += [
            helper.make_node("Reshape", ["x", "shape"], ["x3"]),
            helper.make_node("ReduceSum", ["x3", "last"], ["sums"], keepdims=0),
            helper.make_node("FusedMatMul", ["sums", "d"], ["y1"], domain="com.microsoft", transB=1),
            helper.make_node("Add", ["y0", "y1"], [out]),
        ]
    else:
        nodes.append(helper.make_node("Identity", ["y0"], [out]))
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["m", k]), (out, ["m", n]))
    ]
    constants = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "product", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = rng.normal(size=(rows, k)).astype(np.float32)
    weights = ((codes.reshape(n, -1, group) - zeros[..., None]) * scales[..., None]).reshape(n, k)
    expected, times = x @ weights.T, []
    for _ in range(repeat):
        start = time.perf_counter()
        (made,) = session.run(None, {"x": x})
        times.append(time.perf_counter() - start)
    return statistics.median(times), float(np.abs(made - expected).max() / np.abs(expected).max())


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["one"]:
        kind, root, threads = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
        print(json.dumps((genai if kind.startswith("genai") else engine)(root, threads)))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--genai-python", default=sys.executable)
    parser.add_argument("--products", action="store_true")
    given = parser.parse_args()
    if given.products:
        products()
    else:
        compare(given.shape, given.quant, given.threads, given.rounds, given.genai_python)


if __name__ == "__main__":
    main()
