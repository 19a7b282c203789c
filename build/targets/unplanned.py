"""Shared by mlx and onnx, whose runtimes make their own plans, and whose libraries read files of their own
next to ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from nearfar.build.weights.container import Checkpoint
from nearfar.format.manifest import Function, Program, Requires
from nearfar.format.sizes import MAX_ROWS, ROW_BUCKETS, STEP_BUCKETS

COPIED = ("special_tokens_map.json",)
"""Files that are copied unchanged from a checkpoint that has them."""


def program(
    precision: Literal["f16", "f32"], names: Iterable[str], features: tuple[str, ...] = ()
) -> Program:
    """The record of a program without plans, with the functions of these names."""
    sizes = {"step": STEP_BUCKETS, "greedy": ROW_BUCKETS, "sample": ROW_BUCKETS, "logprobs": ROW_BUCKETS}
    functions = {name: tuple(Function(size, min(size, MAX_ROWS)) for size in sizes[name]) for name in names}
    dtype: Literal["float16", "float32"] = "float16" if precision == "f16" else "float32"
    return Program(precision, dtype, dtype, Requires(features), (), {}, functions)


def write_files(checkpoint: Checkpoint, root: Path, documents: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write JSON documents by name, and the checkpoint's tokenizer files; gives the paths of the latter."""
    for name, document in documents.items():
        (root / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        if (checkpoint.path / name).is_file():
            (root / name).write_bytes((checkpoint.path / name).read_bytes())
    return checkpoint.write_tokenizer(root)
