"""The onnx target: a directory that Transformers.js and onnxruntime-genai load, with our manifest next to
their files.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build import manifest
from nearfar.build.options import BuildOptions
from nearfar.build.source import Source
from nearfar.build.targets.target import Made, OverFiles, Programs, Tell, check_kv_bits
from nearfar.build.targets.unplanned import program, write_files
from nearfar.build.weights.stream import MatrixRows
from nearfar.errors import BuildError
from nearfar.format.consistency import PLANNED
from nearfar.format.manifest import File, Weights
from nearfar.kernels.contract import Products
from nearfar.kernels.quantized import Matrix, StorableMatrices
from nearfar.step.params import Param
from nearfar.targets.onnx import configs

HEADS = 8
"""ONNX Runtime's attention needs a head_dim that is a multiple of this."""


class OnnxWriter(OverFiles):
    """Writes the tables of rotations, then matrices as the graph's operators read them, in the step's order.

    At the end it writes the graph, which says where in the files each tensor is.
    """

    def __init__(self, source: Source, root: Path, int8: bool) -> None:
        """`int8`: products quantize the rows that a matrix is multiplied by."""
        lowering, matrices, external = _modules("lowering", "matrices", "external")
        self._source, self._int8 = source, int8
        self._graph_file = root / configs.graph_file(configs.widest(source.matrices))
        stem = f"{self._graph_file.relative_to(root).as_posix()}_data"
        self._files = external.ExternalWriter(root, stem, external.PART_BYTES)
        super().__init__(self._files)
        self._write_matrix, self._step_graph = matrices.write_matrix, lowering.step_graph
        self._matrices: dict[str, dict[str, Any]] = {}
        self._single: dict[str, Any] = lowering.write_tables(self._files, source.model)

    def vector(self, param: Param, values: npt.NDArray[np.float32]) -> None:
        """Write a vector in float32, with its folded factor."""
        self._single[param.name] = self._files.add(param.name, param.folded(values))

    def matrix(self, param: Param, matrix: Matrix, tensor: MatrixRows) -> None:
        """Write a matrix with its rows in the step's order."""
        if param.order is not None:
            tensor = tensor[np.array(param.order)]
        self._matrices[param.name] = self._write_matrix(self._files, param.name, matrix, tensor, self._int8)

    def finish(self) -> Weights:
        """Write the graph; the manifest's `weights`."""
        files = self._files.finish()
        source = self._source
        graph = self._step_graph(source.model, source.matrices, self._matrices, self._single, self._int8)
        graph.save(self._graph_file)
        sizes = [file.bytes for file in files]
        return Weights(sum(sizes), max(sizes), files, (), "onnx")


class OnnxTarget:
    """See nearfar.build.targets.target.Target."""

    held = StorableMatrices.pairs()

    def products(self, options: BuildOptions) -> set[Products]:
        """The products of the one graph: float, unless the options name int8 alone."""
        return {"float"} if "float" in options.multiplied_as else {"int8"}

    def check(self, source: Source, options: BuildOptions) -> None:
        """Reject a step for which ONNX Runtime has no operators; writing the graph also needs onnx."""
        check_kv_bits("onnx", options)
        (lowering,) = _modules("lowering")
        if reason := lowering.refusal(source.model.step.ops):
            raise BuildError(f"target onnx {reason}")
        lengths = sorted({cache.head_dim for cache in source.model.step.caches if cache.head_dim % HEADS})
        if lengths:
            raise BuildError(
                f"target onnx has no attention for heads of {lengths[0]} values: ONNX Runtime's "
                f"GroupQueryAttention takes multiples of {HEADS}. Build for another target"
            )

    def writer(self, source: Source, root: Path, options: BuildOptions) -> OnnxWriter:
        """A writer of the graph, with the weights in files of at most 2 GB."""
        return OnnxWriter(source, root, self.products(options) == {"int8"})

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        """No programs: ONNX Runtime compiles at run time."""
        return Programs()

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        """Write the files that the libraries read before the graph, and the tokenizer."""
        checkpoint, model = source.checkpoint, source.model
        bits = configs.widest(source.matrices)
        hidden = next(param.k for param in source.params if param.is_matrix)
        documents = {
            "config.json": configs.transformers_config(source.reading, model, bits, len(weights.shards)),
            "generation_config.json": configs.generation_config(checkpoint.generation_config, model),
            "genai_config.json": configs.genai_config(model, hidden, bits),
        }
        files = write_files(checkpoint, root, documents)
        config = File.of(root, root / "config.json")
        function = File.of(root, root / configs.graph_file(bits))
        return Made(
            manifest.listed_ropes(model.step), (program("f32", PLANNED["generate"]),), files, config, function
        )


def _modules(*names: str) -> list[ModuleType]:
    """Import modules of targets/onnx/, which need onnx. Raises BuildError where it is not installed."""
    from importlib import import_module

    try:
        return [import_module(f"nearfar.targets.onnx.{name}") for name in names]
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise BuildError(
            f"target onnx needs the onnx package ({error}): pip install 'nearfar[onnx]', or leave "
            "the target out"
        ) from error


TARGET = OnnxTarget()
