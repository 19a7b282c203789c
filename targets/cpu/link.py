"""Links kernels' objects and the C runtime into a shared library, for any platform on any platform.

It uses `ziglang` from PyPI, which contains a C compiler, linkers, and descriptions of each system's
libraries.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from nearfar.children import child_environment
from nearfar.errors import BuildError
from nearfar.folders import cache_folder
from nearfar.targets.cpu.platforms import Platform

RUNTIME = Path(__file__).with_name("runtime")
COMMON = ("pool.c", "replay.c", "hooks.c")
FLAGS = ("-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-fno-sanitize=undefined")
_FFI = "TVMFFIErrorSetRaisedFromCStrParts"
"""The functions of tvm-ffi that kernels call; the process has loaded tvm-ffi before."""
_KERNEL32 = """
AcquireSRWLockExclusive CloseHandle CreateThread GetProcessHeap HeapAlloc HeapFree InitializeConditionVariable
InitializeSRWLock QueryPerformanceCounter QueryPerformanceFrequency ReleaseSRWLockExclusive
SleepConditionVariableSRW SwitchToThread TlsAlloc TlsFree TlsGetValue TlsSetValue WaitForSingleObject
WakeAllConditionVariable
"""
_UCRT = "cosf expf logf powf sinf"
_MACHINES = {"x86_64": "i386:x86-64", "aarch64": "arm64"}
"""Architectures, by dlltool's names."""


