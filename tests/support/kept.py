"""Content-addressed results that tests keep: compiled kernels, shaders, zig's libraries.

They lie in one folder that outlives a run and a clone: `$NEARFAR_TEST_CACHE`, or `nearfar-tests` beside the
user's cache of nearfar. They are never in that cache itself, since a test may alter the code that compiles
kernels. The folder can be deleted at any time. The name of each entry covers everything that it was made of,
so a run tests the same with and without the folder.
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
"""The environment variable that names another folder."""
UNUSED = 30 * 24 * 3600  # seconds after which the folder of an unused version of zig is deleted
MESA_LIMIT = "2G"  # Mesa's own limit, in place of a time: it deletes what was used longest ago


def use_kept(environment: MutableMapping[str, str], now: float | None = None) -> None:
    """Make this process and its children keep results there; variables that are already set stay.

    Each part has a limit: the kernel cache and Mesa have their own; zig never deletes anything, so each
    version has a folder, which is removed when no run has used it for a month.
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
