"""Bits by what they cost: beside the best choice at a size, as trying all of them finds it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nearfar.build.calibration.allocation import Costs, allocate
from nearfar.errors import BuildError

BITS = (2, 3, 4, 5, 6, 8)


def costs(count: int, seed: int) -> dict[str, Costs]:
    """Matrices of one size whose losses fall about fourfold a bit, as those of real ones do."""
    rng = np.random.default_rng(seed)
    return {
        f"m{i}": Costs(
            64_000,
            {bits: 8_000 * bits + 4_000 for bits in BITS},
            {bits: float(sensitivity * 4.0**-bits) for bits in BITS},
        )
        for i, sensitivity in enumerate(rng.lognormal(0, 2, count))
    }


def of(found: dict[str, Costs], bits: dict[str, int]) -> tuple[int, float]:
    """Bytes and loss of a choice."""
    return (
        sum(found[name].size[b] for name, b in bits.items()),
        sum(found[name].loss[b] for name, b in bits.items()),
    )


@pytest.mark.parametrize("seed", range(5))
def test_nothing_that_is_a_step_smaller_is_better(seed: int) -> None:
    found = costs(5, seed)
    choices = [dict(zip(found, choice, strict=True)) for choice in itertools.product(BITS, repeat=5)]
    every = [of(found, choice) for choice in choices]
    for budget in range(116_000, 345_000, 12_000):
        size, loss = of(found, allocate(found, budget))
        assert size <= budget
        # The largest step, of 6 bits to 8, may be the one that is left over.
        best = min(other for taken, other in every if taken <= budget - 16_000)
        assert loss <= best * (1 + 1e-9)


def test_a_size_that_nothing_fits_is_refused_with_what_would() -> None:
    with pytest.raises(BuildError, match=r"0\.1 MB are too little .* with 2 bits each they have 0\.1 MB"):
        allocate(costs(5, 0), 99_000)
    assert set(allocate(costs(5, 0), 10**9).values()) == {8}


def test_bits_that_make_nothing_better_are_not_taken() -> None:
    """A matrix that loses more with 3 bits than with 2, by chance."""
    odd = Costs(64_000, {2: 20_000, 3: 28_000, 4: 36_000}, {2: 0.5, 3: 0.6, 4: 0.1})
    assert allocate({"m": odd}, 30_000) == {"m": 2}
    assert allocate({"m": odd}, 36_000) == {"m": 4}
