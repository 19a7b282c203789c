"""Every architecture in the onnx target's form: logits and greedy tokens are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.errors import BuildError
from tests.support.architectures import ATTENDING, checkpoint
from tests.support.cases import Case
from tests.support.parity import check_answers, opened
from tests.support.recurrent_cases import RECURRENT, STATE_SPACES
from tests.support.turns import share

SHORT = ("olmo2-plain",)
"""Cases with a head size for which ONNX Runtime has no attention."""


@pytest.mark.parametrize(
    "case",
    share(
        [case for case in ATTENDING if str(case) not in SHORT and not case.experts],
        2,
        lambda case: case.model_type,
    ),
    ids=str,
)
def test_answers_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    with opened(case, "onnx", tmp_path) as engine:
        check_answers(case, engine)


@pytest.mark.parametrize("case", [case for case in ATTENDING if str(case) in SHORT], ids=str)
def test_heads_without_attention_are_refused_by_name(case: Case, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"heads of 12 values.*multiples of 8"):
        build(BuildOptions(str(checkpoint(case)), tmp_path, ("onnx",), "none", context=case.context))


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    case = next(case for case in ATTENDING if case.experts)
    with pytest.raises(BuildError, match="target onnx has no experts"):
        build(BuildOptions(str(checkpoint(case)), tmp_path, ("onnx",), "none"))


@pytest.mark.parametrize("case", [RECURRENT[0], STATE_SPACES[0]], ids=str)
def test_states_are_refused_by_name(case: Case, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no short convolutions"):
        build(BuildOptions(str(checkpoint(case)), tmp_path, ("onnx",), "none"))
