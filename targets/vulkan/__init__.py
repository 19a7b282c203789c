"""The Vulkan target: SPIR-V by our own code generator, of the kernels that the GPU targets share."""

from __future__ import annotations

from nearfar.targets.gpu import variants

from .codegen import Module, modules

VARIANTS = variants(vectors=True, cooperative=True)

__all__ = ["VARIANTS", "Module", "modules"]
