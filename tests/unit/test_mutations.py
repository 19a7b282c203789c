"""The patches of tests/mutations are valid for their runner, and apply."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutations.__main__ import main
from tests.mutations.patches import MOST_LINES, PatchError, Selection, read, read_all
from tests.mutations.running import of_pytest
from tests.support.paths import ROOT

MUTATIONS = read_all()
GOOD = """What it breaks.
area: cache
catch: tests/unit/test_cache_vectors.py -k "a or b"
catch: web/test/held.test.ts

diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -1,3 +1,3 @@
 one
-two
+2
 three
"""


def test_there_are_forty() -> None:
    assert len(MUTATIONS) == 40


def test_every_patch_applies_by_itself() -> None:
    for mutation in MUTATIONS:
        done = subprocess.run(
            ["git", "apply", "--check", mutation.file], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{mutation.file} does not apply any more: {done.stderr}"


def test_every_patch_is_small_and_names_tests_that_there_are() -> None:
    for mutation in MUTATIONS:
        assert 1 <= mutation.lines <= MOST_LINES, mutation.name
        assert not any(name.startswith(("tests/", "web/test/")) for name in mutation.files), mutation.name
        assert mutation.breaks.endswith("."), mutation.name
        for selection in mutation.catch:
            assert (ROOT / selection.path).is_file(), f"{mutation.file}: there is no {selection.path}"


def test_a_header_is_read(tmp_path: Path) -> None:
    (file := tmp_path / "good.patch").write_text(GOOD)
    mutation = read(file)
    assert (mutation.name, mutation.breaks, mutation.area) == ("good", "What it breaks.", "cache")
    assert mutation.catch == (
        Selection("tests/unit/test_cache_vectors.py", ("-k", "a or b")),
        Selection("web/test/held.test.ts"),
    )
    assert [selection.is_web for selection in mutation.catch] == [False, True]
    assert (mutation.files, mutation.lines, mutation.builds_web) == (("x.py",), 1, False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("diff --git", "diff", "there is no line that begins with"),
        ("What it breaks.\n", "", "lacks a sentence that says what it breaks"),
        ("area: cache\n", "", "lacks area"),
        ("catch: web", "caught: web", "'caught: web/test/held.test.ts' is none of area, catch, build"),
        ('-k "a or b"', "-x -v", "give a file, and after it nothing or -k and a word"),
        ("held.test.ts", "held.test.ts -k word", "give a file, and after it nothing or -t and a word"),
        ("\n\ndiff", "\nbuild: docs\n\ndiff", "build can be web alone"),
    ],
)
def test_a_header_that_is_none_says_why(old: str, new: str, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "bad.patch").write_text(GOOD.replace(old, new))
    with pytest.raises(PatchError, match=message):
        read(file)


@pytest.mark.parametrize(
    ("code", "printed", "failed", "problem"),
    [
        (0, "2 passed in 1 s", (), None),
        (0, "s.. [100%]", (), None),
        (0, "ss [100%]", (), "ran no test"),
        (1, "FAILED tests/a.py::test_b[c - d] - assert 1 == 2", ("tests/a.py::test_b[c - d]",), None),
        (1, "ERROR tests/a.py::test_b - AssertionError", ("tests/a.py::test_b",), None),
        (1, "ERROR tests/a.py::test_b - ImportError: no", (), "did not run"),
        (1, "ERROR tests/a.py - SyntaxError: no", (), "did not run"),
        (2, "ERROR tests/a.py - SyntaxError: no", (), "did not run"),
        (4, "ERROR: file or directory not found: tests/a.py", (), "did not run"),
        (5, "3 deselected", (), "selects no test"),
    ],
)
def test_only_a_test_that_fails_has_caught_something(
    code: int, printed: str, failed: tuple[str, ...], problem: str | None
) -> None:
    outcome = of_pytest(Selection("tests/a.py"), code, printed, printed)
    assert outcome.failed == failed
    assert problem in outcome.problem if problem and outcome.problem else outcome.problem is problem


def test_the_list_is_told_and_a_name_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", MUTATIONS[0].name]) == 0
    assert MUTATIONS[0].breaks in capsys.readouterr().out
    assert main(["--only", "nothing-of-this-name"]) == 2
    assert "no mutation in" in capsys.readouterr().err
