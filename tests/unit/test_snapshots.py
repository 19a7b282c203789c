"""Saving and loading the cache over the tiny model: the same tokens, other models rejected, running requests
unaffected.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime import AsyncEngine, snapshots
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.snapshots import file, seam, transfer
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError, RequestError, SnapshotError
from nearfar.format.manifest import Quantization, StoredMatrix
from tests.support import tiny
from tests.support.numpy_executor import Array

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SYSTEM = [{"role": "system", "content": "Speak of foxes, badgers and moles, and of nothing else."}]
both = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "lockstep"])
INNER = (  # a template of Llama 2's kind: the system prompt stands in the user's turn
    "{{ '<|bos|>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' }}{% if loop.index "
    "== 2 and "
    "messages[0]['role'] == 'system' %}{{ '<<' + messages[0]['content'] + '>>\n\n' }}{% endif %}{{ "
    "m['content'] | trim }}"
    "{{ '<|assistant|>' }}{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|end|>' }}{% endif "
    "%}{% endfor %}"
)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def codec(template: str = tiny.TEMPLATE) -> TextCodec:
    return TextCodec(tiny.tokenizer(), {"bos_token": "<|bos|>", "eos_token": "<|end|>"}, template, 256)


def engine(core: EngineCore | None = None, template: str = tiny.TEMPLATE, **options: Any) -> AsyncEngine:
    return AsyncEngine(core or tiny.core(**options), codec(template))


async def collect(
    made: AsyncEngine, tokens: Sequence[int], params: SamplingParams = GREEDY
) -> tuple[list[int], int]:
    """Tokens of the answer, and the number of prompt tokens that were in the cache."""
    generation = made.generate(tokens, params)
    return [event.token async for event in generation], generation.stats.cached_tokens


def nothing_held(made: AsyncEngine) -> bool:
    table = made.core.scheduler.table
    return not table.sequences and not any(
        any(allocator.refs) or table.available_in(group) < allocator.count
        for group, allocator in enumerate(table.allocators)
    )


def found(made: AsyncEngine, tokens: list[int]) -> list[int]:
    """The pages of group 0 that the cache has for the tokens."""
    return [node.pages[0] for node in made.core.scheduler.table.index.lookup(tokens, len(tokens))]


async def saved(path: Path, tokens: list[int], **options: Any) -> Path:
    async with engine(**options) as first:
        await first.save_cache(path, tokens=tokens)
    return path


@both
async def test_after_a_restart_the_answer_is_the_same_and_the_prefix_is_not_computed(
    tmp_path: Path, pipelined: bool
) -> None:
    tokens = prompt(90)
    async with engine(pipelined=pipelined) as first:
        made = await first.save_cache(tmp_path / "a.snap", tokens=tokens)
        assert (made.tokens, made.page_size, made.kv_dtype, made.kv_bits) == (80, 16, "float32", None)
        assert made.bytes == (tmp_path / "a.snap").stat().st_size
        assert nothing_held(first)
    async with engine(pipelined=pipelined) as cold:
        expected, cached = await collect(cold, tokens)
        assert cached == 0
    async with engine(pipelined=pipelined) as warm:
        assert await warm.load_cache(tmp_path / "a.snap") == made
        assert nothing_held(warm)
        warm.core.executor.steps.clear()
        assert await collect(warm, tokens) == (expected, 80)
        assert warm.core.executor.steps[0] == 16, "ten tokens were left to compute"
        _, cached = await collect(warm, tokens[:80])
        assert cached == 64, "the last token is always computed"


async def test_keys_and_values_come_back_bit_by_bit(tmp_path: Path) -> None:
    tokens = prompt(64)
    async with engine() as first, engine() as second:
        await first.save_cache(tmp_path / "a.snap", tokens=tokens)
        await collect(second, prompt(40, 5))  # another prompt first, so that the prefix lands on other pages
        await second.load_cache(tmp_path / "a.snap")
        contents = []
        for made in (first, second):
            pages = found(made, tokens)
            contents.append(made.core.executor.read_pages(0, pages))
        for name, array in contents[0].items():
            np.testing.assert_array_equal(array, contents[1][name])
        assert np.ptp(contents[0]["kv.1.v"]) > 0


@pytest.mark.parametrize("size", [8, 16, 32])
async def test_a_runtime_with_another_page_size_loads_it(tmp_path: Path, size: int) -> None:
    tokens = prompt(90)
    path = await saved(tmp_path / "a.snap", tokens, page_size=16)
    async with engine(page_size=size) as warm, engine() as cold:
        await warm.load_cache(path)
        assert await collect(warm, tokens) == ((await collect(cold, tokens))[0], 80 // size * size)


async def test_a_system_prompt_serves_every_conversation_behind_it(tmp_path: Path) -> None:
    for template in (tiny.TEMPLATE, INNER):
        async with engine(template=template) as first:
            made = await first.save_cache(tmp_path / "a.snap", messages=SYSTEM)
            assert made.messages == tuple(SYSTEM)
        async with engine(template=template) as warm, engine(template=template) as cold:
            await warm.load_cache(tmp_path / "a.snap")
            for question in ("Who?", " a", "1"):
                messages = [*SYSTEM, {"role": "user", "content": question}]
                answers = [
                    await e.chat.completions.create(messages, max_tokens=9, temperature=0)
                    for e in (warm, cold)
                ]
                assert answers[0].choices == answers[1].choices
                assert answers[0].usage.prompt_tokens_details.cached_tokens == made.tokens == 48


def test_a_prefix_is_what_stays_whatever_follows() -> None:
    text = codec()
    stable = seam.chat_prefix(text, SYSTEM)
    for question in ("", "x", "\n", " y", "é"):
        assert text.encode_chat([*SYSTEM, {"role": "user", "content": question}])[: len(stable)] == stable
    asked = [*SYSTEM, {"role": "user", "content": "A long text."}]
    stable = seam.chat_prefix(text, asked)
    assert text.encode_chat(asked)[: len(stable)] == stable
    longer = [*SYSTEM, {"role": "user", "content": "A long text. What of it?"}]
    assert text.encode_chat(longer)[: len(stable)] == stable
    assert seam.text_prefix(text, "abc") == text.encode("abc")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"tokens": prompt(15)},
            "15 tokens that stay whatever follows; a snapshot needs at least a page of 16",
        ),
        ({"tokens": []}, "begins with 0 tokens"),
        ({"tokens": prompt(200)}, "maximum context length is 160 tokens"),
        ({"tokens": [999] * 20}, "token id 999 .* outside the vocabulary"),
        ({}, "give one of messages, prompt and tokens"),
        ({"tokens": prompt(30), "prompt": "a"}, "give one of"),
        ({"messages": "a"}, "messages must be a list"),
        ({"prompt": "\ud800"}, "not valid Unicode"),
    ],
)
async def test_prompts_that_cannot_be_saved(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    async with engine() as made:
        with pytest.raises(RequestError, match=match):
            await made.save_cache(tmp_path / "a.snap", **options)
        assert nothing_held(made)
    assert not list(tmp_path.iterdir())


async def test_a_target_that_must_not_be_overwritten_is_refused_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    (tmp_path / "thesis").write_text("precious")
    async with engine() as made:
        with pytest.raises(SnapshotError, match="not overwritten"):
            await made.save_cache(tmp_path / "thesis", tokens=prompt(90))
        assert made.core.executor.steps == []


def quantized(bits: int, group_size: int, method: str = "m") -> Quantization:
    return Quantization(f"q{bits}", method, (StoredMatrix("a", 8, 64, bits, group_size),))


def changed(**changes: Any) -> EngineCore:
    """A core with a changed manifest."""
    core = tiny.core()
    core.manifest = replace(core.manifest, **changes)
    return core


@pytest.mark.parametrize(
    ("core", "match"),
    [
        (
            lambda: tiny.core(seed=1),
            r"made with tiny \(not quantized; checkpoint 000000000000\), this model is tiny",
        ),
        (
            lambda: changed(quantization=quantized(4, 64)),
            r"with tiny \(not quantized.*this model is tiny \(q4; checkpoint",
        ),
        (lambda: changed(provenance={}), "does not say which checkpoint it was made from"),
        (lambda: tiny.core(pages=4), "the snapshot has 80 tokens, but only 64 fit the context here"),
    ],
)
async def test_a_snapshot_that_does_not_fit_is_refused(
    tmp_path: Path, core: Callable[[], EngineCore], match: str
) -> None:
    path = await saved(tmp_path / "a.snap", prompt(90))
    async with engine(core()) as other:
        with pytest.raises(SnapshotError, match=match):
            await other.load_cache(path)
        assert list(other.core.scheduler.table.index.nodes()) == []


async def test_damage_is_refused_and_the_cache_stays_as_it_was(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a.snap", prompt(90))
    data = bytearray(path.read_bytes())
    async with engine() as made:
        for position in (9, 70, len(data) // 2, len(data) - 1):
            bad = bytearray(data)
            bad[position] ^= 4
            path.write_bytes(bad)
            with pytest.raises(SnapshotError, match=r"damaged|not a snapshot"):
                await made.load_cache(path)
        path.write_bytes(data[:-100])
        with pytest.raises(SnapshotError, match="truncated"):
            await made.load_cache(path)
        assert list(made.core.scheduler.table.index.nodes()) == []
        assert not made.core.executor.kv[0][0].any()


def test_check_layout() -> None:
    layout = {f"kv.0.{part}": np.zeros((1, 2, 16, 8), np.float16) for part in "kv"}
    fine = {f"kv.0.{part}": np.zeros((2, 32, 8), np.float16) for part in "kv"}
    exact = {name: array.astype(np.float32) for name, array in fine.items()}
    transfer.check_layout([layout], fine, 32, [32], 8)
    transfer.check_layout([layout], exact, 32, [32], 8)
    codes = {
        "kv.0.k.codes": np.zeros((2, 32, 2), np.uint32),
        "kv.0.k.scales": np.zeros((2, 32, 1), np.float16),
    }
    exact_layout = {name: array.astype(np.float32) for name, array in layout.items()}
    for tensors, pages, match in [
        (fine, exact_layout, "was saved from a float16 cache, this one is float32"),
        (
            {name: array + 70000 for name, array in exact.items()},
            layout,
            "float16, the type of this cache, cannot hold",
        ),
        (
            {name: array[:1] for name, array in fine.items()},
            layout,
            r"kv.0.k is \[1, 32, 8\], this cache needs \[2, 32, 8\]",
        ),
        (codes, layout, "float16, 8-bit keys and values of 1 layers, this cache float16 ones of 1"),
        (fine | {"kv.1.k": fine["kv.0.k"]}, layout, "of 2 layers, this cache float16 ones of 1"),
        ({}, layout, "no keys and values of 0 layers"),
    ]:
        with pytest.raises(SnapshotError, match=match):
            transfer.check_layout([pages], tensors, 32, [32], 8)


class Quantized:
    """Pages of an 8-bit cache beside the tiny model's own, which show what is read and written."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.cache: dict[str, Array] = {}
        for name in ("kv.0.k", "kv.0.v"):
            self.cache[f"{name}.codes"] = rng.integers(0, 2**32, (64, 2, 16, 2), np.uint64).astype(np.uint32)
            self.cache[f"{name}.scales"] = rng.normal(size=(64, 2, 16, 1)).astype(np.float16)
            self.cache[f"{name}.biases"] = rng.normal(size=(64, 2, 16, 1)).astype(np.float16)
        core.executor.read_pages = self.read  # type: ignore[method-assign]
        core.executor.write_pages = self.write  # type: ignore[method-assign]

    def read(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        return {name: array[list(pages)] for name, array in self.cache.items()}

    def write(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        for name, array in self.cache.items():
            array[list(pages)] = content[name]


async def test_a_quantized_cache_is_stored_as_it_is(tmp_path: Path) -> None:
    tokens = prompt(64)
    async with engine() as first, engine() as second, engine() as plain:
        ours, theirs = Quantized(first.core, 0), Quantized(second.core, 1)
        await collect(second, prompt(20, 5))  # another prompt first, so that the prefix lands on other pages
        made = await first.save_cache(tmp_path / "a.snap", tokens=tokens)
        assert (made.kv_bits, made.kv_dtype) == (8, "float16")
        await second.load_cache(tmp_path / "a.snap")
        pages = [found(e, tokens) for e in (first, second)]
        assert pages[0] != pages[1]
        for name in ours.cache:
            np.testing.assert_array_equal(ours.read(0, pages[0])[name], theirs.read(0, pages[1])[name])
        with pytest.raises(
            SnapshotError, match="8-bit keys and values of 1 layers, this cache float32 ones of 2"
        ):
            await plain.load_cache(tmp_path / "a.snap")


@both
async def test_saving_and_loading_beside_running_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    # transfers a page at a time, so that much can happen between
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)
    requests = [prompt(length, length) for length in (5, 33, 47, 60, 21, 90)]
    async with engine() as alone:
        expected = [(await collect(alone, tokens))[0] for tokens in requests]
        shared = prompt(64, 99)
        answer = (await collect(alone, [*shared, 1]))[0]
    path = await saved(tmp_path / "b.snap", shared)
    async with engine(pipelined=pipelined, pages=24, slots=3) as busy:
        running = [asyncio.create_task(collect(busy, tokens)) for tokens in requests]
        await asyncio.sleep(0)
        await asyncio.gather(busy.save_cache(tmp_path / "a.snap", tokens=requests[5]), busy.load_cache(path))
        found, cached = await collect(busy, [*shared, 1])
        assert [tokens for tokens, _ in await asyncio.gather(*running)] == expected
        assert (found, cached) == (answer, 64)
        assert nothing_held(busy)
    async with engine() as warm:
        await warm.load_cache(tmp_path / "a.snap")
        assert await collect(warm, requests[5]) == (expected[5], 80)


async def test_no_room_beside_running_requests(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a.snap", prompt(144, 1))
    async with engine(pages=10) as busy:
        generation = busy.generate(prompt(60), replace(GREEDY, max_tokens=90))
        await anext(generation)
        with pytest.raises(
            SnapshotError, match=r"needs 9 pages of the cache, but running requests leave only \d of 10"
        ):
            await busy.load_cache(path)
        await generation.aclose()
        await busy.load_cache(path)
        assert (await collect(busy, prompt(144, 1)))[1] == 128


async def test_a_request_that_waits_for_pages_held_by_a_load_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await saved(tmp_path / "a.snap", prompt(96, 1))
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)
    async with engine(pages=10) as busy:
        loop, writing = asyncio.get_running_loop(), asyncio.Event()
        write = busy.core.executor.write_pages

        def slow(group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
            loop.call_soon_threadsafe(writing.set)
            write(group, pages, content)

        monkeypatch.setattr(busy.core.executor, "write_pages", slow)
        load = asyncio.create_task(busy.load_cache(path))
        await writing.wait()
        async with asyncio.timeout(20):
            # the request needs nine pages; the load holds six of ten
            assert len((await collect(busy, prompt(140)))[0]) == 12
        await load


async def test_a_prefix_that_others_push_out_of_the_cache_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine() as made:
        table = made.core.scheduler.table
        borrow = table.borrow
        monkeypatch.setattr(table, "borrow", lambda tokens: (table.clear(), borrow(tokens))[1])
        with pytest.raises(DeviceError, match="other requests push the prefix of 80 tokens out"):
            await made.save_cache(tmp_path / "a.snap", tokens=prompt(90))
        assert nothing_held(made)
    assert not list(tmp_path.iterdir())


async def test_a_failed_write_leaves_no_prefix_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await saved(tmp_path / "a.snap", prompt(90))
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1)
    async with engine() as made:
        write, calls = made.core.executor.write_pages, []

        def fail(group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
            calls.append(pages)
            if len(calls) == 3:
                raise DeviceError("lost")
            write(group, pages, content)

        monkeypatch.setattr(made.core.executor, "write_pages", fail)
        with pytest.raises(DeviceError, match="lost"):
            await made.load_cache(path)
        assert nothing_held(made)
        tokens, cached = await collect(made, prompt(90))
        assert cached == 32, "the two pages that were written whole"
        async with engine() as cold:
            assert tokens == (await collect(cold, prompt(90)))[0]


async def test_cancelling_and_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "PIECE_BYTES", 64)
    async with engine() as made:
        loop, writing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def hold(done: int, total: int) -> None:
            loop.call_soon_threadsafe(writing.set)
            go_on.wait(10)

        task = asyncio.create_task(made.save_cache(tmp_path / "a.snap", tokens=prompt(90), progress=hold))
        await writing.wait()
        task.cancel()
        loop.call_later(0.1, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not list(tmp_path.iterdir())
        assert nothing_held(made)
    for call in (
        made.save_cache(tmp_path / "a.snap", tokens=prompt(90)),
        made.load_cache(await saved(tmp_path / "b", prompt(40))),
    ):
        with pytest.raises(DeviceError, match="closed"):
            await call


def test_the_fingerprint_is_that_of_the_weights_not_of_the_target() -> None:
    base = tiny.core().manifest
    mine = snapshots.origin(base, 100).fingerprint
    assert snapshots.origin(replace(base, target="webgpu", programs=(), buffers=()), 100).fingerprint == mine
    others = [
        replace(base, provenance={"checkpoint_sha256": "1" * 64}),
        replace(base, quantization=quantized(8, 64)),
        replace(base, quantization=quantized(8, 32)),
        replace(base, quantization=quantized(8, 32, "n")),
        replace(base, step=replace(base.step, ops=base.step.ops[1:])),
        replace(base, ropes={"rope": replace(base.ropes["rope"], scale=2.0)}),
    ]
    assert len({mine, *(snapshots.origin(other, 100).fingerprint for other in others)}) == 7
