"""The WebGPU target: the kernels that GPU targets share, compiled to WGSL by TVM."""

from __future__ import annotations

from nearfar.targets.gpu import variants

from .codegen import Shader, shaders

VARIANTS = variants()

__all__ = ["VARIANTS", "Shader", "shaders"]
