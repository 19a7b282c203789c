"""The Vulkan target: SPIR-V by our own code generator, of the kernels that the GPU targets share."""

from __future__ import annotations

from nearfar.targets.gpu import GpuKernels
from nearfar.targets.kernels import Kernels

from .codegen import Module, modules

KERNELS: Kernels = GpuKernels(vectors=True)

__all__ = ["KERNELS", "Module", "modules"]
