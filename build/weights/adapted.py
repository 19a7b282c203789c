"""A checkpoint with a LoRA adapter merged into it: rows are summed in float32 as they are read, so memory
holds no second model, and every reader sees the sum.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.build.adapters import WEIGHTS
from nearfar.build.weights.checks import some
from nearfar.build.weights.container import Checkpoint, Stored
from nearfar.build.weights.lora import Lora, LoraDelta
from nearfar.build.weights.quantize import F32, Scheme, to_float32
from nearfar.build.weights.quantized.contract import Carried, Quantized, RequiredTensor, Shape
from nearfar.checkpoint_files import ADAPTER
from nearfar.edge_runtime.text.files import ChatTemplates
from nearfar.errors import CheckpointError
from nearfar.format.scales import PAIRS, Scales
from nearfar.kernels.quantized import Array
from nearfar.step.reading import OTHER_PARTS, SPELLINGS


@dataclass(frozen=True)
class Sum:
    """A tensor as the merged checkpoint has it; see nearfar.build.weights.container.Stored."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Merge:
    """An adapter by the names of a checkpoint's tensors: `deltas` of floats, `anew` of quantized matrices.
    `untied`: the head of a model whose head is the embedding, where the adapter changes the embedding alone;
    its rows are those of the embedding without the adapter.
    """

    deltas: Mapping[str, LoraDelta]
    anew: Mapping[str, LoraDelta]
    whole: Mapping[str, str]
    untied: Mapping[str, str]


def merged(
    base: Checkpoint, quantized: Quantized | None, lora: Lora
) -> tuple[AdaptedCheckpoint, Quantized | None]:
    """A checkpoint and its quantized matrices with an adapter merged into them. Raises CheckpointError where
    the adapter changes tensors that the checkpoint lacks, or has in another shape.
    """
    merge = _named(base, quantized, lora)
    checkpoint = AdaptedCheckpoint(base, lora, merge)
    return checkpoint, None if quantized is None else AdaptedQuantized(quantized, merge)


def _named(base: Checkpoint, quantized: Quantized | None, lora: Lora) -> Merge:
    """The adapter's tensors by the checkpoint's names, which may be spelled otherwise than the modules."""
    there = [*base.entries, *(quantized.tensors if quantized is not None else ())]
    names = {_plain(name): name for name in there if not name.removeprefix("model.").startswith(OTHER_PARTS)}
    deltas = {names.get(_plain(f"{module}.weight"), ""): delta for module, delta in lora.deltas.items()}
    inside = [head for start, head in SPELLINGS if any(name.startswith(f"{start}layers.") for name in there)]
    names.setdefault("lm_head.weight", f"{[*inside, 'lm_head.'][0]}weight")
    whole = {names.get(_plain(name), ""): tensor for name, tensor in lora.whole.items()}
    if lost := [
        *(module for module in lora.deltas if names.get(_plain(f"{module}.weight")) not in there),
        *(name for name in lora.whole if _plain(name) not in names),
    ]:
        raise CheckpointError(
            f"{lora.path}: the adapter changes {some(lost)}, which {base.name} does not have as tensors of "
            f"its own: it belongs to another model{f' ({lora.base})' if lora.base else ''}"
        )
    coded = set(quantized.tensors) if quantized is not None else set()
    for name, delta in deltas.items():
        if name not in coded and delta.shape != base.entries[name].shape:
            raise CheckpointError(
                f"{lora.path}: the adapter's {name} is {list(delta.shape)}, and {base.name} has "
                f"{list(base.entries[name].shape)}: it belongs to another model"
            )
    head = names["lm_head.weight"]
    changed = [name for name, delta in deltas.items() if delta.turned] if head not in (*there, *whole) else []
    if lora.tied or not changed:
        untied: dict[str, str] = {}
    elif changed[0] in coded:
        raise CheckpointError(
            f"{lora.path}: the adapter changes the embedding, which is also the head of {base.name} and is "
            "quantized there: merge it into the unquantized model"
        )
    else:
        untied = {head: changed[0]}
    return Merge(
        {name: delta for name, delta in deltas.items() if name not in coded},
        {name: delta for name, delta in deltas.items() if name in coded},
        whole,
        untied,
    )


def _plain(name: str) -> str:
    """A tensor's name without what stands before the text model's parts, in any spelling."""
    for prefix in ("model.", "language_model.", "text_model.", "model."):
        name = name.removeprefix(prefix)
    return name


