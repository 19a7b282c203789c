"""The systems that CPU artifacts are built for: all of them from any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearfar.edge_runtime.executors.cpu.system import architecture, system
from nearfar.errors import BuildError

HOST = "host"
"""What --cpu calls the platform that the build runs on."""


@dataclass(frozen=True)
class Platform:
    """A processor's architecture and an operating system. `triple`: LLVM's name; `zig`: the linker's, with
    the oldest version that the library is for. `library`: its file name.
    """

    name: str
    architecture: str
    system: str
    triple: str
    zig: str
    library: str


def _linux(architecture: str) -> Platform:
    """From glibc 2.28 on: what is of 2018 or later."""
    return Platform(
        f"{architecture}-linux",
        architecture,
        "linux",
        f"{architecture}-unknown-linux-gnu",
        f"{architecture}-linux-gnu.2.28",
        "model.so",
    )


def _macos(architecture: str) -> Platform:
    """From macOS 13 on."""
    return Platform(
        f"{architecture}-macos",
        architecture,
        "macos",
        f"{'arm64' if architecture == 'aarch64' else architecture}-apple-macosx13.0.0",
        f"{architecture}-macos.13.0",
        "model.dylib",
    )


def _windows(architecture: str) -> Platform:
    return Platform(
        f"{architecture}-windows",
        architecture,
        "windows",
        f"{architecture}-w64-windows-gnu",
        f"{architecture}-windows-gnu",
        "model.dll",
    )


_ANDROID = Platform(
    "aarch64-android",
    "aarch64",
    "android",
    "aarch64-unknown-linux-android29",
    # There is no libc of Android's with the linker. musl's headers describe the same records for what the
    # runtime uses of it (pthread_mutex_t of 40 bytes, pthread_cond_t of 48), and nothing of musl is linked.
    "aarch64-linux-musl",
    "model.so",
)
"""From Android 10 on, whose loader knows thread-local variables."""

PLATFORMS = {
    each.name: each
    for each in (
        _linux("x86_64"),
        _linux("aarch64"),
        _macos("aarch64"),
        _macos("x86_64"),
        _windows("x86_64"),
        _windows("aarch64"),
        _ANDROID,
    )
}


def host() -> Platform:
    """The platform that this process runs on; BuildError where the cpu target does not know it."""
    name = f"{architecture()}-{system()}"
    if name not in PLATFORMS:
        raise BuildError(
            f"this machine is {name}, which the cpu target does not know: name a platform to build for with "
            f"--cpu, of {', '.join(PLATFORMS)}"
        )
    return PLATFORMS[name]


def platforms(names: Sequence[str]) -> tuple[Platform, ...]:
    """The platforms of those names, each once, in their order; BuildError for one that is not known."""
    strange = [name for name in names if name != HOST and name not in PLATFORMS]
    if strange or not names:
        raise BuildError(
            f"unknown platform {', '.join(strange) or '(none)'}: --cpu takes {', '.join(PLATFORMS)} or {HOST}"
        )
    return tuple(dict.fromkeys(host() if name == HOST else PLATFORMS[name] for name in names))
