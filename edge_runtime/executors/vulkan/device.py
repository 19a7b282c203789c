"""Finding a Vulkan device: what each offers, which one is taken, and a logical device with just what a
program needs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nearfar.edge_runtime.executors.vulkan.binding import guard, require_vulkan
from nearfar.errors import DeviceError, RequestError
from nearfar.format.adapters import VENDORS, Adapter, Kind
from nearfar.format.manifest import Requires

log = logging.getLogger(__name__)

API = (1, 2)
"""Kernels are SPIR-V 1.5 and steps wait on timeline semaphores: both came with Vulkan 1.2."""

VALIDATION = "VK_LAYER_KHRONOS_validation"
DEBUG_UTILS = "VK_EXT_debug_utils"
VALIDATION_FEATURES = "VK_EXT_validation_features"
SYNCHRONIZATION = 4
"""VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT: looks for missing barriers too."""

PORTABILITY = "VK_KHR_portability_enumeration"
SUBSET = "VK_KHR_portability_subset"
BUDGET = "VK_EXT_memory_budget"

KINDS: dict[int, Kind] = {2: "discrete", 1: "integrated", 3: "virtual", 4: "cpu", 0: "other"}
"""By VkPhysicalDeviceType, the one to take first in front."""

FEATURES = {
    "VkPhysicalDeviceFeatures": ("shaderInt16", "shaderInt64"),
    "VkPhysicalDeviceVulkan11Features": ("storageBuffer16BitAccess",),
    "VkPhysicalDeviceVulkan12Features": (
        "shaderFloat16", "shaderInt8", "storageBuffer8BitAccess", "timelineSemaphore", "vulkanMemoryModel",
    ),
    "VkPhysicalDeviceShaderIntegerDotProductFeatures": ("shaderIntegerDotProduct",),
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": ("cooperativeMatrix",),
}  # fmt: skip
"""Features that a program can require or the runtime needs, by the struct that has them."""

EXTENSIONS = {
    "shaderIntegerDotProduct": "VK_KHR_shader_integer_dot_product",
    "cooperativeMatrix": "VK_KHR_cooperative_matrix",
}
"""Of features that Vulkan 1.2 does not have: what a device must offer, and be opened with."""

COOPERATIVE = (16, 16, 16, 0, 0, 1, 1, 3)
"""Cooperative matrices that kernels use: m, n, k; float16 (0) times float16 added to float32 (1), the result
too; of a subgroup (3). A device that has others only counts as one without.
"""

SUBGROUPS = {"subgroupBasic": 0x1, "subgroupArithmetic": 0x4, "subgroupShuffle": 0x10}
"""Bits of VkSubgroupFeatureFlagBits; there is nothing to switch on."""


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
    """A physical device as the driver describes it. `features` and `limits` by the names that programs
    require them by.

    `memory`: bytes of its largest device-local heap, whose number is `heap`; `budgeted`: the driver tells how
    much of it this process may take. `shared`: that memory is the host's. `identity`: device and driver
    version, for what is kept on disk.
    """

    handle: Any
    index: int
    name: str
    kind: Kind
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
        """As classes of devices are told apart by."""
        return Adapter(self.vendor, "", self.name, self.driver, self.kind)


@dataclass(frozen=True)
class Device:
    """A logical device with its one queue."""

    gpu: Gpu
    handle: Any
    queue: Any

    def close(self) -> None:
        """Free it; everything made from it must be gone."""
        require_vulkan().vkDestroyDevice(self.handle, None)


@dataclass
class _Instance:
    """The process's connection to Vulkan; kept until the process ends, since drivers take long to load."""

    handle: Any
    messages: list[str]
    keep: tuple[Any, ...] = ()


