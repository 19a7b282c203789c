"""Checkpoints of llm-compressor in the formats of compressed-tensors: w = scale · (value - zero).

Values are signed. pack-quantized: `X.weight_packed` int32, along a row a stream of value + 2^(bits - 1), the
first in the lowest bits (before 2026 no value crossed a word: the count of words tells), `X.weight_shape` the
shape [n, k]; zeros are packed in the same way down a column, `X.weight_zero_point` [n · bits/32, groups].
int-quantized: `X.weight` int8, zeros int8 [n, groups]. float-quantized: float8 (fp8.py). nvfp4- and
mxfp4-pack-quantized: fp4.py. `X.weight_scale` [n, groups].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32, Scheme
from nearfar.build.weights.quantized.affine import Affine, AffineFormat, base_of, whole
from nearfar.build.weights.quantized.contract import RequiredTensor, Shape, scheme_for
from nearfar.build.weights.quantized.e2m1 import E2M1_BITS
from nearfar.build.weights.quantized.fp4 import GROUPS as FP4
from nearfar.build.weights.quantized.fp4 import fp4_affine, fp4_wanted
from nearfar.build.weights.quantized.fp8 import FLOAT8, Block, activations, scaled, wanted_scale
from nearfar.build.weights.quantized.settings import settings_of
from nearfar.errors import CheckpointError
from nearfar.kernels.codes import unpack_codes
from nearfar.step.config import ConfigReader

PACKED, INTEGERS, FLOATING = "pack-quantized", "int-quantized", "float-quantized"
KINDS = (PACKED, INTEGERS, FLOATING, "naive-quantized", *FP4)


@dataclass(frozen=True)
class ModuleSettings:
    """The settings of the modules that `targets` names. `group`: inputs that share a scale, 0 for all;
    `whole`: one scale for the matrix; `block`: rows and columns of a scale.
    """

    targets: tuple[str, ...]
    kind: str
    bits: int
    group: int
    whole: bool = False
    block: Block | None = None

    def names(self, base: str) -> bool:
        """Whether a target names the module `base` itself, not its class."""
        own = (target for target in self.targets if target not in ("Linear", "Embedding"))
        return any(re.match(t[3:], base) if t.startswith("re:") else t == base for t in own)


class CompressedTensors(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "compressed-tensors"

    def __init__(self, checkpoint: Checkpoint, groups: tuple[ModuleSettings, ...]) -> None:
        super().__init__(checkpoint, {})
        entries = checkpoint.entries
        self._of: dict[str, ModuleSettings] = {}
        schemes: dict[str, Scheme | None] = {}
        for name in entries:
            base = name.removesuffix(".weight_scale")
            if base == name:
                continue
            self._of[base] = own = _group_of(base, groups)
            stored = f"{base}.weight_packed" if own.kind in (PACKED, *FP4) else f"{base}.weight"
            shape = entries[stored].shape if stored in entries else (0, 0)
            k = _inputs(checkpoint, base) if own.kind == PACKED else (*shape, 0, 0)[1]
            if own.kind in FP4:
                k *= 2
            carried = own.kind != FLOATING and own.block is None and not self._scattered(base, k, own)
            centred = carried and self._centred(base, own, shape)
            found = scheme_for(own.bits, own.group or k, k, centred) if carried and k else None
            schemes[f"{base}.weight"] = found
        self.tensors = schemes

    @staticmethod
    def of(checkpoint: Checkpoint) -> CompressedTensors | None:
        """Read a checkpoint with quant_method compressed-tensors, else None. Raises CheckpointError for
        unsupported settings.
        """
        settings = settings_of(checkpoint, "compressed-tensors")
        if settings is None:
            return None
        read = ConfigReader(settings, within="quantization_config.")
        sparsity = settings.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            read.refuse("sparsity_config", "nothing, or format dense: sparse weights are not read")
        if settings.get("transform_config"):
            read.refuse("transform_config", "nothing: rotated weights are not read")
        sections = settings.get("config_groups")
        if not isinstance(sections, Mapping) or not all(isinstance(s, Mapping) for s in sections.values()):
            read.refuse("config_groups", "an object of groups")
        reader = read.section("config_groups")
        found = tuple(
            _group(reader.section(name), section, settings.get("format"))
            for name, section in sections.items()
        )
        return CompressedTensors(checkpoint, found)

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors of a matrix in its group's format."""
        own, entries = self._of[base], self.checkpoint.entries
        if own.kind in FP4:
            return fp4_wanted(own.kind, base, n, k)
        scale, zeros = f"{base}.weight_scale", f"{base}.weight_zero_point"
        if own.kind == FLOATING:
            out = {f"{base}.weight": RequiredTensor((n, k), FLOAT8)}
            return out | {scale: wanted_scale(self.checkpoint, scale, n, k, own.block)}
        groups = whole(base, k, "inputs", own.group or k)
        one = own.whole and scale in entries and entries[scale].shape in ((), (1,))
        out = {scale: RequiredTensor(entries[scale].shape if one else (n, groups))}
        if own.kind == PACKED:
            words = self._words(f"{base}.weight_packed", k, own.bits, 1)
            out |= {
                f"{base}.weight_packed": RequiredTensor((n, words), ("int32",)),
                f"{base}.weight_shape": RequiredTensor((2,), ("int64", "int32")),
            }
            if zeros in entries:
                out[zeros] = RequiredTensor((self._words(zeros, n, own.bits, 0), groups), ("int32",))
        else:
            out[f"{base}.weight"] = RequiredTensor((n, k), ("int8",))
            if zeros in entries:
                out[zeros] = RequiredTensor(out[scale].shape, ("int8",))
        if f"{base}.weight_g_idx" in entries:
            out[f"{base}.weight_g_idx"] = RequiredTensor((k,), ("int32", "int64"))
        return out

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """Tensors about activations, and zero points of floats, which are zero."""
        zeros = [f"{base}.weight_zero_point" for base, own in self._of.items() if own.kind == FLOATING]
        return [*activations(self.checkpoint), *zeros]

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """Rows as value times scale, each input with its own group's scale."""
        base = base_of(tensor)
        own = self._of[base]
        if own.kind == FLOATING:
            return scaled(self.checkpoint, tensor, f"{base}.weight_scale", start, stop, own.block)
        found = self.affine(base, start, stop)
        indices = self._indices(base, found.codes.shape[1], found.scales.shape[1])
        if indices is None:
            return found.weights()
        return Affine(found.codes, found.scales[:, indices], found.biases[:, indices]).weights()

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """Rows as unsigned codes: values and zeros plus 2^(bits - 1)."""
        own, read = self._of[base], self.checkpoint.read
        if own.kind in FP4:
            return fp4_affine(self.checkpoint, own.kind, base, start, stop)
        entries, half = self.checkpoint.entries, 2 ** (own.bits - 1)
        name = f"{base}.weight_scale"
        if entries[name].shape in ((), (1,)):
            scales = np.full((stop - start, 1), read(name).astype(np.float64).reshape(()))
        else:
            scales = read(name, start, stop).astype(np.float64)
        if own.kind == PACKED:
            words = np.ascontiguousarray(read(f"{base}.weight_packed", start, stop)).view(np.uint32)
            codes = _unpacked(words, own.bits, _inputs(self.checkpoint, base))
        else:
            values = read(f"{base}.weight", start, stop).astype(np.int16)
            codes = _in_range(values + half, own.bits, f"{base}.weight")
        zeros = self._zeros(base, start, stop, own) if f"{base}.weight_zero_point" in entries else half
        return Affine(codes, scales, -scales * zeros)

    def _centred(self, base: str, own: ModuleSettings, shape: Shape) -> bool:
        """Whether the value 0 stands for 0 in every group: there are no zeros, or all of them are 0. `shape`
        of the tensor that stores the values.
        """
        name = f"{base}.weight_zero_point"
        entry = self.checkpoint.entries.get(name)
        if own.kind in FP4 or entry is None:
            return own.kind not in FP4
        n, packed = shape[0], own.kind == PACKED
        rows, dtype = (self._words(name, n, own.bits, 0), np.int32) if packed else (n, np.int8)
        if len(entry.shape) != 2 or entry.shape[0] != rows or entry.dtype != dtype:
            return False  # `wanted` reports a tensor of another shape or dtype
        return bool((self._zeros(base, 0, n, own) == 2 ** (own.bits - 1)).all())

    def _zeros(self, base: str, start: int, stop: int, own: ModuleSettings) -> npt.NDArray[np.int64]:
        """The zeros as unsigned codes, int64 [stop - start, groups]."""
        name, half = f"{base}.weight_zero_point", 2 ** (own.bits - 1)
        stored = self.checkpoint.read(name)
        if own.kind == PACKED:
            words = np.ascontiguousarray(stored.T).view(np.uint32)
            return _unpacked(words, own.bits, stop)[:, start:].T.astype(np.int64)
        rows = np.broadcast_to(stored.reshape(-1, 1), (stop, 1)) if stored.size == 1 else stored
        return np.asarray(rows[start:stop].astype(np.int64) + half, np.int64)

    def _words(self, name: str, count: int, bits: int, axis: int) -> int:
        """The number of words that hold `count` values along an axis: packed without gaps, or, where the
        stored shape says so, without values that cross words.
        """
        stream, apart = -(-count * bits // 32), -(-count // (32 // bits))
        entry = self.checkpoint.entries.get(name)
        there = entry.shape[axis] if entry is not None and len(entry.shape) == 2 else stream
        return apart if there == apart else stream

    def _indices(self, base: str, k: int, groups: int) -> npt.NDArray[np.int64] | None:
        """The group of each input, None where it is not stored. Raises CheckpointError for a group that does
        not exist.
        """
        name = f"{base}.weight_g_idx"
        entry = self.checkpoint.entries.get(name)
        if entry is None or entry.shape != (k,) or entry.dtype.kind != "i":
            return None
        indices = self.checkpoint.read(name).astype(np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < groups:
            raise CheckpointError(
                f"tensor {name!r} has groups from {indices.min()} to {indices.max()}, but has "
                f"{groups} groups: the checkpoint is damaged, download it again"
            )
        return indices

    def _scattered(self, base: str, k: int, own: ModuleSettings) -> bool:
        """Whether the inputs of a group are not consecutive."""
        group = own.group or max(k, 1)
        indices = self._indices(base, k, -(-k // group))
        return indices is not None and bool((indices != np.arange(k) // group).any())


def _group_of(base: str, groups: tuple[ModuleSettings, ...]) -> ModuleSettings:
    """The settings of a module: the group that names it, else the group of its class."""
    for group in groups:
        if group.names(base):
            return group
    kind = "Embedding" if base.endswith("embed_tokens") else "Linear"
    for group in groups:
        if kind in group.targets:
            return group
    raise CheckpointError(
        f"config.json: {base} is quantized, and no group of quantization_config names it: the config "
        "does not belong to the weights, download both again"
    )


def _group(read: ConfigReader, section: Mapping[str, Any], common: Any) -> ModuleSettings:
    """Read one of config_groups."""
    targets = section.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        read.refuse("targets", "a list of names, classes, or re: and a pattern")
    kind = section.get("format") or common
    if kind not in KINDS:
        raise read.error(
            f"{read.within}format is {kind!r}, which is not read: use {', '.join(KINDS)}, or the unquantized "
            "original"
        )
    if not isinstance(section.get("weights"), Mapping):
        read.refuse("weights", "an object")
    weights = read.section("weights")
    if kind in FP4:
        weights.choice("type", ("float",), "int")
        weights.size("num_bits", 8, most=4, least=4)
        weights.size("group_size", most=FP4[kind], least=FP4[kind])
        return ModuleSettings(tuple(targets), kind, E2M1_BITS, FP4[kind])
    bits = weights.size("num_bits", 8, most=8)
    values = weights.choice("type", ("int", "float"), "int")
    if values == "float" and bits != 8:
        weights.refuse("num_bits", "8 for floats")
    if kind == "naive-quantized":
        kind = FLOATING if values == "float" else INTEGERS
    if (kind == FLOATING) != (values == "float"):
        weights.refuse("type", f"what {kind} stores")
    strategy = weights.choice("strategy", ("group", "channel", "tensor", "block"), "tensor")
    group = weights.size("group_size", most=1 << 20) if strategy == "group" else 0
    block = None
    if strategy == "block":
        if kind != FLOATING:
            weights.refuse("strategy", "group, channel or tensor for integers")
        rows, columns = weights.numbers("block_structure", 2, 1, 1 << 20)
        block = int(rows), int(columns)
    return ModuleSettings(tuple(targets), kind, bits, group, strategy == "tensor", block)


def _inputs(checkpoint: Checkpoint, base: str) -> int:
    """The inputs of a packed matrix, from `weight_shape`; 0 where that tensor is missing, which is reported
    later.
    """
    name = f"{base}.weight_shape"
    entry, packed = checkpoint.entries.get(name), checkpoint.entries.get(f"{base}.weight_packed")
    if entry is None or packed is None or entry.shape != (2,) or entry.dtype.kind != "i":
        return 0
    n, k = (int(extent) for extent in checkpoint.read(name))
    if len(packed.shape) != 2 or n != packed.shape[0] or not 0 < k <= packed.shape[1] * 32:
        raise CheckpointError(
            f"tensor {name!r} says [{n}, {k}], which {list(packed.shape)} words cannot hold: the checkpoint "
            "is damaged, download it again"
        )
    return k


def _unpacked(words: npt.NDArray[np.uint32], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """Unpack words [rows, m] to the first `count` codes of each row, [rows, count]."""
    rows, m = words.shape
    if m == -(-count * bits // 32) or 32 % bits == 0:
        padded = np.zeros((rows, -(-m // bits) * bits), np.uint32)
        padded[:, :m] = words
        return np.ascontiguousarray(unpack_codes(padded, bits)[:, :count])
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words[:, :, None] >> places) & np.uint32(2**bits - 1)
    return np.ascontiguousarray(codes.reshape(rows, -1)[:, :count].astype(np.uint8))


def _in_range(codes: npt.NDArray[np.int16], bits: int, name: str) -> npt.NDArray[np.uint8]:
    """Convert codes to bytes. Raises CheckpointError for a code beyond `bits` bits."""
    if codes.size and not 0 <= codes.min() <= codes.max() < 2**bits:
        half = 2 ** (bits - 1)
        raise CheckpointError(
            f"tensor {name!r} has values from {codes.min() - half} to {codes.max() - half}, which are not of "
            f"{bits} bits: the checkpoint is damaged, or config.json is of another; download both again"
        )
    return codes.astype(np.uint8)
