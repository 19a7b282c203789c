"""The format's facts as TypeScript, so that the browser's runtime does not repeat them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nearfar.format import (
    adapters,
    buffers,
    consistency,
    keywords,
    kv,
    manifest,
    plans,
    requests,
    sampler,
    seal,
    service_fields,
    sizes,
)
from nearfar.format.attributes import meanings
from nearfar.format.tables import snake

WIDTH = 110


def module(command: str) -> str:
    """The content of web/src/format/constants.ts; `command` is the command that writes it."""
    head = f"// Written by `{command}` from nearfar.format: change it there.\n"
    return "\n".join([head, *_constants(), *_buffers(), interfaces(manifest.Manifest, plans.Plan)])


def keyword_module(command: str) -> str:
    """The content of web/src/grammar/keywords.ts; `command` is the command that writes it."""
    return _module_of(keywords, command)


def service_module(command: str) -> str:
    """The content of web/src/routing/service-fields.ts: a module of its own, since the router is loaded
    without the engine. `command` is the command that writes it.
    """
    return _module_of(service_fields, command)


def _module_of(module: types.ModuleType, command: str) -> str:
    head = f"// Written by `{command}` from {module.__name__}: change it there.\n"
    told = meanings(module)
    return "\n".join([head, *(_constant(name, getattr(module, name), told[name]) for name in told)])


def _constants() -> Iterator[str]:
    said = meanings(sizes)
    yield _constant("FORMAT", manifest.FORMAT, "The first word of a manifest.")
    yield _constant("LISTING", manifest.LISTING, meanings(manifest)["LISTING"])
    yield _constant("VERSION", manifest.VERSION, "The newest version of the format that a reader reads.")
    yield _constant("OLDEST", manifest.OLDEST, meanings(manifest)["OLDEST"])
    yield _constant("DIGEST", seal.FIELD, "The manifest's key for its own digest.")
    for name in said:
        yield _constant(name, getattr(sizes, name), said[name])
    for name, said_of in meanings(requests).items():
        yield _constant(name, getattr(requests, name), said_of)
    told = meanings(adapters)
    yield _constant("DEVICE_CLASSES", adapters.DEVICE_CLASSES, told["DEVICE_CLASSES"])
    rules = [{_camel(key): item for key, item in vars(rule).items()} for rule in adapters.RULES]
    yield _constant("RULES", rules, told["RULES"])
    yield _constant("NEARNESS", adapters.NEARNESS, told["NEARNESS"])
    yield _constant("FUNCTIONS", consistency.PLANNED["generate"], "What a program can run.")
    yield _constant("DTYPE_BYTES", consistency.DTYPE_BYTES, "Bytes of an element of each dtype.")
    said = meanings(kv)
    for name in ("BITS", "GROUPS"):
        yield _constant(f"KV_{name}", getattr(kv, name), said[name])
    yield _constant("SAMPLE_COLUMNS", sampler.COLUMNS, "Columns of `sample_f32` and `sample_i32`.")
    for columns in (sampler.SampleF32, sampler.SampleI32):
        indices = {_camel(column.name): column.value for column in columns}
        yield _constant(snake(columns.__name__).upper(), indices, inspect.getdoc(columns) or "")
    yield _constant("PROMPT_FLAG", sampler.PROMPT_FLAG, meanings(sampler)["PROMPT_FLAG"])


def _buffers() -> Iterator[str]:
    table = {row.name: {"dtype": row.dtype, "shape": row.shape} for row in buffers.TABLE}
    yield _constant("BUFFERS", table, "Every buffer that plans name; what is in words depends on the model.")
    yield _constant("OF_LOGITS", buffers.OF_LOGITS, meanings(buffers)["OF_LOGITS"])
    names = "".join(f"\n  | {_name_type(row.name)}" for row in buffers.TABLE)
    yield _block(f"export type BufferName ={names};", "What a buffer can be called.")


def _name_type(name: str) -> str:
    """A buffer's name as a TypeScript type: any number in place of a group or cache, any string in place of a
    rope's name.
    """
    pattern = re.sub("<(g|c)>", "${number}", name).replace("<name>", "${string}")
    return f'"{name}"' if pattern == name else f"`{pattern}`"


def _camel(name: str) -> str:
    first, *rest = name.lower().split("_")
    return first + "".join(part.title() for part in rest)


def _constant(name: str, value: object, doc: str) -> str:
    """An exported constant; objects and lists keep the types of their values."""
    narrow = "" if isinstance(value, str | int | float) else " as const"
    around = f"export const {name} = {narrow};"
    return _block(f"export const {name} = {_literal(value, room=WIDTH - len(around))}{narrow};", doc)


def _block(code: str, doc: str) -> str:
    return f"{_comment(doc)}{code}\n"


def _comment(doc: str) -> str:
    if len(doc) <= WIDTH - len("/**  */"):
        return f"/** {doc} */\n"
    return "/**\n" + textwrap.indent(textwrap.fill(doc, WIDTH - 3), " * ") + "\n */\n"


def _literal(value: object, indent: str = "", room: int = WIDTH) -> str:
    """A value in TypeScript: an object has one entry on each line, a list too if it does not fit on
    one line.
    """
    if isinstance(value, str):
        return f'"{value}"'
    inner = f"{indent}  "
    if isinstance(value, Mapping):
        rooms = {key: WIDTH - len(f"{inner}{_key(str(key))}: ,") for key in value}
        items = {key: _literal(item, inner, rooms[key]) if isinstance(item, tuple) else _flat(item)
                 for key, item in value.items()}  # fmt: skip
        lines = (f"{inner}{_key(str(key))}: {item},\n" for key, item in items.items())
        return f"{{\n{''.join(lines)}{indent}}}"
    flat = _flat(value)
    of_objects = isinstance(value, Sequence) and value and isinstance(value[0], Mapping)
    if isinstance(value, Sequence) and (of_objects or len(flat) > room):
        return f"[\n{''.join(f'{inner}{_flat(item)},{chr(10)}' for item in value)}{indent}]"
    return flat


def _flat(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))}: {_flat(item)}" for key, item in value.items()) + " }"
    return f"[{', '.join(_flat(item) for item in value)}]" if isinstance(value, Sequence) else str(value)


def _key(name: str) -> str:
    return name if name.isidentifier() else f'"{name}"'


def interfaces(*roots: type) -> str:
    """TypeScript interfaces for the JSON of `roots` and of each record in their fields."""
    return "\n".join(_interface(record) for record in _records(roots))


def _records(kinds: Sequence[Any]) -> Iterator[type]:
    """Each record once, after the records in its fields."""
    seen: dict[type, None] = {}

    def visit(kind: Any) -> None:
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            for argument in typing.get_args(kind):
                visit(argument)
        elif kind not in seen:
            for hint in typing.get_type_hints(kind).values():
                visit(hint)
            seen[kind] = None

    for kind in kinds:
        visit(kind)
    yield from seen


def _interface(record: type) -> str:
    hints = typing.get_type_hints(record)
    lines = [
        f"  readonly {field.name}{'' if _required(field) else '?'}: {_type(hints[field.name])};\n"
        for field in dataclasses.fields(record)
    ]
    doc = " ".join((inspect.getdoc(record) or "").split("\n\n")[0].split())
    return _block(f"export interface {_name(record)} {{\n{''.join(lines)}}}", doc)


def _name(record: type) -> str:
    return f"{record.__name__.removesuffix('Records')}Record"


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


SCALARS: Mapping[Any, str] = {
    str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", Any: "unknown"
}  # fmt: skip


def _type(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _name(kind)
    if origin is typing.Literal:
        return " | ".join(f'"{value}"' for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_type(argument) for argument in arguments)
    if origin is dict:
        return f"Readonly<Record<string, {_type(arguments[1])}>>"
    if origin is tuple and arguments[1:] == (...,):
        item = _type(arguments[0])
        return f"readonly ({item})[]" if "|" in item else f"readonly {item}[]"
    raise TypeError(f"no TypeScript for {kind}: teach nearfar.format.typescript")
