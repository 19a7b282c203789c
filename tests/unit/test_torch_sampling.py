"""The torch engine's sampling against the definition in docs/artifact.md, written out token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.fallback_server.backend import Sampling
from tests.support.late import late

torch = late("torch")
ours = late("nearfar.fallback_server.torch_engine.sampling", "torch", "transformers")
numbers = late("nearfar.fallback_server.torch_engine.noise")

VOCAB = 300
CPU = "cpu"


def pcg4d(low: int, high: int, counter: int, token: int) -> int:
    """First word of the hash, in Python's integers."""
    m = 0xFFFFFFFF
    x, y, z, w = ((part * 1664525 + 1013904223) & m for part in (low, high, counter, token))
    for turn in range(2):
        x = (x + y * w) & m
        y = (y + z * x) & m
        z = (z + x * y) & m
        w = (w + y * z) & m
        if turn == 0:
            x, y, z, w = (part ^ (part >> 16) for part in (x, y, z, w))
    return x


def noise(seed: int, counter: int, vocab: int) -> np.ndarray:
    low, high = numbers.split_seed(seed)
    u = np.array([((pcg4d(low, high, counter, v) >> 8) + 0.5) * 2.0**-24 for v in range(vocab)])
    return -np.log(np.maximum(-np.log(np.float32(u)), np.float32(2.0**-24)))


def defined(
    logits: np.ndarray, s: Sampling, counter: int, prompt: list[int], generated: list[int]
) -> np.ndarray:
    """Scores whose argmax is the token: steps (1) to (9) for one row."""
    values = logits.astype(np.float64).copy()
    for token, bias in s.logit_bias.items():
        values[token] += bias
    for v in range(len(values)):
        times = generated.count(v)
        if times or v in prompt:
            values[v] = (
                values[v] / s.repetition_penalty if values[v] > 0 else values[v] * s.repetition_penalty
            )
        values[v] -= s.frequency_penalty * times + s.presence_penalty * (times > 0)
    if s.temperature == 0:
        return values
    values /= s.temperature
    values[values < np.sort(values)[::-1][s.top_k - 1 if 0 < s.top_k <= len(values) else -1]] = -np.inf
    if s.top_p < 1:
        mass = np.exp(values - values.max())
        order = np.sort(values)[::-1]
        enough = next(t for t in order if mass[values >= t].sum() >= s.top_p * mass.sum() * (1 - 1e-9))
        values[values < enough] = -np.inf
    if s.min_p > 0:
        values[values - values.max() < math.log(s.min_p)] = -np.inf
    return values + noise(s.seed or 0, counter, len(values))


def choose(logits: torch.Tensor, samplings: list[Sampling], counters: list[int]) -> list[ours.Choice]:
    rows = [
        ours.RowInput(ours.prepare(s, s.seed or 0, [1, 2], logits.shape[1], CPU), c)
        for s, c in zip(samplings, counters, strict=True)
    ]
    return ours.sample(logits.clone(), rows)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, -1, 2**64 - 1])
def test_the_noise_is_pcg4d(seed: int) -> None:
    low, high = numbers.split_seed(seed)
    v = torch.arange(2000)
    got = numbers.gumbel(torch.full_like(v, low), torch.full_like(v, high), torch.full_like(v, 77), v).numpy()
    np.testing.assert_allclose(got, noise(seed, 77, 2000), rtol=2e-5, atol=2e-5)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 50, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 2**32))
def test_every_row_of_a_mixed_batch_is_as_defined(samplings: list[Sampling], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = [ours.prepare(s, s.seed or 0, [1, 2], VOCAB, CPU) for s in samplings]
    generated: list[list[int]] = [[] for _ in samplings]
    for counter in range(2, 6):
        logits = torch.randn(len(samplings), VOCAB, generator=generator) * 4
        choices = ours.sample(logits.clone(), [ours.RowInput(state, counter) for state in states])
        for row, choice in enumerate(choices):
            scores = defined(logits[row].numpy(), samplings[row], counter, [1, 2], generated[row])
            assert choice.token is not None
            # Where two scores are equal except for rounding, either may win.
            assert scores[choice.token] >= scores.max() - 1e-3
            generated[row].append(choice.token)


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    samplings = [Sampling(seed=i, top_p=0.8 if i % 2 else 1.0) for i in range(5)]
    together = [c.token for c in choose(logits, samplings, [9] * 5)]
    alone = [choose(logits[i : i + 1], [samplings[i]], [9])[0].token for i in range(5)]
    assert together == alone


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rows = [ours.RowInput(ours.prepare(Sampling(), 5, [0], 4, CPU), counter) for counter in range(4000)]
    tokens = torch.tensor([c.token for c in ours.sample(logits.expand(4000, 4).clone(), rows)])
    found = torch.bincount(tokens, minlength=4) / 4000
    assert torch.allclose(found, torch.softmax(logits[0], 0), atol=0.03)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_ends_alone(bad: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    want = [
        c.token
        for c in choose(logits, [Sampling(seed=1), Sampling(temperature=0), Sampling(seed=2)], [4] * 3)
    ]
    logits[1, 7] = bad
    got = choose(logits, [Sampling(seed=1), Sampling(temperature=0), Sampling(seed=2)], [4] * 3)
    assert [c.token for c in got] == [want[0], None, want[2]]
    assert [c.broken for c in got] == [False, True, False]


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 1e-3])
def test_almost_no_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, VOCAB) * 3 - 50
    assert choose(logits, [Sampling(temperature=temperature, seed=1)], [1])[0].token == int(logits.argmax())


def test_the_mask_of_allowed_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 5.0
    only = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
    only[3] = 1 << 2  # the bit of token 98
    none = torch.zeros_like(only)
    plain = ours.prepare(Sampling(temperature=0), 0, [0], VOCAB, CPU)
    choices = ours.sample(
        logits.clone(), [ours.RowInput(replace(plain), 1, only), ours.RowInput(plain, 1, none)]
    )
    assert choices[0].token == 98  # the grammar allows nothing else
    assert (choices[1].token, choices[1].broken) == (None, False)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    want = torch.log_softmax(logits, 1)
    states = [
        ours.prepare(Sampling(temperature=0.5, seed=4, logit_bias={5: 20.0}), 4, [1], VOCAB, CPU, logprobs=3),
        ours.prepare(Sampling(), 4, [1], VOCAB, CPU),
    ]
    first, second = ours.sample(logits.clone(), [ours.RowInput(state, 3) for state in states])
    assert first.token == 5
    assert first.logprob == pytest.approx(want[0, 5].item())
    assert [entry.token for entry in first.top] == want[0].topk(3).indices.tolist()
    assert (second.logprob, second.top) == (None, ())
    ((own, top),) = ours.logprobs_of(logits[:1], [7], 2)
    assert own.logprob == pytest.approx(want[0, 7].item())
    assert [entry.logprob for entry in top] == pytest.approx(want[0].topk(2).values.tolist())
