"""Kernels of class `software`; their tilings were measured on software GPUs.

The matrix kernels take every shape, so other classes use them for odd ones.
"""

from nearfar.targets.gpu.kernels.software.attention import attention
from nearfar.targets.gpu.kernels.software.matmul import matmul
from nearfar.targets.gpu.kernels.software.matvec import matvec

__all__ = ["attention", "matmul", "matvec"]
