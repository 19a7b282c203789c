"""Shared parts of executors that replay plans, whatever memory they use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors import quantized_pages
from nearfar.errors import ArtifactError
from nearfar.format import buffers as names
from nearfar.format.manifest import Dim, Program, Tensor
from nearfar.format.plans import Launch
from nearfar.format.rotations import rope_table

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]
Stamps = npt.NDArray[np.uint64]


class Profiled(Protocol):
    """An executor of plans that can time each launch."""

    def profile(self, function: str, size: int) -> tuple[float, ...]:
        """Run a plan as `run` does, wait, and return the seconds of each of its launches, in order.

        DeviceError if this device cannot measure them.
        """
        ...


def seconds(before: Stamps, after: Stamps, tick: float, bits: int = 64) -> tuple[float, ...]:
    """Seconds between stamps of a counter of `bits` bits that wraps around; `tick`: seconds of one count.

    If the counter went back, as it may when a GPU changes its clock, the time is 0.
    """
    passed = (after - before) & np.uint64((1 << bits) - 1)
    return tuple(np.where(passed >> np.uint64(bits - 1), 0, passed * tick).tolist())


@dataclass(frozen=True)
class BufferShape:
    """The shape and dtype of a named buffer. Rows are counted by the first axis."""

    extents: tuple[int, ...]
    dtype: np.dtype[Any]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return math.prod(self.extents) * self.dtype.itemsize

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.extents[1:]) * self.dtype.itemsize

    def rows(self, count: int) -> tuple[int, ...]:
        """The extents of `count` rows."""
        return (count, *self.extents[1:])


class ProgramLayout:
    """Resolves the names in a program's plans for the settings' pages and positions: shapes, caches,
    launches.
    """

    def __init__(self, artifact: Artifact, program: Program, settings: Settings) -> None:
        self._artifact, self._program, self._settings = artifact, program, settings
        self._quantized = quantized_pages.quantized(artifact.manifest, program)
        stored = {b.name: names.stored(b, program.kv_dtype) for b in artifact.manifest.buffers}
        self.buffers = {
            name: BufferShape(self.extents(shape), np.dtype(dtype)) for name, (dtype, shape) in stored.items()
        }

    def extents(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        """A shape with its named dimensions replaced by numbers."""
        return names.sized(shape, self._settings.context, self._settings.pages)

    def buffer(self, name: str) -> BufferShape:
        """The shape of a buffer; ArtifactError if the artifact does not have it."""
        if name not in self.buffers:
            raise ArtifactError(f"the artifact has no buffer {name!r}")
        return self.buffers[name]

    def place(self, buffer: str, data: Array, row: int, column: int) -> int:
        """The byte offset in a buffer at which a write begins; see the function `place`."""
        shape = self.buffer(buffer)
        return place(buffer, shape.extents, shape.dtype, data, row, column) * data.itemsize

    def caches(self, group: int) -> dict[str, BufferShape]:
        """The buffers of the caches of a group, with one row for each page."""
        own = (each for each in enumerate(self._artifact.manifest.caches) if each[1].group == group)
        return {
            name: self.buffer(name) for index, cache in own for name in names.of_cache(index, cache.parts)
        }

    def check_pages(
        self, group: int, pages: Sequence[int], content: Mapping[str, Array]
    ) -> dict[str, BufferShape]:
        """The float caches of a group. ValueError unless `content` has all of them for the pages."""
        caches = self.caches(group)
        check_pages(content, {name: (shape.rows(len(pages)), shape.dtype) for name, shape in caches.items()})
        return caches

    def told(self, pages: Mapping[str, Array], *, innermost: bool = False) -> dict[str, Array]:
        """Convert pages from the kernels' form to the result of Executor.read_pages.

        Float keys must already have its shape. `innermost`: the codes of keys have positions innermost.
        """
        if not self._quantized:
            return dict(pages)
        dtype = self._program.kv_dtype
        floats = {name: array for name, array in pages.items() if name not in self._quantized}
        return floats | {
            f"{name}.{part}": array
            for name, words in pages.items()
            if name in self._quantized
            for part, array in quantized_pages.parts_of(
                words, self._quantized[name], dtype, innermost=innermost and names.is_keys(name)
            ).items()
        }

    def held(
        self, group: int, pages: Sequence[int], content: Mapping[str, Array], *, innermost: bool = False
    ) -> dict[str, Array]:
        """Convert `content`, in the form of Executor.read_pages, to the kernels' form, by cache
        of a group.

        ValueError unless it has all caches of the group for these pages, and nothing else.
        """
        if not self._quantized:
            return {name: content[name] for name in self.check_pages(group, pages, content)}
        every, dtype = self.caches(group), self._program.kv_dtype
        caches = {name: shape for name, shape in every.items() if name in self._quantized}
        floats = {name: shape for name, shape in every.items() if name not in self._quantized}
        wanted = {name: (shape.rows(len(pages)), shape.dtype) for name, shape in floats.items()}
        wanted |= {
            f"{name}.{part}": kind
            for name, shape in caches.items()
            for part, kind in quantized_pages.shapes(
                shape.rows(len(pages)), self._quantized[name], dtype
            ).items()
        }
        check_pages(content, wanted)
        return {name: content[name] for name in floats} | {
            name: quantized_pages.pages_of(
                {part: content[f"{name}.{part}"] for part in quantized_pages.PARTS},
                dtype,
                innermost=innermost and names.is_keys(name),
            )
            for name in caches
        }

    def rope_tables(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """The buffers of rotary tables, with their contents."""
        for name, rope in self._artifact.manifest.ropes.items():
            context = self._settings.context
            frequencies = self._artifact.read_tensor(str(rope.frequencies(context)))
            yield names.rope(name), rope_table(frequencies, rope.scale, context)

    def smallest(self, function: str) -> int:
        """The smallest bucket of a function."""
        return min(bucket.size for bucket in self._program.functions[function])

    def launches(self, function: str, size: int) -> tuple[Launch, ...]:
        """The plan of a bucket, checked against the manifest; ArtifactError if there is none."""
        for bucket in self._program.functions.get(function, ()):
            if bucket.size == size:
                return self._artifact.plan(bucket).launches
        raise ArtifactError(f"the artifact has no plan for {function} of size {size}")


def place(
    buffer: str, shape: tuple[int, ...], dtype: np.dtype[Any], data: Array, row: int, column: int
) -> int:
    """The index of the element in a buffer at which a write begins (see Executor.write). ValueError if it
    does not fit.
    """
    part = data.ndim == len(shape) == 2 and len(data) == 1 and 0 <= column <= shape[1] - data.shape[1]
    whole = column == 0 and data.shape[1:] == shape[1:]
    if data.dtype != dtype or not (part or whole) or not 0 <= row <= shape[0] - len(data):
        at = f"row {row}, column {column}" if column else f"row {row}"
        raise ValueError(
            f"{data.dtype}{list(data.shape)} at {at} does not fit {buffer}, {dtype}{list(shape)}"
        )
    return row * math.prod(shape[1:]) + column


def put(target: Array, buffer: str, data: Array, row: int, column: int) -> None:
    """Write to a buffer in the host's memory: see Executor.write."""
    start = place(buffer, target.shape, target.dtype, data, row, column)
    target.reshape(-1)[start : start + data.size] = data.reshape(-1)


def check_pages(
    content: Mapping[str, Array], expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
) -> None:
    """Raise ValueError if `content` for pages has other names, shapes or dtypes than the cache."""
    given = {name: (array.shape, array.dtype) for name, array in content.items()}
    if given != dict(expected):
        wrong = sorted(name for name in {*given, *expected} if given.get(name) != expected.get(name))
        raise ValueError(
            f"pages do not fit the cache: {wrong[0]} is {given.get(wrong[0])}, not {expected.get(wrong[0])}"
        )


def pieces(artifact: Artifact, tensor: Tensor, most: int) -> Iterator[tuple[int, Bytes]]:
    """A tensor's bytes in pieces of at most `most`, each with its offset. The next piece
    overwrites a piece.
    """
    room = np.empty(min(most, tensor.bytes), np.uint8)
    for start in range(0, tensor.bytes, max(most, 1)):
        piece = room[: min(most, tensor.bytes - start)]
        artifact.read_into(tensor.offset + start, piece.data)
        yield start, piece


def as_bytes(data: Array) -> Bytes:
    """The bytes of an array, in order."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
