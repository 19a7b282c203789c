"""The process's connection to Vulkan, with the validation layer on request."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nearfar.edge_runtime.executors.vulkan.binding import require_vulkan
from nearfar.errors import DeviceError

API = (1, 2)
"""The least version of Vulkan: SPIR-V 1.5 and timeline semaphores came with 1.2."""

VALIDATION = "VK_LAYER_KHRONOS_validation"
DEBUG_UTILS = "VK_EXT_debug_utils"
VALIDATION_FEATURES = "VK_EXT_validation_features"
SYNCHRONIZATION = 4
"""VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT: the layer also looks for missing barriers."""

PORTABILITY = "VK_KHR_portability_enumeration"


@dataclass
class _Instance:
    """The process's connection to Vulkan; it is kept until the process ends, since drivers take
    long to load.
    """

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
        raise DeviceError(NO_DRIVER) from error
    except (vk.VkError, vk.VkException) as error:
        raise DeviceError(
            f"Vulkan does not start: {type(error).__name__}. Reinstall the GPU's driver"
        ) from error
    made = _Instance(handle, [])
    if debug:
        made.keep = _listen(handle, made.messages)
    return made


NO_DRIVER = (
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
