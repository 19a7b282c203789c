"""Counts the bytes that a launch moves, from its plan and the manifest: the least that it must read and
write.

Each weight, value and position counts once a launch, however often a kernel loads it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nearfar.edge_runtime.artifact.budget import cache_bytes, cache_page_bytes
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.format import buffers as names
from nearfar.format.consistency import DTYPE_BYTES
from nearfar.format.manifest import Buffer, Function, KernelParam, Program
from nearfar.format.plans import Launch
from nearfar.format.sizes import pages_for
from nearfar.step.model import op_of, param_of
from nearfar.step.ops import Attend, Glu, Linear


class Traffic:
    """Counts the bytes of a plan's launches, in their order.

    The rows of the step are consecutive positions of one sequence, of which the last makes `context`.
    """

    def __init__(self, artifact: Artifact, program: Program, bucket: Function, context: int) -> None:
        self._artifact, self._program, self._bucket, self._context = artifact, program, bucket, context
        manifest = artifact.manifest
        self._buffers = {buffer.name: buffer for buffer in manifest.buffers}
        self._tables = {names.page_table(group) for group in range(len(manifest.groups))}
        caches = enumerate(manifest.caches)
        self._caches = {name: i for i, cache in caches for name in names.of_cache(i, cache.parts)}
        ops = [op_of(record) for record in manifest.step.ops]
        params = [param_of(record) for record in manifest.step.params]
        halved = {op.x for op in ops if isinstance(op, Glu)}
        gated = {op.weight for op in ops if isinstance(op, Linear) and op.out in halved}
        self._matrices = {p.name: (p.n // (1 + (p.name in gated)), p.k) for p in params if p.is_matrix}
        self._heads = {op.cache: op.heads for op in ops if isinstance(op, Attend)}
        self._appended: set[str] = set()
        self._widths: dict[str, int] = {}

    def of(self, launch: Launch) -> int:
        """Bytes of the next launch of the plan."""
        kernel = self._program.kernels[launch.kernel]
        total = sum(self._named(arg, launch) for arg in launch.args)
        if kernel.params:
            shapes = zip(launch.args, kernel.params, strict=True)
            return total + sum(_bytes(param) for arg, param in shapes if _is_value(arg))
        return total + self._values(launch, kernel.access)

    def _named(self, arg: str, launch: Launch) -> int:
        """Bytes of a weight or buffer."""
        space, _, name = arg.partition(":")
        if space == "weight":
            size, rows = self._artifact.tensors[name].bytes, self._looked_up(name, launch)
            share = self._artifact.manifest.step.share(name.rpartition(".")[0], self._bucket.size)
            return round(size * share) if rows is None else size * self._bucket.size // rows
        if space != "buffer":
            return 0
        return self._cache(name) if name in self._caches else self._buffer(self._buffers[name])

    def _looked_up(self, tensor: str, launch: Launch) -> int | None:
        """The rows of a table from which a launch reads one for each token; None if it reads the whole
        tensor.
        """
        matrix = self._matrices.get(tensor.rpartition(".")[0])
        return matrix[0] if matrix and "buffer:tokens" in launch.args else None

    def _cache(self, name: str) -> int:
        """Bytes of keys or of values: the first launch that names them appends the rows; others read the
        positions that the rows see. One launch reads and writes a state, or appends the rows of one tensor.
        """
        manifest = self._artifact.manifest
        cache = manifest.caches[self._caches[name]]
        if cache.parts == "state":
            return 2 * cache_page_bytes(manifest, cache, self._program.kv_dtype)
        if cache.parts == "k":
            return cache_bytes(cache, self._program.kv_dtype) * self._bucket.size
        window = manifest.groups[cache.group].window
        rows = self._bucket.size
        seen = self._context if window is None else min(self._context, window + rows - 1)
        tokens = seen if name in self._appended else rows
        self._appended.add(name)
        return cache_bytes(cache, self._program.kv_dtype) // 2 * tokens

    def _buffer(self, buffer: Buffer) -> int:
        """Bytes of the rows that a step needs; of a page table, the columns of one sequence."""
        if buffer.name in self._tables:
            columns = pages_for(self._context, self._artifact.manifest.cache.page_size)
            return DTYPE_BYTES[buffer.dtype] * columns
        first, *rest = (self._context if isinstance(extent, str) else extent for extent in buffer.shape)
        rows = (
            self._bucket.rows if buffer.name in ("logits", "embedding", "logit_rows") else self._bucket.size
        )
        return DTYPE_BYTES[buffer.dtype] * min(first, rows) * math.prod(rest)

    def _values(self, launch: Launch, access: tuple[str, ...]) -> int:
        """Bytes of the workspace values of a kernel that does not state its shapes.

        A matrix gives the width of its input and output (a residual is as wide as the output), a cache the
        width of queries; other values are as wide as the ones that are read.
        """
        used = {a: how == "read" for a, how in zip(launch.args, access, strict=True) if _is_value(a)}
        read = [arg for arg in used if used[arg]]
        matrix = self._matrix(launch)
        if matrix and self._caches.keys() & set(_names(launch, "buffer")):
            # The output is q; keys and values are in the caches, and the row inputs are small.
            out = self._width(launch, read)
            columns = matrix[1] + out
        elif matrix:
            out = matrix[1] if "buffer:tokens" in launch.args else matrix[0]
            columns = matrix[1] * bool(read) + out * (len(used) - bool(read))
        else:
            out = self._width(launch, read)
            columns = sum(self._widths.get(arg, out) if arg in read else out for arg in used)
        self._widths.update(dict.fromkeys(used.keys() - set(read), out))
        rows = self._bucket.rows if "buffer:logits" in launch.args else self._bucket.size
        return columns * rows * DTYPE_BYTES[self._program.activations]

    def _width(self, launch: Launch, read: list[str]) -> int:
        """Columns of the output of a launch without a matrix."""
        for name in _names(launch, "buffer"):
            cache = self._caches.get(name)
            if cache in self._heads:
                return self._heads[cache] * self._artifact.manifest.caches[cache].head_dim
        return max((self._widths.get(arg, 0) for arg in read), default=0)

    def _matrix(self, launch: Launch) -> tuple[int, int] | None:
        """Columns out and in of the matrix that a launch multiplies by, or in which it looks up rows."""
        found = (self._matrices.get(name.rpartition(".")[0]) for name in _names(launch, "weight"))
        return next((matrix for matrix in found if matrix), None)


def _names(launch: Launch, space: str) -> Iterator[str]:
    """The names of a launch's arguments in one space."""
    return (arg.removeprefix(f"{space}:") for arg in launch.args if arg.startswith(f"{space}:"))


def _is_value(arg: str) -> bool:
    return arg.startswith("workspace:")


def _bytes(param: KernelParam) -> int:
    return DTYPE_BYTES[param.dtype] * math.prod(extent for extent in param.shape if isinstance(extent, int))
