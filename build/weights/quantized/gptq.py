"""Reads checkpoints of AutoGPTQ and GPTQModel: w = scale · (code - zero).

`X.qweight` int32 [k · bits/32, n]: a stream of codes down each column, the first in the lowest bits;
`X.qzeros` int32 [groups, n · bits/32]: a stream along each row, of zero - 1 ("gptq") or zero ("gptq_v2");
`X.scales` [groups, n]; `X.g_idx` int32 [k], the group of each input. Where inputs were quantized in order of
activation (`desc_act`) without static groups, a group's inputs are scattered: groups of consecutive inputs
then cannot hold the codes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.container import Checkpoint, Stored
from nearfar.build.weights.quantize import F32, Scheme
from nearfar.build.weights.quantized.affine import Affine, AffineFormat, base_of, whole
from nearfar.build.weights.quantized.contract import RequiredTensor, Shape, scheme_for
from nearfar.build.weights.quantized.settings import matrices_of, settings_of
from nearfar.errors import CheckpointError
from nearfar.kernels.codes import unpack_codes
from nearfar.kernels.quantized import Array
from nearfar.step.config import ConfigReader

BITS = (2, 3, 4, 8)
ALIGNED = 32  # the number of outputs whose zeros fill whole words at any number of bits


class Gptq(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "GPTQ"

    def __init__(self, checkpoint: Checkpoint, bits: int, group: int, less: int) -> None:
        self._bits, self._group, self._less = bits, group, less
        found = matrices_of(checkpoint, ".qweight")
        super().__init__(checkpoint, {})
        self.tensors: Mapping[str, Scheme | None] = {
            f"{base}.weight": self._scheme(base, entry) for base, entry in found.items()
        }

    @staticmethod
    def of(checkpoint: Checkpoint) -> Gptq | None:
        """Read a checkpoint with quant_method gptq, else None. Raises CheckpointError for unsupported
        settings.
        """
        settings = settings_of(checkpoint, "gptq")
        if settings is None:
            return None
        read = ConfigReader(settings, within="quantization_config.")
        stored = read.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        if read.given("pack_dtype"):
            read.choice("pack_dtype", ("int32",), "int32")
        if settings.get("dynamic"):
            read.refuse("dynamic", "nothing: matrices with settings of their own are not read")
        if settings.get("is_marlin_format"):
            read.refuse("is_marlin_format", "false: Marlin's layout is not read")
        bits, group = read.size("bits"), read.size("group_size", 128, least=-1)
        if bits not in BITS:
            read.refuse("bits", " or ".join(map(str, BITS)))
        if not group:
            read.refuse("group_size", "the inputs of a group, or -1 for all of them")
        return Gptq(checkpoint, bits, max(group, 0), 1 if stored == "gptq" else 0)

    def _scheme(self, base: str, qweight: Stored) -> Scheme | None:
        """The scheme that holds a matrix's codes; None where its groups are scattered."""
        k = qweight.shape[0] * 32 // self._bits
        group = self._group or k
        indices = self._groups_of_inputs(base, k, -(-k // group))
        in_order = indices is None or bool((indices == np.arange(k) // group).all())
        return scheme_for(self._bits, group, k, self._centred(base)) if in_order and k else None

    def _centred(self, base: str) -> bool:
        """Whether all zeros of a matrix are 2^(bits - 1): a symmetric checkpoint."""
        entry = self.checkpoint.entries.get(f"{base}.qzeros")
        if entry is None or entry.dtype != np.int32 or len(entry.shape) != 2:
            return False  # `wanted` reports it
        zeros = self._zeros(self.checkpoint.read(f"{base}.qzeros"))
        outputs = self.checkpoint.entries[f"{base}.qweight"].shape[1]
        return bool((zeros[:, :outputs] == 2 ** (self._bits - 1)).all())

    def _zeros(self, words: Array) -> npt.NDArray[np.int64]:
        """The zeros that words of `qzeros` [groups, words] hold, [groups, outputs]."""
        stored = unpack_codes(np.ascontiguousarray(words).view(np.uint32), self._bits).astype(np.int64)
        return np.asarray((stored + self._less) % 2**self._bits, np.int64)

    def _groups_of_inputs(self, base: str, k: int, groups: int) -> npt.NDArray[np.int64] | None:
        """The group of each input from `g_idx`; None where it is missing, or has another shape or dtype,
        which `wanted` reports. Raises CheckpointError for a group that does not exist.
        """
        name = f"{base}.g_idx"
        entry = self.checkpoint.entries.get(name)
        if entry is None or entry.shape != (k,) or entry.dtype != np.int32:
            return None
        indices = self.checkpoint.read(name).astype(np.int64)
        if bad := np.flatnonzero((indices < 0) | (indices >= groups))[:1].tolist():
            raise CheckpointError(
                f"tensor {name!r} gives input {bad[0]} group {indices[bad[0]]}, but has {groups} groups: "
                "the checkpoint is damaged, download it again"
            )
        return indices

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors `qweight`, `qzeros`, `scales`, and `g_idx` if the checkpoint has it."""
        groups = -(-k // (self._group or k))
        words = [whole(base, size * self._bits, "bits", 32) for size in (k, n)]
        out = {
            f"{base}.qweight": RequiredTensor((words[0], n), ("int32",)),
            f"{base}.qzeros": RequiredTensor((groups, words[1]), ("int32",)),
            f"{base}.scales": RequiredTensor((groups, n)),
        }
        if f"{base}.g_idx" in self.checkpoint.entries:
            out[f"{base}.g_idx"] = RequiredTensor((k,), ("int32",))
        return out

    def harmless(self, plain: Mapping[str, Shape]) -> Collection[str]:
        """Biases of zeros, which AutoGPTQ writes for matrices without a bias."""
        biases = [f"{base_of(name)}.bias" for name in self.tensors]
        extra = [name for name in biases if name in self.checkpoint.entries and name not in plain]
        return [name for name in extra if not self.checkpoint.read(name).astype(np.float32).any()]

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """The unpacked codes; a bias is -scale · zero."""
        words = self.checkpoint.read_columns(f"{base}.qweight", start, stop).view(np.uint32)
        codes = unpack_codes(np.ascontiguousarray(words.T), self._bits)
        first = start // ALIGNED * ALIGNED
        last = min(-(-stop // ALIGNED) * self._bits, self.checkpoint.entries[f"{base}.qzeros"].shape[1])
        columns = self.checkpoint.read_columns(f"{base}.qzeros", first * self._bits // 32, last)
        zeros = self._zeros(columns)[:, start - first : stop - first].T
        scales = self.checkpoint.read_columns(f"{base}.scales", start, stop).T.astype(np.float64)
        return Affine(codes, scales, -scales * zeros)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """The dequantized rows, each input with its own group."""
        base = base_of(tensor)
        found = self.affine(base, start, stop)
        k = found.codes.shape[1]
        indices = self._groups_of_inputs(base, k, found.scales.shape[1])
        if indices is None:
            indices = np.arange(k) // (self._group or k)
        return Affine(found.codes, found.scales[:, indices], found.biases[:, indices]).weights()
