"""Every architecture on the targets that compute on the CPU: logits and greedy tokens are transformers'.

The architectures are those of tests/support/architectures.py: tiny random models of transformers' own
classes, with odd shapes, for prompts within and beyond their windows. Each case runs on one of both targets,
in turns. The cases of an architecture alternate between the targets, so an architecture with several cases
runs on both in each run. Text models within multimodal models have the lists of other cases, with other names
of tensors: a run takes one in three. test_architectures_gpu.py covers the targets with shaders.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.architectures import ATTENDING, VISUAL
from tests.support.cases import Case
from tests.support.parity import check_answers, opened
from tests.support.recurrent_cases import RECURRENT, STATE_SPACES
from tests.support.turns import in_turns, paired

BACKENDS = ("cpu", "mlx-f32")
ALONE = [case for case in ATTENDING if case not in VISUAL]
ARCHITECTURES = dict.fromkeys(case.model_type for case in ALONE)
SHARES = 3
PLACES = [
    place
    for at, model_type in enumerate(ARCHITECTURES)
    for place in paired(
        [case for case in ALONE if case.model_type == model_type], BACKENDS[:: -1 if at % 2 else 1]
    )
]
PLACES += [(case, backend) for case in RECURRENT if case not in STATE_SPACES for backend in BACKENDS]


@pytest.mark.parametrize(("case", "backend"), PLACES, ids=str)
def test_answers_are_those_of_transformers(case: Case, backend: str, tmp_path: Path) -> None:
    with opened(case, backend, tmp_path) as engine:
        check_answers(case, engine)


@in_turns("case")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model_type", "case"), [(case.model_type, case) for case in STATE_SPACES], ids=str)
def test_answers_of_state_spaces(model_type: str, case: Case, backend: str, tmp_path: Path) -> None:
    with opened(case, backend, tmp_path) as engine:
        check_answers(case, engine)


@in_turns("case", "backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("share", "case"), [(i % SHARES, case) for i, case in enumerate(VISUAL)], ids=str)
def test_answers_of_text_models_within(share: int, case: Case, backend: str, tmp_path: Path) -> None:
    with opened(case, backend, tmp_path) as engine:
        check_answers(case, engine)
