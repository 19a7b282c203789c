"""The mlx target: a directory that mlx-lm and mlx-swift-lm load unchanged, with our manifest next to their
files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from nearfar.build import manifest
from nearfar.build.options import BuildOptions
from nearfar.build.source import Source
from nearfar.build.targets.target import Made, OverFiles, Programs, Tell
from nearfar.build.targets.unplanned import program, write_files
from nearfar.build.weights.safetensors import SafetensorsWriter, TensorSpec
from nearfar.build.weights.stream import MatrixRows, to_float16
from nearfar.errors import BuildError
from nearfar.format.consistency import PLANNED
from nearfar.format.manifest import File, Weights
from nearfar.kernels.contract import Products
from nearfar.kernels.quantized import QuantTensor, StorableMatrices
from nearfar.step.params import Param
from nearfar.targets.mlx.config_json import mlx_config, module_of


def dense_dtype(source: Source) -> str:
    """The dtype of everything that is not quantized, one for the whole model: MLX then computes in it."""
    wide = all(matrix.bits == 32 for matrix in source.matrices.values())
    return "float32" if wide else "float16"


def tensor_specs(source: Source) -> list[TensorSpec]:
    """The tensors in the order in which the stream delivers them; a matrix's scales and biases follow it."""
    dtype, specs = dense_dtype(source), []
    for param in source.params:
        matrix = source.matrices.get(param.name)
        for name, rows in param.tensors.items():
            shape = replace(param.piece(name), transposed=False).shape(rows, param.k)
            high = shape[:-1]
            if matrix is None or not matrix.quantized:
                specs.append(TensorSpec(name, dtype, shape))
            else:
                affine = (*high, matrix.k // matrix.group)
                specs.append(TensorSpec(name, "uint32", (*high, matrix.k * matrix.bits // 32)))
                specs += [
                    TensorSpec(f"{module_of(name)}.{part}", "float16", affine)
                    for part in ("scales", "biases")
                ]
    return specs


@dataclass
class _Affine:
    """Scales and biases of the tensor being written, kept until its codes are written: an eighth of the
    codes' bytes at 4 bits.
    """

    left: int  # the number of rows still to come
    scales: list[npt.NDArray[np.float16]] = field(default_factory=list)
    biases: list[npt.NDArray[np.float16]] = field(default_factory=list)


class MlxWriter(OverFiles):
    """Writes the checkpoint's own tensors under their names, in slices as they arrive."""

    def __init__(self, source: Source, root: Path) -> None:
        self._files = SafetensorsWriter(root, tensor_specs(source))
        super().__init__(self._files)
        self._dtype = dense_dtype(source)
        self._rows = {name: n for param in source.params for name, n in param.tensors.items()}
        self._affine: _Affine | None = None

    def vector(self, param: Param, values: npt.NDArray[np.float32]) -> None:
        """Write the tensors that the parameter was stacked from, as the checkpoint has them."""
        start = 0
        for name, n in param.tensors.items():
            part = values[start : start + n].reshape(param.piece(name).shape(n, 0))
            self._files.write(name, part if self._dtype == "float32" else to_float16(part, name))
            start += n

    def rows(self, tensor: str, piece: MatrixRows) -> None:
        """Write the rows; the scales and biases of a quantized tensor when its last rows have come."""
        if not isinstance(piece, QuantTensor):
            self._files.write(tensor, piece.astype(self._dtype, copy=False))
            return
        affine = self._affine = self._affine or _Affine(self._rows[tensor])
        self._files.write(tensor, piece.words)
        affine.scales.append(piece.scales)
        affine.biases.append(piece.biases)
        affine.left -= len(piece.words)
        if not affine.left:
            for part, arrays in (("scales", affine.scales), ("biases", affine.biases)):
                for array in arrays:
                    self._files.write(f"{module_of(tensor)}.{part}", array)
            self._affine = None

    def finish(self) -> Weights:
        """The manifest's `weights`: the files' own headers describe the tensors."""
        files = self._files.finish()
        sizes = [file.bytes for file in files]
        return Weights(sum(sizes), max(sizes), files, (), "safetensors")


class MlxTarget:
    """See nearfar.build.targets.target.Target."""

    held = StorableMatrices.pairs((32, 64, 128))

    def products(self, options: BuildOptions) -> set[Products]:
        """Float products only: MLX has no other."""
        return {"float"}

    def check(self, source: Source, options: BuildOptions) -> None:
        """For an exported function, raise BuildError without mlx installed, and for an embedding model,
        experts or layers that keep more than keys and values.
        """
        if options.export_function:
            if source.model.embedding is not None:
                raise BuildError(
                    "--export-function is for models that give logits: leave it, or --embeddings, out"
                )
            if any(param.stack > 1 for param in source.params):
                raise BuildError(
                    "--export-function is not for models with experts: a function would copy the matrices of "
                    "all experts at every step. Leave it out"
                )
            if any(cache.parts != "kv" for cache in source.model.step.caches):
                raise BuildError(
                    "--export-function is not for models with a short convolution or a recurrent state: a "
                    "function keeps keys and values only. Leave it out"
                )
            _exporter()

    def writer(self, source: Source, root: Path, options: BuildOptions) -> MlxWriter:
        """A writer of one safetensors file, or of several with an index."""
        return MlxWriter(source, root)

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        """No programs: MLX compiles at run time."""
        return Programs()

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        """Write config.json, the tokenizer and, if requested, the exported function."""
        checkpoint = source.checkpoint
        documents = {"config.json": mlx_config(checkpoint.config, source.reading, source.matrices)}
        if (checkpoint.path / "generation_config.json").is_file():
            documents["generation_config.json"] = dict(checkpoint.generation_config)
        if source.model.eos_token_ids:  # mlx-lm takes end tokens from either document
            for document in documents.values():
                document["eos_token_id"] = list(source.model.eos_token_ids)
        ordered = {name: dict(sorted(document.items())) for name, document in documents.items()}
        files = write_files(checkpoint, root, ordered)
        step, function = source.model.step, None
        if options.export_function:
            export = _exporter()
            tensors = export.load_weights([root / shard.file for shard in weights.shards])
            export.export_step(root / export.FUNCTION, step, source.model.vocab_size, tensors)
            function = File.of(root, root / export.FUNCTION)
        task = "generate" if source.model.embedding is None else "embed"
        records = (program("f16", PLANNED[task], ("metal",)), program("f32", PLANNED[task]))
        config = File.of(root, root / "config.json")
        return Made(manifest.listed_ropes(step), records, files, config, function)


def _exporter() -> ModuleType:
    """Import the exporter, which needs mlx. Raises BuildError where it is not installed."""
    try:
        from nearfar.build.targets import mlx_function as export
    except ImportError as error:
        raise BuildError(
            f"--export-function needs mlx ({error}): pip install 'nearfar[mlx]', or build without it"
        ) from error
    return export


TARGET = MlxTarget()
