"""The choice of a GPU's program: by its class, by trials, and by kept results of trials."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nearfar.edge_runtime.artifact.trial import known
from nearfar.edge_runtime.artifact.trial_notes import TrialNotes
from nearfar.edge_runtime.artifact.variants import ProgramChoice, StepKind, compare, line_up
from nearfar.folders import read_cache, write_cache
from nearfar.format.adapters import DEVICE_CLASSES, Adapter, DeviceClass, class_of
from tests.support.paths import ROOT

VECTORS = ROOT / "tests" / "vectors" / "variants"
CLASSES = json.loads((VECTORS / "classes.json").read_text())
CHOICES = json.loads((VECTORS / "choices.json").read_text())
GPU = Adapter("nvidia", "", "a card", "1.0", "discrete")


@dataclass(frozen=True)
class Named:
    """A program with only the properties that matter here."""

    name: str

    @property
    def device_class(self) -> DeviceClass:
        """The first part of its name."""
        return next(each for each in DEVICE_CLASSES if self.name.startswith(each))


@pytest.mark.parametrize("case", CLASSES, ids=lambda case: f"{case['vendor']}-{case['name']}-{case['kind']}")
def test_an_adapter_has_a_class(case: dict[str, Any]) -> None:
    given = {key: value for key, value in case.items() if key != "class"}
    assert class_of(Adapter(**given)) == case["class"]


@pytest.mark.parametrize("case", CHOICES["finalists"])
def test_finalists_are_of_the_devices_class_then_of_its_neighbours(case: dict[str, Any]) -> None:
    able = [Named(name) for name in case["able"]]
    assert [each.name for each in line_up(able, case["class"], case["lost"])] == case["finalists"]


@pytest.mark.parametrize("case", CHOICES["trials"])
def test_a_trial_changes_the_program_only_for_a_clear_gain(case: dict[str, Any]) -> None:
    asked: Counter[tuple[str, StepKind]] = Counter()
    order: list[str] = []

    def measure(name: str, kind: StepKind) -> float:
        seconds = case[kind][name]
        asked[name, kind] += 1
        order.append(f"{name} {kind}")
        return float(seconds[min(asked[name, kind], len(seconds)) - 1])

    choice = compare(list(case["decode"]), measure)
    assert (choice.program, choice.why, asked.total()) == (case["program"], case["why"], case["steps"])
    assert order == case.get("asked", order)


@pytest.mark.parametrize("case", CHOICES["known"])
def test_nothing_is_tried_where_the_choice_is_known(case: dict[str, Any]) -> None:
    process = psutil.Process()
    somebody = {"program": "z", "pid": process.pid, "started": process.create_time()}
    notes = {**case["kept"], "trying": somebody if case["busy"] else None}
    write_cache(TrialNotes("digest", GPU).file, json.dumps(notes).encode())
    choice = known([Named(name) for name in case["finalists"]], TrialNotes("digest", GPU), case["failed"])
    assert (choice and choice.program, choice and choice.why) == (case["program"], case["why"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path))


def test_a_choice_is_kept_for_its_artifact_its_adapter_and_its_finalists() -> None:
    TrialNotes("digest", GPU).keep(["a", "b"], "b")
    assert TrialNotes("digest", GPU).chosen(["a", "b"]) == "b"
    assert TrialNotes("digest", GPU).chosen(["a", "c"]) is None
    assert TrialNotes("another", GPU).chosen(["a", "b"]) is None
    newer = Adapter("nvidia", "", "a card", "1.1", "discrete")
    assert TrialNotes("digest", newer).chosen(["a", "b"]) is None


def test_a_program_whose_trial_took_the_process_down_is_never_tried_again() -> None:
    kept = TrialNotes("digest", GPU)
    kept.trying("a")
    process = psutil.Process()
    assert TrialNotes("digest", GPU).busy, "somebody tries it now, and that is all that is known"
    text = read_cache(kept.file).decode()
    write_cache(kept.file, text.replace(str(process.create_time()), "1.5").encode())
    again = TrialNotes("digest", GPU)
    assert (again.lost, again.busy) == (("a",), False)
    assert TrialNotes("digest", GPU).lost == ("a",)
    programs = [Named("discrete-f16"), Named("discrete-f32")]
    assert line_up(programs, "discrete", ("discrete-f16",)) == (programs[1],)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"lost": 1, "chosen": {}, "trying": null}', b"\xff"])
def test_a_damaged_file_is_as_good_as_none(content: bytes) -> None:
    kept = TrialNotes("digest", GPU)
    kept.keep(["a", "b"], "b")
    kept.file.write_bytes(content)  # the file lacks its hash
    assert TrialNotes("digest", GPU).chosen(["a", "b"]) is None
    write_cache(kept.file, content)  # the file has its hash
    assert TrialNotes("digest", GPU).chosen(["a", "b"]) is None
    TrialNotes("digest", GPU).keep(["a", "b"], "a")
    assert TrialNotes("digest", GPU).chosen(["a", "b"]) == "a"


def test_a_choice_says_what_it_rests_on() -> None:
    measured: dict[str, dict[StepKind, float]] = {
        "a": {"decode": 0.004, "large": 0.08},
        "b": {"decode": 0.005},
    }
    told = str(ProgramChoice("a", "timed", measured))
    assert told == "timed: a 4.00 ms + 80.00 ms, b 5.00 ms"
    assert str(ProgramChoice("a", "pinned")) == "pinned"


def test_nothing_is_timed_where_nothing_is_to_be_chosen() -> None:
    kept = TrialNotes("digest", GPU)
    two = [Named("discrete-f16"), Named("discrete-f32")]
    assert known(two[:1], kept) == ProgramChoice("discrete-f16", "only")
    assert known(two, kept) is None
    assert known(two, kept, {"discrete-f16", "discrete-f32"}) == ProgramChoice("discrete-f16", "only"), (
        "all failed"
    )
    kept.keep(["discrete-f16", "discrete-f32"], "discrete-f32")
    assert known(two, kept) == ProgramChoice("discrete-f32", "kept")
