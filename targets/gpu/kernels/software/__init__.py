"""Matrix kernels of class `software`: their tilings were measured where a processor imitates a GPU.

They take every shape, so other classes use them for the odd ones.
"""

from .matmul import matmul
from .matvec import matvec

__all__ = ["matmul", "matvec"]
