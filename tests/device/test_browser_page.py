"""The chat page and the runtime around the kernels in a real headless Chromium, with an artifact that
recites a text.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.shared_data import shared_data
from tests.support.browser import ARGUMENTS, PATIENCE_MS, Page, browser, launch, new_page, serve
from tests.support.made_up_cloud import CLOUD, SET_CLOUD, cloud_page
from tests.support.toy_artifact import copy_artifact, heldout_script, write_toy_artifact
from tests.support.turns import in_turns

LINK = {"prompt": "Tell me", "max_tokens": 60, "temperature": 0, "raw": 1}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def recital() -> tuple[Any, list[int]]:
    """A tokenizer, and the tokens that the artifact recites: position p is followed by token p + 1."""
    return heldout_script(6000)


@pytest.fixture(scope="module")
def tokenizer(recital: tuple[Any, list[int]]) -> Any:
    return recital[0]


@pytest.fixture(scope="module")
def script(recital: tuple[Any, list[int]]) -> list[int]:
    return recital[1]


@pytest.fixture(scope="module")
def artifact(script: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_artifact(tmp_path_factory.mktemp("toy"), shared_data("models", "classics-7M"), script)


@pytest.fixture(scope="module")
def address(artifact: Path) -> Iterator[str]:
    with serve(artifact) as running:
        yield running


@pytest.fixture(scope="module")
def recited(tokenizer: Any, script: list[int]) -> Any:
    """recited(prompt, count): the text that follows a plain prompt."""

    def following(prompt: str, count: int) -> str:
        start = max(1, len(tokenizer.encode(prompt).ids))
        return str(tokenizer.decode(script[start : start + count]))

    return following


@pytest.mark.parametrize("prompt", ["Tell me", "", "a " * 300])
def test_a_link_loads_runs_and_shows_the_text(chromium: Any, address: str, recited: Any, prompt: str) -> None:
    page = new_page(chromium, address)
    assert page.answer(**{**LINK, "prompt": prompt}) == recited(prompt, 60)
    assert page.complaints == []


# -- ending early
# -----------------------------------------------------------------------------------------------------

NAME_OF_ERROR = "const nameOf = (promise) => promise.then(() => 'no error', (error) => error.name);"


def test_loading_can_be_aborted_at_any_time_and_begun_again(
    chromium: Any, address: str, recited: Any
) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    script = f"""{NAME_OF_ERROR}
    const names = [];
    for (const phase of ["before", "manifest", "weights"]) {{
      const controller = new AbortController();
      if (phase === "before") controller.abort();
      const onProgress = (progress) => progress.phase === phase && controller.abort();
      names.push(await nameOf(createEngine(artifact, {{ signal: controller.signal, onProgress }})));
    }}
    const again = await createEngine(artifact);
    const answer = await again.completions.create({{ prompt: "", max_tokens: 20, temperature: 0 }});
    await again.dispose();
    return [names, answer.choices[0].text];"""
    names, text = page.run(script)
    assert names == ["AbortError"] * 3
    assert text == recited("", 20)


def test_an_answer_can_be_aborted_and_the_next_one_is_whole(
    chromium: Any, address: str, recited: Any
) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    script = """
    const controller = new AbortController();
    const request = { prompt: "", max_tokens: 199, temperature: 0 };
    let pieces = 0, name = "no error";
    try {
      const chunks = await engine.completions.create({ ...request, stream: true, signal: controller.signal });
      for await (const chunk of chunks) if (++pieces === 3) controller.abort();
    } catch (error) { name = error.name; }
    const whole = await engine.completions.create(request);
    return [name, pieces, whole.choices[0].text];"""
    name, pieces, text = page.run(script)
    assert name == "AbortError"
    assert pieces < 20
    assert text == recited("", 199)


def test_dispose_frees_every_gpu_buffer(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    script = f"""{NAME_OF_ERROR}
    await engine.completions.create({{ prompt: "Once", max_tokens: 5, temperature: 0 }});
    const before = await engine.stats();
    await engine.dispose();
    const after = await engine.stats();
    return [before, after, await nameOf(engine.completions.create({{ prompt: "Once", max_tokens: 5 }}))];"""
    before, after, name = page.run(script)
    assert before["gpuBuffers"] > 0
    assert before["gpuBytes"] > 0
    assert (after["gpuBuffers"], after["gpuBytes"]) == (0, 0)
    assert name == "DeviceError"


# -- shards
# ------------------------------------------------------------------------------------------------------------

SHARDS = ["00000.bin", "00001.bin"]

SPOIL_STORED_FILES = """
const root = await navigator.storage.getDirectory();
const folder = await root.getDirectoryHandle("nearfar-files");
let spoiled = 0;
for await (const handle of folder.values()) {
  const stream = await handle.createWritable({ keepExistingData: true });
  await stream.write({ type: "write", position: 1000, data: new Uint8Array([1, 2, 3, 4]) });
  await stream.close();
  spoiled++;
}
return spoiled;
"""


def test_the_second_visit_asks_for_no_shard_and_a_spoiled_one_is_fetched_again(
    chromium: Any, address: str, recited: Any
) -> None:
    context = chromium.new_context()
    page = new_page(chromium, address, context)
    assert page.answer(**LINK) == recited("Tell me", 60)
    assert sorted(page.shards) == SHARDS
    again = new_page(chromium, address, context)
    assert again.answer(**LINK) == recited("Tell me", 60)
    assert again.shards == []
    assert again.run(SPOIL_STORED_FILES) > 2
    assert again.answer(**LINK) == recited("Tell me", 60)
    assert sorted(again.shards) == SHARDS


def test_a_shard_that_is_corrupt_on_the_server_is_named(
    chromium: Any, artifact: Path, tmp_path: Path
) -> None:
    copy_artifact(artifact / "webgpu", tmp_path / "webgpu")
    shard = tmp_path / "webgpu" / "weights" / "00001.bin"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with serve(tmp_path) as address:
        page = new_page(chromium, address).open()
        assert page.wait("idle", "error") == "error"
        assert "weights/00001.bin" in page.notice


def test_an_artifact_of_a_newer_format_is_refused(chromium: Any, artifact: Path, tmp_path: Path) -> None:
    copy_artifact(artifact / "webgpu", tmp_path / "webgpu")
    manifest = tmp_path / "webgpu" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    with serve(tmp_path) as address:
        page = new_page(chromium, address).open()
        assert page.wait("idle", "error") == "error"
        assert "version 99" in page.notice


# -- the page
# ----------------------------------------------------------------------------------------------------------


def test_the_card_shows_the_model(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    card = page.tab.get_by_role("region", name="toy").inner_text()
    assert all(word in card for word in ("llama", "KB", "1,024 tokens", "f32", "Apache-2.0"))


def test_chatting_by_keyboard(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(temperature=0, max_tokens=12)
    page.wait("idle")
    hostile = "<img src=x onerror=alert(1)> & <b>bold</b>"
    page.tab.keyboard.type("Hello")
    page.tab.keyboard.press("Shift+Enter")
    page.tab.keyboard.type(hostile)
    page.tab.keyboard.press("Enter")
    page.wait("done")
    assert page.tab.locator(".turn.user .text").all_inner_texts() == [f"Hello\n{hostile}"]
    assert page.tab.locator(".turn img, .turn b").count() == 0
    assert re.search(
        r"12 tokens · [\d.]+ tokens/s · first token after [\d.]+ m?s", page.tab.inner_text("#stats")
    )
    page.tab.get_by_role("button", name="New chat").click()
    assert page.state == "idle"
    assert page.tab.locator(".turn").count() == 0


# Presses Escape from within the page: an answer of the toy takes about a second, which a test that looks in
# from outside can sleep through on a busy machine.
ESCAPE_AFTER_A_FEW_WORDS = """
new MutationObserver((_, observer) => {
  if (document.querySelector("#answer")?.textContent.length > 20) {
    observer.disconnect();
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  }
}).observe(document.body, { subtree: true, childList: true, characterData: true });
"""


def test_without_a_cloud_an_answer_has_what_the_context_has_left(chromium: Any, address: str) -> None:
    """The router rejects a request whose longest answer would not fit; here nobody else could answer it, so
    it is answered up to the context's end.
    """
    page = new_page(chromium, address).open(prompt="Tell me a long story", temperature=0, max_tokens=5000)
    page.send()
    page.tab.wait_for_function("() => document.querySelector('li.assistant .text')?.textContent.length > 10")
    page.tab.keyboard.press("Escape")
    assert page.wait("done", "error") == "done", page.notice


def test_stop_keeps_what_was_written(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(prompt="Tell me a long story", temperature=0, max_tokens=900)
    page.wait("idle")
    page.run(ESCAPE_AFTER_A_FEW_WORDS)
    page.send().wait("done")
    answer = page.tab.locator(".turn.assistant").inner_text()
    assert "Stopped" in answer
    assert 20 < len(page.text) < 1000
    assert page.tab.get_by_role("button", name="Send").is_visible()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"prompt": "Once", "temperature": "-1"}, "temperature"),
        ({"prompt": "Once", "top_p": "7"}, "top_p"),
        ({"prompt": "word " * 2000, "raw": "1", "max_tokens": "5"}, "1024"),
    ],
)
def test_a_link_that_asks_for_the_impossible_says_so(
    chromium: Any, address: str, parameters: dict[str, str], words: str
) -> None:
    page = new_page(chromium, address).open(**parameters).send()
    assert page.wait("done", "error") == "error"
    assert words in page.notice


def test_a_link_that_cannot_be_read_says_so(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(prompt="Once", max_tokens="many")
    assert page.wait("idle", "error") == "error"
    assert "max_tokens=many" in page.notice


@in_turns("scheme")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(chromium: Any, address: str, scheme: Any, width: int) -> None:
    """Checks the page before a chat, with markdown, beside an error, and with all folding parts open."""
    page, _ = cloud_page(
        chromium,
        address,
        pieces=["# One\n\n`two` [three](https://example.org)\n\n```py\nfour\n```\n\n|a|b|\n|-|-|\n|1|2|\n"],
        color_scheme=scheme,
        bypass_csp=True,
        viewport={"width": width, "height": 800},
    )
    page.open(temperature=0, max_tokens=12).wait("idle")
    assert page.faults() == []
    for at, side in enumerate(("device", "cloud")):
        if side == "cloud":
            page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
        page.tab.fill("#prompt", "Hello")
        page.tab.keyboard.press("Enter")
        page.tab.locator(".turn.assistant").nth(at).wait_for()
        assert page.wait("done", "error") == "done", page.notice
        assert page.faults() == []
    page.tab.evaluate(SET_CLOUD, ["", ""])
    page.tab.evaluate("document.querySelector('#temperature').value = -1")
    page.tab.fill("#prompt", "Hello")
    page.tab.keyboard.press("Enter")
    page.tab.locator("#notice").wait_for()
    if width < 820:
        page.tab.get_by_role("button", name="Menu").click()
    page.tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true;")
    assert page.faults() == []


def test_an_address_without_https_says_so_first(chromium: Any, artifact: Path) -> None:
    """Without https there are no WebGPU, no hashes and no storage, so the artifact cannot even be read."""
    insecure = launch(chromium.browser_type, [*ARGUMENTS, "--host-resolver-rules=MAP page.test 127.0.0.1"])
    try:
        with serve(artifact, "--allowed-host", "page.test") as address:
            page = new_page(insecure, f"http://page.test:{urlsplit(address).port}/").open()
            assert page.wait("idle", "error") == "error"
            assert "not secure" in page.notice
            assert page.complaints == []
    finally:
        insecure.close()


KEY = "sk-of-a-person"

FIND = """
const seen = new Set();
const holds = (value) => {
  if (typeof value === "string") return value.includes(argument);
  if (value === null || typeof value !== "object" || seen.has(value)) return false;
  seen.add(value);
  const names = [...Object.getOwnPropertyNames(value), "device", "policy", "records"];
  return names.some((name) => { try { return holds(value[name]); } catch { return false; } });
};
return {
  kept: JSON.stringify(localStorage).includes(argument),
  inTab: JSON.stringify(sessionStorage).includes(argument),
  published: holds(window.nearfar) || window.nearfar.client.exportRecords().includes(argument),
};
"""


def test_a_link_fills_in_the_message_and_spends_nothing(chromium: Any, address: str) -> None:
    """Any site can open the page with a link, but only a person may spend the person's API key."""
    page, asked = cloud_page(chromium, address)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", KEY])
    page.open(prompt="Write a book", system="Be long", max_tokens=100000).wait("idle")
    page.tab.wait_for_timeout(500)
    assert page.tab.input_value("#prompt") == "Write a book"
    assert page.tab.input_value("#system") == "Be long"
    assert (asked, page.state, page.tab.locator(".turn").count()) == ([], "idle", 0)
    assert page.send().wait("done", "error") == "done", page.notice
    assert page.text == "Far."
    assert asked[0].headers["authorization"] == f"Bearer {KEY}"


