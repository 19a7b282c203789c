"""A GGUF file as a directory that every peer reads: config.json, model.safetensors in float32, the tokenizer.

    PYTHONPATH=benchmarks python -m peers.from_gguf MODEL.gguf DIR [--tied]

--tied leaves the embedding out and uses the head for both: for files that hold the one matrix of a model
twice, in two types, of which the head's is the more exact.

Weights are what the file's blocks stand for, read as `nearfar build` reads them. Where the file is quantized
they lie on its grid: a quantizer whose grid holds that one loses nothing, which says nothing of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import AutoConfig

from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantize import to_float32
from nearfar.build.weights.quantized import find_quantized

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def convert(file: Path, folder: Path, tied: bool) -> None:
    """Write the folder, which may be there already. `tied`: the embedding becomes the head, too."""
    source = open_checkpoint(file)
    quantized = find_quantized(source)
    coded = quantized.tensors if quantized is not None else {}
    weights = {
        name: quantized.weights(name, 0, stored.shape[0])
        if quantized is not None and name in coded
        else to_float32(source.read(name))
        for name, stored in source.entries.items()
    }
    config = dict(source.config)
    if tied:
        weights[EMBEDDING] = weights.pop(HEAD)
        config["tie_word_embeddings"] = True
    source.write_tokenizer(folder)
    # transformers writes the config itself, because it knows where its own version reads each setting (the
    # base of RoPE has moved)
    AutoConfig.for_model(**config).save_pretrained(folder)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    convert(options.file, options.folder, options.tied)
