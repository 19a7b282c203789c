"""Calls a CPU artifact's shared library through ctypes: every call releases the GIL, and a plan
is one call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.executors.planned import Stamps, seconds
from nearfar.errors import ArtifactError, DeviceError
from nearfar.format.machines import system

Array = npt.NDArray[np.generic]
ALIGN = 64  # bytes: a cache line, and what TVM's code may assume of a tensor's data


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    """A TVMFFIAny that holds a DLTensor*; its value has 64 bits even if a pointer has 32."""

    _fields_ = (("type_index", ctypes.c_int32), ("zero", ctypes.c_uint32), ("value", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    """The struct nf_launch of targets/cpu/runtime: a kernel, its arguments, and the largest matrix that it
    reads.
    """

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("args", ctypes.POINTER(_Any)),
        ("count", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    )


_DL_CPU = 1
_TENSOR_POINTER = 7  # kTVMFFIDLTensorPtr
_DTYPE_CODES = {"i": 0, "u": 1, "f": 2}


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """A zeroed array whose data is 64-byte aligned; untouched pages take no memory."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.zeros(count + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + count].view(kind).reshape(shape)


class DlTensor:
    """A DLTensor over an array's memory, with the shape and dtype that a kernel expects; it keeps the array
    alive.
    """

    def __init__(
        self, array: Array, shape: Sequence[int] | None = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        kind = np.dtype(dtype if dtype is not None else array.dtype)
        dims = tuple(array.shape if shape is None else shape)
        needed = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
        if needed > array.nbytes or not array.flags.c_contiguous or array.ctypes.data % ALIGN:
            raise ArtifactError(
                f"a kernel wants {kind}{list(dims)} ({needed} bytes, aligned), its argument has "
                f"{array.nbytes} bytes"
            )
        self._array = array
        self.nbytes = needed
        self._shape = (ctypes.c_int64 * len(dims))(*dims)
        code = _DTYPE_CODES[kind.kind]
        self.struct = _DLTensor(
            array.ctypes.data, _DL_CPU, 0, len(dims), code, kind.itemsize * 8, 1, self._shape, None, 0
        )


class LoadedPlan:
    """Bound launches that can be replayed."""

    def __init__(
        self,
        launches: ctypes.Array[_Launch],
        names: list[str],
        keep: list[object],
    ) -> None:
        self.launches = launches
        self.names = names
        self._keep = keep


class Pool:
    """The threads of one engine. Several pools can use one library at once; each runs one
    replay at a time.
    """

    def __init__(self, lib: ctypes.CDLL, ffi: ctypes.CDLL, threads: int, cores: int = 0) -> None:
        """Start `threads` threads, including the caller's; fewer if the system refuses more.

        `cores`: the number of them that can run at once, 0 if unknown.
        """
        self._lib = lib
        self._ffi = ffi
        self._handle = ctypes.c_void_p(lib.nf_pool_new(threads, cores))
        if not self._handle:
            raise DeviceError("there is no memory for a pool of threads")
        # The threads end with a pool that is dropped without being closed; when the process exits, the system
        # ends them.
        self._end = weakref.finalize(self, lib.nf_pool_free, self._handle)
        self._end.atexit = False

    @property
    def threads(self) -> int:
        """The number of threads, including the caller's; 1 in a forked process, which lacks the parent's
        threads; 0 after `close`.
        """
        return int(self._lib.nf_pool_threads(self._handle)) if self._end.alive else 0

    def replay(self, plan: LoadedPlan, first: int = 0, end: int | None = None) -> None:
        """Run launches of a plan in order: all, or those from `first` up to `end`. DeviceError if a kernel
        refuses its arguments, or if the pool is closed.
        """
        self._run(self._lib.nf_replay, plan, first, end)

    def profile(self, plan: LoadedPlan, first: int = 0, end: int | None = None) -> tuple[float, ...]:
        """Run launches of a plan as `replay` does, and return the seconds of each."""
        if not hasattr(self._lib, "nf_profile"):
            raise ArtifactError("this artifact's library cannot time its launches: build the artifact again")
        end = len(plan.names) if end is None else end
        stamps: Stamps = np.zeros(end - first + 1, np.uint64)
        self._run(self._lib.nf_profile, plan, first, end, stamps.ctypes.data)
        return seconds(stamps[:-1], stamps[1:], 1e-9)

    def _run(
        self, call: Callable[..., int], plan: LoadedPlan, first: int, end: int | None, *more: int
    ) -> None:
        if not self._end.alive:
            raise DeviceError("the threads of this engine have ended: it is closed")
        start = ctypes.addressof(plan.launches) + first * ctypes.sizeof(_Launch)
        failed = call(self._handle, start, (len(plan.names) if end is None else end) - first, *more)
        if failed >= 0:
            failed += first
            raise DeviceError(
                f"kernel {plan.names[failed]} (launch {failed}) rejected its arguments: {_raised(self._ffi)}"
            )

    def close(self) -> None:
        """End the threads; no other thread may be in `replay`."""
        self._end()


class Library:
    """A loaded library: its kernels, and pools of threads to run them."""

    def __init__(self, path: Path | str) -> None:
        self._ffi = _load_ffi()
        try:
            self._lib = ctypes.CDLL(_own_name(Path(path)))
        except OSError as error:
            raise ArtifactError(f"{path} cannot be loaded: {error}") from error
        # older libraries have shorter launches and lack this symbol
        if not hasattr(self._lib, "nf_launch_bytes"):
            raise ArtifactError(f"{path} was made by another version of nearfar: build the artifact again")
        self._lib.nf_pool_new.argtypes = [ctypes.c_int, ctypes.c_int]
        self._lib.nf_pool_new.restype = ctypes.c_void_p
        self._lib.nf_pool_threads.argtypes = [ctypes.c_void_p]
        self._lib.nf_pool_threads.restype = ctypes.c_int
        self._lib.nf_pool_free.argtypes = [ctypes.c_void_p]
        self._lib.nf_pool_free.restype = None
        self._lib.nf_replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        self._lib.nf_replay.restype = ctypes.c_int32
        if hasattr(self._lib, "nf_profile"):  # older libraries lack this function
            self._lib.nf_profile.argtypes = [*self._lib.nf_replay.argtypes, ctypes.c_void_p]
            self._lib.nf_profile.restype = ctypes.c_int32

    def pool(self, threads: int, cores: int = 0) -> Pool:
        """Start a pool of `threads` threads, including the caller's; see Pool."""
        return Pool(self._lib, self._ffi, threads, cores)

    def bind(
        self, launches: Sequence[tuple[str, Sequence[DlTensor]]], weights: Sequence[DlTensor | None] = ()
    ) -> LoadedPlan:
        """Resolve kernels by name and fix their arguments.

        `weights`: for each launch the matrix that it streams, if any; idle threads may prefetch it.
        ArtifactError for an unknown kernel.
        """
        table = (_Launch * len(launches))()
        keep: list[object] = []
        read = weights or [None] * len(launches)
        for entry, (name, tensors), matrix in zip(table, launches, read, strict=True):
            try:
                function = getattr(self._lib, f"__tvm_ffi_{name}")
            except AttributeError as error:
                raise ArtifactError(
                    f"the library has no kernel {name!r}: the artifact is damaged, build it again"
                ) from error
            pointers = (ctypes.addressof(tensor.struct) for tensor in tensors)
            args = (_Any * len(tensors))(*[_Any(_TENSOR_POINTER, 0, pointer) for pointer in pointers])
            entry.function = ctypes.cast(function, ctypes.c_void_p).value
            entry.args = ctypes.cast(args, ctypes.POINTER(_Any))
            entry.count = len(tensors)
            if matrix is not None:
                entry.weights, entry.bytes = matrix.struct.data, matrix.nbytes
            keep += [args, *tensors]
        return LoadedPlan(table, [name for name, _ in launches], keep)


_LOADED: dict[Path, list[tuple[int, int]]] = {}
"""The files (device, inode) that were loaded from each path."""


def _own_name(path: Path) -> str:
    """A spelling of the path by which this process has loaded no other file.

    For a name that it knows, the loader returns the library that it loaded under that name, even if the
    artifact has been rebuilt since. A file that is loaded under a second name is recognized by its inode and
    loaded once.
    """
    path = path.absolute()
    found = path.stat()
    files = _LOADED.setdefault(path, [])
    if (here := (found.st_dev, found.st_ino)) not in files:
        files.append(here)
    if os.name == "nt":  # Windows does not let a loaded library be replaced
        return str(path)
    return os.path.join(path.parent, *["."] * files.index(here), path.name)


def _load_ffi() -> ctypes.CDLL:
    """Load libtvm_ffi, through which kernels report bad arguments, visible to libraries loaded later.

    `import tvm_ffi` would do the same, but it imports torch if that is installed, which takes seconds.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise DeviceError(
            "the cpu device needs apache-tvm-ffi, which is not installed: pip install 'nearfar[edge]'"
        )
    package = Path(spec.origin).parent
    if sys.platform == "win32":
        # The wheel's C++ runtime lies in a folder beside the package.
        brought = package.with_name("apache_tvm_ffi.libs")
        if brought.is_dir():
            os.add_dll_directory(str(brought))
    return ctypes.CDLL(str(package / "lib" / ffi_library(system())), mode=ctypes.RTLD_GLOBAL)


def ffi_library(on: str) -> str:
    """The file name of tvm-ffi's library on a system."""
    return {"macos": "libtvm_ffi.dylib", "windows": "tvm_ffi.dll"}.get(on, "libtvm_ffi.so")


class _Error(ctypes.Structure):
    """The first fields of a TVMFFIErrorCell after its TVMFFIObject, as in tvm-ffi's c_api.h (a test compares
    them).
    """

    _fields_ = (
        ("header", ctypes.c_uint8 * 24),
        ("kind", ctypes.c_void_p),
        ("kind_size", ctypes.c_size_t),
        ("message", ctypes.c_void_p),
        ("message_size", ctypes.c_size_t),
    )


def _raised(ffi: ctypes.CDLL) -> str:
    """The message that a kernel left in tvm-ffi's thread-local slot."""
    handle = ctypes.c_void_p()
    ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        return "no message"
    error = _Error.from_address(handle.value)
    text = ctypes.string_at(error.message, error.message_size).decode(errors="replace")
    ffi.TVMFFIObjectDecRef(handle)
    return text
