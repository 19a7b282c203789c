"""What `--quality` asks for: checked before anything is read, done before the weights are streamed."""

from __future__ import annotations

from collections.abc import Callable

from nearfar.build.calibration.solve import solve
from nearfar.build.calibration.text import read_text
from nearfar.build.source import QUALITIES, BuildOptions, Source
from nearfar.build.weights.quantize import METHOD
from nearfar.build.weights.solved import Solved
from nearfar.errors import BuildError

METHODS = {
    "good": f"{METHOD}, weighted by the moments of the inputs",
    "best": f"GPTQ with static groups of {METHOD}, weighted by the moments of the inputs, and refitted",
}


def check_quality(options: BuildOptions, source: Source) -> None:
    """BuildError where the options do not go together, or the checkpoint has codes that are kept."""
    if options.quality not in QUALITIES:
        raise BuildError(f"unknown quality {options.quality!r}: use {', '.join(QUALITIES)}")
    if options.quality == "fast":
        if options.calibrate is not None:
            raise BuildError(
                f"--calibrate {options.calibrate} is a text for --quality good or best: add one of them, or "
                "leave it out"
            )
        return
    if source.keeps:
        kept = source.packed.name if source.packed is not None else ""
        raise BuildError(
            f"--quality {options.quality} looks for codes, and those of {options.checkpoint} ({kept}) are "
            f"kept: leave it out, or quantize anew with --requantize {source.scheme.name}"
        )
    if not source.scheme.bits:
        raise BuildError(
            f"--quality {options.quality} is about quantized weights, and none are asked for: leave it out, "
            "or say --quant q4"
        )


def solve_for(
    options: BuildOptions, source: Source, progress: Callable[[str, int, int], None]
) -> Solved | None:
    """The matrices as the quality asked for has them, None where they are quantized as they are streamed; the
    source's report says how it was done.
    """
    if options.quality == "fast":
        return None
    text = read_text(options.calibrate, source.checkpoint, source.model)
    solved = solve(
        source, options.quality, text, lambda done, total: progress("calibrating and quantizing", done, total)
    )
    source.report.method = f"{METHODS[options.quality]}; {text.description}"
    return solved
