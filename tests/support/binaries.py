"""Reads shared libraries of every system as far as a loader does: format, exported and imported symbols."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_ELF = {62: "x86_64", 183: "aarch64"}
_MACHO = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_PE = {0x8664: "x86_64", 0xAA64: "aarch64"}


@dataclass
class Binary:
    """A shared library. `needed`: libraries; `signed`: how a Mach-O file is."""

    format: str
    architecture: str
    exports: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    signed: str | None = None


def binary(data: bytes) -> Binary:
    """Parse a shared library. Raises ValueError for other data."""
    if data[:4] == b"\x7fELF":
        return _elf(data)
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return _macho(data)
    if data[:2] == b"MZ":
        return _pe(data)
    raise ValueError(f"no library begins with {data[:4]!r}")


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(0, at)].decode()


def _elf(data: bytes) -> Binary:
    kind, machine = struct.unpack_from("<HH", data, 16)
    assert kind == 3, "a shared object"
    found = Binary("elf", _ELF[machine])
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + entry * i) for i in range(count)]
    for _, type_, _, _, offset, size, link, _, _, _ in sections:
        names = sections[link][4] if link < count else 0
        if type_ == 11:  # SHT_DYNSYM
            for at in range(offset + 24, offset + size, 24):
                name, info, _, section = struct.unpack_from("<IBBH", data, at)
                if info >> 4:  # not local
                    (found.exports if section else found.undefined).add(_text(data, names + name))
        if type_ == 6:  # SHT_DYNAMIC
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == 1:
                    found.needed.add(_text(data, names + value))
    return found


def _macho(data: bytes) -> Binary:
    _, cpu, _, kind, commands, _, _, _ = struct.unpack_from("<8I", data)
    assert kind == 6, "a dynamic library"
    found, at = Binary("macho", _MACHO[cpu]), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, at)
        if command == 2:  # LC_SYMTAB
            symbols, count, names, _ = struct.unpack_from("<4I", data, at + 8)
            for i in range(count):
                name, type_ = struct.unpack_from("<IB", data, symbols + 16 * i)
                if type_ & 1 and not type_ & 0xE0:  # external, not for a debugger
                    defined = type_ & 0x0E
                    known = found.exports if defined else found.undefined
                    known.add(_text(data, names + name).removeprefix("_"))
        if command == 12:  # LC_LOAD_DYLIB
            found.needed.add(_text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        if command == 29:  # LC_CODE_SIGNATURE
            start = struct.unpack_from("<I", data, at + 8)[0]
            first = struct.unpack_from(">I", data, start + 16)[0]
            flags = struct.unpack_from(">I", data, start + first + 12)[0]
            found.signed = "ad hoc" if flags & 2 else "by somebody"
        at += size
    return found


def _pe(data: bytes) -> Binary:
    (header,) = struct.unpack_from("<I", data, 60)
    machine, sections = struct.unpack_from("<HH", data, header + 4)
    optional_size, flags = struct.unpack_from("<HH", data, header + 20)
    assert flags & 0x2000, "a DLL"
    found = Binary("pe", _PE[machine])
    table = header + 24 + optional_size
    places = [struct.unpack_from("<IIII", data, table + 40 * i + 8) for i in range(sections)]

    def at(address: int) -> int:
        _, start, _, offset = next(p for p in places if p[1] <= address < p[1] + max(p[0], p[2]))
        return address - start + offset

    exports, _, imports, _ = struct.unpack_from("<4I", data, header + 24 + 112)
    if exports:
        count, _, names = struct.unpack_from("<III", data, at(exports) + 24)
        for i in range(count):
            found.exports.add(_text(data, at(struct.unpack_from("<I", data, at(names) + 4 * i)[0])))
    where = at(imports)
    while (entry := struct.unpack_from("<5I", data, where))[3]:
        found.needed.add(_text(data, at(entry[3])))
        thunk = at(entry[0] or entry[4])
        while value := struct.unpack_from("<Q", data, thunk)[0]:
            found.undefined.add(_text(data, at(value) + 2))
            thunk += 8
        where += 20
    return found
