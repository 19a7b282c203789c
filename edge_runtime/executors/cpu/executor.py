"""Runs a CPU artifact: its shared library over NumPy memory. A step is one call that releases the GIL."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.edge_runtime.executors.cpu.cores import usable_cores
from nearfar.edge_runtime.executors.cpu.features import architecture, cpu_flags
from nearfar.edge_runtime.executors.cpu.library import Array, Library, Plan, Tensor
from nearfar.edge_runtime.executors.planned import (
    cache_names,
    check_pages,
    load_weights,
    place,
    reserve,
    rope_table,
    symbols,
)
from nearfar.errors import ArtifactError, DeviceError


class CpuExecutor:
    """See Executor. Work is done before `run` returns, so every order promise holds by itself."""

    name = "cpu"

    def __init__(
        self,
        directory: Path | str,
        manifest: Mapping[str, Any],
        program: Mapping[str, Any],
        *,
        pages: Sequence[int],
        context: int,
        threads: int | None = None,
    ) -> None:
        """Load weights and library, make the buffers for so many pages by group and positions, bind every plan."""
        check_cpu(program["requires"])
        self.precision = {"float16": "f16", "float32": "f32"}[program["activations"]]
        root = Path(directory)
        self._symbols = symbols(pages, context)
        self._groups = [int(cache["group"]) for cache in manifest["caches"]]
        weights, stream = load_weights(root, manifest["weights"])
        self._memory: dict[str, Array] = {f"weight:{name}": array for name, array in weights.items()}
        self._held = stream.nbytes
        for i, count in enumerate(program["workspace"]):
            self._memory[f"workspace:{i}"] = self._reserve((int(count),), "uint8")
        for buffer in manifest["buffers"]:
            dtype = program["kv_dtype"] if buffer["dtype"] == "kv" else buffer["dtype"]
            self._memory[f"buffer:{buffer['name']}"] = self._reserve(self._shape(buffer["shape"]), dtype)
        for name, rope in manifest["ropes"].items():
            self.write(f"rope.{name}", rope_table(weights[rope["inv_freq"]], float(rope["scale"]), context))
        if not program.get("library"):
            raise ArtifactError(f"{root} names no library for its {self.precision} program: build the artifact again")
        self._library = Library(root / program["library"])
        self._tensors: dict[tuple[Any, ...], Tensor] = {}
        self._plans: dict[tuple[str, int], Plan] = {}
        for function, entries in program["functions"].items():
            for entry in entries:
                self._plans[function, int(entry["size"])] = self._bind(root / entry["plan"], program["kernels"])
        self._pool = self._library.pool(threads or usable_cores())
        self._closed = False

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write."""
        target = self._buffer(buffer)
        start = place(buffer, target.shape, target.dtype, data, row, column)
        target.reshape(-1)[start : start + data.size] = data.reshape(-1)

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        try:
            plan = self._plans[function, size]
        except KeyError:
            raise ArtifactError(f"the artifact has no plan for {function} of size {size}") from None
        self._pool.replay(plan)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch."""
        copy = self._buffer(buffer)[:rows].copy()
        return lambda: copy

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page."""
        for name in cache_names(self._groups, group):
            cache = self._buffer(name)
            cache[target] = cache[source]

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        return {name: cache[list(pages)] for name, cache in self._caches(group).items()}

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        caches = self._caches(group)
        check_pages(content, {name: ((len(pages), *cache.shape[1:]), cache.dtype) for name, cache in caches.items()})
        for name, cache in caches.items():
            cache[list(pages)] = content[name]

    @property
    def threads(self) -> int:
        """Threads that compute, the caller's included; 0 once it is closed."""
        return self._pool.threads

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        return self._held

    def close(self) -> None:
        """See Executor.close."""
        if not self._closed:
            self._closed = True
            self._pool.close()
            self._plans.clear()
            self._tensors.clear()
            self._memory.clear()
            self._held = 0

    def _caches(self, group: int) -> dict[str, Array]:
        """Keys and values of a group, as `read_pages` shapes them: views.

        The kernels hold the keys of a page with positions innermost (docs/artifact.md), so that view has its last axes swapped.
        """
        views: dict[str, Array] = {}
        for name in cache_names(self._groups, group):
            views[name] = cache = self._buffer(name)
            if name.endswith(".k"):
                pages, heads, size, width = cache.shape
                views[name] = cache.reshape(pages, heads, width, size).swapaxes(2, 3)
        return views

    def _buffer(self, name: str) -> Array:
        try:
            return self._memory[f"buffer:{name}"]
        except KeyError:
            raise ArtifactError(f"the artifact has no buffer {name!r}") from None

    def _reserve(self, shape: tuple[int, ...], dtype: str) -> Array:
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._held += count
        return reserve(count).view(dtype).reshape(shape)

    def _shape(self, shape: list[int | str]) -> tuple[int, ...]:
        return tuple(self._symbols[extent] if isinstance(extent, str) else int(extent) for extent in shape)

    def _bind(self, file: Path, kernels: Mapping[str, Any]) -> Plan:
        """The plan of a file, its kernels looked up and their arguments fixed."""
        bound = []
        try:
            for launch in json.loads(file.read_text(encoding="utf-8"))["launches"]:
                params = kernels[launch["kernel"]]["params"]
                tensors = [self._tensor(arg, param) for arg, param in zip(launch["args"], params, strict=True)]
                bound.append((launch["kernel"], tensors))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ArtifactError(f"the plan {file} cannot be bound ({reason}): copy or build the artifact again") from error
        return self._library.bind(bound)

    def _tensor(self, arg: str, param: Mapping[str, Any]) -> Tensor:
        if arg not in self._memory:
            raise ArtifactError(f"a plan names {arg!r}, which the manifest does not have")
        shape = self._shape(param["shape"])
        key = (arg, shape, param["dtype"])
        if key not in self._tensors:
            self._tensors[key] = Tensor(self._memory[arg], shape, param["dtype"])
        return self._tensors[key]


def check_cpu(requires: Mapping[str, Any]) -> None:
    """Refuse a library that this CPU cannot run, which would otherwise die of an illegal instruction."""
    wanted = requires.get("arch")
    if wanted is not None and wanted != architecture():
        raise DeviceError(f"this artifact was built for {wanted} CPUs, this machine is {architecture()}: build it here or for it")
    missing = [flag for flag in requires["features"] if flag not in cpu_flags()]
    if missing and cpu_flags():
        raise DeviceError(f"this CPU lacks {', '.join(missing)}, which the artifact uses: build it with --cpu-features baseline, or here")
