"""Runs single kernels on the first Vulkan device: one dispatch, buffers in mapped memory.

One device serves the whole test session. The real executor is nearfar.edge_runtime.executors.vulkan.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

from nearfar.kernels.contract import Precision, Staged
from nearfar.targets.gpu.kernels.common import select
from nearfar.targets.vulkan import Module, modules
from nearfar.targets.vulkan.codegen import FEATURES

from .spirv import validate

vk = pytest.importorskip(
    "vulkan", reason="the package vulkan is not installed", exc_type=(ImportError, OSError)
)
VISIBLE = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
STORAGE = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
COMPUTE = vk.VK_SHADER_STAGE_COMPUTE_BIT
DOT_PRODUCT = "VK_KHR_shader_integer_dot_product"
COOPERATIVE = "VK_KHR_cooperative_matrix"


KEPT = 64
"""Kernels whose modules and pipelines are kept: a test runs a kernel several times."""


@dataclass(frozen=True)
class Pipeline:
    """A kernel on the device, and what it was made from."""

    layout: Any
    outer: Any
    shader: Any
    pipeline: Any


class Device:
    """A device with the features that kernels may need, where it has them, and one queue."""

    def __init__(self) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # Without this variable Mesa complains on stderr.
        with contextlib.suppress(ImportError):
            # Triton's LLVM is loaded before lavapipe's: see edge_runtime/executors/webgpu/device.py.
            import_module("triton._C.libtriton")
        app = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        try:
            instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
            self._gpu = vk.vkEnumeratePhysicalDevices(instance)[0]
        except (vk.VkError, vk.VkException, IndexError) as error:
            pytest.skip(f"no Vulkan device: {error!r}")
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(self._gpu)
        self._family = next(i for i, f in enumerate(families) if f.queueFlags & vk.VK_QUEUE_COMPUTE_BIT)
        self._open()
        self._memory = vk.vkGetPhysicalDeviceMemoryProperties(self._gpu)
        info = vk.VkCommandPoolCreateInfo(queueFamilyIndex=self._family)
        self._pool = vk.vkCreateCommandPool(self._device, info, None)
        self._kept: OrderedDict[tuple[bytes, str, int], Pipeline] = OrderedDict()

    def _open(self) -> None:
        """Open the device with those of the features that kernels may need that it offers."""
        extensions = {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(self._gpu, None)}
        more = [name for name in (DOT_PRODUCT, COOPERATIVE) if name in extensions]
        together = vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR()
        dot = vk.VkPhysicalDeviceShaderIntegerDotProductFeatures(
            pNext=together if COOPERATIVE in more else None
        )
        new = vk.VkPhysicalDeviceVulkan12Features(pNext=dot if DOT_PRODUCT in more else dot.pNext)
        storage = vk.VkPhysicalDeviceVulkan11Features(pNext=new)
        every = vk.VkPhysicalDeviceFeatures2(pNext=storage)
        vk.vkGetPhysicalDeviceFeatures2(self._gpu, every)
        every.features.robustBufferAccess = 0  # robust access is slow, and hides reads beyond a buffer
        structs = (together, dot, new, storage, every.features)
        self.features = {name for struct in structs for name in FEATURES.values() if getattr(struct, name, 0)}
        queue = vk.VkDeviceQueueCreateInfo(
            queueFamilyIndex=self._family, queueCount=1, pQueuePriorities=[1.0]
        )
        info = vk.VkDeviceCreateInfo(
            pNext=every, queueCreateInfoCount=1, pQueueCreateInfos=[queue], ppEnabledExtensionNames=more
        )
        self._device = vk.vkCreateDevice(self._gpu, info, None)
        self._queue = vk.vkGetDeviceQueue(self._device, self._family, 0)
        self.subgroup = vk.VkPhysicalDeviceSubgroupProperties()
        vk.vkGetPhysicalDeviceProperties2(self._gpu, vk.VkPhysicalDeviceProperties2(pNext=self.subgroup))

    def run(self, module: Module, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run one dispatch; gives the arrays afterwards, in the order of the module's bindings."""
        held = [self._buffer(array) for array in arrays]
        made = self._pipeline(module, len(held))
        sizes = [vk.VkDescriptorPoolSize(STORAGE, len(held))]
        pooled = vk.VkDescriptorPoolCreateInfo(maxSets=1, poolSizeCount=1, pPoolSizes=sizes)
        pool = vk.vkCreateDescriptorPool(self._device, pooled, None)
        wanted = vk.VkDescriptorSetAllocateInfo(
            descriptorPool=pool, descriptorSetCount=1, pSetLayouts=[made.layout]
        )
        bound = vk.vkAllocateDescriptorSets(self._device, wanted)[0]
        writes = [
            vk.VkWriteDescriptorSet(
                dstSet=bound, dstBinding=i, descriptorCount=1, descriptorType=STORAGE,
                pBufferInfo=[vk.VkDescriptorBufferInfo(buffer, 0, 2**64 - 1)],
            )
            for i, (buffer, _, _) in enumerate(held)
        ]  # fmt: skip
        vk.vkUpdateDescriptorSets(self._device, len(writes), writes, 0, None)
        self._submit(made, bound, module.grid)
        out = [
            np.frombuffer(bytes(mapped[: a.nbytes]), a.dtype).reshape(a.shape)
            for (_, _, mapped), a in zip(held, arrays, strict=True)
        ]
        vk.vkDestroyDescriptorPool(self._device, pool, None)
        for buffer, memory, _ in held:
            vk.vkDestroyBuffer(self._device, buffer, None)
            vk.vkFreeMemory(self._device, memory, None)
        return out

    def _pipeline(self, module: Module, bound: int) -> Pipeline:
        """A kernel over `bound` buffers, made again only if it has been evicted."""
        key = module.code, module.entry, bound
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        bindings = [vk.VkDescriptorSetLayoutBinding(i, STORAGE, 1, COMPUTE) for i in range(bound)]
        kind = vk.VkDescriptorSetLayoutCreateInfo(bindingCount=bound, pBindings=bindings)
        layout = vk.vkCreateDescriptorSetLayout(self._device, kind, None)
        outline = vk.VkPipelineLayoutCreateInfo(setLayoutCount=1, pSetLayouts=[layout])
        outer = vk.vkCreatePipelineLayout(self._device, outline, None)
        code = vk.VkShaderModuleCreateInfo(codeSize=len(module.code), pCode=module.code)
        shader = vk.vkCreateShaderModule(self._device, code, None)
        stage = vk.VkPipelineShaderStageCreateInfo(stage=COMPUTE, module=shader, pName=module.entry)
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=outer)
        pipeline = vk.vkCreateComputePipelines(self._device, None, 1, [info], None)[0]
        self._kept[key] = Pipeline(layout, outer, shader, pipeline)
        if len(self._kept) > KEPT:
            _, old = self._kept.popitem(last=False)
            vk.vkDestroyPipeline(self._device, old.pipeline, None)
            vk.vkDestroyShaderModule(self._device, old.shader, None)
            vk.vkDestroyPipelineLayout(self._device, old.outer, None)
            vk.vkDestroyDescriptorSetLayout(self._device, old.layout, None)
        return self._kept[key]

    def _buffer(self, array: np.ndarray) -> tuple[Any, Any, Any]:
        """A buffer that contains the array, its memory, and the host's view of the memory."""
        data = np.ascontiguousarray(array).tobytes() or bytes(4)
        info = vk.VkBufferCreateInfo(size=-(-len(data) // 4) * 4, usage=vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT)
        buffer = vk.vkCreateBuffer(self._device, info, None)
        needs = vk.vkGetBufferMemoryRequirements(self._device, buffer)
        kinds = self._memory.memoryTypes
        fits = [
            i
            for i in range(32)
            if needs.memoryTypeBits >> i & 1 and kinds[i].propertyFlags & VISIBLE == VISIBLE
        ]
        memory = vk.vkAllocateMemory(
            self._device, vk.VkMemoryAllocateInfo(allocationSize=needs.size, memoryTypeIndex=fits[0]), None
        )
        vk.vkBindBufferMemory(self._device, buffer, memory, 0)
        mapped = vk.vkMapMemory(self._device, memory, 0, needs.size, 0)
        mapped[: len(data)] = data
        return buffer, memory, mapped

    def _submit(self, made: Pipeline, bound: Any, grid: tuple[int, int, int]) -> None:
        info = vk.VkCommandBufferAllocateInfo(commandPool=self._pool, commandBufferCount=1)
        commands = vk.vkAllocateCommandBuffers(self._device, info)[0]
        vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo())
        vk.vkCmdBindPipeline(commands, vk.VK_PIPELINE_BIND_POINT_COMPUTE, made.pipeline)
        vk.vkCmdBindDescriptorSets(
            commands, vk.VK_PIPELINE_BIND_POINT_COMPUTE, made.outer, 0, 1, [bound], 0, None
        )
        vk.vkCmdDispatch(commands, *grid)
        vk.vkEndCommandBuffer(commands)
        vk.vkQueueSubmit(
            self._queue, 1, [vk.VkSubmitInfo(commandBufferCount=1, pCommandBuffers=[commands])], None
        )
        vk.vkQueueWaitIdle(self._queue)
        vk.vkFreeCommandBuffers(self._device, self._pool, 1, [commands])


@lru_cache(maxsize=1)
def device() -> Device:
    """The session's device; skips the test where there is none."""
    return Device()


def require(module: Module) -> None:
    """Skip the test where the device lacks a feature that the module needs."""
    missing = {name for name in module.features if not name.startswith("subgroup")} - device().features
    if missing or module.subgroup_size > device().subgroup.subgroupSize:
        pytest.skip(f"the device lacks {', '.join(missing) or 'a wide enough subgroup'}")


def run_module(module: Module, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run a kernel; arrays are given and returned in the order of its PrimFunc's parameters."""
    require(module)
    out = list(arrays)
    after = device().run(module, [arrays[i] for i in module.params])
    for i, array in zip(module.params, after, strict=True):
        out[i] = array
    return out


def launch(func: tirx.PrimFunc, *arrays: np.ndarray) -> np.ndarray:
    """Run a kernel; gives the last array afterwards."""
    return run_module(module_of(func), arrays)[-1]


def finished(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Mark a kernel for our own lowering, which keeps barriers as they are written."""
    return select(func, [str(param.name) for param in func.params], "kernel")


def run(staged: Staged, _precision: Precision, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the launches of a job; gives the arrays afterwards. The modules must be valid and declare the
    features that they need.
    """
    held = dict(arrays)
    for i, (shape, dtype) in enumerate(staged.scratch):
        held[f"scratch:{i}"] = np.zeros(shape, dtype)
    for stage in staged.stages:
        after = run_module(module_of(stage.func), [held[arg] for arg in stage.args])
        held.update(zip(stage.args, after, strict=True))
    return held


@lru_cache(maxsize=KEPT)
def module_of(func: tirx.PrimFunc) -> Module:
    """The SPIR-V module of a kernel. It is validated where spirv-val is installed."""
    (made,) = modules(tvm.IRModule({"kernel": func})).values()
    if shutil.which("spirv-val"):
        validate(made.code)
    return made
