"""What the programs of a GPU artifact say of a text: perplexity, and how often each has the same most likely
token as the first program in float32 with float products.

    python benchmarks/programs.py [ARTIFACT] [--text FILE] [--windows N] [--programs NAME,NAME] [--json FILE]

Without an artifact, programs for discrete GPUs of the sample model are built, with products of bytes as well.
Windows of 512 tokens without BOS, as benchmarks/quality.py has them, computed 64 rows a step, once for each
16 logits: matmuls are those of a prompt. The keys and values before a row are those that the program computed
itself.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings, device
from nearfar.edge_runtime.executors.base import Executor
from nearfar.format.manifest import Program
from nearfar.format.sizes import MAX_ROWS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.engines import built

Floats = npt.NDArray[np.float64]
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WINDOW, STEP = 512, 64


def windows(artifact: Artifact, text: Path, limit: int) -> list[npt.NDArray[np.int32]]:
    """The text as windows of tokens."""
    tokenizer = Tokenizer.from_file(str(artifact.path / "tokenizer" / "tokenizer.json"))
    ids = np.array(tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids, np.int32)
    return [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][:limit]


def opened(artifact: Artifact, program: Program) -> Executor:
    """An executor whose first slot has a window's pages, in order."""
    groups, page = artifact.manifest.groups, artifact.manifest.cache.page_size
    count = -(-WINDOW // page)
    made = device(artifact.target).open(artifact, program, Settings((count,) * len(groups), WINDOW))
    for group in range(len(groups)):
        made.write(f"page_table.{group}", np.arange(count, dtype=np.int32)[None])
    return made


def logits(executor: Executor, window: npt.NDArray[np.int32]) -> Iterator[Floats]:
    """Logits [16, n] of the rows in turn."""
    executor.write("slots", np.zeros(STEP, np.int32))
    for start in range(0, len(window), STEP):
        executor.write("tokens", window[start : start + STEP])
        executor.write("positions", np.arange(start, start + STEP, dtype=np.int32))
        for first in range(0, STEP, MAX_ROWS):
            executor.write("logit_rows", np.arange(first, first + MAX_ROWS, dtype=np.int32))
            executor.run("step", STEP)
            yield executor.fetch("logits", MAX_ROWS)().astype(np.float64)


def measure(artifact: Artifact, program: Program, parts: list[npt.NDArray[np.int32]]) -> dict[str, Any]:
    """Perplexity of every token but each window's first, and the most likely token after each."""
    total, count, best = 0.0, 0, []
    with closing(opened(artifact, program)) as executor:
        for part in track(parts, program.name, console=Console(stderr=True), transient=True):
            found = np.concatenate(list(logits(executor, part)))
            best.append(found.argmax(1))
            top = found.max(1, keepdims=True)
            found -= top + np.log(np.exp(found - top).sum(1, keepdims=True))
            total -= float(found[np.arange(len(part) - 1), part[1:]].sum())
            count += len(part) - 1
    return {"program": program.name, "perplexity": math.exp(total / count), "best": np.concatenate(best)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--text", type=Path, default=DATA / "text" / "heldout.txt")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--programs", default="")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(Artifact.open(options.artifact or sample(Path(folder)) / "vulkan"), options)


def sample(folder: Path) -> Path:
    """The sample model's artifact."""
    asked = ("--device-class", "discrete", "--products", "float,int8")
    return built(folder, DATA / "models" / "classics-7M", "vulkan", *asked)


def report(artifact: Artifact, options: argparse.Namespace) -> None:
    """Measure, show, and write --json."""
    parts = windows(artifact, options.text, options.windows)
    named = options.programs.split(",") if options.programs else [p.name for p in artifact.manifest.programs]
    records = [measure(artifact, p, parts) for p in artifact.manifest.programs if p.name in named]
    base = next((r for r in records if r["program"].endswith("-f32")), records[0])
    table = Table(title=f"{artifact.manifest.model.name}, {len(parts)} windows of {WINDOW} tokens")
    for heading in ("program", "perplexity", "over the first", "the same token"):
        table.add_column(heading, justify="right")
    for record in records:
        record["same"] = float((record.pop("best") == base["best"]).mean()) if record is not base else 1.0
        over = f"{100 * (record['perplexity'] / base['perplexity'] - 1):+.3f} %"
        table.add_row(record["program"], f"{record['perplexity']:.4f}", over, f"{100 * record['same']:.2f} %")
    Console().print(table)
    if options.json:
        base.pop("best", None)
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