@lru_cache(maxsize=2)
def instance(debug: bool, /) -> _Instance:
    """Connect to the loader. `debug`: with the validation layer, whose messages go to stderr and to
    `messages`.
    """
    vk = require_vulkan()
    version = vk.vkEnumerateInstanceVersion()
    if (vk.VK_VERSION_MAJOR(version), vk.VK_VERSION_MINOR(version)) < API:
        raise DeviceError(
            "the Vulkan loader of this system is older than 1.2: update the GPU's driver, or libvulkan1"
        )
    layers = [VALIDATION] if debug else []
    if debug and VALIDATION not in {layer.layerName for layer in vk.vkEnumerateInstanceLayerProperties()}:
        raise DeviceError(
            "the Vulkan validation layer is not installed, which --debug needs: install "
            "vulkan-validationlayers (Debian, Ubuntu) or the Vulkan SDK, or leave --debug out"
        )
    known = {
        extension.extensionName
        for source in (None, *layers)
        for extension in vk.vkEnumerateInstanceExtensionProperties(source)
    }
    wanted = [
        name
        for name in (PORTABILITY, *((DEBUG_UTILS, VALIDATION_FEATURES) if debug else ()))
        if name in known
    ]
    checks = (
        vk.VkValidationFeaturesEXT(pEnabledValidationFeatures=[SYNCHRONIZATION])
        if VALIDATION_FEATURES in wanted
        else None
    )
    application = vk.VkApplicationInfo(pApplicationName="nearfar", apiVersion=vk.VK_MAKE_VERSION(*API, 0))
    information = vk.VkInstanceCreateInfo(
        pNext=checks,
        flags=1
        if PORTABILITY in wanted
        else 0,  # VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR: Vulkan over Metal
        pApplicationInfo=application,
        ppEnabledLayerNames=layers,
        ppEnabledExtensionNames=wanted,
    )
    try:
        handle = vk.vkCreateInstance(information, None)
    except vk.VkErrorIncompatibleDriver as error:
        raise DeviceError(_NO_DRIVER) from error
    except (vk.VkError, vk.VkException) as error:
        raise DeviceError(
            f"Vulkan does not start: {type(error).__name__}. Reinstall the GPU's driver"
        ) from error
    made = _Instance(handle, [])
    if debug:
        made.keep = _listen(handle, made.messages)
    return made


_NO_DRIVER = (
    "the Vulkan loader found no driver with a device: install the GPU vendor's driver, or "
    "mesa-vulkan-drivers, whose lavapipe runs on the CPU. In a container, give it the GPU (docker run --gpus "
    "all, or --device /dev/dri)"
)


def _listen(handle: Any, messages: list[str]) -> tuple[Any, ...]:
    """Collect the validation layer's warnings and errors."""
    vk = require_vulkan()

    def told(_severity: int, _kind: int, data: Any, _user: Any) -> int:
        text = vk.ffi.string(data.pMessage).decode(errors="replace")
        messages.append(text)
        print(f"vulkan: {text}", file=sys.stderr)
        return 0

    create = vk.ffi.cast(
        "PFN_vkCreateDebugUtilsMessengerEXT", _address(handle, "vkCreateDebugUtilsMessengerEXT")
    )
    callback = vk.ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", told)
    information = vk.ffi.new(
        "VkDebugUtilsMessengerCreateInfoEXT*",
        {
            "sType": vk.VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT,
            "messageSeverity": 0x100 | 0x1000,  # warnings and errors
            "messageType": 0x2 | 0x4,  # validation and performance
            "pfnUserCallback": callback,
        },
    )
    messenger = vk.ffi.new("VkDebugUtilsMessengerEXT*")
    create(handle, information, vk.ffi.NULL, messenger)
    return callback, messenger


def _address(handle: Any, name: str) -> Any:
    vk = require_vulkan()
    return vk.lib.vkGetInstanceProcAddr(handle, vk.ffi.new("char[]", name.encode()))


def gpus(debug: bool = False) -> tuple[Gpu, ...]:
    """The devices that can run kernels: discrete before integrated before software ones. DeviceError where
    there is none.
    """
    return _gpus(debug)


@lru_cache(maxsize=2)
def _gpus(debug: bool, /) -> tuple[Gpu, ...]:
    vk = require_vulkan()
    made = instance(debug)
    try:
        handles = list(vk.vkEnumeratePhysicalDevices(made.handle))
    except (vk.VkError, vk.VkException) as error:
        raise DeviceError(f"{_NO_DRIVER} ({type(error).__name__})") from error
    if not handles:
        raise DeviceError(_NO_DRIVER)
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


def open_device(gpu: Gpu, requires: Requires) -> Device:
    """A logical device with a program's features; DeviceError where the device has too little."""
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
    structs = _feature_structs({*requires.features, "timelineSemaphore"}, requires.features)
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
        return Device(gpu, handle, vk.vkGetDeviceQueue(handle, gpu.queue_family, 0))


def _feature_structs(names: Collection[str], known: Collection[str]) -> list[Any]:
    """A chain VkPhysicalDeviceFeatures2 → 1.1 → 1.2 with these features set; all of them must stay alive
    while it is used. Those of EXTENSIONS are there where they are `known`.
    """
    ffi = require_vulkan().ffi
    vk = require_vulkan()
    twelve = ffi.new("VkPhysicalDeviceVulkan12Features*")
    twelve.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES
    eleven = ffi.new("VkPhysicalDeviceVulkan11Features*")
    eleven.sType, eleven.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES, twelve
    base = ffi.new("VkPhysicalDeviceFeatures2*")
    base.sType, base.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, eleven
    chain = [base, eleven, twelve]
    for feature, kind, number in (
        (
            "shaderIntegerDotProduct",
            "VkPhysicalDeviceShaderIntegerDotProductFeatures",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES,
        ),
        (
            "cooperativeMatrix",
            "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR,
        ),
    ):
        if feature in known:
            more = ffi.new(f"{kind}*")
            more.sType, chain[-1].pNext = number, more
            chain.append(more)
    for struct, features in _with_names(chain):
        for name in features:
            setattr(struct, name, int(name in names))
    return chain


