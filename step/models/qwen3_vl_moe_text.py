"""The text model of Qwen3-VL with experts (30B-A3B, 235B-A22B): that of Qwen3 with experts.

The experts of a layer are in one tensor: input by input in published files, row by row in files that newer
versions of transformers write. The weights of the chosen experts always sum to 1.
"""

from __future__ import annotations

from nearfar.step.config import ConfigReader
from nearfar.step.model import Model
from nearfar.step.models.qwen3_moe import with_experts

SUM = "norm_topk_prob"


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    if not read.flag(SUM, True):
        read.refuse(SUM, "true: transformers computes this model with it, whatever its config says")
    read = read.filled({SUM: True})
    return with_experts(read, context, "qwen3_vl_moe_text", apart=False, transposed=True)