def link(
    objects: Sequence[Path], platform: Platform, out: Path, shared: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write the library `out` from objects and the runtime; the same objects give the same bytes on every
    host.

    `shared`: further names of kernels, with the names of the kernels that they stand for.
    """
    # Relative names in a temporary directory keep this machine's paths out of the library.
    with tempfile.TemporaryDirectory(prefix="nearfar-link-") as name:
        folder = Path(name)
        names = [f"kernels{i}.o" for i in range(len(objects))]
        for given, held in zip(objects, names, strict=True):
            shutil.copy(given, folder / held)
        runtime = compile_runtime(platform.zig, folder, _SOURCES.get(platform.system, ()), _pic(platform))
        if shared:
            names.append(_compile_names(shared, platform, folder))
        libraries = _IMPORTS[platform.system](platform, folder) if platform.system in _IMPORTS else []
        options = _OPTIONS[platform.system](platform)
        zig(["cc", "-target", platform.zig, "-shared", "-s", *options, *names, *runtime, *libraries,
             "-o", platform.library], folder)  # fmt: skip
        shutil.move(folder / platform.library, out)


def symbol(kernel: str) -> str:
    """The symbol of a kernel's function in TVM's calling convention (tvm-ffi)."""
    return f"__tvm_ffi_{kernel}"


SIGNATURE = "(void *self, const void *args, int32_t count, void *result)"


def _compile_names(shared: Mapping[str, str], platform: Platform, folder: Path) -> str:
    """Compile an object with a function for each further name, which calls the kernel that it stands for."""
    lines = ['#include "platform.h"', "#include <stdint.h>"]
    lines += [f"int32_t {symbol(held)}{SIGNATURE};" for held in sorted(set(shared.values()))]
    lines += [
        f"NF_EXPORT int32_t {symbol(name)}{SIGNATURE} {{ return {symbol(held)}(self, args, count, result); }}"
        for name, held in sorted(shared.items())
    ]
    (folder / "names.c").write_text("\n".join(lines) + "\n", encoding="utf-8")
    zig(["cc", "-target", platform.zig, *FLAGS, f"-I{RUNTIME}", *_pic(platform), "-c", "names.c",
         "-o", "names.o"], folder)  # fmt: skip
    return "names.o"


def compile_runtime(
    target: str, folder: Path, sources: Sequence[str] = (), options: Sequence[str] = ()
) -> list[str]:
    """Compile the C runtime for zig's `target` into `folder`; returns the names of its objects there.

    `sources`: files of the platform, in addition to the common ones.
    """
    names = []
    for name, data in _runtime(target, tuple(sources), tuple(options)).items():
        (folder / name).write_bytes(data)
        names.append(name)
    return names


@lru_cache(maxsize=64)
def _runtime(target: str, sources: tuple[str, ...], options: tuple[str, ...]) -> Mapping[str, bytes]:
    """Objects of the C runtime by name, cached: all builds of a process share them for one platform."""
    made = {}
    with tempfile.TemporaryDirectory(prefix="nearfar-runtime-") as name:
        folder = Path(name)
        for each in RUNTIME.iterdir():
            shutil.copy(each, folder)
        for file in (*COMMON, *sources):
            zig(["cc", "-target", target, *FLAGS, *options, "-c", file, "-o", f"{file}.o"], folder)
            made[f"{file}.o"] = (folder / f"{file}.o").read_bytes()
    return made


def zig(arguments: Sequence[str], folder: Path) -> None:
    """Run zig in a folder; BuildError with zig's output if it fails.

    Files that zig makes once for each platform stay in the user's cache (or $ZIG_GLOBAL_CACHE_DIR), all
    others in the folder.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError(
            "building for cpu needs ziglang, which is not installed: pip install 'nearfar[build]'"
        )
    shared = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(cache_folder() / "zig")
    settings = {
        "ZIG_GLOBAL_CACHE_DIR": shared,
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig-cache"),
        "SOURCE_DATE_EPOCH": "1",  # DLLs contain the time of their making
    }
    command = [sys.executable, "-m", "ziglang", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=child_environment(**settings), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(
            f"zig {arguments[0]} failed with status {done.returncode}, please report it:\n"
            f"{done.stderr.strip()}"
        )


def _pic(platform: Platform) -> tuple[str, ...]:
    return () if platform.system == "windows" else ("-fPIC",)


def _elf(platform: Platform) -> list[str]:
    # Pages of 16 KiB, for Android and some ARM systems; systems with 4 KiB load the library as well.
    pages = "65536" if platform.architecture == "aarch64" else "4096"
    return ["-Wl,-Bsymbolic", "-Wl,--build-id=none", f"-Wl,-z,max-page-size={pages}"]


_SOURCES = {"windows": ("windows.c", "bare.c", "chkstk.c")}
_OPTIONS: dict[str, Callable[[Platform], list[str]]] = {
    "linux": lambda platform: [*_elf(platform), "-lm", "-pthread"],
    "android": lambda platform: [*_elf(platform), "-nostdlib"],
    "macos": lambda platform: [
        "-undefined",
        "dynamic_lookup",
        f"-Wl,-install_name,@rpath/{platform.library}",
    ],
    "windows": lambda platform: ["-nostdlib", "-Wl,--entry,DllMain"],
}


def _windows_libraries(platform: Platform, folder: Path) -> list[str]:
    """Make import libraries for the device's DLLs: their names, and the functions that are called in them."""
    made = []
    for library, functions in (("kernel32", _KERNEL32), ("ucrtbase", _UCRT), ("tvm_ffi", _FFI)):
        text = "\n".join([f"LIBRARY {library}.dll", "EXPORTS", *functions.split()])
        (folder / f"{library}.def").write_text(text + "\n")
        machine = _MACHINES[platform.architecture]
        zig(["dlltool", "-m", machine, "-d", f"{library}.def", "-l", f"{library}.lib"], folder)
        made.append(f"{library}.lib")
    return made


def _android_libraries(platform: Platform, folder: Path) -> list[str]:
    """Make empty libraries with the names of Android's, so that its loader searches those for functions."""
    made = []
    for library in ("libc", "libm"):
        (folder / f"{library}.c").write_text("")
        zig(["cc", "-target", platform.zig, "-shared", "-nostdlib", f"-Wl,-soname,{library}.so",
             f"{library}.c", "-o", f"{library}.so"], folder)  # fmt: skip
        made.append(f"{library}.so")
    return made


_IMPORTS: dict[str, Callable[[Platform, Path], list[str]]] = {
    "windows": _windows_libraries,
    "android": _android_libraries,
}
