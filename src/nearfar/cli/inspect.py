"""`nearfar inspect`."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nearfar import strict_json
from nearfar.cli.carried import carried_lines
from nearfar.cli.launches import has_plans, launches, show_launches, why_no_launches
from nearfar.cli.models import Kept, kept
from nearfar.cli.streams import print_json
from nearfar.edge_runtime.artifact.budget import kv_bytes
from nearfar.edge_runtime.artifact.finder import find_artifacts
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import ArtifactError, RequestError
from nearfar.format.buffers import of_cache, sized
from nearfar.format.consistency import DTYPE_BYTES
from nearfar.format.manifest import Function, Program
from nearfar.format.sampling import SamplingDefaults
from nearfar.step.operation import looked_up_in, weights_of
from nearfar.step.ops import Attend

CONTEXTS = (1024, 4096, 8192, 32768)
LIBRARIES = {"mlx": "MLX", "onnx": "ONNX Runtime"}
"""The libraries that compute for targets without plans."""


def inspect(
    artifact: Kept,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Show the launches of all plans instead (webgpu, vulkan, cpu). GPU kernels have figures if "
            "the build computed them (--kernel-figures): workgroups, threads, bytes of weights in flight, "
            "how often a launch reads each weight, and more.",
        ),
    ] = False,
    program: Annotated[
        str | None, typer.Option("--program", help="With --kernels: only this program, by its name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what an artifact holds: functions and buckets, launches, memory by context length, needs,
    provenance.
    """
    if program is not None and not kernels:
        raise RequestError("--program goes with --kernels", "program")
    found = find_artifacts(kept(artifact))
    reports = _launches(found, program) if kernels else [describe(path) for path in found]
    if as_json:
        print_json(reports if len(reports) > 1 else reports[0])
        return
    console = Console()
    for report in reports:
        (show_launches if kernels else _show)(console, report)


def _launches(found: Sequence[Path], program: str | None) -> list[dict[str, Any]]:
    """The launches of every artifact with our own kernels; other artifacts in the folder are only named."""
    artifacts = [Artifact.open(path) for path in found]
    planned = [artifact for artifact in artifacts if has_plans(artifact)]
    for artifact in artifacts if planned else ():
        if artifact not in planned:
            print(f"{artifact.path}: {why_no_launches(artifact)}", file=sys.stderr)
    return [launches(artifact, program) for artifact in planned or artifacts]


def describe(path: Path) -> dict[str, Any]:
    """The report of `inspect`, from the manifest and the plans."""
    artifact = Artifact.open(path)
    manifest, data = artifact.manifest, artifact.data
    limit = manifest.model.context_length
    contexts = sorted({c for c in CONTEXTS if c < limit} | {limit})
    return {
        "path": str(path),
        "target": manifest.target,
        "model": {**data["model"], **_shape(artifact)},
        "quantization": data["quantization"],
        "weights": {
            "bytes": manifest.weights.bytes,
            "shards": len(manifest.weights.shards),
            "format": manifest.weights.format,
        },
        "programs": [_program(artifact, program) for program in manifest.programs],
        "memory": {
            program.name: {str(c): memory_for(artifact, program, c) for c in contexts}
            for program in manifest.programs
        },
        "cache": {
            program.name: {str(c): kv_bytes(manifest, program, c) for c in contexts}
            for program in manifest.programs
        },
        "sampling": manifest.sampling.given,
        "license": manifest.license or "not stated",
        "provenance": manifest.provenance,
    }


def _shape(artifact: Artifact) -> dict[str, Any]:
    """Facts about the model from the step's list: weights, attention layers, numbers by window."""
    step = artifact.manifest.step
    layers = [op for op in step.operations if isinstance(op, Attend)]
    windows = Counter(str(op.window) for op in layers if op.window is not None)
    counts = {p.name: p.n * max(p.k, 1) for p in step.parameters}
    return {
        "parameters": sum(counts.values()),
        "active_parameters": round(sum(count * step.share(name, 1) for name, count in counts.items())),
        "layers": len(layers),
        "windows": dict(windows),
    }


