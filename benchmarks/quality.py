"""Perplexity on held-out text at equal bytes: nearfar's --quant, --quality and --bits beside mx.quantize, the
calibrated quantizers of mlx_lm, and llama.cpp's types with and without its importance matrix.

Every quantizer runs in a process of its own with one thread (benchmarks/peers/quantized.py), and every
calibrated one with the text that comes with nearfar, or that of --calibrate. What it gives is dequantized
and runs in transformers, float32, over windows of 512 tokens without BOS: only the weights differ. Bytes are
those of all matrices as they are stored; norms stay floats. --divergence adds the mean Kullback-Leibler
divergence of the next token's distribution from the float model's, which still tells rows apart where
perplexities differ by less than their noise. Beside each row of a peer is the best row of nearfar with no
more bytes; --fit asks nearfar for a model of just each peer's bytes, too, and --sizes for models of these
bytes.

    python benchmarks/quality.py [--model DIR] [--text FILE ...] [--only PATTERN,...] [--llama-tools DIR]

DIR is a checkpoint of transformers; benchmarks/peers/from_gguf.py makes one of a GGUF file. Rows that the
file of --json has already are not measured again. benchmarks/code_text.py makes texts of code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nearfar.build.calibration.text import SHIPPED

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "shared" / "data"
WINDOW = 512
OURS = "by_nearfar"
FLOAT = "checkpoint, float32"


@dataclass(frozen=True)
class Row:
    """A configuration: its name, the module of benchmarks/peers that makes it, and its arguments."""

    name: str
    maker: str
    arguments: dict[str, Any]


def rows(tools: str, keep: str | None, windows: int) -> list[Row]:
    """All configurations. `tools`: the folder of llama.cpp's tools; `keep`: a folder where llama.cpp's rows
    share what they need, None for none; `windows`: windows that mlx_lm's quantizers get.
    """
    ways: dict[str, Any] = {"": {}, " pairs": {"scales": ["pairs"]}}
    found = [
        Row(f"nearfar {quality} q{bits} g{group}{way}", OURS,
            {"quality": quality, "quant": f"q{bits}", "group": group, **scales})
        for bits in (2, 3, 4, 5, 8) for group in (64, 32) for quality in ("fast", "good", "best")
        for way, scales in ways.items()
    ]  # fmt: skip
    found += [
        Row(f"nearfar fast q{bits} g64 {'/'.join(names)}", OURS,
            {"quality": "fast", "quant": f"q{bits}", "group": 64, "scales": names})
        for bits in (2, 3, 4) for names in (["levels", "pairs"], ["levels", "single"], ["single"])
    ]  # fmt: skip
    found += [
        Row(f"nearfar best --bits {bits:g}{way}", OURS,
            {"quality": "best", "bits": bits, "group": 64, **scales})
        for bits in (2.75, 3.5, 4.5, 5.5) for way, scales in ways.items()
    ]  # fmt: skip
    found += [
        _mlx(f"mx.quantize q{bits} g{group}", "quantize", bits=bits, group=group)
        for bits in (2, 3, 4, 5) for group in (64, 32)
    ]  # fmt: skip
    given = {"windows": windows}
    for bits in (2, 3, 4):
        found += [
            _mlx(f"mlx_lm dynamic_quant {bits}/{bits + 1} bits", "dynamic",
                 low=bits, high=bits + 1, group=64, target=bits + 1.0, **given),
            _mlx(f"mlx_lm awq q{bits} g64", "awq", bits=bits, group=64, **given),
            _mlx(f"mlx_lm gptq q{bits} g64", "gptq", bits=bits, group=64, embedding=bits, **given),
            *(_mlx(f"mlx_lm dwq q{bits} g64, rate {rate}", "dwq", bits=bits, group=64, rate=float(rate),
                   **given)
              for rate in ("1e-6", "1e-4", "1e-3")),
        ]  # fmt: skip
    for kind in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"):
        for imatrix in (False, True):
            name = f"llama.cpp {kind}{', imatrix' if imatrix else ''}"
            settings = {"tools": tools, "keep": keep, "type": kind, "imatrix": imatrix}
            found.append(Row(name, "by_llama_cpp", settings))
    return found


def fitting(size: int) -> Row:
    """The row of `best` within `size` bytes of matrices."""
    return Row(f"nearfar best --fit {size}", OURS, {"quality": "best", "fit": size, "group": 64})


def _mlx(name: str, method: str, **arguments: Any) -> Row:
    return Row(name, "by_mlx", {"method": method, **arguments})


def windows(model: Path, text: Path, limit: int | None) -> list[torch.Tensor]:
    """The text as token windows [1, WINDOW]; the last may be shorter."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt").input_ids
    return [window for window in ids.split(WINDOW, dim=1) if window.shape[1] > 1][:limit]


