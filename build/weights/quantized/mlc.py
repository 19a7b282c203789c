"""MLC LLM's group quantization in the layouts that keep rows (`_1`, `_2`): w = scale · (code - zero), with
one zero for all weights.

`X.q_weight` uint32 [n, words]: each word holds 32 // bits codes of a row, the first in the lowest bits;
`X.q_scale` [n, groups]. The last group of a row is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import F32
from nearfar.build.weights.quantized.affine import Affine, AffineFormat, base_of
from nearfar.build.weights.quantized.contract import RequiredTensor, scheme_for
from nearfar.build.weights.quantized.settings import matrices_of, settings_of
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader, show


@dataclass(frozen=True)
class MlcScheme:
    """A kind of quantization: bits of a code, inputs that share a scale."""

    bits: int
    group: int

    @property
    def in_word(self) -> int:
        """The number of codes in a word."""
        return 32 // self.bits


KINDS = {name: MlcScheme(4, 32) for name in ("q4f16_1", "q4f16_2", "q4f32_1", "q4bf16_1")}
KINDS |= {name: MlcScheme(3, 40) for name in ("q3f16_1",)}


class Mlc(AffineFormat):
    """See nearfar.build.weights.quantized.contract.Quantized."""

    name = "MLC"

    def __init__(self, checkpoint: Checkpoint, kind: MlcScheme) -> None:
        self._kind = kind
        self._inputs = {base: _inputs(checkpoint, base) for base in matrices_of(checkpoint, ".q_weight")}
        held = {
            f"{base}.weight": None if k % kind.group else scheme_for(kind.bits, kind.group, k)
            for base, k in self._inputs.items()
        }
        super().__init__(checkpoint, held)

    @staticmethod
    def of(checkpoint: Checkpoint) -> Mlc | None:
        """Read an MLC directory, else None. Raises CheckpointError for an unsupported quantization."""
        settings = settings_of(checkpoint, "mlc")
        if settings is None:
            return None
        name = settings.get("name")
        if not isinstance(name, str) or name not in KINDS:
            raise CheckpointError(
                f"mlc-chat-config.json: quantization is {show(name)}, which is not read: use "
                f"{', '.join(KINDS)}, or the original checkpoint"
            )
        return Mlc(checkpoint, KINDS[name])

    def wanted(self, base: str, n: int, k: int) -> dict[str, RequiredTensor]:
        """The tensors `q_weight` and `q_scale`."""
        kind = self._kind
        groups = -(-k // kind.group)
        return {
            f"{base}.q_weight": RequiredTensor((n, groups * kind.group // kind.in_word), ("uint32",)),
            f"{base}.q_scale": RequiredTensor((n, groups)),
        }

    def affine(self, base: str, start: int, stop: int) -> Affine:
        """The codes, with those that pad the last group; a bias is -scale · zero."""
        kind = self._kind
        words = np.asarray(self.checkpoint.read(f"{base}.q_weight", start, stop), np.uint32)
        places = np.arange(kind.in_word, dtype=np.uint32) * np.uint32(kind.bits)
        codes = ((words[:, :, None] >> places) & np.uint32(2**kind.bits - 1)).astype(np.uint8)
        scales = self.checkpoint.read(f"{base}.q_scale", start, stop).astype(np.float64)
        zero = 2 ** (kind.bits - 1) - 1
        return Affine(codes.reshape(stop - start, -1), scales, -scales * zero)

    def weights(self, tensor: str, start: int, stop: int) -> F32:
        """The dequantized rows, without the padding of the last group."""
        return super().weights(tensor, start, stop)[:, : self._inputs[base_of(tensor)]]


def _inputs(checkpoint: Checkpoint, base: str) -> int:
    """The inputs of a matrix of the supported model types (mlc_directory.MODELS): rows may be padded."""
    read = ConfigReader(checkpoint.config, "mlc-chat-config.json", "model_config.")
    hidden = read.size("hidden_size")
    if base.endswith("mlp.down_proj"):
        return read.size("intermediate_size")
    if base.endswith("self_attn.o_proj"):
        heads = read.size("num_attention_heads")
        return heads * read.size("head_dim", hidden // heads)
    return hidden
