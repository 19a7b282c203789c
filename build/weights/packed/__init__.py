"""Reads quantized checkpoints: one file for each format, which is recognized by the checkpoint's content."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nearfar.build.options import PACKED
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.packed.awq import Awq
from nearfar.build.weights.packed.bitsandbytes import BitsAndBytes
from nearfar.build.weights.packed.compressed_tensors import CompressedTensors
from nearfar.build.weights.packed.contract import Packed
from nearfar.build.weights.packed.fp8 import Fp8
from nearfar.build.weights.packed.gguf import Gguf
from nearfar.build.weights.packed.gptq import Gptq
from nearfar.build.weights.packed.mlc import Mlc
from nearfar.build.weights.packed.mlx import Mlx
from nearfar.build.weights.packed.mxfp4 import Mxfp4
from nearfar.build.weights.packed.settings import quantization_config
from nearfar.errors import CheckpointError
from nearfar.step.config import show

_READERS: tuple[Callable[[Checkpoint], Packed | None], ...] = (
    Mlx.of, Awq.of, Gptq.of, CompressedTensors.of, Fp8.of, BitsAndBytes.of, Mxfp4.of, Gguf.of, Mlc.of,
)  # fmt: skip
FORMATS: Mapping[str, Callable[[Checkpoint], Packed | None]] = dict(zip(PACKED, _READERS, strict=True))
"""The readers of the formats, by name. A reader gives None for a checkpoint of another format, and raises
CheckpointError for unsupported settings.
"""


def find_packed(checkpoint: Checkpoint) -> Packed | None:
    """The quantized matrices of a checkpoint, None where it has none. Raises CheckpointError, with its name,
    for an unsupported quantization.
    """
    for of in FORMATS.values():
        if (packed := of(checkpoint)) is not None:
            return packed
    settings = quantization_config(checkpoint)
    if not settings:
        _check_floats(checkpoint)
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    known = ", ".join(FORMATS)
    raise CheckpointError(
        f"config.json: the weights are quantized by {show(method)}, which is not read: use a checkpoint of "
        f"{known} (docs/checkpoints.md), or the unquantized original"
    )


def _check_floats(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where tensors are quantized but config.json does not say how: old AutoGPTQ and
    AutoAWQ kept the settings in files of their own.
    """
    packed = [name for name in checkpoint.entries if name.endswith(".qweight")]
    if packed:
        raise CheckpointError(
            f"config.json has no quantization_config, but {len(packed)} tensors such as {packed[0]!r} are "
            "quantized: put the contents of quantize_config.json or quant_config.json there, with "
            "quant_method gptq or awq"
        )