class AdaptedCheckpoint:
    """See nearfar.build.weights.container.Checkpoint."""

    def __init__(self, base: Checkpoint, lora: Lora, merge: Merge) -> None:
        self._base, self._lora, self._merge = base, lora, merge
        self.path: Path = base.path
        self.name = f"{base.name}+{lora.name}"
        self.config = base.config
        self.config_source, self.mismatch_advice = base.config_source, base.mismatch_advice
        entries: dict[str, Stored] = dict(base.entries)
        for head, embedding in merge.untied.items():
            entries[head] = entries[embedding]
        for name, tensor in merge.whole.items():
            entries[name] = lora.files.entries[tensor]
        for name in merge.deltas:
            entries[name] = _sum(entries[name])
        self.entries: Mapping[str, Stored] = dict(sorted(entries.items()))

    def untouched(self, tensors: Iterable[str]) -> str | None:
        """A note about those of the tensors that the adapter was trained for, as its config says, and for
        which it has no matrices; None if there are none. `target_modules` cannot name experts.
        """
        ends, changed = self._lora.targets, {*self._merge.deltas, *self._merge.anew, *self._merge.whole}
        lost = [
            name
            for name in tensors
            if name not in changed
            and ".experts." not in name
            and _plain(name).removesuffix(".weight").endswith(tuple(f".{end}" for end in ends))
        ]
        if not lost:
            return None
        return (
            f"{self._lora.name}: {WEIGHTS} has no matrices for {some(lost)}, which target_modules in "
            f"{ADAPTER} names: these weights stay as they are"
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read rows of a tensor, with what the adapter adds to them."""
        if name in self._merge.whole:  # with save_embedding_layers a changed embedding is there, too
            rows = self._lora.files.read(self._merge.whole[name], start, stop)
        else:
            rows = self._base.read(self._merge.untied.get(name, name), start, stop)
        delta = self._merge.deltas.get(name)
        if delta is None:
            return rows
        return (to_float32(rows) + delta.rows(start, start + len(rows))).astype(self.entries[name].dtype)

    def read_into(self, name: str, start: int, out: Array) -> None:
        """Read rows of a tensor from `start` into an array of its dtype."""
        if self._changed(name):
            out[...] = self.read(name, start, start + len(out))
        else:
            self._base.read_into(name, start, out)

    def read_columns(self, name: str, start: int, stop: int) -> Array:
        """Read columns [start, stop) of a matrix."""
        if self._changed(name):
            return np.ascontiguousarray(self.read(name)[:, start:stop])
        return self._base.read_columns(name, start, stop)

    def _changed(self, name: str) -> bool:
        return any(name in named for named in (self._merge.whole, self._merge.deltas, self._merge.untied))

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer of the adapter's model."""
        return self._base.tokenizer_json

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        """The tokenizer_config.json of the adapter's model."""
        return self._base.tokenizer_config

    @property
    def generation_config(self) -> dict[str, Any]:
        """The generation_config.json of the adapter's model."""
        return self._base.generation_config

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the adapter's model."""
        return self._base.chat_templates

    @property
    def license_text(self) -> str | None:
        """The licence of the adapter's model."""
        return self._base.license_text

    def sha256(self, stop: threading.Event | None = None) -> str:
        """SHA-256 over the digests of both."""
        both = f"{self._base.sha256(stop)}\n{self._lora.sha256()}"
        return hashlib.sha256(both.encode()).hexdigest()

    def write_tokenizer(self, folder: Path) -> list[Path]:
        """Write the tokenizer of the adapter's model."""
        return self._base.write_tokenizer(folder)


def _sum(entry: Stored) -> Sum:
    """A matrix with an adapter: float32 stays so, and others become float16, which rounds the sum less than
    bfloat16 would.
    """
    dtype = np.dtype(np.float32 if entry.dtype == np.float32 else np.float16)
    return Sum(dtype, entry.shape, entry.bytes)


class AdaptedQuantized:
    """Quantized matrices of which an adapter changes some: these are dequantized, and quantized again. See
    nearfar.build.weights.quantized.contract.Quantized.
    """

    def __init__(self, quantized: Quantized, merge: Merge) -> None:
        self._quantized, self._merge = quantized, merge
        changed = {*merge.anew, *merge.whole}
        self.tensors: Mapping[str, Scheme | None] = {
            name: None if name in changed else scheme
            for name, scheme in quantized.tensors.items()
            if name not in merge.whole
        }
        self.name = quantized.name
        self.scheme = quantized.scheme
        self.notes = quantized.notes

    def kind(self, tensor: str) -> str:
        """How a matrix is quantized in the checkpoint, and that an adapter changes it."""
        return f"{self._quantized.kind(tensor)}{' with the adapter' if tensor in self._merge.anew else ''}"

    def expected(self, plain: Mapping[str, Shape]) -> dict[str, RequiredTensor]:
        """The tensors that the checkpoint must have."""
        kept = {name: shape for name, shape in plain.items() if name not in self._merge.whole}
        return self._quantized.expected(kept) | {
            name: RequiredTensor(plain[name]) for name in self._merge.whole if name in plain
        }

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """Further tensors that have no effect; of matrices that the adapter replaces, their codes."""
        replaced = [name for name in self._merge.whole if name in self._quantized.tensors]
        codes = {entry for name in replaced for entry in self._quantized.entries(name)}
        return {*self._quantized.harmless(plain), *codes}

    def entries(self, tensor: str) -> tuple[str, ...]:
        """The checkpoint's tensors that hold a matrix."""
        return self._quantized.entries(tensor)

    def carry(self, tensor: str, start: int, stop: int, scales: Scales = PAIRS) -> Carried:
        """Rows of a matrix that the adapter leaves as it is."""
        return self._quantized.carry(tensor, start, stop, scales)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """Rows [start, stop) dequantized, with what the adapter adds to them."""
        rows = self._quantized.weights(tensor, start, stop)
        delta = self._merge.anew.get(tensor)
        return rows if delta is None else rows + delta.rows(start, stop)
