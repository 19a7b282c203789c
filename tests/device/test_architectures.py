"""Every architecture on the targets that compute on the CPU: logits and greedy tokens are transformers'.

The architectures are those of tests/support/architectures.py: tiny random models of transformers' own
classes, with odd shapes, for prompts within and beyond their windows. test_architectures_gpu.py has the
targets with shaders.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.architectures import CASES, Case
from tests.support.parity import check_answers, opened


@pytest.mark.parametrize("backend", ["cpu", "mlx-f32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_transformers(case: Case, backend: str, tmp_path: Path) -> None:
    with opened(case, backend, tmp_path) as engine:
        check_answers(case, engine)
