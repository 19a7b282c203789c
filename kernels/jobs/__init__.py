"""Jobs, which say what a kernel must compute: one frozen record for each, with everything that the kernel
depends on.

A job states the order of its inputs (`inputs`), its output (`out`), and its kernel's name (`label`). Names of
inputs: `x` is rows of activations; `w0`, `w1`, … are the packed parts of a matrix; the others are those of
the buffer table (format/buffers.py). A kernel's parameters are the inputs in this order, then `out`.
"""

from __future__ import annotations

from nearfar.step.operation import Activation

from .experts import Experts, Route
from .linear import Embed, Linear, Norm
from .logits import Greedy, Logprobs, OverLogits, Sample
from .names import Output, labelled, short
from .paged import Attend, Paged, RopeAppend, Rows, Split
from .project import Project
from .state import Conv, Delta, Ssm

GraphJob = Embed | Norm | Linear | RopeAppend | Rows | Project | Attend | Route | Experts | Conv | Delta | Ssm
"""Jobs of a step; their arguments are tensors of the graph."""
SamplerJob = Greedy | Sample | Logprobs
"""Jobs of the sampler; their arguments are buffers of the artifact, by name."""
Job = GraphJob | SamplerJob

__all__ = [
    "Activation",
    "Attend",
    "Conv",
    "Delta",
    "Embed",
    "Experts",
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
    "Route",
    "Rows",
    "Sample",
    "SamplerJob",
    "Split",
    "Ssm",
    "labelled",
    "short",
]
