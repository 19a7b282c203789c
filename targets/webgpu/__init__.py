"""The WebGPU target: WGSL through TVM, of the kernels that the GPU targets share."""

from __future__ import annotations

from nearfar.targets.gpu import KERNELS

from .codegen import Shader, shaders

__all__ = ["KERNELS", "Shader", "shaders"]
