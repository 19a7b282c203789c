"""nearfar's own quantization, as `nearfar build` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nearfar.build.calibration.quality import refined, with_storable
from nearfar.build.calibration.text import calibration_text
from nearfar.build.options import BuildOptions, Quality
from nearfar.build.source import open_source
from nearfar.build.targets import target_of
from nearfar.build.weights.quantize import Scheme, dequantize, quantize
from peers.quantized import Quantized


def make(
    model: Path,
    text: Path,
    quality: Quality,
    group: int,
    quant: str | None = None,
    bits: float | None = None,
    fit: int | None = None,
    scales: Sequence[str] | None = None,
) -> Quantized:
    """Quantize with nearfar for cpu, with `--quality`, `--group-size`, `--scales`, and one of `--quant`,
    `--bits` and `fit`, here bytes of the matrices.
    """
    options = BuildOptions(
        str(model), Path(), ("cpu",), quant=quant, group_size=group, quality=quality, bits=bits,
        calibrate=None if quality == "fast" else text, scales=None if scales is None else tuple(scales),
    )  # fmt: skip
    if fit is not None:  # --fit is for vectors as well
        opened = open_source(replace(options, quant="q4"))
        fit += sum(opened.bytes_of(param) for param in opened.params if not param.is_matrix)
        options = replace(options, fit=fit)
    source = with_storable(options, open_source(options), {"cpu": target_of("cpu").held})
    read = calibration_text(options, source)
    source, solved = refined(options, source, read, lambda stage, done, total: None)
    weights, size = {}, 0
    for param in source.params:
        if not param.is_matrix:
            continue
        matrix = source.matrices[param.name]
        size += matrix.bytes
        if not matrix.quantized:
            continue
        for name in param.tensors:
            stored = (
                solved[name]
                if solved is not None and name in solved
                else quantize(
                    source.checkpoint.read(name), Scheme(matrix.bits, matrix.group, matrix.scales), name
                )
            )
            weights[name] = dequantize(stored, matrix.group, matrix.scales)
    return Quantized(weights, size)
