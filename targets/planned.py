"""Targets that TVM compiles: plans over our own kernels, and a weight stream packed for them (cpu, webgpu, vulkan)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tvm

from nearfar.build import manifest
from nearfar.build.program.compile import Program, compile_program
from nearfar.build.source import BuildOptions, Source
from nearfar.build.weights.shards import SHARD_BYTES, ShardWriter
from nearfar.build.weights.stream import Piece
from nearfar.errors import BuildError
from nearfar.step.params import Param
from nearfar.targets import emit
from nearfar.targets.kernels import Kernels
from nearfar.targets.quantized import Matrix
from nearfar.targets.target import Made

BITS = (4, 8)  # that there are kernels for


class PackedWriter:
    """Packs whole matrices for a target's kernels and appends them to its weight stream."""

    def __init__(self, kernels: Kernels, shards: ShardWriter) -> None:
        self._kernels, self._shards = kernels, shards

    def vector(self, param: Param, values: npt.NDArray[np.float32]) -> None:
        """As it is, in float32."""
        self._shards.add(param.name, values)

    def matrix(self, param: Param, matrix: Matrix, tensor: Piece) -> None:
        """In the parts that the kernels want."""
        packed = self._kernels.pack(matrix, tensor)
        for part, array in zip(self._kernels.parts(matrix), packed, strict=True):
            self._shards.add(f"{param.name}.{part.name}", array)

    def finish(self) -> dict[str, Any]:
        """The manifest's `weights`."""
        shards, tensors = self._shards.finish()
        size = sum(shard["bytes"] for shard in shards)
        return {"bytes": size, "shard_bytes": SHARD_BYTES, "shards": shards, "tensors": tensors}

    def __enter__(self) -> Self:
        self._shards.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shards.__exit__(kind, error, trace)


@dataclass(frozen=True)
class CompiledTarget:
    """A target with kernels. `kernels` is a function, as its modules take a while to import."""

    name: str
    kernels: Callable[[], Kernels]
    tvm_target: dict[str, Any]
    emit: Callable[[Program, emit.EmitContext], dict[str, Any]]

    def check(self, source: Source, options: BuildOptions) -> None:
        """Kernels are written for 4 and 8 bits."""
        if source.scheme.bits and source.scheme.bits not in BITS:
            raise BuildError(
                f"quantization {source.scheme.name} exists for target mlx only: build {self.name} with --quant q4, q8 or none"
            )

    def writer(self, source: Source, root: Path) -> PackedWriter:
        """The weight stream; it begins with the frequencies of the rotary embedding."""
        shards = ShardWriter(root)
        shards.add(manifest.ROPE_WEIGHT, source.config.rope.inv_freq(source.config.head_dim))
        return PackedWriter(self.kernels(), shards)

    def finish(self, source: Source, root: Path, weights: dict[str, Any], options: BuildOptions) -> Made:
        """Compile a program for each precision. The kernels attend to everything, so a model's context ends at its window."""
        model = source.within_window()
        context = emit.EmitContext(
            root=root,
            buffers={buffer["name"]: buffer for buffer in manifest.buffers(model.config, model.cache)},
            weights={tensor["name"]: tensor for tensor in weights["tensors"]},
            cpu_features=options.cpu_features,
        )
        kernels, programs = self.kernels(), []
        for precision in kernels.precisions:
            dump = options.dump_ir / self.name / precision if options.dump_ir is not None else None
            program = compile_program(model, kernels, precision, tvm.target.Target(self.tvm_target), dump)
            programs.append(self.emit(program, context))
        files = source.checkpoint.write_tokenizer(root / "tokenizer")
        return Made(model, {"inv_freq": manifest.ROPE_WEIGHT, "scale": 1.0}, programs, files, {})


def _cpu_kernels() -> Kernels:
    from nearfar.targets.cpu import KERNELS

    kernels: Kernels = KERNELS
    return kernels


def _vulkan_kernels() -> Kernels:
    from nearfar.targets.vulkan import KERNELS

    kernels: Kernels = KERNELS
    return kernels


def _webgpu_kernels() -> Kernels:
    from nearfar.targets.webgpu import KERNELS

    kernels: Kernels = KERNELS
    return kernels


CPU = CompiledTarget("cpu", _cpu_kernels, {"kind": "llvm"}, emit.emit_cpu)
WEBGPU = CompiledTarget("webgpu", _webgpu_kernels, {"kind": "webgpu", "host": "llvm"}, emit.emit_webgpu)
VULKAN = CompiledTarget("vulkan", _vulkan_kernels, {"kind": "vulkan", "host": "llvm"}, emit.emit_vulkan)
