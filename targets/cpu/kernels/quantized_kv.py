"""A quantized cache on the CPU: the append writes rows as codes, attention loads them as vectors.

The words of a page's head (nearfar.format.kv) hold bytes of codes, then pairs of float16 (scale and offset):
- keys, with positions innermost as in caches of floats: [bytes of a row, page_size], then [groups, 2,
  page_size];
- values: [page_size, bytes of a row], then [page_size, groups, 2].
With 4 bits, byte j of each 16 has component j of 32 in its low half, and component j + 16 in its high one, so
that a load of sixteen bytes gives whole vectors of either half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.kv import BITS, UNIT, group_size, row_words
from nearfar.kernels.jobs import Attend, RopeAppend
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.half import by_hand, stored, widen
from nearfar.targets.cpu.units import Unit

Expr = Any
LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class PageLayout:
    """The layout of one head's part of a page, for a job's cache."""

    unit: Unit
    head_dim: int
    page_size: int
    bits: int
    group: int

    @classmethod
    def of(cls, job: RopeAppend | Attend, unit: Unit) -> PageLayout | None:
        """The layout of a job's cache; None if the cache holds floats."""
        if job.kv_dtype not in BITS:
            return None
        bits = BITS[job.kv_dtype]
        group = group_size(job.head_dim, bits)
        assert group is not None  # PlannedTarget.check has refused other shapes
        return cls(unit, job.head_dim, job.page_size, bits, group)

    @property
    def row(self) -> int:
        """Bytes of a row's codes."""
        return self.head_dim * self.bits // 8

    @property
    def groups(self) -> int:
        """The number of groups in a row."""
        return self.head_dim // self.group

    @property
    def bytes(self) -> int:
        """Bytes of one head's part of a page: codes, and pairs of scale and offset."""
        return 4 * self.page_size * row_words(self.head_dim, f"int{self.bits}")

    @property
    def halves(self) -> int:
        """The number of codes in a byte."""
        return 8 // self.bits

    def views(self, data: Expr, pages: Expr, kv_heads: int) -> tuple[Expr, Expr]:
        """Two views of a cache: as bytes, for codes, and as float16, for the scales and offsets behind the
        codes.
        """
        half = "uint16" if by_hand(self.unit, "float16") else "float16"
        return (
            T.decl_buffer((pages, kv_heads, self.bytes), "uint8", data=data),
            T.decl_buffer((pages, kv_heads, self.bytes // 2), half, data=data),
        )

    def key_pair(self, group: Expr, which: int, position: Expr) -> Expr:
        """The index, in float16 values, of the scale (`which` 0) or offset (1) of a key's group."""
        return self.row * self.page_size // 2 + (group * 2 + which) * self.page_size + position

    def value_pair(self, position: Expr, group: Expr) -> Expr:
        """The index, in float16 values, of the scale of a value's group; the offset follows it."""
        return self.row * self.page_size // 2 + (position * self.groups + group) * 2


def key_vectors(
    layout: PageLayout, keys: tuple[Expr, Expr], at: list[tuple[Expr, Expr, int]],
    prefetch: Callable[[Expr], None], use: Callable[[Expr, list[Expr]], None],
) -> None:  # fmt: skip
    """Calls use(component, a vector for each of `at`) for all components of keys, sixteen positions in a
    vector.

    `at`: page, head, first position. `prefetch`: called with an offset in a page's head, in bytes, once for
    each line.
    """
    codes, pairs = keys
    size, per_byte = layout.page_size, layout.halves
    rows = layout.group // per_byte  # rows of bytes in a group
    share = layout.bytes // layout.groups
    with T.serial(0, layout.groups) as g:
        for line in range(0, share, LINE):
            prefetch(g * share + line)
        scales, offsets = v.registers(len(at)), v.registers(len(at))
        for i, (page, head, first) in enumerate(at):
            for which, held in enumerate((scales, offsets)):
                half = v.lanes(pairs, [page, head, layout.key_pair(g, which, first)])
                v.put1(held, [i], widen(layout.unit, half))
        with T.serial(0, rows) as r:
            byte = T.Bind(g * rows + r)
            loaded = [v.lanes(codes, [page, head, byte * size + first]) for page, head, first in at]
            for half in range(per_byte):
                own = [v.cast(_half(each, half, layout.bits), v.F32X16) for each in loaded]
                vectors = [T.Bind(code * scales[i] + offsets[i]) for i, code in enumerate(own)]
                # Groups of 4-bit codes have UNIT values, so the bytes of a UNIT are those of the group.
                use(T.Bind(g * layout.group + half * (UNIT // 2) + r), vectors)


def value_vector(
    layout: PageLayout, values: tuple[Expr, Expr], page: Expr, head: Expr, t: Expr, at: Expr
) -> Expr:
    """Sixteen components, from `at` on, of the value at position t of a page, as float32."""
    codes, pairs = values
    pair = widen(layout.unit, v.lanes(pairs, [page, head, layout.value_pair(t, at // layout.group)], 2), 2)
    scale, offset = (tirx.Shuffle([pair], [which]) for which in range(2))
    if layout.halves == 1:
        code = v.lanes(codes, [page, head, t * layout.row + at])
    else:
        both = v.lanes(codes, [page, head, t * layout.row + at // UNIT * (UNIT // 2)])
        shift = v.cast(at // (UNIT // 2) % 2 * 4, "uint8")
        code = (both >> v.splat(shift)) & v.isplat(15, "uint8")
    return T.Bind(v.cast(code, v.F32X16) * v.splat(scale) + v.splat(offset))


def put_row(
    layout: PageLayout, row: Expr, put_code: Callable[[Expr, Expr], None],
    put_pair: Callable[[Expr, int, Expr], None], weights: Callable[[Expr], Expr] | None = None,
) -> None:  # fmt: skip
    """Quantize a row of float32 [head_dim].

    Calls put_code(index of a byte in the row, the byte) and put_pair(group, 0 or 1, scale or offset in
    float16). The offset is the group's least value, the scale the step to its largest in equal steps; codes
    are computed from the scale and offset as they are stored. Values outside float16's range saturate. If a
    group contains NaN, its offset is NaN, so every value read back from the group is NaN. `weights`: the
    sixteen weights from a component on by which the rounding errors move the offset
    (nearfar.format.kv.rounding).
    """
    levels, unit = float(2**layout.bits - 1), layout.unit
    half = "uint16" if by_hand(unit, "float16") else "float16"
    pair, codes = v.local((2,), half), v.local((layout.row,), "uint8")
    most = v.splat(65504.0)
    with T.serial(0, layout.groups) as g:
        held = v.registers(layout.group // v.LANES)
        low, high, none = v.registers(1), v.registers(1), v.registers(1)
        for i in range(layout.group // v.LANES):
            value = v.keep(v.lanes(row, [g * layout.group + i * v.LANES]))
            value = v.keep(tirx.Select(value < v.splat(0.0) - most, v.splat(0.0) - most, value))
            value = v.keep(tirx.Select(value > most, most, value))
            v.put1(held, [i], value)
            zero = value * v.splat(0.0)
            v.put1(low, [0], value if i == 0 else tirx.min(low[0], value))
            v.put1(high, [0], value if i == 0 else tirx.max(high[0], value))
            v.put1(none, [0], zero if i == 0 else none[0] + zero)
        least = T.Bind(v.hreduce(T.Bind(low[0]), tirx.min) + v.hsum(T.Bind(none[0])))
        v.put1(pair, [1], stored(unit, "float16", least))
        offset = T.Bind(tirx.Shuffle([widen(unit, v.lanes(pair, [0], 2), 2)], [1]))
        step = (v.hmax(T.Bind(high[0])) - offset) * v.f32(1.0 / levels)
        v.put1(pair, [0], stored(unit, "float16", T.Bind(tirx.max(step, v.f32(0.0)))))
        scale = T.Bind(tirx.Shuffle([widen(unit, v.lanes(pair, [0], 2), 2)], [0]))
        inverse = T.Bind(tirx.Select(scale > v.f32(0.0), v.f32(1.0) / scale, v.f32(0.0)))
        made, left = [], []
        for i in range(layout.group // v.LANES):
            code = (held[i] - v.splat(offset)) * v.splat(inverse) + v.splat(0.5)
            # NaN becomes 0: the maximum returns its second operand.
            code = tirx.min(tirx.max(v.keep(code), v.splat(0.0)), v.splat(levels))
            whole = v.keep(v.cast(v.keep(code), v.I32X16), "int32x16")
            made.append(v.keep(v.cast(whole, "uint8x16"), "uint8x16"))
            if weights is not None:
                stands_for = v.cast(whole, v.F32X16) * v.splat(scale) + v.splat(offset)
                at = g * layout.group + i * v.LANES
                left.append(v.keep((held[i] - v.keep(stands_for)) * weights(at)))
        if left:
            moved = T.Bind(offset + v.hsum(v.keep(sum(left[1:], left[0]))))
            moved = tirx.Select(moved < v.f32(-65504.0), v.f32(-65504.0), moved)
            moved = T.Bind(tirx.Select(moved > v.f32(65504.0), v.f32(65504.0), moved))
            v.put1(pair, [1], stored(unit, "float16", moved))
        for which in range(2):
            put_pair(g, which, pair[which])
        if layout.halves == 2:
            made = [made[0] | (made[1] << v.isplat(4, "uint8"))]
        for i, each in enumerate(made):
            v.put(codes, [g * (layout.group // layout.halves) + i * v.LANES], each)
    with T.serial(0, layout.row) as byte:
        put_code(byte, codes[byte])


def _half(codes: Expr, half: int, bits: int) -> Expr:
    """The codes in the low (0) or high (1) half of each byte."""
    if bits == 8:
        return codes
    return codes >> v.isplat(4, "uint8") if half else codes & v.isplat(15, "uint8")
