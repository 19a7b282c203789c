"""AutoAWQ's checkpoints, in the layout of its `gemm` kernels: w = scale · (code - zero).

`X.qweight` int32 [k, n/8]: a word holds the codes of eight outputs for one input, four bits each, in the
order of ORDER from the lowest bits up. `X.qzeros` int32 [k/group, n/8] holds zeros in the same way;
`X.scales` is [k/group, n].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantized.affine import Affine, AffineFormat, whole
from nearfar.build.weights.quantized.contract import RequiredTensor, scheme_for
from nearfar.build.weights.quantized.settings import matrices_of, settings_of
from nearfar.step.config import ConfigReader

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS, IN_WORD = 4, 8


class Awq(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "AWQ"

    def __init__(self, checkpoint: Checkpoint, group: int) -> None:
        sizes = {base: entry.shape[0] for base, entry in matrices_of(checkpoint, ".qweight").items()}
        schemes = {f"{base}.weight": scheme_for(BITS, group or k, k) for base, k in sizes.items()}
        super().__init__(checkpoint, schemes)
        self._group = group

    @staticmethod
    def of(checkpoint: Checkpoint) -> Awq | None:
        """Read a checkpoint with quant_method awq, else None. Raises CheckpointError for another layout than
        gemm's.
        """
        settings = settings_of(checkpoint, "awq")
        if settings is None:
            return None
        read = ConfigReader(settings, within="quantization_config.")
        read.choice("version", ("gemm",), "gemm")
        read.size("bits", BITS, most=BITS, least=BITS)
        if not read.flag("zero_point", True):
            read.refuse("zero_point", "true: AutoAWQ's gemm layout has zeros")
        group = read.size("group_size", 128, least=-1)
        if not group:
            read.refuse("group_size", "the inputs of a group, or -1 for all of them")
        return Awq(checkpoint, max(group, 0))

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors `qweight`, `qzeros` and `scales`."""
        groups, words = whole(base, k, "inputs", self._group or k), whole(base, n, "outputs", IN_WORD)
        return {
            f"{base}.qweight": RequiredTensor((k, words), ("int32",)),
            f"{base}.qzeros": RequiredTensor((groups, words), ("int32",)),
            f"{base}.scales": RequiredTensor((groups, n)),
        }

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """The unpacked codes; a bias is -scale · zero."""
        first, last = start // IN_WORD, -(-stop // IN_WORD)
        rows = slice(start - first * IN_WORD, stop - first * IN_WORD)
        codes, zeros = (
            _unpacked(self.checkpoint.read_columns(f"{base}.{part}", first, last).view(np.uint32))[rows]
            for part in ("qweight", "qzeros")
        )
        scales = self.checkpoint.read_columns(f"{base}.scales", start, stop).T.astype(np.float64)
        return Affine(np.ascontiguousarray(codes), scales, -scales * zeros)


def _unpacked(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Unpack words [k, m] to codes [8m, k]."""
    k, m = words.shape
    out = np.empty((m, IN_WORD, k), np.uint8)
    for place, output in enumerate(ORDER):
        out[:, output] = ((words >> np.uint32(BITS * place)) & np.uint32(15)).T
    return out.reshape(m * IN_WORD, k)