def _with_names(chain: list[Any]) -> Iterable[tuple[Any, tuple[str, ...]]]:
    """Each struct of a chain, and the features that it has."""
    ffi = require_vulkan().ffi
    for struct in chain:
        kind = str(ffi.typeof(struct).item.cname).removeprefix("struct ")
        if kind == "VkPhysicalDeviceFeatures2":
            yield struct.features, FEATURES["VkPhysicalDeviceFeatures"]
        else:
            yield struct, FEATURES[kind]


def _unfit(handle: Any) -> str | None:
    """Why a device cannot be used at all, None where it can."""
    vk = require_vulkan()
    properties = vk.vkGetPhysicalDeviceProperties(handle)
    name = str(properties.deviceName)
    version = (vk.VK_VERSION_MAJOR(properties.apiVersion), vk.VK_VERSION_MINOR(properties.apiVersion))
    if version < API:
        return f"{name} has Vulkan {version[0]}.{version[1]}, and 1.2 is needed"
    if _queue_family(handle) is None:
        return f"{name} has no queue for compute"
    return None if "timelineSemaphore" in _features(handle) else f"{name} lacks timelineSemaphore"


def _queue_family(handle: Any) -> int | None:
    """A family for compute: one without graphics where there is one, since a desktop does not wait in it."""
    vk = require_vulkan()
    flags = [int(family.queueFlags) for family in vk.vkGetPhysicalDeviceQueueFamilyProperties(handle)]
    able = [index for index, bits in enumerate(flags) if bits & vk.VK_QUEUE_COMPUTE_BIT]
    return min(able, key=lambda index: flags[index] & vk.VK_QUEUE_GRAPHICS_BIT, default=None)


def _features(handle: Any) -> set[str]:
    vk = require_vulkan()
    offered = _extensions(handle)
    chain = _feature_structs((), {name for name, extension in EXTENSIONS.items() if extension in offered})
    vk.vkGetPhysicalDeviceFeatures2(handle, chain[0])
    found = {name for struct, names in _with_names(chain) for name in names if getattr(struct, name)}
    if "cooperativeMatrix" in found and COOPERATIVE not in matrices(handle):
        found.remove("cooperativeMatrix")
    return found


def matrices(handle: Any) -> set[tuple[int, ...]]:
    """The cooperative matrices of a device, as COOPERATIVE has them; none where the driver does not tell."""
    vk = require_vulkan()
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    names = ("MSize", "NSize", "KSize", "AType", "BType", "CType", "ResultType", "scope")
    try:
        found = vk.vkGetInstanceProcAddr(instance(False).handle, name)(handle)
    except Exception as error:  # whatever the binding makes of it: nobody may have asked for them
        log.warning("a Vulkan driver does not tell its cooperative matrices: %s", error)
        return set()
    return {tuple(int(getattr(each, name)) for name in names) for each in found}


def _extensions(handle: Any) -> set[str]:
    return {e.extensionName for e in require_vulkan().vkEnumerateDeviceExtensionProperties(handle, None)}


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
    extensions = _extensions(handle)
    types, heaps = _memory(handle)
    local = max(
        range(len(heaps)), key=lambda heap: (any(t.heap == heap and t.local for t in types), heaps[heap])
    )
    kind = KINDS.get(int(properties.deviceType), "other")
    family = _queue_family(handle)
    assert family is not None  # _unfit has looked
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
        features=frozenset(_features(handle) | {name for name, bit in SUBGROUPS.items() if operations & bit}),
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
    """Bytes that this process may take of its memory now: what other processes and engines hold changes
    all the time.
    """
    vk = require_vulkan()
    if not gpu.budgeted:
        return gpu.memory
    told = vk.ffi.new("VkPhysicalDeviceMemoryBudgetPropertiesEXT*")
    told.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT
    _memory_properties(gpu.handle, told)
    return max(int(told.heapBudget[gpu.heap]) - int(told.heapUsage[gpu.heap]), 0)


def _memory(handle: Any) -> tuple[tuple[MemoryType, ...], list[int]]:
    """Memory types, and the sizes of the heaps."""
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
    """VkPhysicalDeviceMemoryProperties; `more` is a struct to be filled beside it, or NULL."""
    vk = require_vulkan()
    both = vk.ffi.new("VkPhysicalDeviceMemoryProperties2*")
    both.sType, both.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2, more
    vk.vkGetPhysicalDeviceMemoryProperties2(handle, both)
    return both.memoryProperties
