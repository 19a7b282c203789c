"""`nearfar build`: one checkpoint in, one artifact per target out."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tvm

from nearfar.build import emit, manifest
from nearfar.build.checkpoint import Checkpoint, check_tensors, open_checkpoint
from nearfar.build.config import ConfigReader, ModelConfig
from nearfar.build.layout import CacheLayout
from nearfar.build.models import architecture
from nearfar.build.output import output_directory
from nearfar.build.params import Param
from nearfar.build.program import Model, compile_program
from nearfar.build.quantize import Scheme
from nearfar.build.shards import SHARD_BYTES, ShardRecord, ShardWriter, TensorRecord
from nearfar.build.weights import Report, choose_matrices, stream_weights
from nearfar.errors import BuildError
from nearfar.targets.base import Kernels

IGNORABLE = (r".*rotary_emb\.inv_freq",)


@dataclass(frozen=True)
class BuildOptions:
    """What to build. `checkpoint`: a local Hugging Face directory or a hub id. `out`: one sub-directory a target."""

    checkpoint: str
    out: Path
    targets: tuple[str, ...] = ("cpu", "webgpu")
    quant: str = "q4"
    group_size: int = 64
    cpu_features: emit.CpuFeatures = "native"
    dump_ir: Path | None = None


class Progress(Protocol):
    """Told how far the build is: `stage` is shown, `total` counts bytes for weights, programs for kernels."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report `done` of `total`."""
        ...


@dataclass(frozen=True)
class Target:
    """How one target is built."""

    kernels: Callable[[], Kernels]
    tvm_target: dict[str, Any]
    emit: Callable[[Any, emit.EmitContext], dict[str, Any]]


def _cpu_kernels() -> Kernels:
    from nearfar.targets.cpu import KERNELS

    kernels: Kernels = KERNELS
    return kernels


def _webgpu_kernels() -> Kernels:
    from nearfar.targets.webgpu import KERNELS

    kernels: Kernels = KERNELS
    return kernels


TARGETS = {
    "cpu": Target(_cpu_kernels, {"kind": "llvm"}, emit.emit_cpu),
    "webgpu": Target(_webgpu_kernels, {"kind": "webgpu", "host": "llvm"}, emit.emit_webgpu),
}


@dataclass(frozen=True)
class Source:
    """The checked checkpoint and what is decided about it before any weight is read."""

    checkpoint: Checkpoint
    config: ModelConfig
    params: list[Param]
    model: Model
    scheme: Scheme
    report: Report


def build(options: BuildOptions, progress: Progress = lambda stage, done, total: None) -> list[Path]:
    """Build all targets; gives their directories. Nothing appears in `out` unless its target is whole."""
    unknown = [target for target in options.targets if target not in TARGETS]
    if unknown or not options.targets:
        raise BuildError(f"unknown target {', '.join(unknown) or '(none)'}; known: {', '.join(TARGETS)}")
    source = _open(options)
    with ExitStack() as stack:
        roots = {
            target: stack.enter_context(output_directory(options.out / target))
            for target in dict.fromkeys(options.targets)
        }
        weights = _write_weights(source, roots, progress)
        digest = source.checkpoint.sha256()
        for index, (target, root) in enumerate(roots.items()):
            progress(f"compiling for {target}", index, len(roots))
            _write_target(source, target, root, weights[target], digest, options)
        progress("compiled", len(roots), len(roots))
    return [options.out / target for target in roots]


def _open(options: BuildOptions) -> Source:
    scheme = Scheme.parse(options.quant, options.group_size)
    checkpoint = open_checkpoint(options.checkpoint)
    arch = architecture(checkpoint.config)
    config = arch.parse(checkpoint.config)
    params = arch.params(config)
    expected = {name: shape for param in params for name, shape in param.expected().items()}
    tied_copy = (r"lm_head\.weight",) if config.tied else ()
    check_tensors(checkpoint, expected, (*IGNORABLE, *tied_copy))
    matrices, report = choose_matrices(params, checkpoint, scheme)
    biases = frozenset(param.name for param in params if param.name.endswith(".bias"))
    model = Model(config, arch, matrices, biases, CacheLayout(config.context_length))
    return Source(checkpoint, config, params, model, scheme, report)