def test_the_key_stays_with_its_tab(chromium: Any, address: str) -> None:
    """The next server at localhost:8080 can read what is in localStorage."""
    context = chromium.new_context(service_workers="block")
    page, _ = cloud_page(chromium, address, context)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", KEY])
    assert page.run(FIND, KEY) == {"kept": False, "inTab": True, "published": False}
    page.open().wait("idle")
    assert page.tab.input_value("#cloud-key") == KEY
    other, _ = cloud_page(chromium, address, context)
    # The settings as earlier versions stored them.
    old = {"mode": "cloud_only", "address": f"{CLOUD}/v1", "key": "sk-old", "preset": None}
    other.tab.add_init_script(f"localStorage.setItem('nearfar.cloud', {json.dumps(json.dumps(old))})")
    other.open().wait("idle")
    assert other.tab.input_value("#cloud-address") == f"{CLOUD}/v1"
    assert other.tab.input_value("#cloud-key") == ""
    assert other.run(FIND, "sk-old")["kept"] is False
    nobody_asked = Page(context.new_page(), address).open()
    nobody_asked.wait("idle")
    assert nobody_asked.tab.evaluate("() => 'nearfar' in window") is False


def test_the_service_worker_leaves_when_another_server_has_the_address(
    chromium: Any, artifact: Path, tmp_path: Path
) -> None:
    context = chromium.new_context()
    with serve(artifact) as address:
        page = new_page(chromium, address, context).open()
        page.tab.wait_for_function("() => document.body.dataset.offline === 'ready'", timeout=PATIENCE_MS)
    assert page.open().wait("idle", "error") == "idle", "without its server the page goes on"
    (tmp_path / "index.html").write_text("<!doctype html><title>Another app</title>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", int(urlsplit(address).port or 0)), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab = context.new_page()
        tab.goto(address)
        assert tab.title() == "Another app"
        left = (
            "async () => !(await navigator.serviceWorker.getRegistrations()).length && !(await "
            "caches.keys()).length"
        )
        tab.wait_for_function(left, timeout=20_000)
        server.shutdown()


