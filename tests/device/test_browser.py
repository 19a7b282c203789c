"""Models in a real headless Chromium, behind the real `nearfar web`, give the same texts as elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.kernels.buckets import Buckets
from tests.shared_data import shared_data
from tests.support import architectures, tiny
from tests.support.artifacts import Built, reference
from tests.support.browser import Page, browser, new_page, serve
from tests.support.turns import in_turns, share

STORY = {"prompt": "", "max_tokens": 199, "temperature": 0, "raw": 1}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def stories(built: Built) -> Iterator[str]:
    """The address at which stories260K is served."""
    with serve(built("stories260K", "none")) as address:
        yield address


@pytest.fixture(scope="module")
def classics(built: Built) -> Iterator[str]:
    """The address at which classics-7M is served at q4."""
    with serve(built("classics-7M", "q4")) as address:
        yield address


@pytest.fixture(scope="module")
def classics_page(chromium: Any, classics: str) -> Page:
    """A tab with classics-7M at q4, for several tests: each load compiles its kernels (7 CPU seconds)."""
    page = new_page(chromium, classics).open()
    page.wait("idle")
    return page


@pytest.fixture(scope="module")
def other_page(chromium: Any, classics: str) -> Page:
    """Another tab with the model of `classics_page`, whose prefix cache has none of that page's prompts."""
    page = new_page(chromium, classics).open()
    page.wait("idle")
    return page


@pytest.fixture(autouse=True)
def _closed(chromium: Any) -> Iterator[None]:
    """Closes the tabs that a test opened: they would go on compiling kernels that nobody asks for. Tabs of
    the module's fixtures are open before this one is set up.
    """
    before = chromium.contexts
    yield
    for context in chromium.contexts:
        if context not in before:
            context.close()


def golden() -> str:
    return shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")


def test_the_golden_story_by_link(chromium: Any, stories: str) -> None:
    page = new_page(chromium, stories)
    assert page.answer(**STORY) == golden()
    assert page.complaints == []


@pytest.mark.parametrize("target", ["webgpu", None])
def test_a_cold_load_asks_for_six_files_and_the_shards_at_most(
    chromium: Any, built: Built, target: str | None
) -> None:
    """Counts the requests for an artifact, or for a folder with several, where the artifact has to be found
    first.

    Requests of the page, which keeps the manifest for its service worker, are not counted.
    """
    with serve(built("stories260K", "none"), target=target) as address:
        page = new_page(chromium, address, chromium.new_context(service_workers="block")).open()
        page.wait("idle")
        assert len([url for url in page.requests if "/artifact/" in url]) < 20
        page.tab.evaluate("async () => (await navigator.storage.getDirectory()).remove({ recursive: true })")
        page.requests.clear()
        page.run("const other = await createEngine(artifact); await other.dispose();")
        asked = [url.partition("/artifact/")[2] for url in page.requests]
    small = [path for path in asked if path and "weights/" not in path]
    assert len(small) <= 6
    assert [path for path in small if "packs/" in path] != []
    assert len(asked) > len(small), "the shards come too: the load was cold"


@in_turns("quant")
@pytest.mark.parametrize("quant", ["q4", "q8"])
def test_greedy_tokens_equal_transformers_on_the_dequantized_weights(
    chromium: Any, classics_page: Page, built: Built, quant: str
) -> None:
    prompt = "The old king looked at the sea and said"
    expected = reference("classics-7M", quant)
    asked = {"prompt": prompt, "max_tokens": 100, "temperature": 0}
    if quant == "q4":
        script = "return (await engine.completions.create(argument)).choices[0].text;"
        text = classics_page.run(script, asked)
    else:
        with serve(built("classics-7M", quant)) as address:
            text = new_page(chromium, address).answer(**asked, raw=1)
    assert text == expected.continuation(expected.tokenizer.encode(prompt), 100)


def story_prompts(lengths: list[int]) -> dict[int, str]:
    """Beginnings of stories that have exactly the given number of tokens."""
    text = (
        shared_data("text", "tinystories-sample", "tinystories.txt")
        .read_text(encoding="utf-8")
        .lstrip()[:3000]
    )
    tokenizer = reference("stories260K", "none").tokenizer
    found: dict[int, str] = {}
    for end in range(1, len(text)):
        found.setdefault(len(tokenizer.encode(text[:end])), text[:end])
    return {length: found[length] for length in lengths}


