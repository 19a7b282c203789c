"""Finds Vulkan devices and what they offer, chooses one, and opens it with only the features that a program
needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nearfar.edge_runtime.executors.vulkan.binding import guard, require_vulkan
from nearfar.edge_runtime.executors.vulkan.features import (
    EXTENSIONS,
    SUBGROUPS,
    extensions_of,
    feature_structs,
    features_of,
)
from nearfar.edge_runtime.executors.vulkan.instance import API, NO_DRIVER, instance
from nearfar.errors import DeviceError, RequestError
from nearfar.format.adapters import VENDORS, Adapter, AdapterKind
from nearfar.format.manifest import Requires

SUBSET = "VK_KHR_portability_subset"
BUDGET = "VK_EXT_memory_budget"

KINDS: dict[int, AdapterKind] = {2: "discrete", 1: "integrated", 3: "virtual", 4: "cpu", 0: "other"}
"""Kinds of GPUs by VkPhysicalDeviceType, in order of preference."""


@dataclass(frozen=True)
class MemoryType:
    """A type of VkPhysicalDeviceMemoryProperties, with the size of its heap in bytes."""

    local: bool
    mapped: bool
    coherent: bool
    cached: bool
    heap: int
    heap_bytes: int


@dataclass(frozen=True)
class Gpu:
    """A physical device as the driver describes it.

    `features` and `limits` have the names by which programs require them. `memory`: bytes of the largest
    device-local heap, whose number is `heap`. `budgeted`: the driver tells how much of it this process may
    take. `shared`: the memory is the host's. `identity`: device and driver version, the key of data kept on
    disk.
    """

    handle: Any
    index: int
    name: str
    kind: AdapterKind
    driver: str
    version: str
    features: frozenset[str]
    limits: Mapping[str, int]
    memory_types: tuple[MemoryType, ...]
    memory: int
    heap: int
    budgeted: bool
    shared: bool
    identity: str
    queue_family: int
    portability: bool
    vendor: str = ""

    @property
    def adapter(self) -> Adapter:
        """The record by which device classes are told apart."""
        return Adapter(self.vendor, "", self.name, self.driver, self.kind)


@dataclass(frozen=True)
class LogicalDevice:
    """A logical device with its one queue."""

    gpu: Gpu
    handle: Any
    queue: Any

    def close(self) -> None:
        """Free the device; everything made from it must be freed already."""
        require_vulkan().vkDestroyDevice(self.handle, None)


def gpus(debug: bool = False) -> tuple[Gpu, ...]:
    """The devices that can run kernels: discrete before integrated before software GPUs. DeviceError if there
    is none.
    """
    return _gpus(debug)


@lru_cache(maxsize=2)
def _gpus(debug: bool, /) -> tuple[Gpu, ...]:
    vk = require_vulkan()
    made = instance(debug)
    try:
        handles = list(vk.vkEnumeratePhysicalDevices(made.handle))
    except (vk.VkError, vk.VkException) as error:
        raise DeviceError(f"{NO_DRIVER} ({type(error).__name__})") from error
    if not handles:
        raise DeviceError(NO_DRIVER)
    order = list(KINDS)
    handles.sort(key=lambda handle: order.index(int(vk.vkGetPhysicalDeviceProperties(handle).deviceType)))
    reasons: list[str] = []
    found: list[Gpu] = []
    for handle in handles:
        reason = _unfit(handle)
        if reason:
            reasons.append(reason)
        else:
            found.append(_describe(handle, len(found)))
    if not found:
        raise DeviceError(
            f"no Vulkan device here can run kernels: {'; '.join(reasons)}. Update its driver, or "
            "install mesa-vulkan-drivers"
        )
    return tuple(found)


def select(which: str | None, found: Sequence[Gpu]) -> Gpu:
    """The device that `--device vulkan:WHICH` means: a number of `nearfar devices`, or a part of a name;
    None: the first.

    RequestError if none fits.
    """
    if which is None:
        return found[0]
    fitting = [gpu for gpu in found if which.lower() in gpu.name.lower()]
    if which.isdigit() and int(which) < len(found):
        fitting = [found[int(which)]]
    if not fitting:
        known = ", ".join(f"vulkan:{gpu.index} ({gpu.name})" for gpu in found)
        raise RequestError(f"there is no Vulkan device {which!r} here, only {known}", "device")
    return fitting[0]


def open_device(gpu: Gpu, requires: Requires) -> LogicalDevice:
    """Open a device with a program's features; DeviceError if it lacks features or limits."""
    vk = require_vulkan()
    missing = sorted(set(requires.features) - gpu.features)
    if missing:
        raise DeviceError(
            f"{gpu.name} lacks {', '.join(missing)}: use the program of another precision, or another device"
        )
    short = [
        f"{n} {gpu.limits[n]:,} of {v:,}" for n, v in requires.limits.items() if gpu.limits.get(n, v) < v
    ]
    if short:
        raise DeviceError(
            f"{gpu.name} offers too little: {', '.join(short)}. Choose another device (nearfar devices)"
        )
    structs = feature_structs({*requires.features, "timelineSemaphore"}, requires.features)
    queue = vk.VkDeviceQueueCreateInfo(
        queueFamilyIndex=gpu.queue_family, queueCount=1, pQueuePriorities=[1.0]
    )
    extensions = [SUBSET] if gpu.portability else []
    extensions += [extension for feature, extension in EXTENSIONS.items() if feature in requires.features]
    information = vk.VkDeviceCreateInfo(
        pNext=structs[0], pQueueCreateInfos=[queue], ppEnabledExtensionNames=extensions, pEnabledFeatures=None
    )
    with guard(gpu.name, "being opened"):
        handle = vk.vkCreateDevice(gpu.handle, information, None)
        return LogicalDevice(gpu, handle, vk.vkGetDeviceQueue(handle, gpu.queue_family, 0))


