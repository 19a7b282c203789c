"""`nearfar build`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from nearfar.build.first_look import first_look
from nearfar.build.options import GROUP_SIZE, QUANT, QUANTIZED, BuildOptions, Quality
from nearfar.build.targets import target_names
from nearfar.cli.progress import Bars, importing, telling
from nearfar.errors import BuildError
from nearfar.paths import check_place

if TYPE_CHECKING:
    from nearfar.build.timings import Timings
    from nearfar.format.manifest import Quantization


@contextlib.contextmanager
def without(module: str) -> Iterator[None]:
    """Make imports in the block believe that an optional module is not installed."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


DEFAULTS = BuildOptions(checkpoint="", out=Path())
FEW_BITS = ("q2", "q3", "q4")
"""Schemes that lose much with least squares alone: 37 % of perplexity on SmolLM2-135M at q4
(docs/quality.md).
"""


def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face model, as a local directory or as a hub id such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct; or a GGUF file, as a path or as owner/name-GGUF:Q4_K_M. "
            f"Weights that are quantized already keep their codes, in these formats: {', '.join(QUANTIZED)}."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--output", "-o", help="The directory to write; each target gets a sub-directory.")
    ],
    target: Annotated[
        list[str],
        typer.Option(
            help="Targets to build for, separated by commas or as repeated options: "
            f"{', '.join(target_names())}."
        ),
    ] = list(DEFAULTS.targets),  # noqa: B006 (typer reads it, nobody changes it)
    quant: Annotated[
        str | None,
        typer.Option(
            help=f"Quantization of the weights: q2, q3, q4, q5, q6, q8 or none. Default: {QUANT}, or the "
            "quantization that the checkpoint has."
        ),
    ] = DEFAULTS.quant,
    requantize: Annotated[
        str | None,
        typer.Option(
            help="Quantize a quantized checkpoint again, instead of keeping its weights: q2, q3, q4, q5, q6, "
            "q8 or none. It costs accuracy."
        ),
    ] = DEFAULTS.requantize,
    group_size: Annotated[
        int | None,
        typer.Option(
            help=f"Weights that share a scale: 16, 32 (finer), 64 or 128 (smaller). Default: {GROUP_SIZE}."
        ),
    ] = DEFAULTS.group_size,
    quality: Annotated[
        str,
        typer.Option(
            help="How the codes are chosen. `fast` makes the squared error of the weights least. `good` "
            "makes the error of each matrix's outputs for a text least, input by input; it takes half a "
            "minute for a model of 135 million parameters. `best` also lets errors of several inputs cancel "
            "(GPTQ); it takes ten minutes (docs/quality.md)."
        ),
    ] = DEFAULTS.quality,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="A text file (UTF-8) for the calibration, which --quality good and best and a cache of 4 "
            "bits (--kv-bits) need. Default: the prose and documentation that come with nearfar."
        ),
    ] = DEFAULTS.calibrate,
    scales: Annotated[
        str | None,
        typer.Option(
            help="How scales of quantized matrices may be stored, separated by commas: `pairs` (a float16 "
            "scale and offset for each group), `single` (a scale alone, for half as many weights), `levels` "
            "(6 bits, for half as many weights). None takes more bytes than pairs. --quality good and best "
            "take the way with which a matrix loses least; fast takes the first that fits. Default: pairs "
            "with fast, else all that every target has (docs/quality.md)."
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            help="Mean bits of a weight, scales included, such as 4.5. Each matrix gets bits of its own, "
            "more where errors cost most. Needs --quality good or best."
        ),
    ] = DEFAULTS.bits,
    fit: Annotated[
        str | None,
        typer.Option(help="Like --bits, but with the size of all weights, such as 700MB."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most tokens of prompt and answer. Default: the context length of the model. A model "
            "with LongRoPE gets its short factors alone if this is at most its original context length.",
        ),
    ] = DEFAULTS.context,
    cpu: Annotated[
        list[str],
        typer.Option(
            help="cpu: platforms to compile for, separated by commas or as repeated options: "
            "x86_64-linux, aarch64-linux, aarch64-macos, x86_64-macos, x86_64-windows, aarch64-windows, "
            "aarch64-android, or `host`. All platforms share the weights."
        ),
    ] = list(DEFAULTS.cpu),  # noqa: B006
    cpu_features: Annotated[
        list[str],
        typer.Option(
            help="cpu: vector units to compile for, separated by commas: `native` for this machine's "
            "instructions, `baseline` for any machine of the platform, or names such as avx2, avx512, "
            "dotprod. Default: a program for each kind of processor; a machine takes the best one that it "
            "can run."
        ),
    ] = list(DEFAULTS.cpu_features),  # noqa: B006
    dump_ir: Annotated[
        Path | None, typer.Option(help="Write the module after each compiler pass into this directory.")
    ] = None,
    device_class: Annotated[
        list[str],
        typer.Option(
            help="webgpu, vulkan: device classes to compile for, separated by commas or as repeated options; "
            "a device takes the program that suits it. Fewer classes make the artifact smaller; "
            "other devices still run it, but slower. `software` is for software GPUs."
        ),
    ] = list(DEFAULTS.device_classes),  # noqa: B006
    products: Annotated[
        list[str] | None,
        typer.Option(
            help="webgpu, vulkan: how prefill multiplies activations, separated by commas. `float`: "
            "unchanged. `int8`: also programs that round them to 8 bits, with a scale for each 32, for GPUs "
            "with packed integer products; a device takes such a program where it is quicker. It costs "
            "accuracy (docs/decisions/0017 has measurements), and answers are no longer those of the float "
            "programs. `cooperative` (vulkan): also a program that multiplies tiles of float16, for cards "
            "with cooperative matrices of 16 by 16. Default: float, and cooperative if there is such a "
            "program."
        ),
    ] = None,
    kv_bits: Annotated[
        list[str],
        typer.Option(
            help="cpu, wasm, webgpu, vulkan: KV caches to compile for, as bits of a value, separated by "
            "commas: 16 for floats, 8 and 4 for codes, which take about a half and a third of the memory. 8 "
            "bits cost no measurable quality, 4 bits cost small models some, and need calibration "
            "(--calibrate). `nearfar run --kv-bits` takes one of them. An mlx artifact quantizes its cache "
            "when it is loaded, and onnx has floats alone."
        ),
    ] = list(map(str, DEFAULTS.kv_bits)),  # noqa: B006, B008
    adapter: Annotated[
        str | None,
        typer.Option(
            help="A LoRA adapter that peft has saved, a folder or a hub id, which is merged into the model. "
            "An adapter alone, in place of the model, is merged into the model that it names.",
        ),
    ] = DEFAULTS.adapter,
    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings",
            help="Build a model that gives embeddings instead of text: the last token's state, normalized. "
            "Checkpoints that sentence-transformers saved do not need this option.",
        ),
    ] = False,
    export_function: Annotated[
        bool,
        typer.Option("--export-function", help="mlx: also write the step as a function (see docs/mac.md)."),
    ] = DEFAULTS.export_function,
    kernel_cache: Annotated[
        bool,
        typer.Option(
            "--kernel-cache/--no-kernel-cache",
            help="Reuse compiled programs of earlier builds with the same model shapes, options and nearfar "
            "(for cpu and wasm also single kernels of other programs), and store new ones, in the user's "
            "cache folder or in $NEARFAR_KERNEL_CACHE. The artifact is the same either way.",
        ),
    ] = DEFAULTS.kernel_cache,
    kernel_figures: Annotated[
        bool,
        typer.Option(
            "--kernel-figures",
            help="webgpu, vulkan: also compute figures of each kernel for `nearfar inspect --kernels`: "
            "threads, bytes in flight, registers and more. It makes a build slower.",
        ),
    ] = DEFAULTS.kernel_figures,
) -> None:
    """Compile a checkpoint into one artifact per device target.

    Example: `nearfar build ./SmolLM2-135M-Instruct --target cpu,webgpu --quant q4 -o out/smollm2`
    then `nearfar run out/smollm2 "Why is the sky blue?"` or `nearfar web out/smollm2`.
    """
    targets = _names(target)
    if export_function and "mlx" not in targets:
        raise BuildError(
            f"--export-function is for target mlx, and --target is {','.join(targets)}: add mlx, or leave "
            "out --export-function"
        )
    check_place(out)
    first_look(checkpoint, context, embeddings, adapter)
    with importing("the compiler"):
        from nearfar.edge_runtime.artifact.budget import parse_size
    options = BuildOptions(
        checkpoint=checkpoint,
        out=out,
        targets=targets,
        quant=quant,
        group_size=group_size,
        requantize=requantize,
        cpu=_names(cpu),
        cpu_features=_names(cpu_features),
        context=context,
        dump_ir=dump_ir,
        export_function=export_function,
        device_classes=_names(device_class),
        products=None if products is None else _names(products),
        kv_bits=_bits(kv_bits),
        embeddings=embeddings,
        quality=cast(Quality, quality),  # the value is checked where the checkpoint is known
        calibrate=calibrate,
        scales=None if scales is None else _names([scales]),
        bits=bits,
        fit=None if fit is None else parse_size(fit, "--fit"),
        kernel_cache=kernel_cache,
        kernel_figures=kernel_figures,
        adapter=adapter,
    )
    console = Console(stderr=True)
    made = build_shown(options, console)
    for path in made:
        console.print(f"[green]built[/] {path}", highlight=False)
    from nearfar.cli.carried import lines_by_target
    from nearfar.edge_runtime.artifact.reader import Artifact

    artifacts = [Artifact.open(path) for path in made]
    artifact = artifacts[0]
    for line in lines_by_target({each.manifest.target: each.data["quantization"] for each in artifacts}):
        console.print(line, highlight=False)
    if skipped := artifact.manifest.provenance.get("skipped"):
        parts = ", ".join(f"{part} ({count} tensors)" for part, count in skipped.items())
        console.print(f"left out: {parts}; only the text model is built", highlight=False)
    if _could_be_better(options, artifact.manifest.quantization):
        console.print(
            "For better answers at the same size, build with --quality good (docs/quality.md).",
            highlight=False,
        )
    console.print(f"next: nearfar inspect {made[0]}", highlight=False)


