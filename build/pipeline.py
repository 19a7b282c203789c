"""`nearfar build`: one checkpoint in, one artifact per target out."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from nearfar.build import manifest
from nearfar.build.bundle_files import write_bundle_files
from nearfar.build.calibration.keys import with_rounding
from nearfar.build.calibration.quality import check_quality, refined, with_storable
from nearfar.build.calibration.text import calibration_text
from nearfar.build.meanwhile import BuildProgress, Stages, meanwhile
from nearfar.build.options import BuildOptions
from nearfar.build.output import output_directory
from nearfar.build.source import Source, open_source
from nearfar.build.targets import target_names, target_of
from nearfar.build.targets.target import Made, Target
from nearfar.build.timings import Timings
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.solved import Solved
from nearfar.build.weights.stream import WeightStream
from nearfar.edge_runtime.artifact import trust
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import ArtifactError, BuildError
from nearfar.format.adapters import DEVICE_CLASSES
from nearfar.format.kv import OF_BITS
from nearfar.format.manifest import FORMAT, File, Manifest, TokenizerFiles, Weights
from nearfar.format.manifest_file import document
from nearfar.format.scales import VALUE_BITS
from nearfar.format.seal import seal
from nearfar.interruptible import Stopped
from nearfar.kernels.contract import PRODUCTS
from nearfar.kernels.quantized import StorableMatrices
from nearfar.room import lacking

__all__ = ["BuildOptions", "BuildProgress", "Timings", "build"]


def build(
    options: BuildOptions,
    progress: BuildProgress = lambda stage, done, total: None,
    timings: Timings | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Build all targets and give their directories. A target appears in `out` only when it is complete.

    `timings` gets the seconds of each phase. `tell` gets lines for the user: settings that were read in an
    unexpected way, and weights that a target does not store as the checkpoint has them.
    """
    timings = Timings() if timings is None else timings
    unknown = [target for target in options.targets if target not in target_names()]
    if unknown or not options.targets:
        raise BuildError(
            f"unknown target {', '.join(unknown) or '(none)'}; known: {', '.join(target_names())}"
        )
    strange = [name for name in options.device_classes if name not in DEVICE_CLASSES]
    if strange or not options.device_classes:
        raise BuildError(
            f"unknown device class {', '.join(strange) or '(none)'}; known: {', '.join(DEVICE_CLASSES)}"
        )
    strange = [name for name in options.multiplied_as if name not in PRODUCTS]
    if strange or not options.multiplied_as:
        raise BuildError(f"unknown products {', '.join(strange) or '(none)'}; known: {', '.join(PRODUCTS)}")
    unknown_bits = [str(bits) for bits in options.kv_bits if bits not in OF_BITS]
    if unknown_bits or not options.kv_bits:
        raise BuildError(
            f"unknown --kv-bits {', '.join(unknown_bits) or '(none)'}; known: {', '.join(map(str, OF_BITS))}"
        )
    with timings.phase("open"):
        source = open_source(options)
        check_quality(options, source)
    targets = {name: target_of(name) for name in dict.fromkeys(options.targets)}
    source = with_storable(options, source, {name: target.held for name, target in targets.items()})
    sources = _by_target(source, targets)
    for name, target in targets.items():
        target.check(sources[name], options)
    made_as = {products for target in targets.values() for products in target.products(options)}
    if lacking := [products for products in options.products or () if products not in made_as]:
        raise BuildError(
            f"no program of {', '.join(targets)} for class {', '.join(options.device_classes)} has products "
            f"of {', '.join(lacking)}: leave that out of --products, or add a target or class (nearfar build "
            "--help)"
        )
    _check_room(sources, options)
    for line in (*source.notes, *_made_anew(sources), *_made_wider(source, sources)):
        tell(line)
    with ExitStack() as stack:
        roots = {name: stack.enter_context(output_directory(options.out / name)) for name in targets}
        with timings.phase("calibrate"):
            text = calibration_text(options, source)
            source, solved = refined(options, source, text, progress)
            source = with_rounding(options, source, text, solved, progress)
            sources = _by_target(source, targets)
        stages = Stages(progress)

        def write(stop: threading.Event) -> tuple[dict[str, Weights], str]:
            with timings.phase("weights"):
                return _write_weights(sources, solved, targets, roots, options, stages.beside, stop)

        programs = {}
        with meanwhile(write) as written:
            for name, target in targets.items():
                tell_kernels = functools.partial(stages.report, f"compiling kernels for {name}")
                with timings.phase("kernels"):
                    programs[name] = target.compile(sources[name], options, tell_kernels)
                timings.count(programs[name].kernels)
            weights, digest = written()
        for index, (name, target) in enumerate(targets.items()):
            progress(f"checking {name}", index, len(targets))
            with timings.phase("check"):
                made = target.finish(sources[name], roots[name], weights[name], programs[name], options)
                rounds = options.rounds_keys_of(name)
                _write_manifest(sources[name], name, roots[name], weights[name], made, digest, rounds)
                _check(roots[name])
        progress("artifacts built", len(targets), len(targets))
    paths = [options.out / name for name in targets]
    for path in paths:
        trust.remember(path)
    return paths


def _by_target(source: Source, targets: Mapping[str, Target]) -> dict[str, Source]:
    """The source as each target stores it; targets that can store the same share one object."""
    found: dict[StorableMatrices, Source] = {}
    for name, target in targets.items():
        if target.held not in found:
            found[target.held] = source.held_by(name, target.held)
    return {name: found[target.held] for name, target in targets.items()}