@pytest.mark.parametrize("how", ["no adapter", "no navigator.gpu"])
def test_missing_webgpu_is_explained(chromium: Any, address: str, how: str) -> None:
    if how == "no adapter":
        plain = launch(chromium.browser_type, ["--no-sandbox", "--disable-gpu"])
        check_missing_webgpu(new_page(plain, address))
        plain.close()
    else:
        page = new_page(chromium, address)
        page.tab.add_init_script("Object.defineProperty(Navigator.prototype, 'gpu', { value: undefined })")
        check_missing_webgpu(page)


def check_missing_webgpu(page: Page) -> None:
    page.open(prompt="Once")
    assert page.wait("idle", "error") == "error"
    first = page.tab.locator("#notice li").all_inner_texts()
    assert any(step.startswith("Chrome:") for step in first[:2])
    assert all(any(name in step for step in first) for name in ("Edge", "Firefox", "Safari"))
    assert page.shards == []


def test_the_progress_shows_bytes_while_loading(chromium: Any, address: str) -> None:
    page = new_page(chromium, address)
    page.tab.route("**/weights/*", lambda route: (time.sleep(0.5), route.continue_()))
    page.tab.goto(address, wait_until="commit")
    page.wait("loading")
    page.tab.wait_for_function(
        r"() => / of [\d.]+ KB/.test(document.querySelector('#loading-bytes').textContent)"
    )
    assert page.state == "loading"
    page.wait("idle")
    assert page.tab.locator("#loading").is_hidden()


