"""Libraries for every platform, linked here: their format, what they give and what they ask for."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

tvm = pytest.importorskip("tvm")

from tvm import tirx  # noqa: E402
from tvm.script.ir_builder import tirx as T  # noqa: E402

from nearfar.errors import BuildError  # noqa: E402
from nearfar.targets.cpu import link  # noqa: E402
from nearfar.targets.cpu.codegen import compile_library  # noqa: E402
from nearfar.targets.cpu.kernels import vec as v  # noqa: E402
from nearfar.targets.cpu.platforms import PLATFORMS, host, platforms  # noqa: E402
from nearfar.targets.cpu.units import BASELINE  # noqa: E402
from tests.support.binaries import binary  # noqa: E402

N = 1024
FORMATS = {"linux": "elf", "android": "elf", "macos": "macho", "windows": "pe"}
GIVES = {"nf_pool_new", "nf_pool_threads", "nf_pool_free", "nf_replay", "nf_profile", "nf_launch_bytes"}
_LIBC = """
pthread_create pthread_join pthread_setname_np pthread_mutex_init pthread_mutex_destroy pthread_mutex_lock
pthread_mutex_unlock pthread_cond_init pthread_cond_destroy pthread_cond_wait pthread_cond_broadcast
pthread_self sched_yield getpid clock_gettime posix_memalign free memset memcpy memmove bzero
"""
LIBC = set(_LIBC.split())
MATHEMATICS = {"expf", "logf", "powf", "cosf", "sinf"}
HALVES = {"__extendhfsf2", "__truncsfhf2"}  # libSystem has them: libcompiler_rt.dylib is part of it
ASKS = {
    "linux": LIBC | MATHEMATICS | {"__cxa_finalize", "__gmon_start__", "__tls_get_addr"},
    "android": LIBC | MATHEMATICS,
    "macos": LIBC
    | MATHEMATICS
    | HALVES
    | {"__bzero", "_tlv_bootstrap", "dyld_stub_binder", "memset_pattern16"},
    "windows": set(link._KERNEL32.split()) | set(link._UCRT.split()),
}
NEEDS = {
    "linux": {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"},
    "android": {"libc.so", "libm.so"},
    "macos": {"/usr/lib/libSystem.B.dylib"},
    "windows": {"kernel32.dll", "ucrtbase.dll", "tvm_ffi.dll"},
}


def module() -> tvm.IRModule:
    """What a platform may not have: a parallel loop, halves to floats and back, e^x, and an array that is too
    large for TVM to keep on the stack.
    """

    def body(x, y):
        with v.parallel(N) as i:
            far = T.alloc_buffer((N,), "float32")
            with T.serial(0, N) as j:
                v.put1(far, [j], tirx.exp(v.cast(x[(i + j) % N], "float32")))
            v.put1(y, [i], v.cast(far[i] + far[N - 1 - i], "float16"))

    func = v.prim_func("widen", [("x", (N,), "float16"), ("y", (N,), "float16")], body)
    return tvm.IRModule({"widen": func.with_attr("global_symbol", "widen")})


@cache
def linked(name: str, folder: Path) -> bytes:
    platform = PLATFORMS[name]
    path = folder / f"{name}-{platform.library}"
    compile_library(module(), path, BASELINE[platform.architecture], platform)
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_library_is_one_of_its_platform(name, folder):
    platform, found = PLATFORMS[name], binary(linked(name, folder))
    assert (found.format, found.architecture) == (FORMATS[platform.system], platform.architecture)
    assert GIVES | {"__tvm_ffi_widen"} <= found.exports
    assert found.undefined - ASKS[platform.system] == {link._FFI}
    assert found.needed <= NEEDS[platform.system]


@pytest.mark.parametrize("name", ["aarch64-macos"])
def test_code_for_apples_processors_is_signed(name, folder):
    """Their kernel ends a process that loads what nobody signed; ad hoc is enough."""
    assert binary(linked(name, folder)).signed == "ad hoc"


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_same_module_gives_the_same_bytes_and_no_path_of_this_machine(name, folder, tmp_path):
    first, again = linked(name, folder), tmp_path / "again"
    platform = PLATFORMS[name]
    compile_library(module(), again, BASELINE[platform.architecture], platform)
    assert again.read_bytes() == first
    for path in (tmp_path, folder, Path.home(), Path(sys.prefix), link.RUNTIME.resolve()):
        assert f"{path}/".encode() not in first


def test_platforms_are_named_once_and_host_is_one_of_them():
    assert platforms(["host", "aarch64-linux", host().name]) == (host(), PLATFORMS["aarch64-linux"])
    with pytest.raises(
        BuildError, match=r"unknown platform mips-linux: --cpu takes x86_64-linux, .* or host"
    ):
        platforms(["x86_64-linux", "mips-linux"])
    with pytest.raises(BuildError, match=r"unknown platform .none."):
        platforms([])
