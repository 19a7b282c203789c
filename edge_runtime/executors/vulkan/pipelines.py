"""Compute pipelines and descriptor sets of one program, and the pipeline cache on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.executors.compiling import Compiler, content
from nearfar.edge_runtime.executors.vulkan.binding import guard, require_vulkan
from nearfar.edge_runtime.executors.vulkan.blocks import Region
from nearfar.edge_runtime.executors.vulkan.commands import Dispatch
from nearfar.edge_runtime.executors.vulkan.device import LogicalDevice
from nearfar.errors import ArtifactError
from nearfar.folders import cache_folder, read_cache, trim_cache, write_cache
from nearfar.format.manifest import Kernel, Program
from nearfar.format.plans import Launch

STORAGE_BUFFER = 7
COMPUTE = 0x20
CACHE_BYTES = 256 << 20
"""Bytes of all pipeline files together; beyond them, the least recently used files are removed."""


class Pipelines:
    """Makes the launches of plans ready to record; each pipeline and each descriptor set is made once."""

    def __init__(
        self, device: LogicalDevice, artifact: Artifact, program: Program, regions: Mapping[str, Region]
    ) -> None:
        self._vk = require_vulkan()
        self._device = device
        self._artifact = artifact
        self._program = program
        self._regions = regions
        self._layouts: dict[int, tuple[Any, Any]] = {}
        self._compiler: Compiler[Any] = Compiler(self._compile, rest=self._save_cache)
        self._sets: dict[tuple[str, ...], Any] = {}
        self._pools: list[Any] = []
        self._file = cache_file(device.gpu.identity, program.kernels.values())
        self._cached = read_cache(self._file)
        with contextlib.suppress(OSError):
            os.utime(self._file)  # the time of the last use, which trim_cache reads
        with guard(device.gpu.name, "reading its pipeline cache"):
            self._cache = self._create_cache(self._cached)

    def begin(self, launches: Sequence[Launch], later: bool = False) -> list[Future[Any]]:
        """Compile the kernels of a plan in the background, in the order of their launches; return their
        futures.

        ArtifactError if the plan names kernels or arguments that the artifact lacks. `later`: see
        Compiler.begin.
        """
        for launch in launches:
            if launch.kernel not in self._program.kernels:
                raise ArtifactError(
                    f"a plan names the kernel {launch.kernel!r}, which the manifest does not have"
                )
            for argument in launch.args:
                if argument not in self._regions:
                    raise ArtifactError(f"a plan names {argument!r}, which the manifest does not have")
            # the layout is made here, because the compile threads only read layouts
            self._layout(len(launch.args))
        names = dict.fromkeys(launch.kernel for launch in launches)
        return self._compiler.begin([(name, self._program.kernels[name]) for name in names], later=later)

    def prepare(self, launches: Sequence[Launch]) -> list[Dispatch]:
        """Wait for the pipelines of a plan and make its descriptor sets. Errors: see `begin`."""
        compiled = [future.result() for future in self.begin(launches)]
        pipelines = dict(zip(dict.fromkeys(x.kernel for x in launches), compiled, strict=True))
        self._make_sets(list(dict.fromkeys(x.args for x in launches if x.args not in self._sets)))
        return [self._dispatch(launch, pipelines[launch.kernel]) for launch in launches]

    def close(self) -> None:
        """Free everything. The pipeline cache was saved when the last kernel was compiled."""
        vk, device = self._vk, self._device.handle
        self._compiler.close()
        for pipeline in self._compiler.made():
            vk.vkDestroyPipeline(device, pipeline, None)
        for pool in self._pools:
            vk.vkDestroyDescriptorPool(device, pool, None)
        for sets, layout in self._layouts.values():
            vk.vkDestroyPipelineLayout(device, layout, None)
            vk.vkDestroyDescriptorSetLayout(device, sets, None)
        vk.vkDestroyPipelineCache(device, self._cache, None)

    def _dispatch(self, launch: Launch, pipeline: Any) -> Dispatch:
        kernel = self._program.kernels[launch.kernel]
        x, y, z = launch.grid
        writes = frozenset(
            a for a, access in zip(launch.args, kernel.access, strict=True) if access != "read"
        )
        return Dispatch(
            pipeline,
            self._layout(len(launch.args))[1],
            self._sets[launch.args],
            (x, y, z),
            frozenset(launch.args),
            writes,
        )

    def _layout(self, arguments: int) -> tuple[Any, Any]:
        """The descriptor set layout and the pipeline layout of kernels with `arguments` arguments."""
        if arguments not in self._layouts:
            vk, device = self._vk, self._device.handle
            bindings = [
                vk.VkDescriptorSetLayoutBinding(
                    binding=i, descriptorType=STORAGE_BUFFER, descriptorCount=1, stageFlags=COMPUTE
                )
                for i in range(arguments)
            ]
            with guard(self._device.gpu.name, "preparing kernels"):
                sets = vk.vkCreateDescriptorSetLayout(
                    device, vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings), None
                )
                layout = vk.vkCreatePipelineLayout(
                    device, vk.VkPipelineLayoutCreateInfo(pSetLayouts=[sets]), None
                )
            self._layouts[arguments] = sets, layout
        return self._layouts[arguments]

    def _compile(self, name: str, kernel: Kernel) -> Any:
        """Compile one pipeline. Threads share the pipeline cache, which Vulkan locks."""
        vk, device = self._vk, self._device.handle
        code = self._code(name, kernel)
        with guard(self._device.gpu.name, f"compiling kernel {name}"):
            information = vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code)
            module = vk.vkCreateShaderModule(device, information, None)
            try:
                # a variable of its own keeps the record alive, because the binding only copies its address
                stage = self._stage(module, kernel)
                wanted = vk.VkComputePipelineCreateInfo(
                    stage=stage,
                    layout=self._layouts[len(kernel.access)][1],
                    basePipelineIndex=-1,
                )
                return next(iter(vk.vkCreateComputePipelines(device, self._cache, 1, [wanted], None)))
            finally:
                vk.vkDestroyShaderModule(device, module, None)

    def _stage(self, module: Any, kernel: Kernel) -> Any:
        """The shader stage, with the workgroup size in specialization constants 0, 1 and 2."""
        vk = self._vk
        size = vk.ffi.new("uint32_t[3]", list(kernel.workgroup))
        entries = [vk.VkSpecializationMapEntry(constantID=i, offset=4 * i, size=4) for i in range(3)]
        special = vk.VkSpecializationInfo(pMapEntries=entries, dataSize=12, pData=size)
        return vk.VkPipelineShaderStageCreateInfo(
            stage=COMPUTE, module=module, pName=kernel.entry or "main", pSpecializationInfo=special
        )

    def _code(self, name: str, kernel: Kernel) -> bytes:
        try:
            code = (self._artifact.path / str(kernel.file)).read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"kernel {name} cannot be read: {error}. Copy or build the artifact again"
            ) from error
        if len(code) % 4 or not code.startswith(b"\x03\x02\x23\x07") or len(kernel.workgroup) != 3:
            raise ArtifactError(
                f"kernel {name} ({kernel.file}) is not SPIR-V for Vulkan. Copy or build the artifact again"
            )
        return code

    def _make_sets(self, argument_lists: Sequence[tuple[str, ...]]) -> None:
        if not argument_lists:
            return
        vk, device = self._vk, self._device.handle
        total = sum(len(arguments) for arguments in argument_lists)
        sizes = [vk.VkDescriptorPoolSize(type=STORAGE_BUFFER, descriptorCount=total)]
        with guard(self._device.gpu.name, "preparing the arguments of kernels"):
            information = vk.VkDescriptorPoolCreateInfo(maxSets=len(argument_lists), pPoolSizes=sizes)
            self._pools.append(vk.vkCreateDescriptorPool(device, information, None))
            layouts = [self._layout(len(arguments))[0] for arguments in argument_lists]
            wanted = vk.VkDescriptorSetAllocateInfo(descriptorPool=self._pools[-1], pSetLayouts=layouts)
            made = list(vk.vkAllocateDescriptorSets(device, wanted))
        for arguments, descriptors in zip(argument_lists, made, strict=True):
            regions = [self._regions[argument] for argument in arguments]
            infos = [
                vk.VkDescriptorBufferInfo(buffer=r.buffer, offset=r.offset, range=r.bound) for r in regions
            ]
            write = vk.VkWriteDescriptorSet(
                dstSet=descriptors,
                descriptorCount=len(infos),
                descriptorType=STORAGE_BUFFER,
                pBufferInfo=infos,
            )
            vk.vkUpdateDescriptorSets(device, 1, [write], 0, None)
            self._sets[arguments] = descriptors

    def _create_cache(self, data: bytes) -> Any:
        vk = self._vk
        held = vk.ffi.from_buffer(data) if data else None
        information = vk.VkPipelineCacheCreateInfo(initialDataSize=len(data), pInitialData=held)
        return vk.vkCreatePipelineCache(self._device.handle, information, None)

    def _save_cache(self) -> None:
        """Save the pipeline cache from a compile thread: if the process is killed later, nothing is lost."""
        vk, lib = self._vk, self._vk.lib
        size = vk.ffi.new("size_t*")
        if lib.vkGetPipelineCacheData(self._device.handle, self._cache, size, vk.ffi.NULL):
            return
        data = np.empty(size[0], np.uint8)
        result = lib.vkGetPipelineCacheData(self._device.handle, self._cache, size, vk.ffi.from_buffer(data))
        content = data[: size[0]].tobytes()
        if result == 0 and content and content != self._cached:
            self._cached = content
            write_cache(self._file, content)
            trim_cache(self._file.parent, self._file.suffix, CACHE_BYTES, keep=self._file)


def cache_file(identity: str, kernels: Iterable[Kernel]) -> Path:
    """The file of the pipelines of these kernels on a device and driver, in the user's cache folder.

    Artifacts with the same kernels (a rebuild with other weights) share it.
    """
    compiled = sorted(repr(content(kernel)) for kernel in kernels)
    key = hashlib.sha256("\n".join([identity, *compiled]).encode()).hexdigest()[:32]
    return cache_folder() / "vulkan" / f"{key}.bin"