@torch.no_grad()
def answers(model: PreTrainedModel, parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities [tokens, vocabulary] of every token but each window's first."""
    for part in parts:
        yield model(part).logits[0, :-1].float().log_softmax(-1)


def scores(
    found: Iterable[torch.Tensor], parts: list[torch.Tensor], expected: Iterable[torch.Tensor] | None
) -> tuple[float, float | None]:
    """Give the perplexity, exp of the mean negative log-likelihood, and the mean over positions of the
    divergence of the answers `found` from `expected`, those of the float model; None without these.
    """
    total, apart, count = 0.0, 0.0, 0
    for part, given, wanted in zip(
        parts, found, repeat(None) if expected is None else expected, strict=False
    ):
        total += torch.nn.functional.nll_loss(given, part[0, 1:], reduction="sum").item()
        count += len(given)
        if wanted is not None:
            apart += (wanted.exp() * (wanted - given)).sum(dtype=torch.float64).item()
    return math.exp(total / count), None if expected is None else apart / count


def perplexity(model: PreTrainedModel, parts: list[torch.Tensor]) -> float:
    """The perplexity of a model on windows of tokens."""
    return scores(answers(model, parts), parts, None)[0]


def with_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor | np.ndarray]) -> None:
    """Put the weights into the model (tied ones go in through the embedding)."""
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        parameters[name].data.copy_(torch.as_tensor(value))


def quantized(
    row: Row, model: Path, calibrate: Path, folder: Path, limit: float
) -> tuple[dict[str, Any], Path]:
    """The report of the row's process, or `{"reason": …}` for a failure; and the file of the weights."""
    output = folder / "weights.safetensors"
    command = [
        sys.executable, "-m", "peers.quantized", row.maker, model, calibrate, output,
        json.dumps(row.arguments),
    ]  # fmt: skip
    paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [str(part) for part in command], env=os.environ | threads, capture_output=True, text=True,
            timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"reason": f"not done in {limit / 60:g} minutes"}, output
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"reason": said[-1]}, output
    return json.loads(done.stdout.splitlines()[-1]), output


