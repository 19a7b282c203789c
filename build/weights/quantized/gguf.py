"""Reads the quantized matrices of a GGUF file: each has its own type, in affine blocks."""

from __future__ import annotations

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.gguf.container import GgufCheckpoint
from nearfar.build.weights.gguf.header import Type
from nearfar.build.weights.quantized.affine import Affine, AffineFormat
from nearfar.build.weights.quantized.contract import RequiredTensor
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS, read_rows
from nearfar.kernels.quantized import GROUPS
from nearfar.step.reading import DRAFTS

MUCH = 1.5
"""The least growth of a type's weights that is told to the user."""


def _growth(kind: Type) -> float:
    """How many times the space of the file a type's codes take, with a float16 scale and bias a group."""
    blocks = BLOCKS[kind.name]
    return (blocks.bits + 32 / min(blocks.group, GROUPS[-1])) * kind.block / (8 * kind.bytes)


class Gguf(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "GGUF"

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._types = {
            name: tensor.type
            for name, tensor in checkpoint.tensors.items()
            if tensor.type.dtype is None and not name.startswith(DRAFTS)
        }
        found = {
            name: BLOCKS[kind.name].scheme(checkpoint.tensors[name].shape[-1])
            for name, kind in self._types.items()
        }
        super().__init__(checkpoint, found)

    @staticmethod
    def of(checkpoint: Checkpoint) -> Gguf | None:
        """Read a GGUF file with quantized matrices; None for other checkpoints."""
        if not isinstance(checkpoint, GgufCheckpoint):
            return None
        found = Gguf(checkpoint)
        return found if found.tensors else None

    @property
    def notes(self) -> tuple[str, ...]:
        """A line about types whose exact codes take much more space than the file."""
        wide = {kind.name: _growth(kind) for kind in self._types.values() if _growth(kind) >= MUCH}
        if not wide:
            return ()
        told = ", ".join(
            f"{name} ({BLOCKS[name].bits} bits, {wide[name]:.1f} times)" for name in sorted(wide)
        )
        return (
            f"weights of {told} are kept exactly, in codes that take more space than the file: build with "
            "--requantize q4 for small ones, at a loss",
        )

    def kind(self, tensor: str) -> str:
        """The matrix's type in GGUF, such as Q6_K."""
        return self._types[tensor].name

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The one tensor of a matrix, with rows of blocks."""
        kind = self._types[f"{base}.weight"]
        return {f"{base}.weight": RequiredTensor((n, k // kind.block * kind.bytes), ("uint8",))}

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """The codes of the blocks."""
        name = f"{base}.weight"
        return read_rows(
            self._types[name].name, self.checkpoint.read(name, start, stop), self._types[name].bytes
        )
