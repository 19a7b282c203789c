"""The platforms that CPU artifacts are built for: each can be built on any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearfar.errors import BuildError
from nearfar.format.machines import architecture, system

HOST = "host"
"""The name that --cpu has for the platform of the build."""


@dataclass(frozen=True)
class Platform:
    """A processor's architecture and an operating system.

    `triple`: LLVM's name. `zig`: the linker's name, with the oldest supported version. `library`: the
    library's file name.
    """

    architecture: str
    system: str
    triple: str
    zig: str
    library: str

    @property
    def name(self) -> str:
        """The name that --cpu has for the platform."""
        return f"{self.architecture}-{self.system}"


PLATFORMS = {
    each.name: each
    for each in (
        # glibc 2.28: systems of 2018 or later.
        Platform("x86_64", "linux", "x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.28", "model.so"),
        Platform("aarch64", "linux", "aarch64-unknown-linux-gnu", "aarch64-linux-gnu.2.28", "model.so"),
        Platform("aarch64", "macos", "arm64-apple-macosx13.0.0", "aarch64-macos.13.0", "model.dylib"),
        Platform("x86_64", "macos", "x86_64-apple-macosx13.0.0", "x86_64-macos.13.0", "model.dylib"),
        Platform("x86_64", "windows", "x86_64-w64-windows-gnu", "x86_64-windows-gnu", "model.dll"),
        Platform("aarch64", "windows", "aarch64-w64-windows-gnu", "aarch64-windows-gnu", "model.dll"),
        # Android 10, whose loader knows thread-local variables. There is no libc of Android's with the
        # linker. musl's headers describe the same records for what the runtime uses of it (pthread_mutex_t of
        # 40 bytes, pthread_cond_t of 48), and nothing of musl is linked.
        Platform("aarch64", "android", "aarch64-unknown-linux-android29", "aarch64-linux-musl", "model.so"),
    )
}


def host() -> Platform:
    """The platform of this process; BuildError if the cpu target does not support it."""
    name = f"{architecture()}-{system()}"
    if name not in PLATFORMS:
        raise BuildError(
            f"this machine is {name}, which the cpu target does not know: name a platform to build for with "
            f"--cpu, of {', '.join(PLATFORMS)}"
        )
    return PLATFORMS[name]


def platforms(names: Sequence[str]) -> tuple[Platform, ...]:
    """The platforms with those names, each once, in order; BuildError for an unknown name."""
    strange = [name for name in names if name != HOST and name not in PLATFORMS]
    if strange or not names:
        raise BuildError(
            f"unknown platform {', '.join(strange) or '(none)'}: --cpu takes {', '.join(PLATFORMS)} or {HOST}"
        )
    return tuple(dict.fromkeys(host() if name == HOST else PLATFORMS[name] for name in names))