def _made_anew(sources: Mapping[str, Source]) -> Iterator[str]:
    """Yield a line for each set of targets that requantize some of the checkpoint's codes."""
    for names, source in _alike(sources):
        parts = [
            f"{was} becomes {becomes} ({count} {'tensor' if count == 1 else 'tensors'})"
            for (was, becomes), count in source.report.anew.items()
        ]
        if parts:
            kept = "; all else keeps its codes" if source.keeps else ""
            yield f"weights for {', '.join(names)}: {', '.join(parts)}{kept}"


def _made_wider(source: Source, sources: Mapping[str, Source]) -> Iterator[str]:
    """Yield a line for each set of targets that store the values of a table in place of its codes."""
    tabled = _with_tables(source)
    for names, stored in _alike(sources):
        if wide := len(tabled - _with_tables(stored)):
            what = "1 matrix takes" if wide == 1 else f"{wide:,} matrices take"
            yield (
                f"{what} {VALUE_BITS} bits a weight for {', '.join(names)}, because kernels there have no "
                "tables for the checkpoint's codes: build with --requantize q4 for small ones, at a loss"
            )


def _with_tables(source: Source) -> set[str]:
    """The matrices whose codes stand for the values of a table."""
    return {
        name
        for name, matrix in source.matrices.items()
        if any(piece.scales.table for piece in matrix.pieces or (matrix,))
    }


def _alike(sources: Mapping[str, Source]) -> list[tuple[list[str], Source]]:
    """Sets of targets that store the weights alike, each with the source that they store."""
    found: dict[int, tuple[list[str], Source]] = {}
    for name, source in sources.items():
        found.setdefault(id(source), ([], source))[0].append(name)
    return list(found.values())


def _check_room(sources: Mapping[str, Source], options: BuildOptions) -> None:
    """Raise BuildError, before anything is computed, where the disk has no room for the weights of all
    targets.

    An artifact that is to be replaced stays until its successor is complete. Kernels and tokenizers are small
    compared with weights.
    """
    total = sum(source.bytes_of(param) for source in sources.values() for param in source.params)
    if lack := lacking(options.out, total):
        (name, *_) = {source.checkpoint.name for source in sources.values()}
        raise BuildError(
            f"building {name} for {', '.join(sources)} {lack}: free some space, build for "
            "fewer targets or with fewer bits, or choose another output directory (NEARFAR_HOME: the store's)"
        )


def _write_weights(
    sources: Mapping[str, Source],
    solved: Solved | None,
    targets: Mapping[str, Target],
    roots: Mapping[str, Path],
    options: BuildOptions,
    progress: BuildProgress,
    stop: threading.Event,
) -> tuple[dict[str, Weights], str]:
    """Stream the weights into all targets, once for those that store them alike.

    Gives each target's `weights` section of the manifest, and the checkpoint's SHA-256. Raises Stopped where
    `stop` is set.
    """
    alike = _alike(sources)
    source = alike[0][1]
    total = len(alike) * sum(entry.bytes for entry in source.checkpoint.entries.values())
    quantizes = source.scheme.bits and not source.keeps and solved is None
    stage = "quantizing and packing weights" if quantizes else "packing weights"
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        if stop.is_set():
            raise Stopped
        done += count
        progress(stage, done, total)

    # The checkpoint is hashed while the stream reads it, so that both find it in the system's cache.
    with ThreadPoolExecutor(1) as hasher, ExitStack() as stack:
        stack.callback(stop.set)
        digest = hasher.submit(source.checkpoint.sha256, stop)
        writers = {
            name: stack.enter_context(target.writer(sources[name], roots[name], options))
            for name, target in targets.items()
        }
        for names, each in alike:
            stream = WeightStream(
                each.params, each.matrices, each.checkpoint, each.quantized, each.keeps, each.report, solved
            )
            stream.write([writers[name] for name in names], advance)
        return {name: writer.finish() for name, writer in writers.items()}, digest.result()


def _write_manifest(
    source: Source, name: str, root: Path, weights: Weights, made: Made, digest: str, rounds_keys: bool
) -> None:
    """Write the manifest, as the last file. `rounds_keys`: whether programs round keys by the calibration."""
    checkpoint, model = source.checkpoint, source.model
    tokenizer = tuple(File.of(root, file) for file in made.tokenizer)
    record = Manifest(
        format=FORMAT,
        version=manifest.version(source.matrices),
        target=name,
        model=manifest.model_record(checkpoint.name, model),
        cache=manifest.CACHE,
        groups=manifest.groups(model.step),
        caches=manifest.caches(model.step),
        ropes=made.ropes,
        step=manifest.step_records(model.step),
        quantization=manifest.quantization(source.scheme.name, source.matrices, source.report),
        weights=weights,
        buffers=manifest.buffers(model),
        programs=made.programs,
        tokenizer=TokenizerFiles(tokenizer),
        config=made.config,
        function=made.function,
        packs=write_bundle_files(root, tokenizer, made.programs) if made.bundled else (),
        license=_write_license(checkpoint, root),
        answers=source.answers,
        sampling=source.sampling,
        provenance=manifest.provenance(checkpoint, digest, source.report, keys=rounds_keys),
    )
    (root / "manifest.json").write_bytes(seal(document(record)).encode())


def _check(root: Path) -> None:
    """Open the artifact as a runtime does, before it is moved into place."""
    try:
        artifact = Artifact.open(root)
        artifact.verify()
        TextCodec.open(artifact)
    except ArtifactError as error:
        raise BuildError(
            f"the build wrote an artifact that its own reader rejects, please report it: {error}"
        ) from error


def _write_license(checkpoint: Checkpoint, root: Path) -> str:
    text = checkpoint.license_text
    if text is None:
        return "not stated by the checkpoint"
    (root / "LICENSE").write_text(text, encoding="utf-8")
    return next((line.strip() for line in text.splitlines() if line.strip()), "see LICENSE")
