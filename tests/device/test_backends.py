"""The requirements that every executor must meet, tested on real models. Absent devices are skipped
by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime import Engine, SamplingParams
from tests.shared_data import shared_data
from tests.support.backends import (
    BACKENDS,
    FAST,
    SOFTWARE,
    Lab,
    Transformers,
    executor,
    forget,
    greedy,
    kv_dtype,
    last_logits,
    transformers_of,
)
from tests.support.numpy_executor import sample_row
from tests.support.turns import paired, share

TOLERANCE = {"f32": 1e-3, "f16": 0.15}
# cpu rounds the inputs of quantized matrices to 16-bit integers: a difference of 2.5e-3 was measured over 700
# positions, with logits up to 17.
QUANTIZED_TOLERANCE = 5e-3
CACHE_TOLERANCE = 2e-2
"""Tolerance where keys and values are rounded to float16: by one part in 4,096 for numbers up to 25."""
BORDERS = (
    1,
    2,
    3,
    4,
    5,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    79,
    80,
    81,
    127,
    128,
    129,
    255,
    256,
    257,
    271,
    272,
    273,
    319,
    320,
    321,
    511,
    512,
    513,
    527,
    528,
    529,
    576,
    640,
    699,
    700,
)

SCHEMES = [
    *((backend, "q4") for backend in BACKENDS),
    *((backend, "q8") for _, backend in paired(("q8",), [name for name in BACKENDS if name not in SOFTWARE])),
    *((backend, "q8") for _, backend in paired(("q8",), SOFTWARE)),
]
SLOW = ["mlx", *SOFTWARE]
EIGHTHS = 8
PARTS = paired(SLOW, range(EIGHTHS))
"""An eighth of BORDERS has lengths at, below and above borders of pages and of steps."""


def lengths_of(backend: str) -> Sequence[int]:
    """Lengths of prompts on a backend in this run. On cpu half of the borders and a sixteenth of all lengths;
    elsewhere each border, where a prompt is slow an eighth of them. Together the turns cover all lengths and
    all borders.
    """
    if backend == "cpu":
        return sorted({*share(BORDERS, 2), *share(range(1, 701), 16)})
    if backend not in SLOW:
        return BORDERS
    return sorted(length for slow, part in PARTS if slow == backend for length in BORDERS[part::EIGHTHS])


def text(name: str = "heldout.txt", skip: int = 0) -> str:
    """Running text, from which prompts are made."""
    return shared_data("text", name).read_text(encoding="utf-8")[skip : skip + 6000]


def tolerance(engine: Engine) -> float:
    """How far logits may be from those of transformers in float32. The logits of these models reach about
    20.
    """
    exact = TOLERANCE[executor(engine).precision]
    if kv_dtype(engine) == "float16":
        exact = max(exact, CACHE_TOLERANCE)
    return exact if engine.manifest.quantization.scheme == "none" else max(exact, QUANTIZED_TOLERANCE)


def test_golden_text(stories: Engine) -> None:
    if executor(stories).precision != "f32":
        pytest.skip("the golden text is float32's")
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    assert stories.completions.create("", max_tokens=199, temperature=0).choices[0].text == golden


def test_logits_are_those_of_transformers(stories: Engine, stories_reference: Transformers) -> None:
    tokens = stories.asynchronous.codec.encode("Once upon a time there was a big dog. " * 30)[:200]
    expected = stories_reference.logits(tokens)
    for length in (1, 2, 5, 17, 64, 65, 130, 200):
        forget(stories)
        assert np.abs(last_logits(stories, tokens[:length]) - expected[length - 1]).max() < tolerance(stories)


@pytest.mark.parametrize(("backend", "quant"), SCHEMES, indirect=["backend"])
def test_greedy_tokens_are_those_of_transformers_on_dequantized_weights(
    lab: Lab, backend: str, quant: str
) -> None:
    engine = lab.engine(quant, backend)
    prompt, count = engine.asynchronous.codec.encode(text())[:40], 40 if backend in SOFTWARE else 100
    answer = greedy(engine, prompt, count)
    if answer != transformers_of(quant).greedy(prompt, count):
        # A float16 cache may change a near tie.
        assert kv_dtype(engine) == "float16"
        logits = transformers_of(quant).logits([*prompt, *answer])[len(prompt) - 1 : -1]
        behind = [best.max() - best[token] for best, token in zip(logits, answer, strict=True)]
        assert max(behind) < 2 * tolerance(engine)


def test_every_prompt_length_gives_what_one_unbroken_prefill_gives(
    classics: Engine, backend: str, classics_reference: Transformers
) -> None:
    tokens = classics.asynchronous.codec.encode(text())[:700]
    expected = classics_reference.logits(tokens)
    worst = 0.0
    for length in lengths_of(backend):
        # A cold start, except for the steps of 256 rows that all lengths have in common.
        forget(classics, keep=(length - 1) // 256 * 16)
        worst = max(worst, float(np.abs(last_logits(classics, tokens[:length]) - expected[length - 1]).max()))
    assert worst < tolerance(classics)


def test_prefix_reuse_gives_the_same_logits(classics: Engine, classics_reference: Transformers) -> None:
    tokens = classics.asynchronous.codec.encode(text(skip=900))[:400]
    expected = classics_reference.logits(tokens)
    forget(classics)
    for length in (100, 101, 116, 120, 250, 399, 400):
        assert np.abs(last_logits(classics, tokens[:length]) - expected[length - 1]).max() < tolerance(
            classics
        )


def test_a_second_turn_through_the_prefix_cache_equals_a_cold_start(classics: Engine, backend: str) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40 if backend in FAST else 20}
    messages = [{"role": "user", "content": text()[:300]}]
    forget(classics)
    first = classics.chat.completions.create(messages, **options)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    warm = classics.chat.completions.create(messages, **options)
    assert warm.usage.prompt_tokens_details.cached_tokens > 0
    forget(classics)
    cold = classics.chat.completions.create(messages, **options)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_a_batch_of_mixed_requests_gives_what_each_gives_alone(classics: Engine, backend: str) -> None:
    source, share = text(skip=2000), 1 if backend in FAST else 3
    requests: list[tuple[str, dict[str, Any]]] = [
        (source[:10], {"temperature": 0, "max_tokens": 30}),
        (source[:700], {"temperature": 0, "max_tokens": 20}),
        (source[700:900], {"temperature": 0.8, "seed": 1, "max_tokens": 40}),
        (source[900:960], {"temperature": 1.1, "seed": 2, "top_k": 30, "top_p": 0.9, "max_tokens": 25}),
        (
            source[960:1700],
            {"temperature": 0.7, "seed": 3, "min_p": 0.05, "frequency_penalty": 0.4, "max_tokens": 10},
        ),
        (source[1700:1800], {"temperature": 0, "repetition_penalty": 1.2, "max_tokens": 35}),
        ("", {"temperature": 0, "max_tokens": 50}),
    ]

    def ask(request: tuple[str, dict[str, Any]]) -> str:
        options = {**request[1], "max_tokens": request[1]["max_tokens"] // share}
        return classics.completions.create(request[0], ignore_eos=True, **options).choices[0].text

    alone = []
    for request in requests:
        forget(classics)
        alone.append(ask(request))
    forget(classics)
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(ask, requests)) == alone


def test_several_answers_share_a_page_until_they_part(classics: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    prompt = text(skip=50)[:100]
    made = classics.completions.create(prompt, n=4, **options)
    for index, choice in enumerate(made.choices):
        forget(classics)
        assert (
            classics.completions.create(prompt, **{**options, "seed": 7 + index}).choices[0].text
            == choice.text
        )


def test_one_seed_gives_one_text_on_every_backend(lab: Lab, stories: Engine, backend: str) -> None:
    if backend == "cpu":
        pytest.skip("cpu is what the others are compared with")
    if executor(stories).precision != "f32":
        pytest.skip("float16 rounds differently")
    cpu = lab.engine("stories", "cpu")
    # with other parameters a text may differ
    all_of_them = {"temperature": 0.9, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
    for seed in range(2 if backend in SOFTWARE else 5):
        options: dict[str, Any] = {**all_of_them, "seed": seed, "max_tokens": 100}
        assert stories.completions.create("", **options).choices[0].text == \
            cpu.completions.create("", **options).choices[0].text  # fmt: skip


SAMPLERS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=1e-50),  # this top_p is 0 in float32
    SamplingParams(top_p=1e-40, top_k=3),  # this top_p is not a normal float32
    SamplingParams(top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(min_p=1.0),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-1),
    SamplingParams(temperature=0, repetition_penalty=2, frequency_penalty=2),
    SamplingParams(temperature=1.5, top_p=0.8),
]


@pytest.mark.parametrize("model", ["stories", "q4"])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_sampler_does_what_the_reference_does(lab: Lab, backend: str, model: str, rows: int) -> None:
    engine = lab.engine(model, backend)
    device, vocab, rng = executor(engine), engine.manifest.model.vocab_size, np.random.default_rng(rows)
    slots, words = engine.manifest.cache.slots, (vocab + 31) // 32
    for trial in range(16 // rows * 2):
        logits = (rng.normal(0, 4, (16, vocab))).astype(np.float32)
        bias = np.where(rng.random((slots, vocab)) < 0.02, rng.normal(0, 5, (slots, vocab)), 0).astype(
            np.float32
        )
        allowed = rng.integers(0, 2**32, (slots, words), np.uint64).astype(np.uint32)
        allowed |= np.uint32(0xFFFFFFFF) if trial % 2 else np.uint32(1)
        counts = np.where(rng.random((slots, vocab)) < 0.1, rng.integers(0, 5, (slots, vocab)), 0).astype(
            np.int32
        )
        counts |= np.where(rng.random((slots, vocab)) < 0.1, 1 << 24, 0).astype(np.int32)
        ints, floats = np.zeros((16, 8), np.int32), np.zeros((16, 8), np.float32)
        ints[:, 0] = ints[:, 5] = -1
        used = slots - np.arange(rows)[::-1] - 1 if rows < slots else np.arange(rows)
        for row in range(rows):
            p = SAMPLERS[(trial * rows + row) % len(SAMPLERS)]
            seed = rng.integers(-(2**31), 2**31, 2)
            ints[row] = [used[row], p.top_k, *seed, rng.integers(0, 1000), row + 3 if row % 2 else -1, 0, 0]
            penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            floats[row] = [p.temperature, p.top_p, p.min_p, *penalties, 0, 0]
        for name, data in {
            "logits": logits,
            "logit_bias": bias,
            "allowed": allowed,
            "counts": counts,
            "sample_i32": ints,
            "sample_f32": floats,
            "tokens": np.full(256, -5, np.int32),
        }.items():
            device.write(name, data)
        device.run("sample", rows)
        sampled, tokens, after = (
            device.fetch(n, c)() for n, c in (("sampled", rows), ("tokens", 256), ("counts", slots))
        )
        fed = np.full(256, -5)
        for row in range(rows):
            slot = ints[row, 0]
            expected = sample_row(
                logits[row], bias[slot], allowed[slot], counts[slot], floats[row], ints[row]
            )
            assert sampled[row] == expected, (trial, row, SAMPLERS[(trial * rows + row) % len(SAMPLERS)])
            counts[slot, expected] += 1
            if ints[row, 5] >= 0:
                fed[ints[row, 5]] = expected
        np.testing.assert_array_equal(after, counts)
        np.testing.assert_array_equal(tokens, fed)
    _restore(engine)


def test_temperatures_near_0_and_logits_of_any_size_give_the_references_token(lab: Lab, backend: str) -> None:
    engine = lab.engine("q4", backend)
    device, vocab, rng = executor(engine), engine.manifest.model.vocab_size, np.random.default_rng(3)
    slots = engine.manifest.cache.slots
    bias, counts = np.zeros((slots, vocab), np.float32), np.zeros((slots, vocab), np.int32)
    allowed = np.full((slots, (vocab + 31) // 32), 0xFFFFFFFF, np.uint32)
    filters = [(0, 1, 0), (40, 1, 0), (0, 0.5, 0), (0, 1, 0.1)]  # top_k, top_p, min_p
    for spread in (3.0, 1e36, 1e38):
        logits = np.clip(rng.standard_normal((16, vocab)) * spread, -3.4e38, 3.4e38).astype(np.float32)
        for temperature in (1e-30, 1e-6, 0.5, 100.0):
            ints, floats = np.zeros((16, 8), np.int32), np.zeros((16, 8), np.float32)
            ints[:, 0] = ints[:, 5] = -1
            for row, (top_k, top_p, min_p) in enumerate(filters):
                ints[row, :5] = row, top_k, *rng.integers(-(2**31), 2**31, 2), row
                floats[row, :6] = temperature, top_p, min_p, 1, 0, 0
            given = {"logits": logits, "logit_bias": bias, "allowed": allowed, "counts": counts}
            for name, data in {**given, "sample_i32": ints, "sample_f32": floats}.items():
                device.write(name, data)
            device.run("sample", 4)
            expected = [
                sample_row(logits[row], bias[row], allowed[row], counts[row], floats[row], ints[row])
                for row in range(4)
            ]
            assert device.fetch("sampled", 4)().tolist() == expected, (spread, temperature)
    _restore(engine)


def test_greedy_and_logprobs_do_what_the_reference_does(lab: Lab, backend: str) -> None:
    engine = lab.engine("q4", backend)
    device, vocab, rng = executor(engine), engine.manifest.model.vocab_size, np.random.default_rng(5)
    for rows in (1, 4, 16):
        # rounded, so that many logits are tied
        logits = np.round(rng.normal(0, 4, (16, vocab)), 1).astype(np.float32)
        logits[0, 5:9] = np.nan
        ints = np.full((16, 8), -1, np.int32)
        ints[:, 0] = 0
        ints[rows - 1, 5] = 7
        device.write("logits", logits)
        device.write("sample_i32", ints)
        device.run("greedy", rows)
        sampled = device.fetch("sampled", rows)()
        np.testing.assert_array_equal(sampled, np.argmax(np.nan_to_num(logits[:rows], nan=-np.inf), -1))
        assert device.fetch("tokens", 8)()[7] == sampled[rows - 1]
        logits[0, 5:9] = 0
        device.write("logits", logits)
        device.run("logprobs", rows)
        values = logits[:rows].astype(np.float64)
        values -= values.max(-1, keepdims=True)
        values -= np.log(np.exp(values).sum(-1, keepdims=True))
        order = np.argsort(-logits[:rows], -1, kind="stable")[:, :20]
        np.testing.assert_array_equal(device.fetch("top_ids", rows)(), order)
        np.testing.assert_allclose(
            device.fetch("top_logprobs", rows)(), np.take_along_axis(values, order, -1), atol=1e-4
        )
        np.testing.assert_allclose(
            device.fetch("logprob", rows)(), values[np.arange(rows), sampled], atol=1e-4
        )
    device.write("sampled", np.full(16, 9, np.int32))
    device.write("sample_i32", np.full((16, 8), -1, np.int32))
    device.run("greedy", 16)
    assert device.fetch("sampled", 16)().tolist() == [9] * 16, "a row without a slot writes nothing"


def _restore(engine: Engine) -> None:
    """Restore the sampler's buffers to the content that the engine left."""
    for write in engine.asynchronous.core._builder.initial():
        executor(engine).write(write.buffer, write.data, write.row)
