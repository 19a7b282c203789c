"""A router fitted to outcomes: what it learns, targets, rejected files, and the output of the commands."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.cli.route_log import summarize
from nearfar.errors import RequestError
from nearfar.routing.confidence import Monitor, Token
from nearfar.routing.fitted import FittedRouter, Judge
from nearfar.routing.record_lines import read_lines
from nearfar.routing.targets import point_for
from tests.support.commands import nearfar
from tests.support.late import late
from tests.vectors.routing.routers import ROUTER

fitting = late("nearfar.routing.fitting", "sklearn", reason="fitting needs scikit-learn")
MADE = FittedRouter.parse(ROUTER)
ARTIFACT = f"{'a' * 64}/q4"


def told(best: float, **more: Any) -> dict[str, Any]:
    made = {"prompt_tokens": 50, "top": [best, best - 1.0, best - 3.0]}
    return {**made, "prompt_logprob": None, "sure": None, **more}


def lines(count: int = 200, *, later: bool = False) -> list[dict[str, Any]]:
    """Records in which the device is wrong where its first token is unsure, or (`later`) where its next
    tokens are; the cloud is right in nine of ten.
    """
    rng = np.random.default_rng(0)
    made = []
    for at in range(count):
        doubt, noise = float(rng.uniform(0, 2)), float(rng.uniform(0, 2))
        shown, hidden = (noise, doubt) if later else (doubt, noise)
        first = [[-0.1 - hidden, 0.2 + hidden]] * 8
        made.append(
            {
                "id": f"d-{at}",
                "knowledge": told(-0.1 - shown),
                "model": "m",
                "artifact": ARTIFACT,
                "cloud": {"price_in": 2.0, "price_out": 8.0},
                "outcome": {"prompt_tokens": 50, "completion_tokens": 100, "first_tokens": first},
                "device_quality": float(rng.uniform() > doubt / 2),
                "cloud_quality": float(rng.uniform() < 0.9),
            }
        )
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fitted(path: Path, rows: list[dict[str, Any]]) -> FittedRouter:
    return fitting.fit(fitting.read_examples(write(path, rows), None).examples)


def test_a_fit_finds_what_decides_and_its_curve_is_of_examples_kept_back(tmp_path: Path) -> None:
    made = fitted(tmp_path / "r.jsonl", lines())
    assert made.prompt.auroc > 0.7
    assert made.gain(told(-2.0)) > 0.5 > made.gain(told(-0.1))
    assert (made.answer, made.limit) == (None, None), "the prompt says everything"
    first, half, last = made.curve[0], made.curve[10], made.curve[-1]
    assert half.quality > first.quality + 0.7 * (last.quality - first.quality)
    noise = [{**row, "knowledge": told(-0.5 - 0.001 * at)} for at, row in enumerate(lines())]
    for row in noise:
        row["outcome"].pop("first_tokens")
    assert fitted(tmp_path / "n.jsonl", noise).prompt.auroc < 0.6


def test_a_fit_gives_up_answers_after_their_first_tokens_where_these_tell_more(tmp_path: Path) -> None:
    made = fitted(tmp_path / "r.jsonl", lines(later=True))
    assert made.answer is not None
    assert made.limit is not None
    assert made.answer.auroc > 0.7 > made.prompt.auroc
    judge = Judge(made, told(-1.0))
    for logprob, escalates in ((-0.1, False), (-2.1, True)):
        monitor = Monitor(doubt=judge)
        top = (-0.1, -8.0) if logprob > -1 else (-1.2, -1.3, -1.9)
        reasons = [monitor.push(Token(f"t{at}", logprob, top)) for at in range(20)]
        assert len(monitor.first) == 16
        codes = [None if reason is None else reason.code for reason in reasons]
        assert codes == [*[None] * 7, "doubtful" if escalates else None, *[None] * 12]


def test_a_probe_learns_a_direction_of_the_last_hidden_row(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(1), lines()
    for row in rows:
        # The hidden row has four numbers, of which the second one tells whether the device fails.
        hidden = rng.normal(size=4)
        hidden[1] = 4 * row["device_quality"] - 2 + rng.normal()
        logits = np.random.default_rng(2).normal(size=(16, 4)) @ hidden
        row["knowledge"] = told(-0.5, row=[[7 * at, float(each - 9)] for at, each in enumerate(logits)])
    path = write(tmp_path / "r.jsonl", rows)
    examples = fitting.read_examples(path, None).examples
    assert fitting.fit(examples).prompt.auroc < 0.6
    made = fitting.fit(examples, probe=True)
    assert made.prompt.auroc > 0.9
    assert made.row_tokens == tuple(range(0, 7 * 16, 7))
    known = rows[0]["knowledge"]
    # Another offset of all logits is another normalization, not another row.
    moved = {**known, "row": [[token, each - 3.0] for token, each in reversed(known["row"])]}
    assert made.gain(moved) == pytest.approx(made.gain(known))
    assert made.gain({**known, "row": []}) == pytest.approx(made.gain({**known, "row": known["row"][:3]}))
    made.save(tmp_path / "router.json")
    assert FittedRouter.load(tmp_path / "router.json") == made
    rows[3]["knowledge"].pop("row")
    with pytest.raises(RequestError, match="fit without --probe"):
        fitting.fit(fitting.read_examples(write(path, rows), None).examples, probe=True)


def test_the_command_joins_outcomes_by_id_and_reports_the_curve(tmp_path: Path) -> None:
    rows = lines(later=True)
    names = ("device_quality", "cloud_quality")
    records = write(tmp_path / "r.jsonl", [{k: v for k, v in row.items() if k not in names} for row in rows])
    outcomes = write(tmp_path / "o.jsonl", [{k: row[k] for k in ("id", *names)} for row in rows])
    router = tmp_path / "router.json"
    given = ("route", "fit", records, "--outcomes", outcomes, "-o", router)
    done = nearfar(*given, "--target", "share=0.3")
    assert done.returncode == 0, done.stderr
    made = FittedRouter.load(router)
    point = next(p for p in made.curve if p.share == pytest.approx(0.3))
    assert (made.threshold, made.limit) == (point.threshold, point.limit)
    # A request costs (50 · 2 + 100 · 8) / 10⁶; a thousand of them, of which 30 % go, 0.27.
    assert point.money == pytest.approx(0.27)
    assert "0.27 per thousand requests" in done.stdout
    dearer = nearfar(*given, "--target", "money=2.7", "--price-in", 20, "--price-out", 80)
    assert "30% of the prompts" in dearer.stdout
    assert "both --price-in" in nearfar(*given, "--price-in", 2).stderr
    picture = tmp_path / "curve.svg"
    told_it = nearfar("route", "report", router, "--picture", picture).stdout
    assert all(word in told_it for word in ("AUROC", "share", "limit", "per 1,000", "at random"))
    drawn = ET.fromstring(picture.read_text())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert "router" in [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_targets_are_in_the_users_terms() -> None:
    shares = {target: point_for(MADE.curve, target).share for target in (
        "share=0.7", "share=0", "quality=0.55", "quality=0.7", "money=0", "money=2", "money=99")}  # fmt: skip
    assert list(shares.values()) == [0.5, 0, 0.5, 1, 0, 0.5, 1]
    for wrong in ("quality=0.95", "money=-1", "money=nan", "share", "share=2", "tokens=3"):
        with pytest.raises(RequestError) as raised:
            point_for(MADE.curve, wrong)
        assert raised.value.param == "target"
    unpriced = [replace(point, money=None) for point in MADE.curve]
    with pytest.raises(RequestError, match="price_in"):
        point_for(unpriced, "money=1")


def test_files_that_are_no_routers_are_refused_and_so_is_another_artifact(tmp_path: Path) -> None:
    path = tmp_path / "router.json"
    MADE.save(path)
    assert FittedRouter.load(path) == MADE
    for text in ("", "[]", "3"):
        path.write_text(text)
        with pytest.raises(RequestError, match=r"router\.json is not a router"):
            FittedRouter.load(path)
    MADE.check(ARTIFACT, "sample")
    said = (
        r"fitted to sample \(checkpoint aaaaaaaaaaaa, q4\), but the device runs other .*bbb, q8.* route fit"
    )
    with pytest.raises(RequestError, match=said):
        MADE.check(f"{'b' * 64}/q8", "other")


def test_too_few_and_one_sided_examples_are_refused(tmp_path: Path) -> None:
    for rows, said in (
        (lines(20), "at least"),
        ([{**row, "cloud_quality": 0.0} for row in lines()], "nothing to fit"),
        ([{**row, "artifact": row["id"]} for row in lines()], "artifacts"),
    ):
        path = write(tmp_path / "r.jsonl", rows)
        with pytest.raises(RequestError, match=said):
            fitting.fit(fitting.read_examples(path, None).enough)


def changed(row: dict[str, Any], field: str, value: Any) -> str:
    """The line of a row in which one field, or a field of a field, has another value; `...` removes it."""
    made = json.loads(json.dumps(row))
    *outer, last = field.split(".")
    inner = made
    for each in outer:
        inner = inner[each]
    inner[last] = value
    if value is ...:
        del inner[last]
    return json.dumps(made)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("device_quality", "good", 'device_quality must be a number from 0 to 1, not "good"'),
        ("cloud_quality", float("nan"), "cloud_quality must be a number from 0 to 1, not NaN"),
        ("device_quality", 2, "device_quality must be a number from 0 to 1, not 2"),
        ("device_quality", True, "device_quality must be a number from 0 to 1, not true"),
        ("cloud_quality", ..., "the field cloud_quality is missing"),
        ("knowledge", "x", 'knowledge must be an object, not "x"'),
        ("knowledge", {}, "knowledge.top is missing: the record is damaged, or an earlier nearfar"),
        ("knowledge.top", [0, None], "knowledge.top.1 must be a number, not null"),
        ("knowledge.sure", float("inf"), "knowledge.sure must be a number, not Infinity"),
        ("knowledge.row", [[1]], r"knowledge.row.0 must be a list of 2 numbers, not \[1\]"),
        ("outcome", [], r"outcome must be an object, not \[\]"),
        ("outcome.first_tokens", [[-1, "2"]], 'outcome.first_tokens.0.1 must be a number, not "2"'),
        ("outcome.prompt_tokens", -1, "outcome.prompt_tokens must be a number of at least 0, not -1"),
        ("cloud.price_in", "2", 'cloud.price_in must be a number of at least 0, not "2"'),
        ("outcome.completion_tokens", 10**400, "outcome.completion_tokens must be a number of at least 0"),
        ("model", ["\ud800"], r'model must be a string, not \["\\ud800"\]'),
        ("id", 5, "id must be a string, not 5"),
        ("id", "d-0", "the id 'd-0' is also in line 1"),
    ],
)
def test_a_wrong_record_is_refused_with_file_line_field_and_value(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    rows = [json.dumps(row) for row in lines(3)]
    rows[1] = changed(lines(3)[1], field, value)
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    with pytest.raises(RequestError, match=rf"r\.jsonl, line 2: {said}"):
        fitting.read_examples(tmp_path / "r.jsonl", None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id": "d-1", "device_quality": 0, "cloud_quality": NaN}', "from 0 to 1, not NaN"),
        (b'{"id": "d-1", "device_quality": 0}', "the field cloud_quality is missing"),
        (b'{"id": "d-1", "device": 0, "cloud_quality": 1}', "the field device_quality is missing"),
        (b'{"id": "d-0", "device_quality": 0, "cloud_quality": 1}', "the id 'd-0' is also in line 1"),
        (b'{"id": "\xff"}', "byte 9 is 0xff, which is not UTF-8"),
        (b"[" * 100_000, "this is not JSON"),
        (b"5", "an outcome must be an object, not 5"),
        (b"{", "this is not JSON"),
    ],
)
def test_a_wrong_outcome_is_refused_with_file_and_line(tmp_path: Path, line: bytes, said: str) -> None:
    records, outcomes = write(tmp_path / "r.jsonl", lines(3)), tmp_path / "o.jsonl"
    outcomes.write_bytes(b'{"id": "d-0", "device_quality": 0, "cloud_quality": 1}\n' + line)
    with pytest.raises(RequestError, match=rf"o\.jsonl, line 2: .*{said}"):
        fitting.read_examples(records, outcomes)


def test_what_gives_no_example_is_counted_with_its_reason(tmp_path: Path) -> None:
    rows = lines(60)
    judged = [{name: row.pop(name) for name in fitting.QUALITIES} | {"id": row["id"]} for row in rows]
    rows[0].pop("knowledge")
    rows[1]["knowledge"] = None
    judged[2]["id"] = "other"
    records, outcomes = write(tmp_path / "r.jsonl", rows), write(tmp_path / "o.jsonl", judged)
    read = fitting.read_examples(records, outcomes)
    assert len(read.examples) == 57
    assert read.left_out == (
        f"1 of 60 records in {records} have no outcome (device_quality, cloud_quality)",
        f"2 of 60 records in {records} have no knowledge: record with Policy(router='record'); private "
        "requests have none",
        f"1 of 60 outcomes in {outcomes} have an id that no record has, such as 'other'",
    )
    done = nearfar("route", "fit", records, "-o", tmp_path / "router.json")
    assert done.returncode != 0
    assert f"0 examples have outcomes: at least 40 are needed; 60 of 60 records in {records}" in " ".join(
        done.stderr.split()
    )
    assert not (tmp_path / "router.json").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"request": {}, "decision": {}}', "the field outcome is missing"),
        (b'{"request": {}, "decision": {}, "outcome": {"spent": "x"}}', 'outcome.spent must be .*not "x"'),
        (b'{"request": {}, "decision": {}, "outcome": {"path": ["x"]}}', "outcome.path.0 must be device or"),
        (b'{"request": 5, "decision": {}, "outcome": {}}', "request must be an object, not 5"),
        (b'{"request": {}, "decision": {"reasons": [1]}, "outcome": {}}', "decision.reasons.0 must be"),
        (b'{"request": "\xe9"}', "byte 14 is 0xe9, which is not UTF-8"),
    ],
)
def test_route_log_names_the_line_and_the_field_that_are_wrong(
    tmp_path: Path, line: bytes, said: str
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"request": {}, "decision": {}, "outcome": {}}\n\n' + line)
    with pytest.raises(RequestError, match=rf"r\.jsonl, line 3: {said}"):
        summarize(read_lines(path, ("request", "decision", "outcome"), "a decision record"))
