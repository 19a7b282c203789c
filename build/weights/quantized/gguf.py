"""Reads the quantized matrices of a GGUF file: each has its own type, in affine blocks."""

from __future__ import annotations

from nearfar.build.options import GROUP_SIZE
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.gguf.container import GgufCheckpoint
from nearfar.build.weights.gguf.header import Type
from nearfar.build.weights.quantized.affine import Affine, AffineFormat
from nearfar.build.weights.quantized.contract import RequiredTensor
from nearfar.build.weights.quantized.gguf_blocks import BLOCKS, read_rows
from nearfar.format.scales import GROUP_SIZES, HALF, PAIRS
from nearfar.step.reading import DRAFTS

MUCH = 1.5
"""The least growth of a type's weights that is told to the user."""


def _in_pairs(bits: int, group: int) -> float:
    """Bits of a weight whose groups have a float16 scale and offset each."""
    return bits + PAIRS.values * HALF / group


SMALL = _in_pairs(4, GROUP_SIZE)
"""Bits of a weight after --requantize q4."""


def _bits(kind: Type) -> float:
    """Bits of a weight of a type, in float16 pairs."""
    blocks = BLOCKS[kind.name]
    return _in_pairs(blocks.bits, min(blocks.group, GROUP_SIZES[-1]))


def _growth(kind: Type) -> float:
    """How many times the space of the file the weights of a type take on every target; 1 where a target can
    store the file's own bytes.
    """
    return 1 if BLOCKS[kind.name].scales != PAIRS else _bits(kind) * kind.block / (8 * kind.bytes)


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
        """A line about types whose codes take much more space than in the file, on every target."""
        wide = {kind.name: kind for kind in self._types.values() if _growth(kind) >= MUCH}
        if not wide:
            return ()
        told = ", ".join(
            f"{name} ({BLOCKS[name].bits} bits, {_growth(kind):.1f} times)"
            for name, kind in sorted(wide.items())
        )
        shrinks = any(_bits(kind) > SMALL for kind in wide.values())
        advice = ": build with --requantize q4 for small ones, at a loss" if shrinks else ""
        return (f"weights of {told} keep their codes, which take more space than in the file{advice}",)

    def kind(self, tensor: str) -> str:
        """The matrix's type in GGUF, such as Q6_K."""
        return self._types[tensor].name

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The one tensor of a matrix, with rows of blocks."""
        kind = self._types[f"{base}.weight"]
        shape = (n, k // kind.block * kind.bytes)
        return {f"{base}.weight": RequiredTensor(shape, ("uint8",), (kind.block, kind.bytes))}

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """The codes of the blocks."""
        name = f"{base}.weight"
        return read_rows(
            self._types[name].name, self.checkpoint.read(name, start, stop), self._types[name].bytes
        )
