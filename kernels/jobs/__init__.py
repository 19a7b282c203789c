"""What kernels are asked to do: one frozen record a job, keyed by everything that the kernel depends on.

A job states once the order of its inputs (`inputs`), its output (`out`), and what its kernel is called
(`label`). Names of inputs: `x` rows of activations; `w0`, `w1`, … the packed parts of a matrix; the rest as
in the buffer table (format/buffers.py). Kernels take their inputs in this order, then `out`.
"""

from __future__ import annotations

from nearfar.step.ops import Activation

from .linear import Embed, Linear, Norm
from .logits import Greedy, Logprobs, OverLogits, Sample
from .names import Output, labelled, short
from .paged import Attend, Paged, RopeAppend, Rows, Split
from .project import Project

GraphJob = Embed | Norm | Linear | RopeAppend | Rows | Project | Attend
"""Jobs of a step; their arguments are the graph's tensors."""
SamplerJob = Greedy | Sample | Logprobs
"""Jobs beside the step; their arguments are buffers of the artifact, by name."""
Job = GraphJob | SamplerJob

__all__ = [
    "Activation",
    "Attend",
    "Embed",
    "GraphJob",
    "Greedy",
    "Job",
    "Linear",
    "Logprobs",
    "Norm",
    "Output",
    "OverLogits",
    "Paged",
    "Project",
    "RopeAppend",
    "Rows",
    "Sample",
    "SamplerJob",
    "Split",
    "labelled",
    "short",
]
