"""Kernels of class `software`: their tilings were measured where a processor imitates a GPU.

Those of matrices take every shape, so other classes use them for the odd ones.
"""

from .attention import attention
from .matmul import matmul
from .matvec import matvec

__all__ = ["attention", "matmul", "matvec"]
