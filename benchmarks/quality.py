"""Perplexity of the project's quantization, by --quality and with mixed bits (--bits), against MLX's
(mx.quantize, as mlx_lm.convert -q), at the same size.

Every model runs as its dequantized weights in transformers, float32, over windows of 512 tokens without BOS.

    python benchmarks/quality.py [--model DIR] [--text FILE] [--limit-windows N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nearfar.build.calibration.quality import refined
from nearfar.build.source import BuildOptions, Quality, open_source
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.containers import open_checkpoint
from nearfar.build.weights.quantize import Scheme, dequantize, quantize, to_float32
from nearfar.targets.quantized import QuantTensor

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WINDOW = 512
SCHEMES = "q8g64,q4g32,q4g64,q3g32,q3g64,q2g32,q2g64"

Weights = dict[str, np.ndarray]


def ours(checkpoint: Checkpoint, scheme: Scheme) -> Weights:
    """Dequantized matrices of `--quality fast`; those whose width does not fit stay as they are."""
    found = {}
    for name, shape in checkpoint.shapes.items():
        if len(shape) == 2 and scheme.fits(shape[1]):
            found[name] = dequantize(quantize(checkpoint.read(name), scheme, name), scheme.group_size)
    return found


def calibrated(quality: Quality, mixed: bool = False) -> Callable[[Checkpoint, Scheme], Weights]:
    """The same by `--quality good` or `best`, with the text that comes with nearfar. `mixed`: bits for each
    matrix, all of them together as large as with the scheme's.
    """

    def found(checkpoint: Checkpoint, scheme: Scheme) -> Weights:
        options = BuildOptions(
            str(checkpoint.path),
            Path(),
            ("cpu",),
            quant=None if mixed else scheme.name,
            group_size=scheme.group_size,
            quality=quality,
            bits=scheme.bits + 32 / scheme.group_size if mixed else None,
        )
        source, solved = refined(options, open_source(options), lambda stage, done, total: None)
        assert solved is not None
        made: Weights = {}
        for param in source.params:
            if param.name not in source.matrices or not source.matrices[param.name].quantized:
                continue
            matrix = source.matrices[param.name]
            for name in param.tensors:
                codes = solved[name] if name in solved else _fast(checkpoint, name, matrix.bits, matrix.group)
                made[name] = dequantize(codes, matrix.group)
        return made

    return found


def _fast(checkpoint: Checkpoint, name: str, bits: int, group: int) -> QuantTensor:
    return quantize(checkpoint.read(name), Scheme(bits, group), name)


def mlx(checkpoint: Checkpoint, scheme: Scheme) -> Weights:
    """Dequantized matrices of MLX's own quantizer, which `mlx_lm.convert -q` calls, on float16 weights:
    the same size as ours.
    """
    import mlx.core as mx

    found = {}
    for name, shape in checkpoint.shapes.items():
        if len(shape) == 2 and scheme.fits(shape[1]):
            weight = mx.array(to_float32(checkpoint.read(name))).astype(mx.float16)
            parts = mx.quantize(weight, group_size=scheme.group_size, bits=scheme.bits)
            # in float32, as ours: the format's own error without that of float16 arithmetic
            packed, scales, biases = parts
            wide = mx.dequantize(
                packed,
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                group_size=scheme.group_size,
                bits=scheme.bits,
            )
            found[name] = np.array(wide)
    return found


def windows(checkpoint: Checkpoint, text: Path, limit: int | None) -> list[torch.Tensor]:
    """The text as token windows [1, WINDOW]; the last may be shorter."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    return [window for window in ids.split(WINDOW, dim=1) if window.shape[1] > 1][:limit]


@torch.no_grad()
def perplexity(model: PreTrainedModel, parts: list[torch.Tensor]) -> float:
    """Give exp of the mean negative log-likelihood of every token but each window's first."""
    total, count = 0.0, 0
    for part in parts:
        logits = model(part).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, part[0, 1:], reduction="sum").item()
        count += part.shape[1] - 1
    return math.exp(total / count)


def with_weights(model: PreTrainedModel, weights: Weights) -> None:
    """Put the matrices into the model (tied ones go in through the embedding)."""
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        parameters[name].data.copy_(torch.from_numpy(value))


def squared_error(checkpoint: Checkpoint, weights: Weights) -> float:
    """Sum of squared differences to the checkpoint over all quantized matrices."""
    return sum(
        float(((to_float32(checkpoint.read(name)) - value) ** 2).sum()) for name, value in weights.items()
    )


def measure(
    checkpoint: Checkpoint, parts: list[torch.Tensor], schemes: list[Scheme]
) -> Iterator[dict[str, object]]:
    """A record a configuration: quantizer, scheme, perplexity, squared error."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    yield {"by": "checkpoint", "scheme": "f32", "group": None, "bits": 32.0,
           "perplexity": perplexity(model, parts), "error": 0.0}  # fmt: skip
    makers: list[tuple[str, Callable[[Checkpoint, Scheme], Weights]]] = [
        ("fast", ours), ("good", calibrated("good")), ("best", calibrated("best")),
        ("mixed", calibrated("best", mixed=True)), ("mlx", mlx),
    ]  # fmt: skip
    for scheme in track(schemes, "measuring", console=Console(stderr=True), transient=True):
        for by, make in makers:
            weights = make(checkpoint, scheme)
            with_weights(model, weights)
            yield {
                "by": by,
                "scheme": scheme.name,
                "group": scheme.group_size,
                "bits": scheme.bits + 32 / scheme.group_size,
                "perplexity": perplexity(model, parts),
                "error": squared_error(checkpoint, weights),
            }


def named(text: str) -> tuple[str, int]:
    """q4g64 as the arguments of Scheme.parse."""
    scheme, _, group = text.partition("g")
    return scheme, int(group)


def main() -> None:
    """Measure, show, and write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DATA / "models" / "classics-7M")
    parser.add_argument("--text", type=Path, default=DATA / "text" / "heldout.txt")
    parser.add_argument("--schemes", default=SCHEMES, help="bits and group sizes, by default %(default)s")
    parser.add_argument("--limit-windows", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    parts = windows(checkpoint, options.text, options.limit_windows)
    schemes = [Scheme.parse(*named(text)) for text in options.schemes.split(",")]
    records = list(measure(checkpoint, parts, schemes))
    base = float(str(records[0]["perplexity"]))
    table = Table(title=f"{checkpoint.name}, {len(parts)} windows of {WINDOW} tokens")
    for heading in ("scheme", "group", "bits a weight", "by", "perplexity", "over f32", "squared error"):
        table.add_column(heading, justify="right")
    for record in records:
        value = float(str(record["perplexity"]))
        group = str(record["group"] or "")
        over = f"{100 * (value / base - 1):+.3f} %"
        error = f"{record['error']:.4f}"
        table.add_row(
            str(record["scheme"]), group, str(record["bits"]), str(record["by"]), f"{value:.4f}", over, error
        )
    Console().print(table)
    if options.json:
        report = {"model": checkpoint.name, "windows": len(parts), "window": WINDOW, "results": records}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
