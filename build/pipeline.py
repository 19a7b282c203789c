"""`nearfar build`: one checkpoint in, one artifact per target out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from nearfar.build import manifest
from nearfar.build.checkpoint import Checkpoint
from nearfar.build.compiled import CPU, VULKAN, WEBGPU
from nearfar.build.config import ConfigReader, ModelConfig
from nearfar.build.mlx import MLX
from nearfar.build.output import output_directory
from nearfar.build.source import BuildOptions, Source, open_source
from nearfar.build.target import Made, Target
from nearfar.build.weights import WeightStream
from nearfar.edge_runtime import trust
from nearfar.errors import BuildError

__all__ = ["TARGETS", "BuildOptions", "Progress", "build"]

TARGETS: Mapping[str, Target] = {"cpu": CPU, "webgpu": WEBGPU, "vulkan": VULKAN, "mlx": MLX}


class Progress(Protocol):
    """Told how far the build is: `stage` is shown, `total` counts bytes for weights, programs for kernels."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report `done` of `total`."""
        ...


def build(options: BuildOptions, progress: Progress = lambda stage, done, total: None) -> list[Path]:
    """Build all targets; gives their directories. Nothing appears in `out` unless its target is whole."""
    unknown = [target for target in options.targets if target not in TARGETS]
    if unknown or not options.targets:
        raise BuildError(f"unknown target {', '.join(unknown) or '(none)'}; known: {', '.join(TARGETS)}")
    source = open_source(options)
    targets = {name: TARGETS[name] for name in dict.fromkeys(options.targets)}
    for target in targets.values():
        target.check(source, options)
    with ExitStack() as stack:
        roots = {name: stack.enter_context(output_directory(options.out / name)) for name in targets}
        weights, digest = _write_weights(source, targets, roots, progress)
        for index, (name, target) in enumerate(targets.items()):
            progress(f"making {name}", index, len(targets))
            made = target.finish(source, roots[name], weights[name], options)
            _write_manifest(source, name, roots[name], weights[name], made, digest)
        progress("made", len(targets), len(targets))
    paths = [options.out / name for name in targets]
    for path in paths:
        trust.remember(path)
    return paths


def _write_weights(
    source: Source, targets: Mapping[str, Target], roots: Mapping[str, Path], progress: Progress
) -> tuple[dict[str, dict[str, Any]], str]:
    """Stream the weights into all targets; each one's section of the manifest, and the checkpoint's SHA-256."""
    total = sum(entry.bytes for entry in source.checkpoint.entries.values())
    stage = "quantizing and packing weights" if source.scheme.bits and not source.packed else "packing weights"
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(stage, done, total)

    stream = WeightStream(
        source.params, source.model.matrices, source.checkpoint, source.scheme, source.packed, source.report
    )
    stop = threading.Event()
    # The checkpoint is hashed beside the stream that reads it, so that both find it in the system's cache.
    with ThreadPoolExecutor(1) as hasher, ExitStack() as stack:
        stack.callback(stop.set)
        digest = hasher.submit(source.checkpoint.sha256, stop)
        writers = {name: stack.enter_context(target.writer(source, roots[name])) for name, target in targets.items()}
        stream.write(list(writers.values()), advance)
        return {name: writer.finish() for name, writer in writers.items()}, digest.result()


def _write_manifest(
    source: Source, name: str, root: Path, weights: dict[str, Any], made: Made, digest: str
) -> None:
    """The manifest, last."""
    checkpoint, config = source.checkpoint, made.model.config
    document = {
        "format": manifest.FORMAT,
        "version": manifest.VERSION,
        "target": name,
        "model": manifest.model_section(checkpoint.name, config, _eos_token_ids(checkpoint, config)),
        "cache": {"page_size": made.model.cache.page_size, "slots": made.model.cache.slots},
        "rope": made.rope,
        "quantization": manifest.quantization_section(source.scheme, source.report),
        "weights": weights,
        "buffers": manifest.buffers(config, made.model.cache),
        "programs": made.programs,
        "memory": manifest.memory_section(config, weights["bytes"]),
        "tokenizer": {"files": [manifest.file_record(root, file) for file in made.tokenizer]},
        "license": _write_license(checkpoint, root),
        "provenance": manifest.provenance_section(checkpoint, digest),
        **made.extra,
    }
    (root / "manifest.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _eos_token_ids(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, ...]:
    """End tokens: generation_config.json's where it has them (chat models end turns with more than one), else config.json's."""
    generation = ConfigReader(checkpoint.generation_config)
    ids = config.eos_token_ids if generation.get("eos_token_id") is None else generation.token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _write_license(checkpoint: Checkpoint, root: Path) -> str:
    text = checkpoint.license_text
    if text is None:
        return "not stated by the checkpoint"
    (root / "LICENSE").write_text(text, encoding="utf-8")
    return next((line.strip() for line in text.splitlines() if line.strip()), "see LICENSE")