def _program(artifact: Artifact, program: Program) -> dict[str, Any]:
    """The report of one program; with launches and weights of each function where it has plans (mlx has none:
    MLX makes its own).
    """
    functions = {
        name: [_bucket(artifact, bucket) for bucket in buckets] for name, buckets in program.functions.items()
    }
    decode, greedy = functions["step"][0], functions["greedy"][0]
    planned = decode["launches"] is not None
    return {
        "name": program.name,
        "kv_dtype": program.kv_dtype,
        "requires": {"limits": {}, **dataclasses.asdict(program.requires)},
        "workspace_bytes": sum(program.workspace),
        "kernels": len(program.kernels),
        "launches_per_token": decode["launches"] + greedy["launches"] if planned else None,
        "weight_bytes_per_token": decode["weight_bytes"] if planned else _step_bytes(artifact, program),
        "functions": functions,
    }


def _bucket(artifact: Artifact, bucket: Function) -> dict[str, Any]:
    size = {"size": bucket.size, "rows": bucket.rows}
    if bucket.plan is None:
        return {**size, "launches": None, "weight_bytes": None}
    launches = artifact.plan(bucket).launches
    weights = {
        arg.removeprefix("weight:") for launch in launches for arg in launch.args if arg.startswith("weight:")
    }
    return {
        **size,
        "launches": len(launches),
        "weight_bytes": sum(_read_bytes(artifact, name, bucket.size) for name in weights),
    }


def _read_bytes(artifact: Artifact, tensor: str, rows: int) -> int:
    """Bytes of a tensor of the weight stream that a step of `rows` rows reads at most."""
    share = artifact.manifest.step.share(tensor.rpartition(".")[0], rows)
    return round(artifact.tensors[tensor].bytes * share)


def _step_bytes(artifact: Artifact, program: Program) -> int:
    """Bytes of weights that a step of one token reads: all weights, except for an embedding that is not the
    lm_head as well, of which it reads a row.
    """
    if artifact.manifest.weights.format == "onnx":
        return _matrix_bytes(artifact)
    tensors = _tensors(artifact)
    untied = any(name.startswith("lm_head.") for name, _, _ in tensors)
    read = [tensor for tensor in tensors if not (untied and tensor[0].startswith("model.embed_tokens."))]
    return sum(_loaded_bytes(dtype, size, program.precision) for _, dtype, size in read)


def _matrix_bytes(artifact: Artifact) -> int:
    """Bytes of the matrices that a token reads; vectors and rotation tables are negligible."""
    read = {
        name
        for op in artifact.manifest.step.operations
        for name in weights_of(op)
        if name not in looked_up_in(op)
    }
    stored = (matrix for matrix in artifact.manifest.quantization.matrices if matrix.name in read)
    return sum(matrix.bytes for matrix in stored)


def _tensors(artifact: Artifact) -> list[tuple[str, str, int]]:
    """Name, dtype and bytes of each tensor of the artifact's safetensors files."""
    files = [artifact.path / shard.file for shard in artifact.manifest.weights.shards]
    return [tensor for file in files for tensor in read_tensors(file)]


