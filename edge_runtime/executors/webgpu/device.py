"""Finds a WebGPU device through wgpu-py: what it offers, and a device with only the features of a program."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nearfar.edge_runtime.executors import drivers as mesa
from nearfar.errors import DeviceError
from nearfar.format.adapters import VENDORS, Adapter, AdapterKind
from nearfar.format.manifest import Requires

TIMESTAMPS = "timestamp-query"
"""The feature by which a pass records the times of its beginning and end."""
LANGUAGE = frozenset({"packed_4x8_integer_dot_product"})
"""Language features of WGSL that wgpu-native's compiler has on every adapter; wgpu-py lists none."""
KINDS: dict[str, AdapterKind] = {
    "DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "VirtualGPU": "virtual", "CPU": "cpu"
}  # fmt: skip
"""Kinds of GPUs by wgpu-native's names."""


def require_wgpu() -> Any:
    """The module wgpu; DeviceError says how to install it."""
    try:
        import wgpu
    except ImportError as error:
        raise DeviceError("the package wgpu is not installed: pip install 'nearfar[edge]'") from error
    return wgpu


@lru_cache(maxsize=2)
def adapter(power: str = "high-performance") -> Any:
    """The adapter that the system prefers."""
    mesa.prepare()
    wgpu = require_wgpu()
    try:
        found = wgpu.gpu.request_adapter_sync(power_preference=power)
    except Exception as error:
        raise DeviceError(
            f"no WebGPU adapter: {error}. Install a Vulkan driver (Mesa's lavapipe will do)"
        ) from error
    if found is None:
        raise DeviceError("no WebGPU adapter. Install a Vulkan driver (Mesa's lavapipe will do)")
    return found


def features() -> frozenset[str]:
    """Names of the adapter's features, and of the language's, as WebGPU spells them."""
    return frozenset(adapter().features) | LANGUAGE


def limits() -> dict[str, int]:
    """The adapter's limits by their WebGPU names."""
    return {_camel(name): int(value) for name, value in adapter().limits.items()}


def information() -> dict[str, str]:
    """The adapter's description of itself: device, adapter_type, backend_type, description and more."""
    return {str(name): str(value) for name, value in adapter().info.items()}


def described() -> Adapter:
    """The record by which device classes are told apart; wgpu-native does not know architectures."""
    told = information()
    vendor = VENDORS.get(int(told.get("vendor_id", "0")), told.get("vendor", ""))
    name, driver = told.get("device", ""), f"{told.get('vendor', '')} {told.get('description', '')}".strip()
    return Adapter(
        vendor, told.get("architecture", ""), name, driver, KINDS.get(told.get("adapter_type", ""), "other")
    )


def is_hardware() -> bool:
    """Whether there is a hardware GPU, not none or a software GPU."""
    try:
        return str(adapter().info.get("adapter_type", "")).upper() not in ("CPU", "UNKNOWN", "")
    except DeviceError:
        return False


def open_device(requires: Requires, buffer_bytes: int, what_fits: str) -> Any:
    """Open a device with a program's features and limits; DeviceError names what the adapter lacks.

    `buffer_bytes`: the largest buffer (cache buffers grow with its budget).
    """
    found, have = adapter(), limits()
    missing = sorted(set(requires.features) - features())
    if missing:
        raise DeviceError(f"{_name(found)} lacks {', '.join(missing)}: use the program of another precision")
    wanted = dict(requires.limits)
    for name in ("maxStorageBufferBindingSize", "maxBufferSize"):
        wanted[name] = max(wanted.get(name, 0), buffer_bytes)
    short = [
        f"{name} {have[name]:,} of {value:,}"
        for name, value in wanted.items()
        if have.get(name, value) < value
    ]
    if short:
        raise DeviceError(f"{_name(found)} offers too little: {', '.join(short)}. {what_fits}")
    try:
        return found.request_device_sync(
            required_features=sorted(set(requires.features) - LANGUAGE),
            required_limits={_hyphens(name): value for name, value in wanted.items() if name in have},
        )
    except Exception as error:
        raise DeviceError(f"{_name(found)} gives no device: {error}") from error


def timed(requires: Requires) -> Requires:
    """Add the feature by which passes record times; DeviceError if the adapter lacks it."""
    if TIMESTAMPS not in features():
        raise DeviceError(
            f"{_name(adapter())} lacks {TIMESTAMPS}, so it cannot measure the time of a launch. Measure on "
            "another device (nearfar devices lists them)"
        )
    return replace(requires, features=(*requires.features, TIMESTAMPS))


def _name(found: Any) -> str:
    return str(found.info.get("device") or found.summary)


def _camel(name: str) -> str:
    return re.sub(r"-([a-z])", lambda match: match.group(1).upper(), name)


def _hyphens(name: str) -> str:
    return re.sub(r"[A-Z]", lambda match: "-" + match.group(0).lower(), name)
