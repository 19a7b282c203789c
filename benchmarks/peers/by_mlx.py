"""MLX's own quantizer and the calibrated ones of mlx_lm, with their defaults, except for what a row says.

They work in float32 (bfloat16 is slow on a processor) and on nearfar's calibration text instead of one that
they would download; what they give is stored in float16, as mlx_lm would.

The wheel of mlx-cpu brings the reference BLAS, which multiplies at a sixteenth of OpenBLAS' speed (8 and 122
GFLOP/s on one core): run the calibrated ones with LD_PRELOAD=libopenblas.so.0.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load
from tokenizers import Tokenizer

from peers.quantized import Quantized

WINDOW, WINDOWS, BATCH, SEED = 512, 128, 4, 123
"""mlx_lm's own length, AWQ's number of windows, DWQ's of a step, and its seed."""


def make(model: Path, text: Path, method: str, windows: int = WINDOWS, **arguments: Any) -> Quantized:
    """Quantize with a function of this module, `method`, and its own `arguments`, calibrated with `windows`
    windows of the text.
    """
    mx.random.seed(SEED)
    np.random.seed(SEED)
    network, _, config = load(str(model), return_config=True)
    network.set_dtype(mx.float32)
    network = METHODS[method](network, config, _tokens(model, text, windows), **arguments)
    network.set_dtype(mx.float16)
    # arrays with two dimensions: codes, scales and biases; a norm has one dimension
    size = sum(value.nbytes for _, value in tree_flatten(network.parameters()) if value.ndim == 2)
    return Quantized(_weights(network), size)


def _tokens(model: Path, text: Path, windows: int) -> mx.array:
    """Windows [windows, WINDOW] evenly from the text, as nearfar takes them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = np.array(tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids)
    count = min(windows, len(ids) // WINDOW)
    starts = np.linspace(0, len(ids) - WINDOW, count).astype(np.int64)
    return mx.array(np.stack([ids[start : start + WINDOW] for start in starts]))


def _weights(network: Any) -> dict[str, np.ndarray]:
    """All weights in float32, norms included: AWQ changes them, too."""
    found = {}
    for name, module in tree_flatten(network.leaf_modules(), is_leaf=nn.Module.is_module):
        if "weight" not in module:
            continue
        weight = module.weight
        if "scales" in module:
            scales, biases = (module[key].astype(mx.float32) for key in ("scales", "biases"))
            weight = mx.dequantize(weight, scales, biases, group_size=module.group_size, bits=module.bits)
        found[f"{name}.weight"] = np.array(weight.astype(mx.float32))
    return found


def quantize(network: Any, config: Any, tokens: mx.array, bits: int, group: int) -> Any:
    """`mx.quantize` of every matrix, as `mlx_lm.convert -q`."""
    network.set_dtype(mx.float16)
    nn.quantize(network, group_size=group, bits=bits)
    return network


def dynamic(
    network: Any, config: Any, tokens: mx.array, low: int, high: int, group: int, target: float
) -> Any:
    """`mlx_lm.dynamic_quant`: `low` or `high` bits a matrix, on average at most `target` a weight."""
    from mlx_lm.quant.dynamic_quant import estimate_sensitivities, estimate_threshold

    sensitivities = dict(estimate_sensitivities(network, tokens, low, group, high, group))
    network.set_dtype(mx.float16)
    threshold = estimate_threshold(network, sensitivities, target, low, group, high, group)

    def bits_of(name: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        return {"bits": high, "group_size": group} if sensitivities[name] > threshold else True

    nn.quantize(network, group_size=group, bits=low, class_predicate=bits_of)
    return network


def awq(network: Any, config: Any, tokens: mx.array, bits: int, group: int) -> Any:
    """`mlx_lm.awq`, the embedding with the same bits."""
    from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize

    awq_quantize(
        network, tokens, AWQ_MODEL_CONFIGS[config["model_type"]], bits=bits, group_size=group,
        embed_bits=bits, embed_group_size=group, n_grid=20,
    )  # fmt: skip
    return network


def gptq(network: Any, config: Any, tokens: mx.array, bits: int, group: int, embedding: int) -> Any:
    """`mlx_lm.gptq`, the embedding with `embedding` bits."""
    from mlx_lm.quant.gptq import gptq_quantize

    return gptq_quantize(network, tokens, bits, group, embedding, group)[0]


def dwq(network: Any, config: Any, tokens: mx.array, bits: int, group: int, rate: float) -> Any:
    """`mlx_lm.dwq`, with `rate` as its rate of learning."""
    import mlx.optimizers as optimizers
    from mlx_lm.quant.dwq import dwq_quantize

    student = copy.deepcopy(network)
    nn.quantize(student, group_size=group, bits=bits)
    # the validation's result is only printed: one batch is enough, which any text has
    samples = [(row, 0) for row in np.array(tokens).tolist()]
    with patch.object(mx, "quantized_matmul", _dequantized_matmul):
        dwq_quantize(
            student, lambda batch, step, split: network(batch), optimizers.Adam(rate, bias_correction=True),
            samples, samples[:BATCH], batch_size=BATCH, max_seq_length=WINDOW, seed=SEED, dtype=mx.float32,
        )  # fmt: skip
    return student


def _dequantized_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    transpose: bool,
    group_size: int,
    bits: int,
    mode: str,
) -> mx.array:
    """`mx.quantized_matmul` by OpenBLAS, on dequantized weights: the same product and gradients, which take a
    fourteenth of the time on a processor.
    """
    assert transpose, "mlx_lm's linear layers have the output rows first"
    return x @ mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits, mode=mode).T


METHODS = {"quantize": quantize, "dynamic": dynamic, "awq": awq, "gptq": gptq, "dwq": dwq}
