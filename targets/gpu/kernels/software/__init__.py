"""Kernels of class `software`: their tilings were measured where a processor imitates a GPU.

Those of matrices take every shape, so other classes use them for the odd ones.
"""

from nearfar.targets.gpu.kernels.software.attention import attention
from nearfar.targets.gpu.kernels.software.matmul import matmul
from nearfar.targets.gpu.kernels.software.matvec import matvec

__all__ = ["attention", "matmul", "matvec"]
