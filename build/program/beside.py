"""Compiles programs in other processes.

TIR kernels are made in Python, so threads would take turns: a GPU target's programs take half the time in two
processes. A process reads its share from, and writes its result to, a folder that only this user can read.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from nearfar.build.program.compile import Compilation, compiled
from nearfar.build.program.compiled import Compiled
from nearfar.children import child_environment
from nearfar.errors import BuildError
from nearfar.kernels.contract import Variant
from nearfar.kernels.emission import Emit, EmitContext
from nearfar.processors import processors

_WORK, _MADE = "work.pickle", "made.pickle"
# TVM imports PyTorch where it is installed, which takes longer than all other imports of the process.
_CODE = """
import sys
sys.modules["torch"] = None
from nearfar.build.program.beside import work
work(sys.argv[1])
"""


@dataclass(frozen=True)
class Share:
    """Programs of one target for one process to compile; `tvm_target` and `emit` are fields of Planned."""

    tvm_target: dict[str, Any]
    emit: Emit
    job: Compilation
    variants: tuple[Variant, ...]
    context: EmitContext
    """The context of the target; its folder belongs to another process and is not written to."""


def shares(variants: Sequence[Variant]) -> list[tuple[Variant, ...]]:
    """The variants, cut into as many shares as there are processors, the first for this process.

    Programs of one class of devices have most kernels in common, and stay together.
    """
    classes: dict[str | None, list[Variant]] = {}
    for variant in variants:
        classes.setdefault(variant.device_class, []).append(variant)
    groups = list(classes.values())
    count = max(1, min(processors(), len(groups)))
    return [tuple(each for group in groups[start::count] for each in group) for start in range(count)]


@contextlib.contextmanager
def beside(share: Share) -> Iterator[Callable[[], list[Compiled]]]:
    """Compile a share in another process while the block runs. The block gets a function that waits for the
    programs, in the order of the variants, and raises BuildError as compiling them here would. The process
    ends with the block.
    """
    with tempfile.TemporaryDirectory(prefix="nearfar-beside-") as name:
        folder = Path(name)
        (folder / _WORK).write_bytes(pickle.dumps(share))
        # The child has a session of its own: Ctrl-C reaches only this process, which then ends the child.
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, name], env=child_environment(), start_new_session=True
        )
        try:
            yield lambda: _made(process, folder)
        finally:
            process.kill()
            process.wait()


def _made(process: subprocess.Popen[bytes], folder: Path) -> list[Compiled]:
    status = process.wait()
    if status != 0:
        raise BuildError(
            f"a process that compiles kernels ended with status {status}"
            + (": perhaps there was not enough memory" if status < 0 else ", please report it")
        )
    made: list[Compiled] | BuildError = pickle.loads((folder / _MADE).read_bytes())
    if isinstance(made, BuildError):
        raise made
    return made


def work(name: str) -> None:
    """Entry point of the other process: read its share from the folder `name`, compile, write the programs
    there.
    """
    folder = Path(name)
    share: Share = pickle.loads((folder / _WORK).read_bytes())
    target = tvm.target.Target(share.tvm_target)
    made: list[Compiled] | BuildError
    try:
        made = [compiled(share.job, variant, target, share.emit, share.context) for variant in share.variants]
    except BuildError as error:
        made = BuildError(str(error))
    (folder / _MADE).write_bytes(pickle.dumps(made))