def _unfit(handle: Any) -> str | None:
    """The reason why a device cannot be used at all; None if it can."""
    vk = require_vulkan()
    properties = vk.vkGetPhysicalDeviceProperties(handle)
    name = str(properties.deviceName)
    version = (vk.VK_VERSION_MAJOR(properties.apiVersion), vk.VK_VERSION_MINOR(properties.apiVersion))
    if version < API:
        return f"{name} has Vulkan {version[0]}.{version[1]}, and 1.2 is needed"
    if _queue_family(handle) is None:
        return f"{name} has no queue for compute"
    return None if "timelineSemaphore" in features_of(handle) else f"{name} lacks timelineSemaphore"


def _queue_family(handle: Any) -> int | None:
    """A queue family for compute, preferably without graphics, so that a desktop does not wait for it."""
    vk = require_vulkan()
    flags = [int(family.queueFlags) for family in vk.vkGetPhysicalDeviceQueueFamilyProperties(handle)]
    able = [index for index, bits in enumerate(flags) if bits & vk.VK_QUEUE_COMPUTE_BIT]
    return min(able, key=lambda index: flags[index] & vk.VK_QUEUE_GRAPHICS_BIT, default=None)


def _describe(handle: Any, index: int) -> Gpu:
    vk = require_vulkan()
    ffi = vk.ffi
    subgroup = ffi.new("VkPhysicalDeviceSubgroupProperties*")
    subgroup.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES
    driver = ffi.new("VkPhysicalDeviceDriverProperties*")
    driver.sType, driver.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES, subgroup
    third = ffi.new("VkPhysicalDeviceMaintenance3Properties*")
    third.sType, third.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES, driver
    identity = ffi.new("VkPhysicalDeviceIDProperties*")
    identity.sType, identity.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES, third
    both = ffi.new("VkPhysicalDeviceProperties2*")
    both.sType, both.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, identity
    vk.vkGetPhysicalDeviceProperties2(handle, both)
    properties = both.properties
    operations = (
        int(subgroup.supportedOperations) if subgroup.supportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT else 0
    )
    extensions = extensions_of(handle)
    types, heaps = _memory(handle)
    local = max(
        range(len(heaps)), key=lambda heap: (any(t.heap == heap and t.local for t in types), heaps[heap])
    )
    kind = KINDS.get(int(properties.deviceType), "other")
    family = _queue_family(handle)
    assert family is not None  # checked by _unfit
    ids = bytes(identity.deviceUUID), bytes(identity.driverUUID), bytes(properties.pipelineCacheUUID)
    return Gpu(
        handle=handle,
        index=index,
        name=ffi.string(properties.deviceName).decode(errors="replace"),
        kind=kind,
        driver=" ".join(
            ffi.string(text).decode(errors="replace") for text in (driver.driverName, driver.driverInfo)
        ),
        version=".".join(
            str(part(properties.apiVersion))
            for part in (vk.VK_VERSION_MAJOR, vk.VK_VERSION_MINOR, vk.VK_VERSION_PATCH)
        ),
        features=frozenset(
            features_of(handle) | {name for name, bit in SUBGROUPS.items() if operations & bit}
        ),
        limits=_limits(properties.limits, int(third.maxMemoryAllocationSize), int(subgroup.subgroupSize)),
        memory_types=types,
        memory=heaps[local],
        heap=local,
        budgeted=BUDGET in extensions,
        shared=kind in ("integrated", "cpu"),
        identity=b"".join(ids).hex(),
        queue_family=family,
        portability=SUBSET in extensions,
        vendor=VENDORS.get(int(properties.vendorID), ""),
    )