def _could_be_better(options: BuildOptions, made: Quantization) -> bool:
    """Whether a calibration could have found better codes: the codes have few bits, and none were carried
    over.
    """
    from nearfar.build.weights.quantize import METHOD

    return options.quality == "fast" and made.scheme in FEW_BITS and made.method.startswith(METHOD)


def build_shown(options: BuildOptions, console: Console) -> list[Path]:
    """Build, with progress bars on a terminal and a line with the times; gives the artifacts."""
    # TVM imports PyTorch where it is installed, for features that a build does not use: half of the start-up
    # time, and 0.2 GB.
    with importing("the compiler"), without("torch"):
        from nearfar.build.pipeline import Timings
        from nearfar.build.pipeline import build as run_build
    timings = Timings()
    with Bars(console) as bars:
        made = run_build(options, bars.report, timings, telling(console))
    for line in _timing_lines(timings):
        console.print(line, highlight=False)
    return made


def _names(given: Sequence[str]) -> tuple[str, ...]:
    """Split names that are separated by commas or given one by one; duplicates are dropped."""
    named = (name.strip() for part in given for name in part.split(","))
    return tuple(dict.fromkeys(name for name in named if name))


def _bits(given: Sequence[str]) -> tuple[int, ...]:
    """Parse numbers of bits; duplicates are dropped."""
    try:
        return tuple(int(name) for name in _names(given))
    except ValueError as error:
        raise BuildError(f"--kv-bits takes numbers separated by commas, not {','.join(given)!r}") from error


def _timing_lines(timings: Timings) -> list[str]:
    """Lines that say where the kernels came from, and how long each phase took."""
    kernels = timings.seconds.get("kernels", 0.0)
    lines = [f"kernels: {timings.kept} kept, {timings.compiled} compiled, {kernels:.1f} s"]
    parts = [f"{name} {seconds:.1f} s" for name, seconds in timings.listed() if seconds >= 0.05]
    return [*(lines if timings.kept or timings.compiled else []), f"time: {', '.join(parts)}"]
