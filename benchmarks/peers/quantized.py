"""What a quantizer makes of a model, in a process of its own, so that time and memory are its alone.

    python -m peers.quantized MAKER MODEL TEXT WEIGHTS.safetensors JSON

MAKER is a module beside this one with `make(model, text, **arguments)`, TEXT what it calibrates with,
and JSON its arguments. Written are the weights as float32 under their names in transformers; printed is a
line of JSON with the bytes that they are stored in, the seconds, and the peak of resident memory.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True)
class Quantized:
    """A quantized model. `weights`: the weights that the quantizer changed, dequantized to float32, by
    transformers' names; `size`: bytes of all matrices of the model as they are stored, scales included; norms
    stay floats with every quantizer.
    """

    weights: dict[str, np.ndarray]
    size: int


def main() -> None:
    """Run the maker that the command line names, and write its result."""
    maker, model, text, output, arguments = sys.argv[1:]
    module = importlib.import_module(f"peers.{maker}")
    start = time.perf_counter()
    made: Quantized = module.make(Path(model), Path(text), **json.loads(arguments))
    seconds = time.perf_counter() - start
    # on Linux the peak is in KiB; a tool that was started counts like the process itself
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    save_file({name: np.ascontiguousarray(value) for name, value in made.weights.items()}, output)
    print(json.dumps({"bytes": made.size, "seconds": seconds, "peak_mb": peak * 1024 / 1e6}))


if __name__ == "__main__":
    main()