def measure(
    model: Path,
    texts: Mapping[str, list[torch.Tensor]],
    wanted: list[Row],
    calibrate: Path,
    fit: bool,
    limit: float,
    had: Collection[str],
    divergence: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield one record for each row, the checkpoint itself first; without rows that `had` names.
    `divergence`: measure it, too, which keeps the checkpoint's answers in memory.
    """
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    before = {name: value.clone() for name, value in network.named_parameters()}
    expected = {text: list(answers(network, parts)) for text, parts in texts.items()} if divergence else {}

    def scored(known: Mapping[str, list[torch.Tensor]]) -> dict[str, dict[str, float]]:
        both = {
            text: scores(known.get(text) or answers(network, parts), parts, expected.get(text))
            for text, parts in texts.items()
        }
        found = {"perplexity": {text: value for text, (value, _) in both.items()}}
        if divergence:
            found["divergence"] = {text: apart for text, (_, apart) in both.items() if apart is not None}
        return found

    if FLOAT not in had:
        yield {
            "name": FLOAT,
            **scored(expected),
            "bytes": 4 * sum(value.numel() for value in before.values() if value.ndim == 2),
        }

    def measured(row: Row) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as name:
            record, weights = quantized(row, model, calibrate, Path(name), limit)
            if "reason" not in record:
                with_weights(network, before | load_file(weights))
                record |= scored({})
        return {"name": row.name, "maker": row.maker, **record}

    fitted: set[int] = set()
    left = [row for row in wanted if row.name not in had]
    for row in track(left, "measuring", console=Console(stderr=True), transient=True):
        record = measured(row)
        yield record
        if fit and row.maker != OURS and record.get("bytes", 0) not in fitted | {0}:
            fitted.add(record["bytes"])
            yield measured(fitting(record["bytes"]))


def show(records: list[dict[str, Any]], title: str) -> None:
    """The table, by size, with nearfar's best of no more bytes beside each row of a peer."""
    base = records[0]["perplexity"]
    done = sorted((record for record in records if "reason" not in record), key=lambda one: one["bytes"])
    table = Table(title=title)
    apart = any("divergence" in record for record in records)
    columns = [
        part
        for text in base
        for part in (text, "over float32", "nearfar's, no larger", *(["divergence"] if apart else []))
    ]
    for heading in ("", "MB", *columns, "minutes", "peak MB"):
        table.add_column(heading, justify="right" if heading else "left")
    for record in done:
        ours = [
            other["perplexity"]
            for other in done
            if record.get("maker") not in (None, OURS)
            and other.get("maker") == OURS
            and other["bytes"] <= record["bytes"]
        ]
        cells = []
        for text, value in record["perplexity"].items():
            cells += [f"{value:.3f}", f"{100 * (value / base[text] - 1):+.2f} %"]
            cells.append(f"{min(one[text] for one in ours):.3f}" if ours else "")
            if apart:
                cells.append(f"{record['divergence'][text]:.5f}" if "divergence" in record else "")
        table.add_row(
            record["name"],
            f"{record['bytes'] / 1e6:.3f}",
            *cells,
            f"{record['seconds'] / 60:.2f}" if "seconds" in record else "",
            f"{record['peak_mb']:.0f}" if "peak_mb" in record else "",
        )
    for record in records:
        if "reason" in record:
            table.add_row(record["name"], "", f"did not run: {record['reason']}")
    Console(width=150).print(table)


def main() -> None:
    """Measure, show, and write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DATA / "models" / "classics-7M")
    parser.add_argument("--text", type=Path, nargs="+", default=[DATA / "text" / "heldout.txt"])
    parser.add_argument("--calibrate", type=Path, default=SHIPPED, help="a text, by default nearfar's")
    parser.add_argument("--only", default="", help="rows that one of these regular expressions finds")
    parser.add_argument("--llama-tools", default="", help="folder of llama-quantize and llama-imatrix")
    parser.add_argument("--keep", default=None, help="folder for what several rows of llama.cpp need")
    parser.add_argument(
        "--mlx-windows", type=int, default=128, help="windows of the text for mlx_lm, by default %(default)s"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the measuring, by default %(default)s")
    parser.add_argument(
        "--fit", action="store_true", help="nearfar at just the bytes of each peer's row, too"
    )
    parser.add_argument(
        "--divergence", action="store_true", help="from the float model, too (its answers stay in memory)"
    )
    parser.add_argument("--sizes", default="", help="bytes of matrices, separated by commas")
    parser.add_argument("--limit-windows", type=int, default=None)
    parser.add_argument("--limit-minutes", type=float, default=60, help="of a row, by default %(default)s")
    parser.add_argument("--json", type=Path, default=None, help="kept after each row, and continued")
    parser.add_argument("--show", type=Path, nargs="+", help="the table of files of --json, nothing measured")
    options = parser.parse_args()
    if options.show:
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in options.show]
        merged = {record["name"]: record for report in reports for record in report["results"]}
        show(
            list(merged.values()),
            f"{reports[0]['model']}, {reports[0]['windows']} windows of {WINDOW} tokens",
        )
        return
    torch.set_num_threads(options.threads)
    texts = {file.stem: windows(options.model, file, options.limit_windows) for file in options.text}
    words = options.only.split(",")
    found = rows(options.llama_tools, options.keep, options.mlx_windows)
    wanted = [row for row in found if any(re.search(word, row.name) for word in words)]
    wanted += [fitting(int(size)) for size in options.sizes.split(",") if size]
    records = []
    if options.json and options.json.exists():
        records = json.loads(options.json.read_text(encoding="utf-8"))["results"]
    had = {record["name"] for record in records}
    limit = 60 * options.limit_minutes
    count = len(next(iter(texts.values())))
    for record in measure(
        options.model, texts, wanted, options.calibrate, options.fit, limit, had, options.divergence
    ):
        records.append(record)
        if options.json:
            report = {"model": options.model.name, "windows": count, "results": records}
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    show(records, f"{options.model.name}, {count} windows of {WINDOW} tokens")


if __name__ == "__main__":
    main()
