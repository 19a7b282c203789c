"""The WebGPU target: WGSL through TVM, of the kernels that the GPU targets share."""

from __future__ import annotations

from nearfar.targets.gpu import variants

from .codegen import Shader, shaders

VARIANTS = variants()

__all__ = ["VARIANTS", "Shader", "shaders"]
