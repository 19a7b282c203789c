"""The division of a matmul's output among workgroups, for products of all kinds."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.classes import DeviceClass
from nearfar.targets.gpu.kernels.linear.epilogue import sides
from nearfar.targets.gpu.kernels.script.vectors import WIDTH

BLOCK = 16  # outputs of a thread; a gated product has twice as many sums


@dataclass(frozen=True)
class Tiled:
    """The part of a workgroup: `rows` by `columns` of the matrix.

    `lanes` threads are along its columns of the output, `deep` along its rows; each of these has `own` rows.
    """

    rows: int
    columns: int
    lanes: int
    deep: int

    @staticmethod
    def over(job: Linear, device: DeviceClass, columns: int) -> Tiled:
        """The division with the class's rows for each workgroup, or fewer for jobs with few rows."""
        most = device.tile[0]
        rows = next((size for size in (16, 32) if job.m <= size < most), most)
        lanes = columns // WIDTH // sides(job)
        return Tiled(rows, columns, lanes, max(rows * columns // BLOCK, device.subgroup) // lanes)

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.lanes * self.deep

    @property
    def own(self) -> int:
        """Rows of a thread."""
        return self.rows // self.deep
