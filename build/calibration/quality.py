"""Carries out `--quality`: options are checked before the checkpoint is read, matrices quantized before the
weights are streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from nearfar.build.calibration.allocation import allocated
from nearfar.build.calibration.chosen import LEAST, whole
from nearfar.build.calibration.solve import least_way, solve
from nearfar.build.calibration.text import MOST_WINDOWS, CalibrationText
from nearfar.build.options import QUALITIES, BuildOptions, Quality
from nearfar.build.source import Source
from nearfar.build.weights.quantize import METHOD, Scheme
from nearfar.build.weights.solved import Solved
from nearfar.build.weights.ways import first_of, storable
from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.errors import BuildError
from nearfar.format.scales import CODE_BITS
from nearfar.kernels.quantized import StorableMatrices

METHODS = {
    "good": f"{METHOD}, weighted by the moments of the inputs",
    "best": f"GPTQ with static groups of {METHOD}, weighted by the moments of the inputs, and refitted",
}

WINDOWS: dict[Quality, int] = {"good": 16, "best": MOST_WINDOWS}
"""Windows of the calibration text for each quality, taken evenly from all of it. The mean of an input's
squares is known after a few thousand tokens (docs/quality.md); the moments of pairs of inputs need more.
"""


def check_quality(options: BuildOptions, source: Source) -> None:
    """Raise BuildError where the options exclude each other, or the checkpoint has codes that are kept."""
    _check_scales(options, source)
    if options.quality not in QUALITIES:
        raise BuildError(f"unknown quality {options.quality!r}: use {', '.join(QUALITIES)}")
    _check_size(options, source)
    if options.quality == "fast":
        if options.calibrate is not None and not options.rounds_keys:
            raise BuildError(
                f"--calibrate {options.calibrate} is a text for --quality good or best, or for a cache of 4 "
                "bits (--kv-bits): add one of them, or leave it out"
            )
        return
    asked, kept = f"--quality {options.quality}", _kept(options, source)
    _check_quantizes(source, asked, f"chooses codes, but the codes of {kept} are kept")


def _check_scales(options: BuildOptions, source: Source) -> None:
    """Reject --scales where nothing is quantized."""
    if options.scales is None:
        return
    asked, kept = f"--scales {','.join(options.scales)}", _kept(options, source)
    _check_quantizes(source, asked, f"chooses how scales are stored, but {kept} keeps its codes and scales")


def _kept(options: BuildOptions, source: Source) -> str:
    """The checkpoint with the name of its quantization, as messages call it."""
    return f"{options.checkpoint} ({source.quantized.name if source.quantized is not None else ''})"


def _check_quantizes(source: Source, asked: str, why: str, also: str = "") -> None:
    """Raise BuildError where a build quantizes nothing. `asked`: an option with its value that chooses how to
    quantize; `why`: what it does, and that the checkpoint's codes are kept; `also`: what it needs in addition
    to --requantize.
    """
    option = asked.partition(" ")[0]
    if source.keeps:
        raise BuildError(
            f"{asked} {why}: leave {option} out, or quantize them again with --requantize "
            f"{source.scheme.name}{also}"
        )
    if not source.scheme.bits:
        raise BuildError(
            f"{asked} is for quantized weights, and these are not to be quantized: leave {option} out, or "
            "use --quant q4"
        )


def with_storable(options: BuildOptions, source: Source, held: Mapping[str, StorableMatrices]) -> Source:
    """Give the source the ways of storing scales that a build may choose from: those of `--scales`, or all
    that every target has (`held`, by their names); with quality fast float16 pairs unless asked otherwise.

    With quality fast, which measures nothing, each matrix gets the first way of `--scales` that fits its
    width. Raises BuildError for an unknown way, and for one that a target lacks.
    """
    if options.scales is None and (options.quality == "fast" or source.keeps):
        return source
    source = replace(source, storable=storable(options.scales, held))
    if options.quality != "fast" or options.scales is None:
        return source
    chosen = {
        name: first_of(options.scales, Scheme(matrix.bits, matrix.group), matrix.k, source.storable)
        for name, matrix in source.matrices.items()
        if matrix.quantized
    }
    return source.stored_as(chosen)


def _check_size(options: BuildOptions, source: Source) -> None:
    """Reject a size that is given in two ways, for codes that are kept, or with a quality that measures
    nothing.
    """
    given = [f"--bits {options.bits:g}"] if options.bits is not None else []
    given += [f"--fit {show_size(options.fit)}"] if options.fit is not None else []
    if not given:
        return
    if len(given) > 1:
        raise BuildError(f"{' and '.join(given)} are two sizes: leave one of them out")
    if source.keeps:
        why = f"chooses bits, but the codes of {_kept(options, source)} are kept"
        _check_quantizes(source, given[0], why, " --quality best")
    if options.quality == "fast":
        raise BuildError(f"{given[0]} needs to measure what each matrix loses: add --quality best, or good")
    if options.quant is not None:
        raise BuildError(
            f"--quant {options.quant} says the bits of every matrix, and {given[0]} what they have together: "
            "leave one out"
        )
    if options.bits is not None and not min(CODE_BITS) <= options.bits <= max(CODE_BITS) + 1:
        raise BuildError(
            f"--bits must be between {min(CODE_BITS)} and {max(CODE_BITS) + 1}, not {options.bits:g}"
        )


def _experts(options: BuildOptions, solved: Solved) -> str:
    """What was done with the matrices of experts, as the end of a sentence; empty where there are none."""
    if not solved.experts:
        return ""
    method = f"; experts: {METHODS['good']}" if options.quality == "best" else ""
    few = (
        f"; {solved.seldom:,} of {solved.experts:,} matrices of experts with equal weights, since fewer than "
        f"{LEAST} tokens of the text choose them"
    )
    return method + (few if solved.seldom else "")


def refined(
    options: BuildOptions,
    source: Source,
    text: Callable[[], CalibrationText],
    progress: Callable[[str, int, int], None],
) -> tuple[Source, Solved | None]:
    """Choose bits where a size is given, and quantize the matrices as the quality says.

    Gives the source and the quantized matrices; None in place of these where the matrices are quantized as
    they are streamed. The source's report says how it was done.
    """
    if options.quality == "fast":
        return source, None
    seen = text()
    if options.bits is not None or options.fit is not None:
        source = allocated(
            source,
            seen,
            options.bits,
            options.fit,
            lambda done, total: progress("measuring what each matrix loses", done, total),
        )
    seen = seen.part(WINDOWS[options.quality])
    source, solved = solve(
        source, options.quality, seen, lambda done, total: progress("calibrating and quantizing", done, total)
    )
    source.report.method = f"{METHODS[options.quality]}; {seen.description}{_experts(options, solved)}"
    return _tables(source, solved), solved


def _tables(source: Source, solved: Solved) -> Source:
    """Choose the way of storing scales of matrices that are only looked up: the one that loses least with
    equal weights for all inputs.
    """
    chosen = {}
    for param in source.params:
        matrix = source.matrices.get(param.name)
        if matrix is None or not matrix.quantized or any(name in solved for name in param.tensors):
            continue
        chosen[param.name] = least_way(source, param, whole(param, None))
    return source.stored_as(chosen)
