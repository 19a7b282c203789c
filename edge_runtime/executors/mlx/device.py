"""MLX as a device: whether it is installed, what it computes on, and what its errors mean to a user."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.errors import DeviceError, OutOfMemory

MISSING = "the mlx device needs MLX, which is not installed: pip install 'nearfar[mlx]'"
OUT_OF_MEMORY = ("malloc", "allocate", "OutOfMemory", "Insufficient Memory")


def features() -> frozenset[str]:
    """Features that programs can require: "metal" if MLX has an Apple GPU."""
    return frozenset({"metal"}) if has_metal() else frozenset()


def limits() -> dict[str, int]:
    """The largest buffer of the GPU, in bytes; nothing on a CPU."""
    if not has_metal():
        return {}
    import mlx.core as mx

    return {"maxBufferSize": int(mx.device_info()["max_buffer_length"])}


def describe() -> tuple[str, int]:
    """Name and bytes of memory of the device that MLX computes on; 0 bytes if MLX does not say."""
    import mlx.core as mx

    information = mx.device_info() if has_metal() else {}
    return str(information.get("device_name", "CPU")), int(information.get("memory_size", 0))


def has_metal() -> bool:
    """Whether MLX runs on an Apple GPU here. DeviceError if MLX cannot be imported."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise DeviceError(f"{MISSING} ({error})") from error
    return bool(mx.metal.is_available())


def installed() -> bool:
    """Whether the package mlx is installed."""
    return importlib.util.find_spec("mlx") is not None


@contextmanager
def guard(what: str, bytes_held: Callable[[], int]) -> Iterator[None]:
    """Turn MLX's RuntimeError into a DeviceError: `what` was being done with `bytes_held()` bytes already in
    use.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # MLX has no error class for a lack of memory, only the messages of its allocator and of Metal.
        lacking = isinstance(error, MemoryError) or any(word in str(error) for word in OUT_OF_MEMORY)
        raise (OutOfMemory if lacking else DeviceError)(
            f"MLX failed {what}, with {show_size(bytes_held())} of weights and cache held: {error}. "
            "Where memory ran out, give the cache less (--kv-memory), store it in fewer bits (--kv-bits "
            "8), or take a smaller model"
        ) from error