def test_prompts_around_the_bucket_borders_equal_one_unbroken_prefill(chromium: Any, stories: str) -> None:
    page = new_page(chromium, stories).open()
    page.wait("idle")
    expected = reference("stories260K", "none")
    lengths = [2, 3, 4, 5, 15, 16, 17, 18, 63, 64, 65, 66, 127, 128, 129, 255, 256, 257, 258, 320, 400]
    for length, prompt in story_prompts(share(lengths, 3)).items():
        script = "return engine.completions.create({ prompt: argument, max_tokens: 12, temperature: 0 });"
        answer = page.run(script, prompt)
        assert answer["usage"]["prompt_tokens"] == length
        assert answer["choices"][0]["text"] == expected.continuation(expected.tokenizer.encode(prompt), 12), (
            length
        )


TURNS = """
const messages = [{ role: "user", content: "Tell me of the fox and the grapes in the garden of the king." }];
const ask = () => engine.chat.completions.create({ messages, max_tokens: 16, temperature: 0 });
const first = await ask();
messages.push(first.choices[0].message, { role: "user", content: "And what did the crow say to that?" });
return [messages, await ask()];
"""


def test_a_second_turn_through_the_prefix_cache_equals_a_cold_start(
    classics_page: Page, other_page: Page
) -> None:
    messages, warm = classics_page.run(TURNS)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    script = "return engine.chat.completions.create({ messages: argument, max_tokens: 16, temperature: 0 });"
    cold = other_page.run(script, messages)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"][0]["message"] == warm["choices"][0]["message"]


MIXED = [
    {"prompt": "Once", "temperature": 0, "max_tokens": 14},
    {"prompt": "The sea", "temperature": 1, "seed": 7, "max_tokens": 11},
    {"prompt": "A very long way from the village there lived " * 4, "temperature": 0, "max_tokens": 8},
    {"prompt": "He said", "temperature": 0.8, "top_p": 0.9, "seed": 1, "max_tokens": 16},
    {
        "prompt": "She said",
        "temperature": 1,
        "top_k": 20,
        "seed": 2,
        "frequency_penalty": 0.5,
        "max_tokens": 13,
    },
]


def test_mixed_requests_at_once_equal_each_alone(classics_page: Page, other_page: Page) -> None:
    texts = "const text = async (request) => (await engine.completions.create(request)).choices[0].text;"
    together = classics_page.run(f"{texts} return Promise.all(argument.map(text));", MIXED)
    loop = "const all = []; for (const request of argument) all.push(await text(request)); return all;"
    assert together == other_page.run(f"{texts} {loop}", MIXED)


def test_one_seed_gives_the_same_text_as_on_cpu(chromium: Any, built: Built, classics: str) -> None:
    from nearfar.edge_runtime import Engine

    sampling = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.95, "seed": 1234}
    with Engine.load(built("classics-7M", "q4") / "cpu") as engine:
        expected = engine.completions.create(prompt="In the forest", **sampling).choices[0].text
    assert new_page(chromium, classics).answer(prompt="In the forest", raw=1, **sampling) == expected


def test_windows_and_several_tables_of_rotations_equal_transformers(chromium: Any, tmp_path: Path) -> None:
    """Gemma 3: five layers of seven see 12 positions, and turn by a table of their own."""
    case = next(case for case in architectures.CASES if str(case) == "gemma3_text-plain")
    checkpoint, logits = str(architectures.checkpoint(case)), architectures.reference(case)
    build(
        BuildOptions(
            checkpoint,
            tmp_path,
            ("webgpu",),
            quant="none",
            buckets=Buckets((1, 16), (1,)),
            context=128,
            device_classes=("software",),
        )
    )
    tokenizer = tiny.tokenizer()
    with serve(tmp_path) as address:
        page = new_page(chromium, address).open()
        page.wait("idle")
        for prompt in (
            "A cat",
            "Fewer words than a page of it, but more than a window",
            "The same beginning. " * 4,
        ):
            tokens = tokenizer.encode(prompt).ids
            for _ in range(16):
                tokens.append(int(np.argmax(logits(tokens)[-1])))
            script = (
                "return engine.completions.create({ prompt: argument, max_tokens: 16, temperature: 0, "
                "ignore_eos: true });"
            )
            answer = page.run(script, prompt)
            assert prompt + answer["choices"][0]["text"] == tokenizer.decode(
                tokens, skip_special_tokens=True
            ), prompt
