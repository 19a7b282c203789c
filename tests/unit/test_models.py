"""The list of every architecture's step: logits and greedy tokens equal those of transformers in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nearfar.step.model import param_of, param_record
from nearfar.step.params import Param
from nearfar.step.reading import read_model
from tests.support.architectures import CASES, checkpoint, prompt, reference
from tests.support.cases import Case
from tests.support.step_reference import Array, StepReference, load_tensors

TOLERANCE = 1e-4  # as a share of the largest logit: both sides sum in float32, but in another order


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


def test_parameters_are_the_same_when_read_from_a_manifest(case: Case) -> None:
    params = read_model(*load_tensors(checkpoint(case)), case.context).model.step.params
    assert [param_of(param_record(param)) for param in params] == [plain(param) for param in params]


def plain(param: Param) -> Param:
    """A parameter without orders that move nothing, which records leave out."""
    pieces = (replace(p, order=None) if p.order and p.order.trivial else p for p in param.pieces)
    return replace(param, pieces=tuple(pieces))


def test_a_llama_is_a_phi3_with_its_matrices_apart() -> None:
    case = next(case for case in CASES if case.config.get("partial_rotary_factor"))
    config, tensors = load_tensors(checkpoint(case))
    for key in ("partial_rotary_factor", "rope_parameters", "original_max_position_embeddings"):
        config.pop(key, None)
    apart: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
            ends = np.array([heads, heads + kv]) * (config["hidden_size"] // heads)
            apart |= {
                name.replace("qkv", part): rows
                for part, rows in zip("qkv", np.split(tensor, ends), strict=True)
            }
        elif "gate_up_proj" in name:
            apart |= {
                name.replace("gate_up", p): rows
                for p, rows in zip(("gate", "up"), np.split(tensor, 2), strict=True)
            }
        else:
            apart[name] = tensor
    tokens = prompt(case, 30)
    found = StepReference(read_model({**config, "model_type": "llama"}).model, apart).logits(tokens)
    np.testing.assert_allclose(
        found, StepReference(read_model(config).model, tensors).logits(tokens), atol=1e-4
    )
