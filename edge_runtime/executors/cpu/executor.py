"""Runs a CPU artifact: its shared library over NumPy memory. A step is one call, which releases the GIL."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors.cpu.cores import usable_cores
from nearfar.edge_runtime.executors.cpu.expert_memory import (
    LEAST,
    ChosenExperts,
    ExpertMemory,
    ExpertStack,
    room_for,
)
from nearfar.edge_runtime.executors.cpu.host_memory import MAPS, fits, mapped, reserve
from nearfar.edge_runtime.executors.cpu.library import Array, DlTensor, Library, LoadedPlan
from nearfar.edge_runtime.executors.planned import BufferShape, ProgramLayout
from nearfar.errors import ArtifactError
from nearfar.format import buffers as names
from nearfar.format.kv import BITS
from nearfar.format.manifest import KernelParam, Program, Tensor
from nearfar.format.plans import Launch

ROUTE = 1
"""The argument of a launch of experts that has the rows' choice, [rows, 2·top]: numbers of experts first."""


class CpuExecutor:
    """See Executor. The work is done when `run` returns, so calls take effect in order."""

    name = "cpu"

    def __init__(self, artifact: Artifact, program: Program, settings: Settings) -> None:
        """Load weights and library, allocate the buffers for the settings' pages and positions, bind every
        plan.
        """
        self.precision, self.program_name = program.precision, program.name
        self._layout = ProgramLayout(artifact, program, settings)
        self._kv_dtype = program.kv_dtype
        self._held = 0
        self._chosen = artifact.manifest.step.chosen
        self._experts: ExpertMemory | None = None
        self._stacks: dict[str, ExpertStack] = {}
        self._memory = {
            f"weight:{name}": array for name, array in self._load_weights(artifact, program).items()
        }
        self._memory |= {f"workspace:{i}": self._reserve(count) for i, count in enumerate(program.workspace)}
        self._buffers = {name: self._zeroed(shape) for name, shape in self._layout.buffers.items()}
        self._memory |= {f"buffer:{name}": array for name, array in self._buffers.items()}
        for name, table in self._layout.rope_tables():
            self.write(name, table)
        if program.library is None:
            raise ArtifactError(
                f"{artifact.path} names no library for its program {program.name}: build it again"
            )
        self._library = Library(artifact.path / program.library)
        self._tensors: dict[tuple[str, tuple[int, ...], str], DlTensor] = {}
        self._plans: dict[tuple[str, int], LoadedPlan] = {}
        self._ahead: dict[tuple[str, int], tuple[ChosenExperts, ...]] = {}
        for function, buckets in program.functions.items():
            for bucket in buckets:
                launches = self._layout.launches(function, bucket.size)
                self._plans[function, bucket.size] = self._bind(launches, program)
                self._ahead[function, bucket.size] = tuple(self._chosen_in(launches, program))
        cores = usable_cores()
        self._pool = self._library.pool(settings.threads or cores, cores)
        self._closed = False

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write."""
        start = self._layout.place(buffer, data, row, column) // data.itemsize
        self._buffers[buffer].reshape(-1)[start : start + data.size] = data.reshape(-1)

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """See Executor.prepare. The build has compiled all kernels."""
        return ()

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        plan = self._plan(function, size)
        for first, end in self._parts(function, size, plan):
            self._pool.replay(plan, first, end)

    def profile(self, function: str, size: int) -> tuple[float, ...]:
        """See planned.Profiled."""
        plan = self._plan(function, size)
        parts = self._parts(function, size, plan)
        return tuple(time for first, end in parts for time in self._pool.profile(plan, first, end))

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch."""
        self._layout.buffer(buffer)
        copy = self._buffers[buffer][:rows].copy()
        return lambda: copy

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page."""
        for name in self._layout.caches(group):
            cache = self._buffers[name]
            cache[target] = cache[source]

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        found = {name: self._pages(name)[list(pages)] for name in self._layout.caches(group)}
        return self._layout.told(found, innermost=True)

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        for name, held in self._layout.held(group, pages, content, innermost=True).items():
            self._pages(name)[list(pages)] = held

    @property
    def threads(self) -> int:
        """The number of compute threads, including the caller's; 0 after `close`."""
        return self._pool.threads

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        return self._held

    def close(self) -> None:
        """See Executor.close."""
        if not self._closed:
            self._closed = True
            self._pool.close()
            if self._experts is not None:
                self._experts.close()
            self._plans.clear()
            self._ahead.clear()
            self._tensors.clear()
            self._memory.clear()
            self._buffers.clear()
            self._held = 0

    def _plan(self, function: str, size: int) -> LoadedPlan:
        try:
            return self._plans[function, size]
        except KeyError:
            raise ArtifactError(f"the artifact has no plan for {function} of size {size}") from None

    def _pages(self, name: str) -> Array:
        """A view of keys or values in the layout of Executor.read_pages.

        Kernels store the keys of a page with positions innermost (docs/artifact.md), so the view of float
        keys has its last axes swapped.
        """
        cache = self._buffers[name]
        if not names.is_keys(name) or self._kv_dtype in BITS:
            return cache
        pages, heads, size, width = cache.shape
        return cache.reshape(pages, heads, width, size).swapaxes(2, 3)

    def _load_weights(self, artifact: Artifact, program: Program) -> dict[str, Array]:
        """All weight tensors, as views into one copy of the weight stream. If there is no memory for a copy,
        into memory for some experts and all other weights, or else into the mapped files.
        """
        stream = self._weight_stream(artifact, program)
        return {
            tensor.name: stream[tensor.offset : tensor.offset + tensor.bytes]
            .view(tensor.dtype)
            .reshape(tensor.shape)
            for tensor in artifact.manifest.weights.tensors
        }

    def _weight_stream(self, artifact: Artifact, program: Program) -> npt.NDArray[np.uint8]:
        weights = artifact.manifest.weights
        if not MAPS or fits(weights.bytes):
            stream = self._reserve(weights.bytes, whole=True)
            artifact.read_into(0, stream.data)
            return stream
        files = [(artifact.path / shard.file, shard.bytes) for shard in weights.shards]
        stacks = [tensor for tensor in weights.tensors if self._is_stack(tensor)]
        rest = [tensor for tensor in weights.tensors if tensor not in stacks]
        others = sum(program.workspace) + sum(b.nbytes for b in self._layout.buffers.values())
        room = room_for(sum(tensor.bytes for tensor in rest) + others, [tensor.bytes for tensor in stacks])
        if room is None:
            return mapped(files, weights.shard_bytes)
        self._experts = ExpertMemory(files, weights.shard_bytes, room)
        for tensor in rest:
            part = self._experts.area[tensor.offset : tensor.offset + tensor.bytes]
            artifact.read_into(tensor.offset, part.data)
        self._held += sum(tensor.bytes for tensor in rest) + room
        self._stacks = {
            f"weight:{tensor.name}": ExpertStack(tensor.offset, tensor.bytes // self._count(tensor.name))
            for tensor in stacks
        }
        return self._experts.area

    def _count(self, tensor: str) -> int:
        """The number of experts whose matrices a tensor has; 1 if it has none."""
        return self._chosen.get(tensor.rpartition(".")[0], (1, 1))[1]

    def _is_stack(self, tensor: Tensor) -> bool:
        """Whether a tensor has matrices of experts that are worth a read of their own."""
        return tensor.bytes >= max(2, self._count(tensor.name)) * LEAST and self._count(tensor.name) > 1

    def _reserve(self, count: int, *, whole: bool = False) -> npt.NDArray[np.uint8]:
        self._held += count
        return reserve(count, whole=whole)

    def _zeroed(self, shape: BufferShape) -> Array:
        return self._reserve(shape.nbytes).view(shape.dtype).reshape(shape.extents)

    def _bind(self, launches: Sequence[Launch], program: Program) -> LoadedPlan:
        """A plan with resolved kernels and fixed arguments."""
        bound = [(each.kernel, self._arguments(each, program)) for each in launches]
        streamed = [
            _streamed(each, tensors, self._chosen) for each, (_, tensors) in zip(launches, bound, strict=True)
        ]
        return self._library.bind(bound, streamed)

    def _chosen_in(self, launches: Sequence[Launch], program: Program) -> Iterator[ChosenExperts]:
        """The launches whose experts are not all in memory."""
        for number, launch in enumerate(launches):
            stacks = [arg for arg in launch.args if arg in self._stacks]
            if stacks:
                shape = self._layout.extents(program.kernels[launch.kernel].params[ROUTE].shape)
                held = self._memory[launch.args[ROUTE]].reshape(-1).view(np.float32)
                route = held[: math.prod(shape)].reshape(shape)[:, : self._chosen[_param(stacks[0])][0]]
                yield ChosenExperts(number, route, tuple(self._stacks[arg] for arg in stacks))

    def _parts(self, function: str, size: int, plan: LoadedPlan) -> Iterator[tuple[int, int]]:
        """The plan in parts, from a launch up to another one: a part that begins with a launch of experts is
        given when these are in memory.
        """
        first = 0
        for chosen in self._ahead[function, size]:
            yield first, chosen.launch
            assert self._experts is not None
            self._experts.hold(chosen.matrices())
            first = chosen.launch
        yield first, len(plan.names)

    def _arguments(self, launch: Launch, program: Program) -> list[DlTensor]:
        params = program.kernels[launch.kernel].params
        return [self._tensor(arg, param) for arg, param in zip(launch.args, params, strict=True)]

    def _tensor(self, arg: str, param: KernelParam) -> DlTensor:
        """The tensor of an argument. A buffer has its own extents: groups share kernels, whose record has one
        group's pages.
        """
        space, _, name = arg.partition(":")
        own = space == "buffer"
        extents = self._layout.buffer(name).extents if own else self._layout.extents(param.shape)
        key = (arg, extents, param.dtype)
        if key not in self._tensors:
            self._tensors[key] = DlTensor(self._memory[arg], key[1], param.dtype)
        return self._tensors[key]


def _param(arg: str) -> str:
    """The name of the parameter of which an argument of a launch is a part; empty for other arguments."""
    space, _, name = arg.partition(":")
    return name.rpartition(".")[0] if space == "weight" else ""


def _streamed(launch: Launch, tensors: Sequence[DlTensor], stacks: Collection[str]) -> DlTensor | None:
    """The largest weight matrix of a launch, which it reads from end to end; None if it reads
    only vectors, or matrices of experts (the parameters `stacks`).
    """
    weights = [
        tensor
        for arg, tensor in zip(launch.args, tensors, strict=True)
        if arg.startswith("weight:") and tensor.struct.ndim > 1 and _param(arg) not in stacks
    ]
    return max(weights, key=lambda tensor: tensor.nbytes, default=None)
