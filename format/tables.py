"""The tables of docs/artifact.md that are generated from the format's records; each is between markers with
its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

from nearfar.errors import NearfarError
from nearfar.format import buffers, sampler, sizes
from nearfar.format.attributes import meanings

MARKED = re.compile(r"(<!-- generated: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with current tables between its markers; NearfarError if its markers are not those of TABLES, in
    order.
    """
    found = [name for _, name, _ in MARKED.findall(text)]
    if found != list(TABLES):
        raise NearfarError(
            f"the page has markers for the tables {found}, not for {list(TABLES)}, in this order"
        )
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _buffers() -> str:
    rows = ((f"`{row.name}`", f"{row.dtype} {_shown(row.shape)}", row.what) for row in buffers.TABLE)
    return _table(("buffer", "dtype, shape", "meaning"), rows)


def _columns(columns: type[IntEnum]) -> str:
    said = meanings(columns)
    rows = ((str(column.value), column.name.lower(), said[column.name]) for column in columns)
    return _table(("column", f"`{snake(columns.__name__)}`", "meaning"), rows)


def _sizes() -> str:
    rows = ((name, _shown(getattr(sizes, name)), meaning) for name, meaning in meanings(sizes).items())
    return _table(("name", "value", "meaning"), rows)


def _shown(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def snake(name: str) -> str:
    """A name in snake case: SampleF32 as sample_f32."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


TABLES: Mapping[str, Callable[[], str]] = {
    "buffers": _buffers,
    "columns of sample_f32": lambda: _columns(sampler.SampleF32),
    "columns of sample_i32": lambda: _columns(sampler.SampleI32),
    "sizes": _sizes,
}
"""The functions that write the tables, by the names in the markers, in the order of the page."""