def _limits(limits: Any, allocation: int, subgroup: int) -> dict[str, int]:
    names = (
        "maxComputeWorkGroupInvocations", "maxComputeSharedMemorySize", "maxStorageBufferRange",
        "maxPerStageDescriptorStorageBuffers", "minStorageBufferOffsetAlignment", "nonCoherentAtomSize",
    )  # fmt: skip
    made = {name: int(getattr(limits, name)) for name in names}
    for axis, size, count in zip(
        "XYZ", limits.maxComputeWorkGroupSize, limits.maxComputeWorkGroupCount, strict=True
    ):
        made[f"maxComputeWorkGroupSize{axis}"] = int(size)
        made[f"maxComputeWorkGroupCount{axis}"] = int(count)
    return made | {"maxMemoryAllocationSize": allocation, "subgroupSize": subgroup}


def free_memory(gpu: Gpu) -> int:
    """Bytes of device memory that this process may take now; other processes and engines change it all the
    time.
    """
    vk = require_vulkan()
    if not gpu.budgeted:
        return gpu.memory
    told = vk.ffi.new("VkPhysicalDeviceMemoryBudgetPropertiesEXT*")
    told.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT
    _memory_properties(gpu.handle, told)
    return max(int(told.heapBudget[gpu.heap]) - int(told.heapUsage[gpu.heap]), 0)


def _memory(handle: Any) -> tuple[tuple[MemoryType, ...], list[int]]:
    """The memory types of a device, and the sizes of its heaps in bytes."""
    memory = _memory_properties(handle, require_vulkan().ffi.NULL)
    heaps = [int(memory.memoryHeaps[i].size) for i in range(memory.memoryHeapCount)]
    types = []
    for i in range(memory.memoryTypeCount):
        flags, heap = int(memory.memoryTypes[i].propertyFlags), int(memory.memoryTypes[i].heapIndex)
        types.append(
            MemoryType(bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8), heap, heaps[heap])
        )
    return tuple(types), heaps


def _memory_properties(handle: Any, more: Any) -> Any:
    """VkPhysicalDeviceMemoryProperties; `more` is a further struct for the driver to fill, or NULL."""
    vk = require_vulkan()
    both = vk.ffi.new("VkPhysicalDeviceMemoryProperties2*")
    both.sType, both.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2, more
    vk.vkGetPhysicalDeviceMemoryProperties2(handle, both)
    return both.memoryProperties
