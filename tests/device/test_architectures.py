"""Every architecture on the targets that compute on the CPU: logits and greedy tokens are transformers'.

The architectures are those of tests/support/architectures.py: tiny random models of transformers' own
classes, with odd shapes, for prompts within and beyond their windows. The first case of each architecture
runs on both targets, its other cases on one of them in turns. test_architectures_gpu.py has the targets
with shaders.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.architectures import CASES, Case
from tests.support.parity import check_answers, opened
from tests.support.turns import in_turns

FIRST = {case.model_type: case for case in reversed(CASES)}
OTHERS = [case for case in CASES if case is not FIRST[case.model_type]]
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "mlx-f32"])


@BACKENDS
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_answers_are_those_of_transformers(case: Case, backend: str, tmp_path: Path) -> None:
    with opened(case, backend, tmp_path) as engine:
        check_answers(case, engine)


@in_turns("backend")
@BACKENDS
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_answers_of_other_cases_are_those_of_transformers(case: Case, backend: str, tmp_path: Path) -> None:
    with opened(case, backend, tmp_path) as engine:
        check_answers(case, engine)
