"""Probabilities of labels on every backend are those of transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nearfar.edge_runtime import Engine
from tests.device.test_backends import text, tolerance
from tests.support.backends import Transformers, forget

LABELS = [" the", " a house", " and then nothing", "\n", " the old man said", " of course"]


def expected(reference: Transformers, tokens: Sequence[int], count: int) -> list[float]:
    """Log-probabilities of the last `count` tokens."""
    logits = reference.logits(tokens)[-count - 1 : -1].astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(row[token]) for row, token in zip(rows, tokens[-count:], strict=True)]


def test_labels_have_the_log_probabilities_of_transformers(
    classics: Engine, classics_reference: Transformers
) -> None:
    prompt = text()[:400]
    codec = classics.asynchronous.codec
    tokens = codec.encode(prompt)
    forget(classics)
    made = classics.decide(prompt, LABELS)
    close = 2 * tolerance(classics)
    for option in made.options:
        label = codec.encode(prompt + option.label)[len(tokens) :]
        found = option.token_logprobs
        assert len(found) == len(label)
        told = expected(classics_reference, [*tokens, *label], len(label))
        assert np.abs(np.array(found) - told).max() < close
        assert abs(option.logprob - sum(told)) < close * len(label)
    again = classics.decide(tokens, LABELS)  # from the cache, as tokens
    assert np.allclose([o.logprob for o in again.options], [o.logprob for o in made.options], atol=close)
    assert again.choice == made.choice


def test_numbers_have_an_expected_value_and_a_neutral_prompt_calibrates(stories: Engine) -> None:
    made = stories.decide("Tom is", values=[1, 2.5, 10])
    assert made.expected is not None
    assert made.expected == sum((o.value or 0) * o.probability for o in made.options)
    assert [o.label for o in made.options] == ["1", "2.5", "10"]
    even = stories.decide("Tom is", ["big", "small"], neutral="Tom is")
    assert np.allclose([o.probability for o in even.options], 0.5)
    assert even.confidence < 1e-6
