"""Runs a WebGPU artifact through wgpu-py, which uses Vulkan, Metal or Direct3D 12.

A run is one command encoder with one compute pass: WebGPU makes each dispatch's writes visible to the next.
Bind groups are made at the first use of a bucket and kept, so a run only replays them. Threads make the
pipelines, since wgpu blocks its caller meanwhile, and gives errors to the thread that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.executors.compiling import Compiler, unfinished
from nearfar.edge_runtime.executors.planned import BufferShape, ProgramLayout, pieces
from nearfar.edge_runtime.executors.webgpu.device import is_hardware, open_device, require_wgpu, timed
from nearfar.edge_runtime.executors.webgpu.timestamps import Timestamps
from nearfar.errors import DeviceError, DeviceLost, NearfarError, OutOfMemory
from nearfar.format.manifest import Kernel, Program
from nearfar.format.plans import Launch

Array = npt.NDArray[np.generic]
MAX_GRID_X = 65535
PIECE_BYTES = 8 << 20
"""Bytes of the weight stream that are read and uploaded at once."""


@dataclass(frozen=True)
class Dispatch:
    """One launch, ready to record."""

    pipeline: Any
    group: Any
    grid: tuple[int, int, int]

    def record(self, compute: Any) -> None:
        """Record the launch in a compute pass."""
        compute.set_pipeline(self.pipeline)
        compute.set_bind_group(0, self.group)
        compute.dispatch_workgroups(*self.grid)


class WebGpuExecutor:
    """See Executor. The queue keeps the order of writes, runs, copies and fetches; only the result of a fetch
    waits.
    """

    name = "webgpu"

    def __init__(
        self,
        artifact: Artifact,
        program: Program,
        settings: Settings,
        *,
        beside: WebGpuExecutor | None = None,
    ) -> None:
        """Open a device, load the weights, and allocate the buffers for the settings' pages and positions.

        `beside`: share the device and the weights of another executor of the artifact, which is closed after
        this one.
        """
        self._wgpu = require_wgpu()
        self.precision, self.program_name = program.precision, program.name
        self._artifact, self._program = artifact, program
        self._layout = ProgramLayout(artifact, program, settings)
        self._closed = False
        self._held = 0
        cache = f"a cache of {' + '.join(map(str, settings.pages))} pages"
        largest = max(shape.nbytes for shape in self._layout.buffers.values())
        requires = timed(program.requires) if settings.timed else program.requires
        self._beside = beside
        self._device: Any = (
            beside._device
            if beside
            else open_device(requires, largest, f"With {cache}, a buffer takes {largest:,} bytes")
        )
        self._memory: dict[str, Any] = {}
        self._plans: dict[tuple[str, int], list[Dispatch]] = {}
        self._compiler: Compiler[Any] = Compiler(self._compile)
        self._layouts: dict[tuple[str, ...], Any] = {}
        self._uniforms: dict[int, Any] = {}
        self._staging: dict[int, list[Any]] = {}
        try:
            with self._guard(f"loading weights and {cache}"):
                self._place()
                # The smallest step is compiled while the weights are uploaded.
                self.prepare("step", self._layout.smallest("step"), later=True)
                if beside is None:
                    self._load_weights()
                for name, table in self._layout.rope_tables():
                    self.write(name, table)
        except BaseException:
            self.close()
            raise

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        """See Executor.write."""
        at = self._layout.place(buffer, data, row, column)
        if data.size:
            with self._guard(f"writing {buffer}"):
                self._device.queue.write_buffer(self._buffer(buffer), at, np.ascontiguousarray(data))

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        """See Executor.prepare."""
        if later and not is_hardware():
            return ()
        with self._guard(f"preparing {function} of size {size}"):
            return unfinished(self._begin(self._layout.launches(function, size), later))

    def run(self, function: str, size: int) -> None:
        """See Executor.run."""
        with self._guard(f"running {function} of size {size}"):
            plan = self._plans.get((function, size)) or self._prepare(function, size)
            encoder = self._device.create_command_encoder()
            compute = encoder.begin_compute_pass()
            for dispatch in plan:
                dispatch.record(compute)
            compute.end()
            self._submit(encoder)

    def profile(self, function: str, size: int) -> tuple[float, ...]:
        """See planned.Profiled. Each launch is a pass of its own: WebGPU records times where passes begin and
        end.
        """
        with self._guard(f"timing {function} of size {size}"):
            plan = self._plans.get((function, size)) or self._prepare(function, size)
            encoder = self._device.create_command_encoder()
            with Timestamps(self._device, len(plan)) as stamps:
                for index, dispatch in enumerate(plan):
                    compute = encoder.begin_compute_pass(timestamp_writes=stamps.around(index))
                    dispatch.record(compute)
                    compute.end()
                stamps.end(encoder)
                self._submit(encoder)
                return stamps.seconds()

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        """See Executor.fetch."""
        shape = self._layout.buffer(buffer)
        rows = min(rows, shape.extents[0])
        count = rows * shape.row_bytes
        padded = -(-count // 4) * 4
        pool = self._staging.setdefault(padded, [])
        with self._guard(f"fetching {buffer}"):
            staging = pool.pop() if pool else self._create_staging(padded)
            encoder = self._device.create_command_encoder()
            encoder.copy_buffer_to_buffer(self._buffer(buffer), 0, staging, 0, padded)
            self._submit(encoder)

        def wait() -> Array:
            with self._guard(f"waiting for {buffer}"):
                data = self._mapped(staging, count).view(shape.dtype).reshape(shape.rows(rows))
            pool.append(staging)
            return data

        return wait

    def copy_page(self, group: int, source: int, target: int) -> None:
        """See Executor.copy_page. Copies through a second buffer, since WebGPU does not copy a buffer onto
        itself.
        """
        with self._guard("copying a page"):
            encoder = self._device.create_command_encoder()
            for name, shape in self._layout.caches(group).items():
                cache, count = self._buffer(name), shape.row_bytes
                encoder.copy_buffer_to_buffer(cache, source * count, self._page, 0, count)
                encoder.copy_buffer_to_buffer(self._page, 0, cache, target * count, count)
            self._submit(encoder)

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        """See Executor.read_pages."""
        content: dict[str, Array] = {}
        for name, shape in self._layout.caches(group).items():
            with self._guard("reading pages"):
                content[name] = self._read_cache(self._buffer(name), shape, pages)
        return self._layout.told(content)

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """See Executor.write_pages."""
        held = self._layout.held(group, pages, content)
        with self._guard("writing pages"):
            for name, shape in self._layout.caches(group).items():
                for page, data in zip(pages, held[name], strict=True):
                    self._device.queue.write_buffer(
                        self._buffer(name), page * shape.row_bytes, np.ascontiguousarray(data)
                    )

    def memory_used(self) -> int:
        """See Executor.memory_used."""
        return self._held

    def close(self) -> None:
        """See Executor.close."""
        if self._closed:
            return
        self._closed = True
        self._compiler.close()
        lent = self._beside._memory if self._beside else {}
        for buffer in [
            *(buffer for name, buffer in self._memory.items() if lent.get(name) is not buffer),
            *self._uniforms.values(),
            *(b for pool in self._staging.values() for b in pool),
        ]:
            buffer.destroy()
        self._memory.clear()
        self._plans.clear()
        self._staging.clear()
        self._held = 0
        if self._beside is None:
            self._device.destroy()

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        """Turn errors of wgpu into nearfar's; DeviceLost if the device is gone, so that the engine reopens
        it.
        """
        try:
            yield
        except NearfarError:
            raise
        except Exception as error:
            if self._is_lost(error):
                raise DeviceLost(
                    f"the WebGPU device was lost while {doing}: the driver reset it, after a fault or "
                    "because a step took too long. If it happens again, update the driver, or choose another "
                    "device (nearfar devices lists them)"
                ) from error
            if isinstance(error, self._wgpu.GPUOutOfMemoryError):
                raise OutOfMemory(
                    f"the WebGPU device has no room while {doing}, with {self._held:,} bytes held. Give the "
                    "cache less (--kv-memory), close other programs that use the device, or take a smaller "
                    "model"
                ) from error
            raise DeviceError(
                f"the WebGPU device failed while {doing}: {type(error).__name__}: {error}"
            ) from error

    def _is_lost(self, error: Exception) -> bool:
        """Whether the device is gone. wgpu-py (0.32) has no error class and no `device.lost`, only
        wgpu-native's messages.
        """
        if not isinstance(error, self._wgpu.GPUError | RuntimeError):
            return False
        try:
            self._device.create_command_encoder().finish()
        except Exception as found:
            return "lost" in str(found)
        return "device is lost" in str(error)

    def _submit(self, encoder: Any) -> None:
        self._device.queue.submit([encoder.finish()])

    def _create_staging(self, count: int) -> Any:
        usage = self._wgpu.BufferUsage
        return self._create(count, usage.MAP_READ | usage.COPY_DST)

    def _mapped(self, staging: Any, count: int) -> npt.NDArray[np.uint8]:
        """Wait for the first `count` bytes of a staging buffer and copy them."""
        staging.map_sync(self._wgpu.MapMode.READ)
        data = np.frombuffer(staging.read_mapped(), np.uint8)[:count].copy()
        staging.unmap()
        return data

    def _destroy(self, buffer: Any) -> None:
        self._held -= buffer.size
        buffer.destroy()

    def _read_cache(self, cache: Any, shape: BufferShape, pages: Sequence[int]) -> Array:
        """Copies of pages of keys or values, [len(pages), kv_heads, page_size, head_dim or words]."""
        count = shape.row_bytes
        staging = self._create_staging(count * len(pages))
        encoder = self._device.create_command_encoder()
        for index, page in enumerate(pages):
            encoder.copy_buffer_to_buffer(cache, page * count, staging, index * count, count)
        self._submit(encoder)
        raw = self._mapped(staging, count * len(pages))
        self._destroy(staging)
        return raw.view(shape.dtype).reshape(shape.rows(len(pages)))

    def _buffer(self, name: str) -> Any:
        return self._memory[f"buffer:{name}"]

    def _create(self, count: int, usage: int | None = None) -> Any:
        flags = self._wgpu.BufferUsage
        count = max(-(-count // 4) * 4, 4)
        self._held += count
        return self._device.create_buffer(
            size=count, usage=usage or flags.STORAGE | flags.COPY_SRC | flags.COPY_DST
        )

    def _place(self) -> None:
        """Allocate all buffers that plans name, and one through which pages are copied."""
        weights = {
            f"weight:{tensor.name}": tensor.bytes for tensor in self._artifact.manifest.weights.tensors
        }
        if self._beside is not None:
            self._memory.update({name: self._beside._memory[name] for name in weights})
        sizes = {} if self._beside else weights
        sizes |= {f"workspace:{i}": count for i, count in enumerate(self._program.workspace)}
        sizes |= {f"buffer:{name}": shape.nbytes for name, shape in self._layout.buffers.items()}
        for name, size in sizes.items():
            self._memory[name] = self._create(size)
        groups = range(len(self._artifact.manifest.groups))
        pages = (cache.row_bytes for group in groups for cache in self._layout.caches(group).values())
        self._page = self._memory["page"] = self._create(max(pages, default=4))

    def _load_weights(self) -> None:
        """Upload the weights in pieces: the stream is never in host memory as a whole."""
        for tensor in self._artifact.manifest.weights.tensors:
            for start, piece in pieces(self._artifact, tensor, PIECE_BYTES):
                self._device.queue.write_buffer(self._memory[f"weight:{tensor.name}"], start, piece)

    def _prepare(self, function: str, size: int) -> list[Dispatch]:
        """Pipelines and bind groups of one bucket."""
        launches = self._layout.launches(function, size)
        compiled = [future.result() for future in self._begin(launches)]
        pipelines = dict(zip(dict.fromkeys(x.kernel for x in launches), compiled, strict=True))
        plan = self._plans[function, size] = [self._dispatch(x, pipelines[x.kernel]) for x in launches]
        return plan

    def _begin(self, launches: Sequence[Launch], later: bool = False) -> list[Future[Any]]:
        """Compile the kernels of a plan in the background, in the order of their launches."""
        kernels = {launch.kernel: self._program.kernels[launch.kernel] for launch in launches}
        for kernel in kernels.values():
            # the layout is made here, because the compile threads only read layouts
            self._layout_of(kernel.access)
        return self._compiler.begin(kernels.items(), later=later)

    def _dispatch(self, launch: Launch, pipeline: Any) -> Dispatch:
        kernel = self._program.kernels[launch.kernel]
        x, y, z = launch.grid
        bindings = [*(self._memory[arg] for arg in launch.args), self._uniform(x - 1)]
        group = self._device.create_bind_group(
            layout=self._layout_of(kernel.access),
            entries=[
                {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
                for i, b in enumerate(bindings)
            ],
        )
        grid = (x, y, z) if x <= MAX_GRID_X else (MAX_GRID_X, y, -(-x // MAX_GRID_X))
        return Dispatch(pipeline, group, grid)

    def _uniform(self, value: int) -> Any:
        """The uniform buffer with packGridDimX; kernels with equal grids share it."""
        if value not in self._uniforms:
            usage = self._wgpu.BufferUsage.UNIFORM
            self._uniforms[value] = self._device.create_buffer_with_data(
                data=np.array([value], np.uint32), usage=usage
            )
        return self._uniforms[value]

    def _layout_of(self, access: tuple[str, ...]) -> Any:
        if access not in self._layouts:
            kinds = [{"read": "read-only-storage", "read_write": "storage"}[a] for a in access] + ["uniform"]
            stage = self._wgpu.ShaderStage.COMPUTE
            entries = [
                {"binding": i, "visibility": stage, "buffer": {"type": kind}} for i, kind in enumerate(kinds)
            ]
            self._layouts[access] = self._device.create_bind_group_layout(entries=entries)
        return self._layouts[access]

    def _compile(self, name: str, kernel: Kernel) -> Any:
        with self._guard(f"compiling kernel {name}"):
            layout = self._device.create_pipeline_layout(bind_group_layouts=[self._layouts[kernel.access]])
            module = self._device.create_shader_module(code=self._artifact.text(str(kernel.file)))
            return self._device.create_compute_pipeline(
                layout=layout, compute={"module": module, "entry_point": kernel.entry}
            )
