"""MLX artifacts of weights that a test makes, and an executor over one without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime.artifact.reader import Artifact
from tests.support import tiny
from tests.support.numpy_executor import Weights


def write_mlx_artifact(out: Path, config: dict[str, Any], weights: Weights) -> Path:
    """An unquantized artifact; `config`, `weights`: a Hugging Face model's. The tokenizer is tiny.py's."""
    checkpoint = out.with_name(f"{out.name}-checkpoint")
    checkpoint.mkdir(parents=True)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in weights.items()},
        checkpoint / "model.safetensors",
    )
    (checkpoint / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(checkpoint / "tokenizer.json"))
    text = {"bos_token": "<|bos|>", "chat_template": tiny.TEMPLATE}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(text))
    (path,) = build(BuildOptions(str(checkpoint), out, ("mlx",), "none"))
    return path


def change_weights(path: Path, lose: Sequence[str] = (), add: Weights | None = None) -> Path:
    """Remove tensors from an artifact's file and add others, as if the build had written it so."""
    file = path / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if name not in lose}
    save_file({**tensors, **(add or {})}, file, {"format": "mlx"})
    shard = tiny.describe(path, file.name)

    def change(data: dict[str, Any]) -> None:
        data["weights"] |= {"bytes": shard["bytes"], "shard_bytes": shard["bytes"], "shards": [shard]}

    tiny.edit_manifest(path, change)
    return path


class Direct:
    """An executor without an engine. The test chooses the pages of sequences, which are the same in every
    group.
    """

    def __init__(
        self, path: Path, pages: int = 128, kv_bits: int | None = None, precision: str = "f32"
    ) -> None:
        from nearfar.edge_runtime.executors.mlx.executor import MlxExecutor

        manifest = (artifact := Artifact.open(path)).manifest
        program = next(each for each in manifest.programs if each.precision == precision)
        self.groups = range(len(manifest.groups))
        self.device = MlxExecutor(
            artifact,
            program,
            pages=(pages,) * len(self.groups),
            context=artifact.manifest.model.context_length,
            kv_bits=kv_bits,
        )
        self._columns = -(-manifest.model.context_length // manifest.cache.page_size)

    def pages(self, pages: list[int], slot: int = 0) -> None:
        """Set the pages of a slot's sequence."""
        table = np.zeros((1, self._columns), np.int32)
        table[0, : len(pages)] = pages
        for group in self.groups:
            self.device.write(f"page_table.{group}", table, slot)

    def step(self, tokens: list[int], start: int, slot: int = 0) -> Any:
        """Run a step; gives the logits after the last token."""
        size = next(size for size in (1, 4, 16, 64, 256) if size >= len(tokens))
        positions = np.full(size, -1, np.int32)
        positions[: len(tokens)] = np.arange(start, start + len(tokens))
        self.device.write("tokens", np.array(tokens, np.int32))
        self.device.write("positions", positions)
        self.device.write("slots", np.full(size, slot, np.int32))
        self.device.write("logit_rows", np.array([len(tokens) - 1], np.int32))
        self.device.run("step", size)
        return self.device.fetch("logits", 1)()[0]

    def prefill(self, tokens: list[int], slot: int = 0) -> Any:
        """Run a prompt in steps of 256 rows; gives the logits after it."""
        for start in range(0, len(tokens), 256):
            logits = self.step(tokens[start : start + 256], start, slot)
        return logits

    def spoil(self, group: int, pages: list[int]) -> None:
        """Overwrite pages with NaN."""
        content = self.device.read_pages(group, pages)
        for array in content.values():
            array[...] = np.nan  # type: ignore[call-overload]
        self.device.write_pages(group, pages, content)
