"""A GGUF file as a directory that every peer reads: config.json, model.safetensors in float32, the tokenizer.

    PYTHONPATH=benchmarks python -m peers.from_gguf MODEL.gguf DIR

Weights are what the file's blocks stand for, read as `nearfar build` reads them. Where the file is quantized
they lie on its grid: a quantizer whose grid holds that one loses nothing, which says nothing of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import AutoConfig

from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantize import to_float32
from nearfar.build.weights.quantized import find_quantized


def convert(file: Path, folder: Path) -> None:
    """Write the folder, which may be there already."""
    source = open_checkpoint(file)
    quantized = find_quantized(source)
    coded = quantized.tensors if quantized is not None else {}
    weights = {
        name: quantized.weights(name, 0, stored.shape[0])
        if quantized is not None and name in coded
        else to_float32(source.read(name))
        for name, stored in source.entries.items()
    }
    source.write_tokenizer(folder)
    # transformers writes the config itself, because it knows where its own version reads each setting (the
    # base of RoPE has moved)
    AutoConfig.for_model(**source.config).save_pretrained(folder)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
