"""GPU kernels compute the values of a table from its codes: each value is exact."""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.format.scales import TABLES, Table
from nearfar.targets.gpu.kernels.common import MANTISSA
from nearfar.targets.gpu.kernels.tables import POLYNOMIALS, ROUNDING


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_the_values_of_a_table_are_the_integers_nearest_to_its_polynomial(table: Table, fused: bool) -> None:
    """Whether products are rounded before sums is up to a device."""
    first, *others = POLYNOMIALS[table]
    whole = (1 << MANTISSA) + ROUNDING
    codes = np.arange(len(TABLES[table]), dtype=np.float32)
    made = np.full_like(codes, others[-1])
    for factor in (*reversed(others[:-1]), first + whole):
        product = made.astype(np.float64) * codes if fused else made * codes
        made = (product + product.dtype.type(np.float32(factor))).astype(np.float32)
    bits = made.view(np.uint32) - np.float32(whole).view(np.uint32)
    assert bits.view(np.int32).tolist() == list(TABLES[table])
    np.testing.assert_array_less(np.abs(np.polyval([*reversed(others), first], codes) - TABLES[table]), 0.45)
