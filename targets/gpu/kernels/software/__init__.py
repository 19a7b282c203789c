"""Kernels of class `software`: their tilings were measured where a processor imitates a GPU."""

from .attention import attention

__all__ = ["attention"]
