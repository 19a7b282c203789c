"""A router that is fitted to outcomes: what it learns, which files it refuses, and how a client uses it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.errors import RequestError
from nearfar.routing.fitted import FittedRouter, Point, feature, threshold_for
from tests.support.commands import nearfar

pytest.importorskip("sklearn", reason="fitting needs scikit-learn")

from nearfar.routing import fitting

ROUTER = FittedRouter(
    "m", "a" * 64, ("length", "entropy"), (4.0, 1.0), (1.0, 0.5), (0.0, 2.0), -1.0, 0.6, 50, 0.8,
    (Point(0.0, 1.0, 0.5), Point(0.5, 0.6, 0.8), Point(1.0, 0.0, 0.9)),
)  # fmt: skip


def told(entropy: float, **more: Any) -> dict[str, Any]:
    made = {"prompt_tokens": 50, "entropy": entropy, "best": -entropy, "margin": 1.0}
    return {**made, "prompt_logprob": None, "sure": None, **more}


def lines(count: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """The device is wrong where its entropy is high; the cloud is right in nine of ten."""
    rng = np.random.default_rng(seed)
    made = []
    for at in range(count):
        entropy = float(rng.uniform(0, 2))
        device = float(rng.uniform() > entropy / 2)
        made.append(
            {
                "id": f"d-{at}",
                "knowledge": told(entropy),
                "model": "m",
                "artifact": "a" * 64,
                "device_quality": device,
                "cloud_quality": float(rng.uniform() < 0.9),
            }
        )
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_probability_is_that_of_the_formula() -> None:
    assert ROUTER.gain(told(1.0)) == pytest.approx(1 / (1 + math.e))
    assert ROUTER.gain(told(1.5)) == pytest.approx(1 / (1 + math.exp(-1)))
    missing = {**told(1.0), "entropy": None}
    assert ROUTER.gain(missing) == pytest.approx(ROUTER.gain(told(1.0)))
    assert feature(told(1.0), "length") == pytest.approx(math.log(50))


def test_a_fit_finds_what_decides_and_its_curve_is_of_examples_kept_back(tmp_path: Path) -> None:
    made = fitting.fit(fitting.read_examples(write(tmp_path / "r.jsonl", lines()), None))
    assert made.auroc > 0.7
    assert made.gain(told(1.9)) > 0.5 > made.gain(told(0.1))
    first, half, last = made.curve[0], made.curve[10], made.curve[-1]
    assert half.quality > first.quality + 0.7 * (last.quality - first.quality)
    noise = [{**row, "knowledge": told(0.5 + 0.001 * at)} for at, row in enumerate(lines())]
    assert fitting.fit(fitting.read_examples(write(tmp_path / "n.jsonl", noise), None)).auroc < 0.6


def test_the_command_joins_outcomes_by_id_and_reports_the_curve(tmp_path: Path) -> None:
    rows = lines()
    names = ("device_quality", "cloud_quality")
    records = write(tmp_path / "r.jsonl", [{k: v for k, v in row.items() if k not in names} for row in rows])
    outcomes = write(tmp_path / "o.jsonl", [{k: row[k] for k in ("id", *names)} for row in rows])
    router = tmp_path / "router.json"
    done = nearfar("route", "fit", records, "--outcomes", outcomes, "-o", router, "--target", "share=0.3")
    assert done.returncode == 0, done.stderr
    made = FittedRouter.load(router)
    assert made.threshold == next(p.threshold for p in made.curve if p.share == pytest.approx(0.3))
    picture = tmp_path / "curve.svg"
    told_it = nearfar("route", "report", router, "--picture", picture)
    assert "share" in told_it.stdout
    assert "AUROC" in told_it.stdout
    assert picture.read_text().startswith("<svg")


def test_targets_are_in_the_users_terms() -> None:
    assert threshold_for(ROUTER.curve, "share=0.7") == 0.6
    assert threshold_for(ROUTER.curve, "quality=0.75") == 0.6
    assert threshold_for(ROUTER.curve, "quality=0.85") == 0.0
    for wrong in ("quality=0.95", "money=1", "share", "share=2"):
        with pytest.raises(RequestError):
            threshold_for(ROUTER.curve, wrong)


def test_files_that_are_no_routers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    ROUTER.save(path)
    assert FittedRouter.load(path) == ROUTER
    good = json.loads(path.read_text())
    for change in (
        {"format": "x"}, {"version": 2}, {"weights": [1]}, {"scale": [0, 1]}, {"bias": None},
        {"features": ["length", "mood"]}, {"extra": 1}, {"curve": [{"share": 1}]},
    ):  # fmt: skip
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(RequestError, match="not a router"):
            FittedRouter.load(path)
    with pytest.raises(RequestError, match="fit it again"):
        ROUTER.check("b" * 64, "router.json")


def test_too_few_and_one_sided_examples_are_refused(tmp_path: Path) -> None:
    for rows, said in (
        (lines(20), "at least"),
        ([{**row, "cloud_quality": 0.0} for row in lines()], "nothing to fit"),
        ([{**row, "artifact": row["id"]} for row in lines()], "artifacts"),
        ([{**row, "device_quality": 2} for row in lines()], "from 0 to 1"),
    ):
        path = write(tmp_path / "r.jsonl", rows)
        with pytest.raises(RequestError, match=said):
            fitting.fit(fitting.read_examples(path, None))
