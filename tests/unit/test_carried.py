"""How a build says what became of a quantized checkpoint's weights."""

from __future__ import annotations

from nearfar.cli.carried import lines_by_target

EXACT = {"matrices": [{"name": "a", "carried": "exact"}, {"name": "b", "carried": "exact"}]}
ROUNDED = {"matrices": [{"name": "a", "carried": "codes exact, offsets rounded", "step": 0.01}]}


def test_targets_that_carry_the_weights_alike_share_a_line() -> None:
    assert lines_by_target({"cpu": EXACT, "wasm": EXACT}) == ["weights of the checkpoint: exact: 2 matrices"]


def test_a_target_that_rounds_has_a_line_of_its_own() -> None:
    assert lines_by_target({"cpu": EXACT, "mlx": ROUNDED, "wasm": EXACT}) == [
        "weights of the checkpoint for cpu, wasm: exact: 2 matrices",
        "weights of the checkpoint for mlx: codes exact, offsets rounded (≤ 0.01 of a step): 1 matrices",
    ]


def test_floats_have_no_lines() -> None:
    assert lines_by_target({"cpu": {"matrices": [{"name": "a"}]}, "mlx": {}}) == []
