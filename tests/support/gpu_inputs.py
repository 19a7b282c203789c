"""Random inputs of the GPU targets' jobs: packed matrices, caches, steps of several sequences."""

from __future__ import annotations

import numpy as np

from nearfar.kernels.contract import Kernels
from nearfar.kernels.jobs import (
    Attend,
    Conv,
    Delta,
    GraphJob,
    Paged,
    RopeAppend,
    Route,
    Ssm,
)

from .job_reference import (
    matrices_of,
    random_inputs,
    random_matrix,
    state_inputs,
)

NOT_THERE = 1 << 28
"""The number of a page that no cache has: a kernel that reads it reads far beyond its buffer."""


def inputs(kernels: Kernels, job: GraphJob, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs; matrices packed as `w0`, `w1`, …, and as the numbers that they represent."""
    if isinstance(job, Paged):
        return paged_inputs(job, rng)
    if isinstance(job, Conv | Delta | Ssm):
        return state_inputs(job, rng)
    arrays = random_inputs(job, rng)
    if isinstance(job, Route):  # the last row but one is padding
        arrays["positions"][: job.m] = np.arange(job.m)
        arrays["positions"][max(job.m - 2, 1) : job.m - 1] = -1
    places = 0
    for name, matrix in matrices_of(job).items():
        tensor, arrays[name] = random_matrix(rng, matrix)
        packed = kernels.pack(matrix, tensor)
        for part, array in zip(kernels.parts(matrix), packed, strict=True):
            assert (part.shape, part.dtype) == (array.shape, str(array.dtype))
            arrays[f"w{places}"] = array
            places += 1
    return arrays


def paged_inputs(job: Attend | RopeAppend, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs: the last rows of three sequences by turns, then one row of padding. Pages that no row
    sees do not exist.
    """
    context = job.pages_per_slot * job.page_size
    pages = job.slots * job.pages_per_slot
    arrays = random_inputs(job, rng, pages, context)
    lengths = {2: context - 9, 0: min(70, context), 3: min(129, context)} if job.slots > 3 else {0: context}
    used = max(job.m - 1, 1)
    for i in range(used):
        slot = list(lengths)[i % len(lengths)]
        arrays["positions"][i] = lengths[slot] - 1 - i // len(lengths)
        if "slots" in arrays:
            arrays["slots"][i] = slot
    if "page_table" in arrays:
        table = rng.permutation(pages).astype(np.int32).reshape(job.slots, job.pages_per_slot)
        arrays["page_table"] = only_seen(job, arrays, table)
    return arrays


def step_inputs(
    job: Attend, runs: tuple[tuple[int, int, int], ...], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Random inputs of a step whose rows are those of `runs`."""
    arrays = paged_inputs(job, rng)
    rows = [(slot, first + i) for slot, first, count in runs for i in range(count)][: job.m]
    arrays["positions"][:] = -1
    for i, (slot, position) in enumerate(rows):
        arrays["slots"][i], arrays["positions"][i] = max(slot, 0), position if slot >= 0 else -1
    pages = rng.permutation(job.slots * job.pages_per_slot).astype(np.int32)
    arrays["page_table"] = only_seen(job, arrays, pages.reshape(job.slots, job.pages_per_slot))
    return arrays


def only_seen(job: Attend | RopeAppend, arrays: dict[str, np.ndarray], table: np.ndarray) -> np.ndarray:
    """The page table without the pages that no row needs."""
    made = np.full_like(table, NOT_THERE)
    for slot, position in zip(arrays["slots"][: job.m], arrays["positions"][: job.m], strict=True):
        last = position // job.page_size
        first = last if isinstance(job, RopeAppend) else 0
        if isinstance(job, Attend) and job.window is not None:
            first = max(0, position + 1 - job.window) // job.page_size
        if position >= 0:
            made[slot, first : last + 1] = table[slot, first : last + 1]
    return made
