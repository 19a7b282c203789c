"""e^x as arithmetic: LLVM makes vectors of it, and of a call of libm's expf it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

Expr = Any  # tirx expressions carry their operators at run time only


def exponential(x: Expr, bind: Callable[[Expr], Expr], n: int) -> Expr:
    """e^x on n lanes of float32, with an error of at most 2 ulp. `bind` names a value for several uses.

    2^n · 2^f, f in [-0.5, 0.5], by a polynomial of degree 6 (Taylor coefficients of e^r, r = x − n·ln 2, |r|
    ≤ 0.347: error < 2e-8).
    """

    def all_of(number: Expr) -> Expr:
        return tirx.Broadcast(number, n) if n > 1 else number

    def constant(value: float) -> Expr:
        return all_of(tirx.FloatImm("float32", value))

    def integer(value: int) -> Expr:
        return all_of(tirx.IntImm("int32", value))

    wide = f"x{n}" if n > 1 else ""
    x = bind(tirx.max(tirx.min(x, constant(88.0)), constant(-87.0)))
    whole = bind(tirx.nearbyint(x * constant(1.4426950408889634)))
    r = bind(x - whole * constant(0.693359375))  # ln 2 in two parts (Cody-Waite), so that r is exact
    r = bind(r - whole * constant(-2.12194440e-4))
    poly = constant(1.0 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        poly = bind(poly * r + constant(float(coefficient)))
    power = (tirx.Cast(f"int32{wide}", whole) + integer(127)) << integer(23)
    return bind(poly * tirx.reinterpret(f"float32{wide}", power))