@pytest.fixture
def loading(chromium: Any, address: str) -> Iterator[tuple[Page, Callable[[], None]]]:
    """The page with a model that loads until the function is called."""
    page, held, go = new_page(chromium, address), list[Any](), threading.Event()
    page.tab.route("**/weights/*", lambda route: route.continue_() if go.is_set() else held.append(route))
    page.tab.goto(f"{address}?temperature=0&max_tokens=12", wait_until="commit")
    page.wait("loading")
    page.tab.wait_for_function("() => !document.querySelector('#send').disabled")

    def release() -> None:
        go.set()
        for route in held:
            route.continue_()

    yield page, release
    page.tab.close()


def test_a_message_that_is_sent_while_the_model_loads_waits_in_its_box(loading: Any) -> None:
    page, release = loading
    page.tab.focus("#prompt")
    page.tab.keyboard.type("Hello")
    page.tab.keyboard.press("Enter")
    note = page.tab.locator("#waiting")
    assert "sent when the model is ready" in note.inner_text()
    assert page.tab.input_value("#prompt") == "Hello"
    assert page.tab.locator(".turn").count() == 0
    page.tab.keyboard.press("Escape")
    assert note.is_hidden()
    assert page.tab.get_by_role("button", name="Send").is_visible()
    page.tab.get_by_role("button", name="Send").click()
    assert note.is_visible()
    page.tab.focus("#prompt")
    page.tab.keyboard.type(" again")
    release()
    page.wait("done")
    assert page.tab.locator(".turn.user .text").all_inner_texts() == ["Hello again"]
    assert page.tab.input_value("#prompt") == ""
    assert note.is_hidden()
    # A message that is sent while an answer is written is sent after it.
    for text in ("Two", "Three"):
        page.tab.keyboard.type(text)
        page.tab.keyboard.press("Enter")
    asked = (
        "() => document.body.dataset.state === 'done' && document.querySelectorAll('.assistant').length === 3"
    )
    page.tab.wait_for_function(asked, timeout=PATIENCE_MS)
    assert page.tab.locator(".turn.user .text").all_inner_texts() == ["Hello again", "Two", "Three"]
    assert page.complaints == []


def test_every_control_has_a_name(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    page.tab.click("summary")
    unnamed = page.tab.evaluate(
        "[...document.querySelectorAll('input, textarea')].filter((field) => !field.labels.length)"
        ".map((f) => f.id)"
    )
    assert unnamed == []
