"""Lowers a step's list to an ONNX graph: a function of B sequences of L tokens with their past, for any step.

Transformers.js and onnxruntime-genai know its inputs and outputs:

    input_ids int64 [B, L]; attention_mask int64 [B, T], T = past + L: 1 for each token
    past_key_values.<c>.key, .value float32 [B, kv_heads, past, head_dim]: of cache c
    num_logits_to_keep int64 []: number of last tokens with logits; 0, or left out: all
    logits float32 [B, L or that number, vocab]; present.<c>.key, .value, with L more positions

Sequences of different lengths are aligned at the left, with masked positions behind them, as
GroupQueryAttention requires.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nearfar.format.rotations import rope_table
from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model
from nearfar.step.operation import Op
from nearfar.targets.onnx.external import ExternalWriter, Placed
from nearfar.targets.onnx.graph import Extents, Graph
from nearfar.targets.onnx.operations import OPERATIONS, REFUSED
from nearfar.targets.onnx.step_graph import StepGraph


def write_tables(files: ExternalWriter, model: Model) -> dict[str, Placed]:
    """Write cosines and sines of each rotation by position, float32 [context, head_dim/2] each."""
    placed = {}
    for name, rope in model.step.ropes.items():
        table = rope_table(np.array(rope.inv_freq, np.float32), rope.scale, model.context_length)
        for part, values in zip(("cos", "sin"), np.split(table, 2, axis=1), strict=True):
            placed[f"rope.{name}.{part}"] = files.add(f"rope.{name}.{part}", values)
    return placed


def step_graph(
    model: Model,
    matrices: Mapping[str, Matrix],
    placed: Mapping[str, Mapping[str, Placed]],
    single: Mapping[str, Placed],
    int8: bool,
) -> Graph:
    """Build the whole graph.

    `placed`: the arrays of each matrix; `single`: vectors and tables of rotations by name; `int8`: whether
    products round their rows to 8 bits.
    """
    made = StepGraph(model, matrices, placed, single, int8)
    for op in model.step.ops:
        made.values[op.out] = OPERATIONS[type(op)](made, op)
    graph = made.graph
    graph.output(made.values[model.step.ops[-1].out], "logits", ["batch_size", "kept", model.vocab_size])
    for index, cache in enumerate(model.step.caches):
        shape: Extents = ["batch_size", cache.kv_heads, "total_sequence_length", cache.head_dim]
        for part, value in zip(("key", "value"), made.appended[index], strict=True):
            graph.output(value, f"present.{index}.{part}", shape)
    return graph


def refusal(listed: tuple[Op, ...]) -> str | None:
    """The reason why a list cannot be a graph, as the end of a sentence that begins with the target; None if
    it can.
    """
    return next((REFUSED[type(op)] for op in listed if type(op) in REFUSED), None)