Streams = dict[str, tuple[list[ShardRecord], list[TensorRecord]]]


def _write_weights(source: Source, roots: dict[str, Path], progress: Progress) -> Streams:
    total = sum(entry.bytes for entry in source.checkpoint.entries.values())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("quantizing and packing weights" if source.scheme.bits else "packing weights", done, total)

    with ExitStack() as stack:
        writers = {target: stack.enter_context(ShardWriter(root)) for target, root in roots.items()}
        for writer in writers.values():
            writer.add(manifest.ROPE_WEIGHT, source.config.rope.inv_freq(source.config.head_dim))
        outputs = [(TARGETS[target].kernels(), writer) for target, writer in writers.items()]
        stream_weights(source.params, source.model.matrices, source.checkpoint, source.scheme, outputs, advance)
        return {target: writer.finish() for target, writer in writers.items()}


def _write_target(
    source: Source,
    name: str,
    root: Path,
    weights: tuple[list[ShardRecord], list[TensorRecord]],
    digest: str,
    options: BuildOptions,
) -> None:
    target, config = TARGETS[name], source.config
    shards, tensors = weights
    buffers = manifest.buffers(config, source.model.cache)
    context = emit.EmitContext(
        root=root,
        buffers={buffer["name"]: buffer for buffer in buffers},
        weights={tensor["name"]: tensor for tensor in tensors},
        cpu_features=options.cpu_features,
    )
    kernels = target.kernels()
    programs = []
    for precision in kernels.precisions:
        dump = options.dump_ir / name / precision if options.dump_ir is not None else None
        program = compile_program(source.model, kernels, precision, tvm.target.Target(target.tvm_target), dump)
        programs.append(target.emit(program, context))
    weight_bytes = sum(shard["bytes"] for shard in shards)
    checkpoint = source.checkpoint
    eos = _eos_token_ids(checkpoint, config)
    document = {
        "format": manifest.FORMAT,
        "version": manifest.VERSION,
        "target": name,
        "model": manifest.model_section(checkpoint.name, config, eos),
        "cache": {"page_size": source.model.cache.page_size, "slots": source.model.cache.slots},
        "rope": {"inv_freq": manifest.ROPE_WEIGHT, "scale": 1.0},
        "quantization": manifest.quantization_section(source.scheme, source.report),
        "weights": {"bytes": weight_bytes, "shard_bytes": SHARD_BYTES, "shards": shards, "tensors": tensors},
        "buffers": buffers,
        "programs": programs,
        "memory": manifest.memory_section(config, weight_bytes),
        "tokenizer": {"files": _write_tokenizer(checkpoint, root)},
        "license": _write_license(checkpoint, root),
        "provenance": manifest.provenance_section(checkpoint, digest),
    }
    (root / "manifest.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _eos_token_ids(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, ...]:
    """End tokens: generation_config.json's where it has them (chat models end turns with more than one), else config.json's."""
    generation = ConfigReader(checkpoint.generation_config)
    ids = config.eos_token_ids if generation.get("eos_token_id") is None else generation.token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _write_tokenizer(checkpoint: Checkpoint, root: Path) -> list[dict[str, Any]]:
    folder = root / "tokenizer"
    folder.mkdir()
    for file in checkpoint.tokenizer_files:
        (folder / file.name).write_bytes(file.read_bytes())
    template = checkpoint.chat_template
    if template is not None and not (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return [manifest.file_record(root, file) for file in sorted(folder.iterdir())]


def _write_license(checkpoint: Checkpoint, root: Path) -> str:
    text = checkpoint.license_text
    if text is None:
        return "not stated by the checkpoint"
    (root / "LICENSE").write_text(text, encoding="utf-8")
    return next((line.strip() for line in text.splitlines() if line.strip()), "see LICENSE")
