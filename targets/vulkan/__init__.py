"""The Vulkan target: the kernels that GPU targets share, compiled to SPIR-V by our own code generator."""

from __future__ import annotations

from nearfar.targets.gpu import variants

from .codegen import Module, modules

VARIANTS = variants(vectors=True, cooperative=True)

__all__ = ["VARIANTS", "Module", "modules"]
