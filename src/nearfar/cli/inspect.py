"""`nearfar inspect`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nearfar.errors import ArtifactError

CONTEXTS = (512, 2048, 8192, 32768, 131072)
DTYPE_BYTES = {"float32": 4, "float16": 2, "int32": 4, "uint32": 4}


def inspect(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or the directory that `nearfar build` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what an artifact holds: functions and buckets, launches, memory by context length, needs, provenance."""
    reports = [describe(path) for path in find_artifacts(artifact)]
    if as_json:
        print(json.dumps(reports if len(reports) > 1 else reports[0], indent=1, ensure_ascii=False))
        return
    console = Console()
    for report in reports:
        _show(console, report)


def find_artifacts(path: Path) -> list[Path]:
    """The artifact at `path`, or those in its sub-directories."""
    if (path / "manifest.json").is_file():
        return [path]
    found = sorted(manifest.parent for manifest in path.glob("*/manifest.json"))
    if not found:
        raise ArtifactError(
            f"{path} holds no artifact (no manifest.json there or one level below); make one with `nearfar build`"
        )
    return found


def describe(path: Path) -> dict[str, Any]:
    """All facts that `inspect` shows, from the manifest and the plans."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ArtifactError(
            f"{path / 'manifest.json'} is no JSON ({error}); build or download the artifact again"
        ) from error
    if manifest.get("format") != "nearfar-artifact" or manifest.get("version") != 1:
        raise ArtifactError(
            f"{path}: format {manifest.get('format')!r} version {manifest.get('version')!r}; this nearfar reads "
            "nearfar-artifact version 1: upgrade nearfar, or build the artifact again"
        )
    model, weights = manifest["model"], manifest["weights"]
    contexts = sorted({c for c in CONTEXTS if c < model["context_length"]} | {model["context_length"]})
    return {
        "path": str(path),
        "target": manifest["target"],
        "model": model,
        "quantization": manifest["quantization"],
        "weights": {
            "bytes": weights["bytes"], "shards": len(weights["shards"]), "format": weights.get("format", "stream")
        },
        "programs": [_program(path, program, manifest) for program in manifest["programs"]],
        "memory": {
            program["precision"]: {str(c): _memory(path, manifest, program, c) for c in contexts}
            for program in manifest["programs"]
        },
        "license": manifest["license"],
        "provenance": manifest["provenance"],
    }


def _program(path: Path, program: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """One program; launches and the weights of each function where there are plans (mlx has none: MLX makes its own)."""
    functions = {
        name: [_bucket(path, entry, manifest) for entry in entries] for name, entries in program["functions"].items()
    }
    decode, greedy = functions["step"][0], functions["greedy"][0]
    planned = decode["launches"] is not None
    return {
        "precision": program["precision"],
        "requires": program["requires"],
        "workspace_bytes": sum(program["workspace"]),
        "kernels": len(program["kernels"]),
        "launches_per_token": decode["launches"] + greedy["launches"] if planned else None,
        "weight_bytes_per_token": decode["weight_bytes"] if planned else _step_bytes(path, program, manifest),
        "functions": functions,
    }


def _bucket(path: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    size = {"size": entry["size"], "rows": entry["rows"]}
    if "plan" not in entry:
        return {**size, "launches": None, "weight_bytes": None}
    sizes = {tensor["name"]: tensor["bytes"] for tensor in manifest["weights"]["tensors"]}
    plan = json.loads((path / entry["plan"]).read_text(encoding="utf-8"))
    weights = {arg[7:] for launch in plan["launches"] for arg in launch["args"] if arg.startswith("weight:")}
    return {**size, "launches": len(plan["launches"]), "weight_bytes": sum(sizes[weight] for weight in weights)}


def _step_bytes(path: Path, program: dict[str, Any], manifest: dict[str, Any]) -> int:
    """Weights that a step of one token reads: all of them, but for an embedding that is no lm_head as well (a row of it)."""
    tensors = [tensor for shard in manifest["weights"]["shards"] for tensor in read_tensors(path / shard["file"])]
    untied = any(name.startswith("lm_head.") for name, _, _ in tensors)
    read = [tensor for tensor in tensors if not (untied and tensor[0].startswith("model.embed_tokens."))]
    return sum(_loaded_bytes(dtype, size, program["precision"]) for _, dtype, size in read)


def read_tensors(file: Path) -> list[tuple[str, str, int]]:
    """Name, dtype and bytes of each tensor of a safetensors file, from its header."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} cannot be read ({error}); build or copy the artifact again") from error
    records = [(name, record) for name, record in header.items() if name != "__metadata__"]
    return [(name, record["dtype"], record["data_offsets"][1] - record["data_offsets"][0]) for name, record in records]


