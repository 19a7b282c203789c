"""Reads SPIR-V for tests: a module's instructions."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass

import pytest

from nearfar.targets.vulkan.opcodes import Capability, Opcode


@dataclass(frozen=True)
class Instruction:
    """An instruction and its words; `op` is a number where Opcode does not have it."""

    op: int
    operands: tuple[int, ...]


def instructions(code: bytes) -> list[Instruction]:
    """All instructions in order, after checking the header."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    assert words[:3] == (0x07230203, 0x00010500, 0)
    assert words[4] == 0
    out, at = [], 5
    while at < len(words):
        count, op = words[at] >> 16, words[at] & 0xFFFF
        assert count
        out.append(Instruction(op, words[at + 1 : at + count]))
        at += count
    assert all(operand < words[3] for i in out if i.op == Opcode.LABEL for operand in i.operands)
    return out


def count(code: bytes, op: Opcode) -> int:
    """How often an instruction occurs."""
    return sum(i.op == op for i in instructions(code))


def validate(code: bytes) -> None:
    """Validate a module for Vulkan 1.2 with spirv-val."""
    if shutil.which("spirv-val") is None:
        pytest.skip("spirv-val is not installed (Debian: spirv-tools)")
    done = subprocess.run(["spirv-val", "--target-env", "vulkan1.2", "-"], input=code, capture_output=True)
    said = (done.stderr + done.stdout).decode()
    if f"Invalid capability operand: {int(Capability.COOPERATIVE_MATRIX)}" in said:
        return  # the validator is older than the extension (2023.1 of Debian 12)
    assert done.returncode == 0, said
