"""Features of Vulkan devices by name: queried, enabled, and their meaning for kernels."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from nearfar.edge_runtime.executors.vulkan.binding import require_vulkan
from nearfar.edge_runtime.executors.vulkan.instance import instance

log = logging.getLogger(__name__)

FEATURES = {
    "VkPhysicalDeviceFeatures": ("shaderInt16", "shaderInt64"),
    "VkPhysicalDeviceVulkan11Features": ("storageBuffer16BitAccess",),
    "VkPhysicalDeviceVulkan12Features": (
        "shaderFloat16", "shaderInt8", "storageBuffer8BitAccess", "timelineSemaphore", "vulkanMemoryModel",
    ),
    "VkPhysicalDeviceShaderIntegerDotProductFeatures": ("shaderIntegerDotProduct",),
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": ("cooperativeMatrix",),
}  # fmt: skip
"""Features that programs can require or the runtime needs, by the struct that has them."""

EXTENSIONS = {
    "shaderIntegerDotProduct": "VK_KHR_shader_integer_dot_product",
    "cooperativeMatrix": "VK_KHR_cooperative_matrix",
}
"""Extensions of features that Vulkan 1.2 lacks: a device must offer them, and is opened with them."""

COOPERATIVE = (16, 16, 16, 0, 0, 1, 1, 3)
"""The cooperative matrices that kernels use: m, n, k; float16 (0) times float16 added to float32 (1), with a
float32 result; of a subgroup (3). A device with only other matrices counts as a device without any.
"""

SUBGROUPS = {"subgroupBasic": 0x1, "subgroupArithmetic": 0x4, "subgroupShuffle": 0x10}
"""Bits of VkSubgroupFeatureFlagBits; they need no enabling."""


def feature_structs(names: Collection[str], known: Collection[str]) -> list[Any]:
    """A chain VkPhysicalDeviceFeatures2 → 1.1 → 1.2 with the features `names` set; keep all structs alive
    while it is used.

    The chain has the structs of those EXTENSIONS that are `known`.
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
    """Yield each struct of a chain with the names of its features."""
    ffi = require_vulkan().ffi
    for struct in chain:
        kind = str(ffi.typeof(struct).item.cname).removeprefix("struct ")
        if kind == "VkPhysicalDeviceFeatures2":
            yield struct.features, FEATURES["VkPhysicalDeviceFeatures"]
        else:
            yield struct, FEATURES[kind]


def features_of(handle: Any) -> set[str]:
    """The features in FEATURES that a physical device has."""
    vk = require_vulkan()
    offered = extensions_of(handle)
    chain = feature_structs((), {name for name, extension in EXTENSIONS.items() if extension in offered})
    vk.vkGetPhysicalDeviceFeatures2(handle, chain[0])
    found = {name for struct, names in _with_names(chain) for name in names if getattr(struct, name)}
    if "cooperativeMatrix" in found and COOPERATIVE not in matrices(handle):
        found.remove("cooperativeMatrix")
    return found


def matrices(handle: Any) -> set[tuple[int, ...]]:
    """The cooperative matrices of a device in the form of COOPERATIVE; empty if the driver cannot tell."""
    vk = require_vulkan()
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    names = ("MSize", "NSize", "KSize", "AType", "BType", "CType", "ResultType", "scope")
    try:
        found = vk.vkGetInstanceProcAddr(instance(False).handle, name)(handle)
    # the binding may raise any error, and the program may not need cooperative matrices
    except Exception as error:
        log.warning("a Vulkan driver cannot list its cooperative matrices: %s", error)
        return set()
    return {tuple(int(getattr(each, name)) for name in names) for each in found}


def extensions_of(handle: Any) -> set[str]:
    """The names of the device's extensions."""
    return {e.extensionName for e in require_vulkan().vkEnumerateDeviceExtensionProperties(handle, None)}
