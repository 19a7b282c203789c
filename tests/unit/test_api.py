"""OpenAI's interface over the tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import pytest

from nearfar.edge_runtime import AsyncEngine, Engine
from nearfar.edge_runtime.openai.sync import LoopThread, Stream
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError, RequestError
from tests.support import tiny

HELLO = [{"role": "user", "content": "Hello"}]


def make(**options: Any) -> AsyncEngine:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    return AsyncEngine(tiny.core(**options), TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with make() as made:
        yield made


@pytest.fixture
def sync_engine() -> Iterator[Engine]:
    with Engine(make()) as made:
        yield made


async def test_chat_completion(engine: AsyncEngine) -> None:
    made = await engine.chat.completions.create(messages=HELLO, max_tokens=10, temperature=0, ignore_eos=True)
    choice = made.choices[0]
    assert made.object == "chat.completion"
    assert made.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert made.usage.prompt_tokens == 9
    assert made.usage.completion_tokens == 10
    assert made.usage.total_tokens == 19
    assert made.usage.prompt_tokens_details.cached_tokens == 0
    assert made.timings[0].ttft > 0
    assert json.loads(made.model_dump_json())["choices"][0]["message"]["content"] == choice.message.content


async def test_the_stream_gives_the_same_text(engine: AsyncEngine) -> None:
    whole = await engine.chat.completions.create(HELLO, max_tokens=20, temperature=0)
    stream = await engine.chat.completions.create(
        HELLO, stream=True, max_tokens=20, temperature=0, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_begun_answer_is_continued(engine: AsyncEngine) -> None:
    """The text continues exactly; it has only words and blanks, so that its tokens are unambiguous."""
    letters = {
        token for char, token in tiny.tokenizer().get_vocab().items() if char in "abcdefghijklmnopqrstuvwxyzĠ"
    }
    greedy: dict[str, Any] = {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "logit_bias": {token: -100 for token in range(261) if token not in letters},
    }
    whole = (await engine.chat.completions.create(HELLO, max_tokens=24, **greedy)).choices[0].message.content
    for cut in (1, 7, 23):
        begun = [*HELLO, {"role": "assistant", "content": whole[:cut]}]
        rest = await engine.chat.completions.create(
            begun, max_tokens=24 - cut, continue_final_message=True, **greedy
        )
        assert rest.choices[0].message.content == whole[cut:]
    with pytest.raises(RequestError, match="role assistant"):
        await engine.chat.completions.create(HELLO, continue_final_message=True)


async def test_a_second_turn_reports_cached_tokens(engine: AsyncEngine) -> None:
    question = [{"role": "user", "content": "What is it that I am asking you?"}]
    first = await engine.chat.completions.create(
        question, max_tokens=30, temperature=0, logit_bias={257: -100}
    )
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    again = await engine.chat.completions.create([*question, answer, *HELLO], max_tokens=3, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


async def test_stop_strings_end_the_text_and_the_request(engine: AsyncEngine) -> None:
    base = {"max_tokens": 60, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    whole = (await engine.completions.create("Hello", **base)).choices[0].text
    stop = whole[10:13]
    made = await engine.completions.create("Hello", stop=["not there", stop], **base)
    assert made.choices[0].text == whole[: whole.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.completion_tokens < 60
    assert not engine.core.scheduler.running


async def test_n_answers_differ_and_repeat_with_their_seed(engine: AsyncEngine) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 8, "temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
    made = await engine.completions.create("Tell me", **options)
    texts = [choice.text for choice in made.choices]
    assert len(set(texts)) == 3
    assert [c.text for c in (await engine.completions.create("Tell me", **options)).choices] == texts
    assert made.usage is not None
    assert made.usage.completion_tokens == 36
    pieces = ["", "", ""]
    async for chunk in await engine.completions.create("Tell me", stream=True, **options):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == texts
    single = await engine.completions.create("Tell me", **{**options, "n": 1})
    assert single.choices[0].text == texts[0]


async def test_logprobs(engine: AsyncEngine) -> None:
    made = await engine.chat.completions.create(
        HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content) == 5
    for item in logprobs.content:
        assert item.top_logprobs[0].token == item.token
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
    data = bytes(byte for item in logprobs.content for byte in item.bytes)
    assert data.decode(errors="replace").startswith(made.choices[0].message.content.rstrip("\ufffd"))
    plain = await engine.completions.create("a", max_tokens=2, temperature=0, logprobs=2)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.text_offset[0] == 0


OFFSETS = [("日本 hi", [0, 0, 0, 1, 1, 1, 2, 3, 4]), ("a\U0001f600b", [0, 1, 1, 1, 1, 2])]
"""Texts for the byte tokenizer, and the offset of each token's text: all bytes of a character have the
character's offset.
"""


@pytest.mark.parametrize(("text", "offsets"), OFFSETS)
@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_count_characters(
    engine: AsyncEngine, text: str, offsets: list[int], stream: bool
) -> None:
    form = {"type": "regex", "regex": text}
    params: Any = {"logprobs": 0, "temperature": 0, "response_format": form, "stream": stream}
    made: Any = await engine.completions.create("a", **params)
    chunks = [chunk async for chunk in made] if stream else [made]
    told = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
    assert [at for one in told for at in one.text_offset] == offsets


async def test_echo(engine: AsyncEngine) -> None:
    alone = await engine.completions.create("ab", max_tokens=3, temperature=0)
    both = await engine.completions.create("ab", max_tokens=3, temperature=0, echo=True, n=2, best_of=2)
    assert [choice.text for choice in both.choices] == ["ab" + alone.choices[0].text] * 2
    assert (both.choices[0].finish_reason, both.usage) == (alone.choices[0].finish_reason, both.usage)
    stream = await engine.completions.create("ab", max_tokens=3, temperature=0, echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == both.choices[0].text
    only = await engine.completions.create(engine.codec.encode("ab"), max_tokens=0, echo=True)
    assert (only.choices[0].text, only.choices[0].finish_reason) == ("ab", "length")
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


async def test_token_prompts_and_bad_requests(engine: AsyncEngine) -> None:
    made = await engine.completions.create([1, 2, 3], max_tokens=2, temperature=0)
    assert made.usage is not None
    assert made.usage.prompt_tokens == 3
    for call, param in [
        (engine.completions.create([1, 999]), "prompt"),
        (engine.completions.create([]), "prompt"),
        (engine.completions.create("x" * 160), "prompt"),
        (engine.completions.create("\ud800"), "prompt"),
        (engine.chat.completions.create([]), "messages"),
        (engine.chat.completions.create(HELLO, temperature=-1), "temperature"),
        (engine.chat.completions.create(HELLO, logit_bias={999: 1.0}), "logit_bias"),
        (engine.chat.completions.create(HELLO, n=0), "n"),
        (engine.completions.create("a", echo=True, logprobs=0), "echo"),
    ]:
        with pytest.raises(RequestError) as caught:
            await call
        assert caught.value.param == param, param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "gpt-4o"),
        ("user", 5),
        ("tools", [{"type": "function", "name": "f"}]),
        ("response_format", {"type": "xml"}),
        ("temprature", 0),
        ("stream_options", 5),
        ("stream_options", {"usage": True}),
        ("stream_options", {"include_usage": "no"}),
        ("continue_final_message", "no"),
        ("ignore_eos", "no"),
        ("logit_bias", {1.7: 1.0}),
        ("top_logprobs", 3),
    ],
)
async def test_nothing_that_is_asked_for_is_ignored(engine: AsyncEngine, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        await engine.chat.completions.create(HELLO, **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("prompt", [["a", "b"], [1.5], [True], 5, {"a": 1}, None])
async def test_a_prompt_of_another_kind_is_refused(engine: AsyncEngine, prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        await engine.completions.create(prompt)
    assert caught.value.param == "prompt"


async def test_the_loaded_model_may_be_named(engine: AsyncEngine) -> None:
    name = engine.manifest.model.name
    made = await engine.chat.completions.create(HELLO, model=name, user="me", max_tokens=1)
    assert made.model == name


async def test_closing_a_stream_stops_the_request(engine: AsyncEngine) -> None:
    async with await engine.chat.completions.create(
        HELLO, stream=True, n=2, temperature=0, ignore_eos=True
    ) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    assert not engine.core.scheduler.running
    task = asyncio.create_task(engine.chat.completions.create(HELLO, temperature=0, ignore_eos=True))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine.core.scheduler.running


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("chunks", [0, 1])
async def test_a_stream_that_is_closed_before_its_first_token_leaves_no_request(
    engine: AsyncEngine, chat: bool, chunks: int
) -> None:
    params: Any = {"stream": True, "n": 3, "temperature": 0, "ignore_eos": True}
    stream: Any = await (
        engine.chat.completions.create(HELLO, **params)
        if chat
        else engine.completions.create("ab", echo=True, **params)
    )
    for _ in range(chunks):  # the first chunk has the role, or the prompt
        await anext(stream)
    await stream.close()
    assert not [*engine.core.scheduler.running, *engine.core.scheduler.waiting]


async def test_streams_of_a_closed_engine_end_with_an_error() -> None:
    engine = make()
    stream = await engine.chat.completions.create(HELLO, stream=True, temperature=0, ignore_eos=True)
    await anext(stream)
    await engine.close()
    with pytest.raises(DeviceError, match="closed"):
        async for _ in stream:
            pass
    await engine.close()


def test_the_synchronous_face(sync_engine: Engine) -> None:
    made = sync_engine.chat.completions.create(HELLO, max_tokens=8, temperature=0)
    stream = sync_engine.chat.completions.create(HELLO, max_tokens=8, temperature=0, stream=True)
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == made.choices[0].message.content
    done = sync_engine.completions.create("a", max_tokens=3, temperature=0)
    assert done.choices[0].text == "".join(
        c.choices[0].text
        for c in sync_engine.completions.create("a", max_tokens=3, temperature=0, stream=True)
    )
    assert [event.token for event in sync_engine.generate([1, 2])]
    with pytest.raises(RequestError):
        sync_engine.completions.create("a", temperature=-1)


def test_a_closed_engine_says_so(recwarn: pytest.WarningsRecorder) -> None:
    engine = Engine(make())
    stream = engine.chat.completions.create([{"role": "user", "content": "Hi"}], stream=True)
    engine.close()
    for ask in (
        lambda: engine.chat.completions.create([{"role": "user", "content": "Hi"}]),
        lambda: engine.completions.create("Hi"),
        lambda: engine.embeddings.create("Hi"),
        lambda: engine.generate([1]),
        lambda: engine.save_cache("x.snap", prompt="Hi"),
        lambda: next(iter(stream)),
    ):
        with pytest.raises(DeviceError, match="the engine is closed; load the artifact again"):
            ask()
    engine.close()
    assert not list(recwarn)


def test_leaving_a_synchronous_stream_stops_the_request(sync_engine: Engine) -> None:
    for chunk in sync_engine.completions.create("a", temperature=0, stream=True, ignore_eos=True):
        if chunk.choices[0].text:
            break
    assert sync_engine.completions.create("b", max_tokens=1).choices
    assert not sync_engine.asynchronous.core.scheduler.running
    with sync_engine.completions.create("a", temperature=0, stream=True) as stream:
        assert next(iter(stream)).choices
    assert not sync_engine.asynchronous.core.scheduler.running


def test_threads_share_an_engine(sync_engine: Engine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(index: int) -> str:
        made = sync_engine.completions.create(f"{index} times", max_tokens=10, temperature=0, ignore_eos=True)
        return made.choices[0].text

    alone = [ask(index) for index in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


async def slow_to_end() -> AsyncGenerator[int, None]:
    """Takes a while to be cancelled, as a step under way does."""
    yield 1
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.3)


def test_ctrl_c_ends_a_stream_whose_item_is_on_its_way() -> None:
    loop, items = LoopThread(), slow_to_end()
    stream = Stream(loop, items, items.aclose())

    def press(_: int) -> None:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt), stream:
        list(map(press, stream))
    loop.stop()
