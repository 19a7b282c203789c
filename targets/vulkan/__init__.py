"""The Vulkan target: SPIR-V by our own code generator, of the kernels that the GPU targets share."""

from __future__ import annotations

from nearfar.targets.gpu import KERNELS

from .codegen import Module, modules

__all__ = ["KERNELS", "Module", "modules"]