def read_tensors(file: Path) -> list[tuple[str, str, int]]:
    """Name, dtype and bytes of each tensor of a safetensors file, from its header."""
    try:
        with file.open("rb") as stream:
            header = strict_json.loads(stream.read(int.from_bytes(stream.read(8), "little")).decode("utf-8"))
        records = [(name, record) for name, record in header.items() if name != "__metadata__"]
        return [(name, str(record["dtype"]), _length(*record["data_offsets"])) for name, record in records]
    except (OSError, ValueError, OverflowError, MemoryError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{file} cannot be read ({error}); build or copy the artifact again") from error


def _length(start: int, stop: int) -> int:
    return stop - start


def _loaded_bytes(dtype: str, size: int, precision: str) -> int:
    """Bytes in memory: an f32 program keeps float16 tensors as float32, codes stay what they are."""
    return 2 * size if dtype == "F16" and precision == "f32" else size


def memory_for(artifact: Artifact, program: Program, context: int) -> int:
    """Bytes on the device to hold one sequence of `context` tokens: weights, cache, workspace and fixed
    buffers.
    """
    manifest = artifact.manifest
    total = (
        _weights_in_memory(artifact, program) + sum(program.workspace) + kv_bytes(manifest, program, context)
    )
    caches = {name for i, cache in enumerate(manifest.caches) for name in of_cache(i, cache.parts)}
    for buffer in manifest.buffers:
        if buffer.name not in caches:
            total += math.prod(sized(buffer.shape, context, ())) * DTYPE_BYTES[buffer.dtype]
    return total


def _weights_in_memory(artifact: Artifact, program: Program) -> int:
    if artifact.manifest.weights.format != "safetensors":
        return artifact.manifest.weights.bytes
    return sum(_loaded_bytes(dtype, size, program.precision) for _, dtype, size in _tensors(artifact))


def _show(console: Console, report: dict[str, Any]) -> None:
    model, quant = report["model"], report["quantization"]
    console.rule(f"{model['name']} · {report['target']}")
    facts = Table.grid(padding=(0, 2))
    active = model["active_parameters"]
    of_these = f" ({active:,} of them for a token)" if active != model["parameters"] else ""
    facts.add_row(
        "model",
        f"{model['architecture']}, {model['parameters']:,} parameters{of_these}, {model['layers']} layers of "
        f"attention, vocabulary {model['vocab_size']:,}",
    )
    facts.add_row("context", f"{model['context_length']:,} tokens")
    facts.add_row(
        "weights", f"{_size(report['weights']['bytes'])} in {_files(report['weights'])}, {_quant(quant)}"
    )
    for matrix in quant.get("matrices", []) if quant["scheme"] != "none" else []:
        if "reason" in matrix:
            facts.add_row("", f"not quantized: {matrix['name']} ({matrix['reason']})")
    for line in carried_lines(quant, names=True):
        facts.add_row("", line)
    for window, layers in model["windows"].items():
        facts.add_row("window", f"{int(window):,} tokens in {layers} layers")
    facts.add_row("sampling", SamplingDefaults(**report["sampling"]).told)
    facts.add_row("license", report["license"])
    facts.add_row("provenance", ", ".join(f"{key} {value}" for key, value in report["provenance"].items()))
    console.print(facts)
    for program in report["programs"]:
        name = program["name"]
        _show_program(console, report["target"], program, report["memory"][name], report["cache"][name])


def _show_program(
    console: Console,
    target: str,
    program: dict[str, Any],
    memory: dict[str, int],
    cache: dict[str, int],
) -> None:
    requires = program["requires"]
    needs = ", ".join(requires["features"]) or "no special features"
    limits = "".join(f"\n  {name} ≥ {value:,}" for name, value in requires["limits"].items())
    planned = program["launches_per_token"] is not None
    kernels = f"{program['kernels']} kernels" if planned else f"{LIBRARIES[target]}'s own kernels"
    console.print(f"\n[bold]{program['name']}[/]: {kernels}; needs {needs}{limits}", highlight=False)
    read = f"{_size(program['weight_bytes_per_token'])} of weights read"
    launches = f"{program['launches_per_token']} launches, {read}" if planned else read
    console.print(f"a greedy token: {launches}", highlight=False)
    if planned:
        _show_functions(console, program["functions"])
    line = ", ".join(
        f"{int(context):,} tokens {_size(size)} (cache of {program['kv_dtype']} {_size(cache[context])})"
        for context, size in memory.items()
    )
    console.print(f"device memory by context: {line}", highlight=False)


def _show_functions(console: Console, functions: dict[str, list[dict[str, Any]]]) -> None:
    table = Table("function", "bucket", "logits rows", "launches", "weights read")
    for name, entries in functions.items():
        for entry in entries:
            row = (entry["size"], entry["rows"], entry["launches"], _size(entry["weight_bytes"]))
            table.add_row(name, *(str(value) for value in row))
    console.print(table)


def _files(weights: dict[str, Any]) -> str:
    count = weights["shards"]
    kind = {"stream": "shard", "onnx": "file"}.get(weights["format"], "safetensors file")
    return f"{count} {kind}{'s' if count != 1 else ''}"


def _quant(quant: dict[str, Any]) -> str:
    if quant["scheme"] == "none":
        return "not quantized"
    stored = [matrix for matrix in quant["matrices"] if matrix.get("group_size")]
    kinds = sorted({(matrix["bits"], matrix["group_size"]) for matrix in stored})
    how = ", ".join(f"{bits} bits group {group}" for bits, group in kinds)
    return f"{quant['scheme']}: {how} ({len(stored)} matrices; {quant['method']})"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
