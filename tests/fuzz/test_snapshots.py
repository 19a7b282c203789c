"""Untrusted snapshots with a valid checksum are rejected with a message, or do not change the answer."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nearfar.edge_runtime import AsyncEngine, SamplingParams
from nearfar.errors import SnapshotError
from tests.fuzz.effort import effort
from tests.unit.test_api import make

TOKENS = list(range(40))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
UNSIGNED = "0" * 64

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    1.0,
    16.0,
    0.5,
    float("nan"),
    2**31,
    2**63,
    10**30,
    "",
    "x",
    "F64",
    "\ud800",
    "9" * 5000,
    [],
    [[]],
    {},
    [1],
    [-1, 4],
    [0, 0],
    [10**30, 0],
    [1.0, 4],
    {"a": 1},
    "1",
    "[1]",
    "[" * 5000,
    '[{"role": 1, "content": []}]',
    "kv.0.k.codes",
)


async def answer(engine: AsyncEngine) -> list[int]:
    return [event.token async for event in engine.generate(TOKENS, GREEDY)]


@cache
def written() -> tuple[dict[str, Any], bytes, list[int]]:
    """Header and body of a snapshot, and the answer of an engine without it."""

    async def save(path: Path) -> list[int]:
        async with make() as engine:
            await engine.save_cache(path, tokens=TOKENS)
            return await answer(engine)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.snap")
        expected = asyncio.run(save(path))
        data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["messages"] = '[{"role": "system", "content": "x"}]'
    return header, data[8 + length :], expected


def signed(header: dict[str, Any], body: bytes) -> bytes:
    """The file of a header and a body, with a valid checksum."""
    metadata = header.get("__metadata__")
    sign = isinstance(metadata, dict) and "sha256" in metadata
    if sign:
        metadata["sha256"] = UNSIGNED
    text = json.dumps(header, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + body
    return data.replace(UNSIGNED.encode(), hashlib.sha256(data).hexdigest().encode(), 1) if sign else data


async def load(data: bytes) -> list[int] | None:
    """The answer with a snapshot; None if it is rejected. In that case nothing may have changed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.snap")
        path.write_bytes(data)
        async with make() as engine:
            try:
                await engine.load_cache(path)
            except SnapshotError:
                assert engine.core.scheduler.table.index.idle_count() == 0
                return None
            return await answer(engine)


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inner for path in [(*before, key), *paths(item, (*before, key))]]


@effort(150)
@given(st.data())
def test_altered_headers(data: st.DataObject) -> None:
    header, body, expected = written()
    header = copy.deepcopy(header)
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(paths(header)))
        place = header
        for key in way:
            place = place[key]
        kind = data.draw(st.sampled_from(["replace", "remove", "rename"]))
        if kind == "remove":
            del place[last]
        elif kind == "rename" and isinstance(place, dict):
            place[data.draw(st.sampled_from(["kv.9.k", "kv.", "tokens", "", "kv.0.k.codes"]))] = place.pop(
                last
            )
        else:
            place[last] = data.draw(st.sampled_from(HOSTILE))
        if not paths(header):
            break
    assert asyncio.run(load(signed(header, body))) in (None, expected)


@effort(60)
@given(
    st.integers(0, 10**6), st.sampled_from([b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff"])
)
def test_keys_and_values_that_are_not_numbers(at: int, word: bytes) -> None:
    header, body, _ = written()
    start = header["kv.0.k"]["data_offsets"][0]
    at = start + at % ((len(body) - start) // 4) * 4
    assert asyncio.run(load(signed(copy.deepcopy(header), body[:at] + word + body[at + 4 :]))) is None


@effort(100)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_bytes_of_any_kind(noise: bytes, keep: int) -> None:
    header, body, _ = written()
    data = signed(copy.deepcopy(header), body)
    assert asyncio.run(load(data[:keep] + noise)) is None
