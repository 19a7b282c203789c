"""Checkpoints that transformers saves of models loaded with bitsandbytes.

Four bits: `X.weight` uint8 [n · k/2, 1], two codes a byte, the first in the high bits, of all weights in row
order; `X.weight.quant_map` float32 [16], the value of each code; `X.weight.absmax`, a factor for each block
of consecutive weights. With a second quantization a factor is stored as a uint8 i, and is
`nested_quant_map`[i] times the `nested_absmax` of its block of factors, plus an offset.
`X.weight.quant_state.bitsandbytes__nf4` (or fp4) is
JSON as bytes: shape, block sizes, offset. The 16 values are not an affine grid: the matrix is requantized.

Eight bits: `X.weight` int8 [n, k] and `X.SCB` float32 [n]: w = SCB / 127 · value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfar import strict_json
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32, Scheme
from nearfar.build.weights.quantized.affine import Affine, AffineFormat, base_of, whole
from nearfar.build.weights.quantized.contract import RequiredTensor, Shape, scheme_for
from nearfar.build.weights.quantized.settings import settings_of
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader

STATE = ".weight.quant_state.bitsandbytes__"
STATE_BYTES = 1 << 16
KINDS = ("nf4", "fp4")


@dataclass(frozen=True)
class MatrixState:
    """The settings of a 4-bit matrix: its shape [n, k], the weights of a factor, and, where the factors are
    quantized too, the factors of a second-level factor (0: they are not) and the offset added to them.
    """

    shape: tuple[int, int]
    block: int
    nested: int = 0
    offset: float = 0.0


class BitsAndBytes(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "bitsandbytes"

    def __init__(self, checkpoint: Checkpoint, bits: int) -> None:
        self._states: dict[str, MatrixState] = {}
        schemes: dict[str, Scheme | None] = {}
        for name, entry in checkpoint.entries.items():
            base, state, _ = name.partition(STATE)
            if bits == 4 and state:
                self._states[base] = _state(checkpoint, name)
                schemes[f"{base}.weight"] = None
            elif bits == 8 and name.endswith(".SCB"):
                weight = f"{name.removesuffix('.SCB')}.weight"
                shape = checkpoint.entries[weight].shape if weight in checkpoint.entries else ()
                k = shape[1] if len(shape) == 2 else 0
                schemes[weight] = scheme_for(8, k, k, centred=True) if k and entry else None
        super().__init__(checkpoint, schemes)

    @staticmethod
    def of(checkpoint: Checkpoint) -> BitsAndBytes | None:
        """Read a checkpoint with quant_method bitsandbytes; None for others."""
        settings = settings_of(checkpoint, "bitsandbytes")
        if settings is None:
            return None
        read = ConfigReader(settings, within="quantization_config.")
        four, eight = read.flag("load_in_4bit"), read.flag("load_in_8bit")
        if four == eight:
            read.refuse("load_in_4bit", "true, or load_in_8bit, one of them")
        if four:
            read.choice("bnb_4bit_quant_type", KINDS, "fp4")
            read.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
        return BitsAndBytes(checkpoint, 4 if four else 8)

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors of a matrix of four or of eight bits."""
        weight, state = f"{base}.weight", self._states.get(base)
        if state is None:
            out = {
                weight: RequiredTensor((n, k), ("int8",)),
                f"{base}.SCB": RequiredTensor((n,), ("float32",)),
            }
            form = f"{base}.weight_format"
            return out | ({form: RequiredTensor((), ("uint8",))} if form in self.checkpoint.entries else {})
        if state.shape != (n, k):
            raise CheckpointError(
                f"{base}{STATE}*: its shape is {list(state.shape)}, where config.json has {[n, k]}: they do "
                "not belong together, download both again"
            )
        blocks = -(-n * k // state.block)
        out = {
            weight: RequiredTensor((whole(base, n * k, "weights", 2), 1), ("uint8",)),
            f"{weight}.quant_map": RequiredTensor((16,), ("float32",)),
            f"{weight}.absmax": RequiredTensor((blocks,), ("uint8",) if state.nested else ("float32",)),
        }
        if state.nested:
            out[f"{weight}.nested_absmax"] = RequiredTensor((-(-blocks // state.nested),), ("float32",))
            out[f"{weight}.nested_quant_map"] = RequiredTensor((256,), ("float32",))
        return out

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """The tensors with settings, which have been read."""
        return [name for name in self.checkpoint.entries if STATE in name]

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """Rows of an 8-bit matrix: codes are values + 128."""
        form = f"{base}.weight_format"
        if form in self.checkpoint.entries and int(self.checkpoint.read(form)[()]) != 0:
            raise CheckpointError(
                f"tensor {form!r} is not 0: only rows in order are read, save the model again"
            )
        values = self.checkpoint.read(f"{base}.weight", start, stop).astype(np.int16)
        scales = self.checkpoint.read(f"{base}.SCB", start, stop).astype(np.float64).reshape(-1, 1) / 127
        return Affine((values + 128).astype(np.uint8), scales, -128 * scales)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """Rows of a 4-bit matrix: the value of each code times its block's factor."""
        state = self._states.get(base_of(tensor))
        if state is None:
            return super().weights(tensor, start, stop)
        read, k = self.checkpoint.read, state.shape[1]
        first, last = start * k, stop * k
        packed = read(tensor, first // 2, -(-last // 2)).astype(np.uint8).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[first % 2 :][: last - first]
        values = read(f"{tensor}.quant_map").astype(np.float32)[codes]
        blocks = np.arange(first, last) // state.block
        factors = self._factors(tensor, state, int(blocks[0]), int(blocks[-1]) + 1)
        return np.asarray(values * factors[blocks - blocks[0]], np.float32).reshape(stop - start, k)

    def _factors(self, tensor: str, state: MatrixState, start: int, stop: int) -> F32:
        """The factors of the blocks [start, stop), float32."""
        read = self.checkpoint.read
        stored = read(f"{tensor}.absmax", start, stop)
        if not state.nested:
            return np.asarray(stored, np.float32)
        values = read(f"{tensor}.nested_quant_map").astype(np.float32)[stored.astype(np.uint8)]
        outer = read(f"{tensor}.nested_absmax").astype(np.float32)[np.arange(start, stop) // state.nested]
        return np.asarray(values * outer + np.float32(state.offset), np.float32)


def _state(checkpoint: Checkpoint, name: str) -> MatrixState:
    """Parse the JSON in a tensor of bytes. Raises CheckpointError where it is invalid."""
    if (size := checkpoint.entries[name].bytes) > STATE_BYTES:
        raise CheckpointError(f"tensor {name!r} has {size:,} bytes, where some lines of JSON belong")
    try:
        found: Any = strict_json.loads(checkpoint.read(name).tobytes().decode("utf-8"))
        n, k = (_natural(extent) for extent in found["shape"])
        block = _natural(found["blocksize"])
        nested = _natural(found["nested_blocksize"]) if "nested_blocksize" in found else 0
        offset = float(found.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"tensor {name!r} is not JSON with shape and blocksize ({error}): download the checkpoint again"
        ) from error
    if not math.isfinite(offset):
        raise CheckpointError(f"tensor {name!r}: nested_offset is {offset}: download the checkpoint again")
    return MatrixState((n, k), block, nested, offset)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{value!r} is not a size")
    return value
