"""The `vulkan` bindings, and what Vulkan's errors mean to a user.

Calls that are made once use the bindings' functions (structs from keywords, errors as exceptions). Calls of
every step use the loader's C functions (`Api.lib`) with prepared structs: the bindings' conversions cost more
than the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import Any, NoReturn

from nearfar.edge_runtime.executors import drivers as mesa
from nearfar.errors import DeviceError, DeviceLost, OutOfMemory

SUCCESS = 0
TIMEOUT = 2
DEVICE_LOST = -4
_MEMORY = {
    "VkErrorOutOfDeviceMemory": "is out of memory",
    "VkErrorOutOfHostMemory": "found no host memory left",
    "VkErrorOutOfPoolMemory": "is out of descriptor memory",
    "VkErrorFragmentedPool": "is out of descriptor memory",
    "VkErrorMemoryMapFailed": "could not map its memory",
    "VkErrorTooManyObjects": "has too many allocations",
}


@lru_cache(maxsize=1)
def require_vulkan() -> Any:
    """The module vulkan. DeviceError if it or the system's loader is missing; it says how to install them."""
    mesa.prepare()
    try:
        return import_module("vulkan")
    except ImportError as error:
        raise DeviceError("the package vulkan is not installed: pip install 'nearfar[vulkan]'") from error
    except OSError as error:
        raise DeviceError(
            "this system has no Vulkan loader (libvulkan.so.1, vulkan-1.dll): install the GPU vendor's "
            "driver, or on Linux libvulkan1 and mesa-vulkan-drivers, which can also run on the CPU"
        ) from error


def fail(device: str, doing: str, error: str, held: int = 0) -> NoReturn:
    """Raise the DeviceError for an error of Vulkan.

    `error` is its name in the bindings, `held` the bytes of device memory already in use.
    """
    if error == "VkErrorDeviceLost":
        raise DeviceLost(
            f"{device} was lost while {doing}: the driver reset it, after a fault or because a step took too "
            "long. If it happens again, update the driver, or choose another device (nearfar devices lists "
            "them)"
        )
    if error in _MEMORY:
        raise OutOfMemory(
            f"{device} {_MEMORY[error]} while {doing}, with {held:,} bytes of weights, cache and workspace "
            "held. Give the cache less (--kv-memory), close other programs that use the device, or take a "
            "smaller model"
        )
    raise DeviceError(
        f"{device} failed while {doing}: {error}. Update the driver, or choose another device (nearfar "
        "devices lists them)"
    )


@contextmanager
def guard(device: str, doing: str, held: int = 0) -> Iterator[None]:
    """Turn the bindings' exceptions into nearfar's; see `fail`."""
    vk = require_vulkan()
    try:
        yield
    except (vk.VkError, vk.VkException) as error:
        fail(device, doing, type(error).__name__, held)


def check(result: int, device: str, doing: str) -> None:
    """Raise for the result of a C function that is not VK_SUCCESS."""
    if result != SUCCESS:
        known = require_vulkan().exception_codes.get(result)
        fail(device, doing, known.__name__ if known else f"VkResult {result}")
