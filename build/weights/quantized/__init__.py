"""Reads quantized checkpoints: one file for each format, which is recognized by the checkpoint's content."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nearfar.build.options import QUANTIZED
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantized.awq import Awq
from nearfar.build.weights.quantized.bitsandbytes import BitsAndBytes
from nearfar.build.weights.quantized.compressed_tensors import CompressedTensors
from nearfar.build.weights.quantized.contract import Quantized
from nearfar.build.weights.quantized.fp8 import Fp8
from nearfar.build.weights.quantized.gguf import Gguf
from nearfar.build.weights.quantized.gptq import Gptq
from nearfar.build.weights.quantized.mlc import Mlc
from nearfar.build.weights.quantized.mlx import Mlx
from nearfar.build.weights.quantized.mxfp4 import Mxfp4
from nearfar.build.weights.quantized.settings import quantization_config
from nearfar.errors import CheckpointError
from nearfar.step.config import show

_READERS: tuple[Callable[[Checkpoint], Quantized | None], ...] = (
    Mlx.of, Awq.of, Gptq.of, CompressedTensors.of, Fp8.of, BitsAndBytes.of, Mxfp4.of, Gguf.of, Mlc.of,
)  # fmt: skip
FORMATS: Mapping[str, Callable[[Checkpoint], Quantized | None]] = dict(zip(QUANTIZED, _READERS, strict=True))
"""The readers of the formats, by name. A reader gives None for a checkpoint of another format, and raises
CheckpointError for unsupported settings.
"""


def find_quantized(checkpoint: Checkpoint) -> Quantized | None:
    """The quantized matrices of a checkpoint, None where it has none. Raises CheckpointError, with its name,
    for an unsupported quantization.
    """
    for of in FORMATS.values():
        if (quantized := of(checkpoint)) is not None:
            return quantized
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
    names = [name for name in checkpoint.entries if name.endswith(".qweight")]
    if names:
        raise CheckpointError(
            f"config.json has no quantization_config, but {len(names)} tensors such as {names[0]!r} are "
            "quantized: put the contents of quantize_config.json or quant_config.json there, with "
            "quant_method gptq or awq"
        )
