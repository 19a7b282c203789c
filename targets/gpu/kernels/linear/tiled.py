"""How a workgroup of a matmul of many rows lies over the output: what products of all kinds share."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.classes import DeviceClass
from nearfar.targets.gpu.kernels.linear.epilogue import sides
from nearfar.targets.gpu.kernels.script.vectors import WIDTH

BLOCK = 16  # outputs of a thread, twice as many sums where gated


@dataclass(frozen=True)
class Tiled:
    """A workgroup's `rows` by `columns` of the matrix; `lanes` threads lie across its columns of the output,
    `deep` along its rows, of which each has `own`.
    """

    rows: int
    columns: int
    lanes: int
    deep: int

    @staticmethod
    def over(job: Linear, device: DeviceClass, columns: int) -> Tiled:
        """With as many rows as the class's tile, or fewer where there are fewer."""
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
