"""Linked WebAssembly modules: the same bytes every time, and modules for both kinds of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tvm")

from nearfar.targets.cpu import link
from nearfar.targets.wasm.codegen import link_modules
from tests.unit.test_link import module

SHARED, PLAIN = b"\x03env\x06memory\x02\x03", b"\x03env\x06memory\x02\x01"
"""Imports of a memory with a maximum, shared and not (docs: WebAssembly, "Memory Types"; the threads
proposal).
"""


def linked(folder: Path) -> tuple[bytes, bytes]:
    folder.mkdir()
    shared, plain = folder / "shared.wasm", folder / "plain.wasm"
    link_modules(module(), {shared: True, plain: False})
    return shared.read_bytes(), plain.read_bytes()


def test_the_same_kernels_give_the_same_bytes_and_no_path_of_this_machine(tmp_path: Path) -> None:
    first, again = linked(tmp_path / "first"), linked(tmp_path / "again")
    assert first == again
    shared, plain = first
    assert SHARED in shared
    assert PLAIN in plain
    for path in (tmp_path, Path.home(), Path(sys.prefix), link.RUNTIME.resolve()):
        assert not any(f"{path}/".encode() in content for content in first)