def _loaded_bytes(dtype: str, size: int, precision: str) -> int:
    """Bytes in memory: an f32 program keeps float16 tensors as float32, codes stay what they are."""
    return 2 * size if dtype == "F16" and precision == "f32" else size


def _memory(path: Path, manifest: dict[str, Any], program: dict[str, Any], context: int) -> int:
    """Bytes on the device to hold one sequence of `context` tokens: weights, cache, workspace and fixed buffers."""
    symbols = {"pages": math.ceil(context / manifest["cache"]["page_size"]), "context": context}
    kv = DTYPE_BYTES[program["kv_dtype"]]
    total: int = _weights_in_memory(path, manifest, program) + sum(program["workspace"])
    for buffer in manifest["buffers"]:
        count = int(math.prod(symbols[d] if isinstance(d, str) else int(d) for d in buffer["shape"]))
        total += count * (kv if buffer["dtype"] == "kv" else DTYPE_BYTES[buffer["dtype"]])
    return total


def _weights_in_memory(path: Path, manifest: dict[str, Any], program: dict[str, Any]) -> int:
    weights = manifest["weights"]
    if weights.get("format", "stream") == "stream":
        return int(weights["bytes"])
    tensors = [tensor for shard in weights["shards"] for tensor in read_tensors(path / shard["file"])]
    return sum(_loaded_bytes(dtype, size, program["precision"]) for _, dtype, size in tensors)


def _show(console: Console, report: dict[str, Any]) -> None:
    model, quant = report["model"], report["quantization"]
    console.rule(f"{model['name']} · {report['target']}")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", f"{model['architecture']}, {model['layers']} layers, hidden {model['hidden_size']}, "
                  f"{model['heads']} heads / {model['kv_heads']} kv, vocabulary {model['vocab_size']:,}")  # fmt: skip
    facts.add_row("context", f"{model['context_length']:,} tokens")
    facts.add_row(
        "weights", f"{_size(report['weights']['bytes'])} in {_files(report['weights'])}, {_quant(quant)}"
    )
    for dense in quant["dense"] if quant["bits"] else []:
        facts.add_row("", f"not quantized: {dense['name']} ({dense['reason']})")
    if model.get("sliding_window"):
        facts.add_row("window", f"{model['sliding_window']:,} tokens in {model['layer_types'].count('sliding_attention')} layers")
    facts.add_row("license", report["license"])
    facts.add_row("provenance", ", ".join(f"{key} {value}" for key, value in report["provenance"].items()))
    console.print(facts)
    for program in report["programs"]:
        _show_program(console, program, report["memory"][program["precision"]])


def _show_program(console: Console, program: dict[str, Any], memory: dict[str, int]) -> None:
    requires = program["requires"]
    needs = ", ".join(requires["features"]) or "no special features"
    limits = "".join(f"\n  {name} ≥ {value:,}" for name, value in requires["limits"].items())
    planned = program["launches_per_token"] is not None
    kernels = f"{program['kernels']} kernels" if planned else "MLX's own kernels"
    console.print(f"\n[bold]{program['precision']}[/]: {kernels}; needs {needs}{limits}", highlight=False)
    read = f"{_size(program['weight_bytes_per_token'])} of weights read"
    launches = f"{program['launches_per_token']} launches, {read}" if planned else read
    console.print(f"a greedy token: {launches}", highlight=False)
    if planned:
        _show_functions(console, program["functions"])
    line = ", ".join(f"{int(context):,} tokens {_size(size)}" for context, size in memory.items())
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
    kind = "shard" if weights["format"] == "stream" else "safetensors file"
    return f"{count} {kind}{'s' if count != 1 else ''}"


def _quant(quant: dict[str, Any]) -> str:
    if not quant["bits"]:
        return "not quantized"
    return f"{quant['scheme']} group {quant['group_size']} ({len(quant['quantized'])} matrices; {quant['method']})"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
