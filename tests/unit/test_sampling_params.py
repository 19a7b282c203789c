"""Sampling parameters are refused with the parameter's name and the value."""

from __future__ import annotations

from typing import Any

import pytest

from nearfar.edge_runtime.engine.sampling_params import SamplingParams, defaults_of
from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.openai.parameters import chat_sampling, choices, completion_sampling
from nearfar.errors import CheckpointError, RequestError
from nearfar.format.sampling import SamplingDefaults


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", "1"),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop", tuple("abcdefghijklmnopq")),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_bad_values(param: str, value: Any) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


def test_the_message_has_the_value() -> None:
    with pytest.raises(RequestError, match=r"top_p must be a number in \(0, 1\], not 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match="top_logprobs must be at least 0 and at most 20, not 21"):
        SamplingParams(logprobs=21)


def test_good_values() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=0, top_k=0, seed=-(2**63), max_tokens=1, logprobs=20)
    SamplingParams(seed=2**64 - 1, logit_bias={5: -100}, stop=("a",) * 16)


def test_what_needs_the_full_sampler() -> None:
    assert SamplingParams(temperature=0).plain_greedy
    assert SamplingParams(temperature=0, top_k=5, top_p=0.1).plain_greedy
    assert not SamplingParams(temperature=0, logit_bias={1: 1.0}).plain_greedy
    assert not SamplingParams(temperature=0, repetition_penalty=1.1).plain_greedy
    assert not SamplingParams().plain_greedy


def test_openai_parameters() -> None:
    params = chat_sampling(
        {"stop": "x", "max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2, "seed": None}
    )
    assert (params.stop, params.max_tokens, params.logprobs, params.seed) == (("x",), 5, 2, None)
    assert chat_sampling({"logit_bias": {"7": 1.0}}).logit_bias == {7: 1.0}
    assert completion_sampling({"logprobs": 0}).logprobs == 0
    assert choices({}) == 1


def test_what_a_request_does_not_say_the_model_says() -> None:
    model = defaults_of({"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": False, "max_length": 9})
    assert model == SamplingDefaults(temperature=0.6, top_k=20)
    made = chat_sampling({"top_k": 0, "temperature": None}, model)
    assert (made.temperature, made.top_k, made.top_p) == (0.6, 0, 1.0)
    assert completion_sampling({"temperature": 0}, model) == SamplingParams(temperature=0, top_k=20)


def test_a_model_that_says_nothing_is_drawn_from_as_llama_cpp_does() -> None:
    silent = {"eos_token_id": 2, "do_sample": None, "max_length": 20}
    made = chat_sampling({}, defaults_of(silent))
    assert made == SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
    assert chat_sampling({"temperature": 1.2, "top_k": 0}, defaults_of(silent)).top_k == 0
    # gemma's file has top_k and top_p, and its temperature is 1
    assert chat_sampling({}, defaults_of({"top_k": 64, "top_p": 0.95})).temperature == 1.0
    assert "says nothing" in defaults_of({}).told
    assert SamplingDefaults().told == "as OpenAI's"
    assert SamplingDefaults(top_k=20).told == "top_k 20"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"top_p": 0}, r"generation_config.json: top_p must be a number in \(0, 1\], not 0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
    ],
)
def test_a_models_wish_that_no_request_could_have_is_refused(value: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        defaults_of(value)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 3}, "logprobs"), ({"stop": [1]}, "stop"),
        ({"stop": 5}, "stop"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
        ({"tool": 1}, "tool"),
    ],
)  # fmt: skip
def test_bad_openai_parameters(params: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_sampling(params)
    assert caught.value.param == param


def test_bad_completion_parameters() -> None:
    with pytest.raises(RequestError, match="logprobs"):
        completion_sampling({"logprobs": True})
    for n in (0, 129, True, 1.5):
        with pytest.raises(RequestError, match="n must be"):
            choices({"n": n})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        [],
        None,
        {"role": "user"},
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [7],
    ],
)
def test_bad_messages(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        checked_messages(messages)
    assert caught.value.param == "messages"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts, "name": "z"}]) == [
        {"role": "user", "content": "ab", "name": "z"}
    ]
