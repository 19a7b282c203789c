"""Chooses the kernel of paged attention by the class of device."""

from __future__ import annotations

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.contract import Staged
from nearfar.kernels.jobs import Attend, Linear, Split
from nearfar.targets.gpu.classes import SOFTWARE, Tuning
from nearfar.targets.gpu.kernels import software
from nearfar.targets.gpu.kernels.attention import flash_decode, flash_prefill
from nearfar.targets.gpu.kernels.attention.combine import gathered_bytes, row_bytes
from nearfar.targets.gpu.kernels.attention.heads import HeadVectors
from nearfar.targets.gpu.kernels.linear.matvec import VECTOR_ROWS, room, workgroups
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, fits


def attention(job: Attend, tuning: Tuning) -> Staged:
    """The launches of an Attend job.

    Up to MAX_ROWS rows may each belong to another sequence: workgroups share their positions. With more rows,
    rows that share positions are computed together.
    """
    if tuning.device is SOFTWARE:
        staged: Staged = software.attention(job)
    elif job.m <= MAX_ROWS:
        staged = flash_decode.attention(job, tuning.device)
    else:
        staged = flash_prefill.attention(job, tuning.device)
    return staged


def split(job: Attend, linear: Linear, tuning: Tuning) -> Split | None:
    """The parts that attention leaves to the matmul behind it; None: attention joins them itself.

    Every workgroup of the matmul reads all parts, so the launch saved is paid for by reading them again. Both
    costs are absolute: a launch costs a small model as much as a large one, so the bytes that may be read
    again are a constant of the class (classes.read_again; docs/decisions/0016).
    """
    device = tuning.device
    if device is SOFTWARE or job.m > VECTOR_ROWS or not fits(linear) or HeadVectors.of(job).width != WIDTH:
        return None
    if linear.norm is not None or linear.rows:
        return None
    found = flash_decode.few_parts(job, device)
    again = (found.count - 1) * row_bytes(linear) * workgroups(linear)
    small = again <= device.read_again and room(linear, device, gathered_bytes(linear, found, job.heads))
    return found if small else None
