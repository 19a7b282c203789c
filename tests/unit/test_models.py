"""Every architecture, as the list of its step: logits and greedy tokens are those of transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.step.reading import read_model
from tests.support.architectures import CASES, Case, checkpoint, prompt, reference
from tests.support.step_reference import StepReference, load_tensors

TOLERANCE = 1e-4  # of the largest logit: both sides sum in float32, in another order


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param
    return made


def test_logits_are_those_of_transformers(case: Case) -> None:
    ours = StepReference.of(checkpoint(case), case.context)
    for count in case.prompts:
        tokens = prompt(case, count)
        expected, found = reference(case)(tokens), ours.logits(tokens)
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max(), count
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_a_prompt_in_parts_is_the_prompt(case: Case) -> None:
    ours, tokens = StepReference.of(checkpoint(case), case.context), prompt(case, max(case.prompts))
    whole = ours.logits(tokens)
    assert np.abs(ours.logits(tokens, chunk=7) - whole).max() < TOLERANCE * np.abs(whole).max()


def test_the_list_names_the_tensors_of_the_checkpoint(case: Case) -> None:
    config, tensors = load_tensors(checkpoint(case))
    reading = read_model(config, tensors, case.context)
    expected = {
        name: shape for param in reading.model.step.params for name, shape in param.expected().items()
    }
    assert {name: tensors[name].shape for name in expected if name in tensors} == expected
    assert set(tensors) - set(expected) <= {*reading.skipped, *reading.model.unused}
