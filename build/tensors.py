"""Checks that a checkpoint's tensors are the model's, none missing and none left over, and decides which head
the model has: the embedding, where config.json ties it, or its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nearfar.build.weights.checks import check_tensors
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import slices, to_float32
from nearfar.build.weights.quantized.contract import Quantized, RequiredTensor
from nearfar.kernels.quantized import Array
from nearfar.step.model import Model
from nearfar.step.params import Param
from nearfar.step.reading import Reading, read_model

IGNORABLE = (r".*rotary_emb\.inv_freq",)
OWN_HEAD = (
    "config.json ties the head to the embedding (tie_word_embeddings), but the checkpoint has an lm_head of "
    "other values: lm_head is used, as transformers does"
)


@dataclass(frozen=True)
class ReadHead:
    """How a model is read, with the head that it computes with. `copy`: tensors that repeat the embedding as
    a head; `notes`: lines for the user.
    """

    reading: Reading
    copy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def right_head(
    reading: Reading, checkpoint: Checkpoint, quantized: Quantized | None, context: int | None, embeds: bool
) -> ReadHead:
    """Decide which head the model computes with: where config.json ties it to the embedding, but the
    checkpoint has a head with other values, that head. A model that `embeds` has none. Raises CheckpointError
    where the checkpoint's head does not fit.

    transformers 5 does the same, with a warning (`PreTrainedModel.tie_weights`); vLLM dropped such heads
    (https://github.com/vllm-project/vllm/issues/51063).
    """
    if _param(reading.model, "lm_head") is not None:
        return ReadHead(reading)
    own = read_model(checkpoint.config, checkpoint.entries, context, tied=False)
    head, embed = (_param(own.model, name) for name in ("lm_head", "embed"))
    assert head is not None
    assert embed is not None
    tensor = head.pieces[0].tensor
    held = _held_by(checkpoint, quantized, tensor)
    if not held or embeds:
        return ReadHead(reading, held)
    check_model(own.model, own, checkpoint, quantized)
    tied = embed.pieces[0].tensor
    same = all(
        np.array_equal(_rows(checkpoint, quantized, tied, *rows), _rows(checkpoint, quantized, tensor, *rows))
        for rows in slices(embed.n, embed.k)
    )
    return ReadHead(reading, held) if same else ReadHead(own, notes=(OWN_HEAD,))


def check_model(
    model: Model,
    reading: Reading,
    checkpoint: Checkpoint,
    quantized: Quantized | None,
    more: Iterable[str] = (),
) -> None:
    """Raise CheckpointError where the tensors are not the model's; `more`: tensors that may be there in
    addition.
    """
    plain = {name: shape for param in model.step.params for name, shape in param.expected().items()}
    expected = {name: RequiredTensor(shape) for name, shape in plain.items()}
    harmless: tuple[str, ...] = ()
    if quantized is not None:
        expected, harmless = quantized.expected(plain), tuple(quantized.harmless(plain))
    unused = map(re.escape, (*reading.skipped, *model.unused, *harmless, *more))
    check_tensors(checkpoint, expected, (*IGNORABLE, *unused))


def _param(model: Model, name: str) -> Param | None:
    return next((param for param in model.step.params if param.name == name), None)


def _held_by(checkpoint: Checkpoint, quantized: Quantized | None, matrix: str) -> tuple[str, ...]:
    """The checkpoint's tensors that hold a matrix; empty where it has no such matrix."""
    if quantized is not None and matrix in quantized.tensors:
        return quantized.entries(matrix)
    return (matrix,) if matrix in checkpoint.entries else ()


def _rows(checkpoint: Checkpoint, quantized: Quantized | None, name: str, start: int, stop: int) -> Array:
    """Read rows of a matrix as floats, dequantized if it is quantized."""
    if quantized is not None and name in quantized.tensors:
        return quantized.weights(name, start, stop)
    return to_float32(checkpoint.read(name, start, stop))
