"""What tests make of content, and find again by it: compiled kernels, shaders, zig's libraries.

It lies in one folder that outlives a run and a clone: `$NEARFAR_TEST_CACHE`, or `nearfar-tests` beside the
user's cache of nearfar, and never in that cache itself: a test may alter what compiles kernels. The folder
can be deleted at any time. What is in it is named by all that it was made of, so a run with it tests what a
run without it does.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

from nearfar.build.program.kept import FOLDER as KERNELS
from nearfar.folders import cache_folder

FOLDER = "NEARFAR_TEST_CACHE"
"""The environment's variable that names another folder."""
UNUSED = 30 * 24 * 3600  # seconds after which the folder of an unused version of zig is deleted
MESA_LIMIT = "2G"  # Mesa's own limit, in place of a time: it deletes what was used longest ago


def use_kept(environment: MutableMapping[str, str], now: float | None = None) -> None:
    """Make this process, and those that it starts, keep there; what the environment says already holds.

    Each part has a bound: the kernel cache and Mesa have one of their own; zig never gives anything up, so it
    has a folder a version, and one that no run used for a month is removed.
    """
    given = environment.get(FOLDER)
    folder = Path(given).absolute() if given else cache_folder().with_name("nearfar-tests")
    zig = folder / "zig" / _zig()
    for each in (folder / "mesa", zig):  # Mesa makes its own folder, but not the folders above it
        each.mkdir(parents=True, exist_ok=True)
    environment[FOLDER] = str(folder)  # for processes that are given another NEARFAR_HOME
    environment.setdefault(KERNELS, str(folder / "kernels"))
    environment.setdefault("MESA_SHADER_CACHE_DIR", str(folder / "mesa"))
    environment.setdefault("MESA_SHADER_CACHE_MAX_SIZE", MESA_LIMIT)
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(zig))
    os.utime(zig)
    for other in zig.parent.iterdir():
        if other.stat().st_mtime < (now or time.time()) - UNUSED:
            shutil.rmtree(other, ignore_errors=True)


def _zig() -> str:
    try:
        return metadata.version("ziglang")
    except metadata.PackageNotFoundError:
        return "none"
