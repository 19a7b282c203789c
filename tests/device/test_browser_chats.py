"""The chat page as people use it, in a real headless Chromium: markdown, copies, questions asked again, and
chats that the browser keeps.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared_data
from tests.support.browser import Page, browser, new_page, serve
from tests.support.made_up_cloud import CLOUD, SET_CLOUD, cloud_page
from tests.support.toy_artifact import heldout_script, write_toy_artifact


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    artifact = write_toy_artifact(
        tmp_path_factory.mktemp("toy"), shared_data("models", "classics-7M"), heldout_script(6000)[1]
    )
    with serve(artifact) as running:
        yield running


def ask(page: Page, text: str) -> Page:
    """Send a message and wait for the end of its answer."""
    turns = page.tab.locator(".turn.assistant").count()
    page.tab.fill("#prompt", text)
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_function(
        "count => document.querySelectorAll('.turn.assistant').length > count", arg=turns
    )
    assert page.wait("done", "error") == "done", page.notice
    return page


def turns_of(page: Page) -> list[str]:
    return [str(text) for text in page.tab.locator(".turn .text").all_inner_texts()]


ANSWER = """# Three things

A **bold** word, `code <b>`, 1 &lt; 2 and [a link](https://example.org/a?b=1&c=2).

- one
- two

```python
print("<i>hello</i>")
```

| a | b |
|---|--:|
| 1 | 2 |

<img src=x onerror="document.title='hacked'"><script>document.title='hacked'</script>
[trap](javascript:document.title='hacked') ![picture](https://example.org/spy.png)
"""


def answered_in_markdown(chromium: Any, address: str, **options: Any) -> Page:
    # The answer comes in pieces of seven characters, so that it passes through every half-written state.
    pieces = [ANSWER[at : at + 7] for at in range(0, len(ANSWER), 7)]
    page, _ = cloud_page(chromium, address, pieces=pieces, **options)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    return ask(page, "Show me *markdown*")


def test_an_answer_is_shown_as_markdown_and_nothing_of_it_runs(chromium: Any, address: str) -> None:
    page = answered_in_markdown(chromium, address)
    answer = page.tab.locator("#answer")
    assert answer.locator("h3").inner_text() == "Three things"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("p code").inner_text() == "code <b>"
    assert "1 < 2" in answer.locator("p").first.inner_text()
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("pre").inner_text() == 'print("<i>hello</i>")'
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    links = answer.locator("a").evaluate_all("all => all.map((a) => [a.href, a.target, a.rel])")
    assert links == [
        [href, "_blank", "noopener noreferrer nofollow"]
        for href in ("https://example.org/a?b=1&c=2", "https://example.org/spy.png")
    ]
    assert answer.locator("img, script, i, b").count() == 0
    assert "<img src=x" in answer.inner_text()
    assert page.tab.title() == "toy · nearfar"
    # What a person writes is shown as it is.
    assert page.tab.locator(".turn.user .text").inner_text() == "Show me *markdown*"
    assert page.complaints == []


def test_code_and_answers_are_copied(chromium: Any, address: str) -> None:
    page = answered_in_markdown(chromium, address, permissions=["clipboard-read", "clipboard-write"])
    for button, text in (("Copy code", 'print("<i>hello</i>")'), ("Copy", ANSWER)):
        page.tab.get_by_role("button", name=button, exact=True).click()
        page.tab.wait_for_function("async text => (await navigator.clipboard.readText()) === text", arg=text)


def test_a_growing_answer_keeps_the_blocks_that_stay(chromium: Any, address: str) -> None:
    """Blocks that are made again flicker and lose what somebody selected."""
    page, _ = cloud_page(chromium, address, pieces=["First.\n\n"] + ["more "] * 400)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    page.tab.evaluate(
        """() => {
          window.removed = 0;
          new MutationObserver((changes) => {
            for (const { removedNodes } of changes)
              for (const node of removedNodes) if (node.textContent === "First.") window.removed++;
          }).observe(document.querySelector("#log"), { subtree: true, childList: true });
        }"""
    )
    ask(page, "Go on")
    assert page.tab.locator("#answer p").count() == 2
    assert page.tab.evaluate("window.removed") == 0


BELOW = """() => {
  const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#scroller");
  return scrollHeight - scrollTop - clientHeight;
}"""


def test_the_end_of_an_answer_stays_in_sight_until_somebody_scrolls_up(chromium: Any, address: str) -> None:
    page = answered_in_markdown(chromium, address, viewport={"width": 390, "height": 600})
    page.tab.wait_for_function(f"() => ({BELOW})() < 2")
    page.tab.set_viewport_size({"width": 390, "height": 500})
    page.tab.wait_for_function(f"() => ({BELOW})() < 2")
    page.tab.locator("#scroller").hover()
    page.tab.mouse.wheel(0, -150)
    page.tab.wait_for_function(f"() => ({BELOW})() > 100")
    page.tab.set_viewport_size({"width": 390, "height": 450})
    page.tab.wait_for_timeout(200)
    assert page.tab.evaluate(BELOW) > 100


def test_a_message_is_edited_and_answered_again_from_there(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(temperature=0, max_tokens=6)
    page.wait("idle")
    ask(page, "One")
    first = page.text
    ask(page, "Two")
    page.tab.get_by_role("button", name="Answer again").click()
    page.wait("done", "error")
    assert page.tab.locator(".turn").count() == 4
    page.tab.get_by_role("button", name="Edit").first.click()
    field = page.tab.get_by_role("textbox", name="Edit your message")
    assert field.input_value() == "One"
    field.press("Escape")
    assert turns_of(page)[0] == "One"
    page.tab.get_by_role("button", name="Edit").first.click()
    field.fill("One")
    field.press("Enter")
    page.wait("done", "error")
    assert turns_of(page)[0] == "One"
    assert (page.tab.locator(".turn").count(), page.text) == (2, first)


def test_chats_outlive_a_reload_and_are_exported_and_deleted(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(temperature=0, max_tokens=6)
    page.wait("idle")
    ask(page, "The first chat")
    page.tab.get_by_role("button", name="New chat").click()
    ask(page, "Another")
    ask(page, "and more of it")
    written = turns_of(page)
    page.open(temperature=0, max_tokens=6).wait("idle")
    assert turns_of(page) == written
    chats = page.tab.get_by_role("list", name="Chats")
    titles = chats.locator(".chat-title")
    assert titles.all_inner_texts() == ["Another", "The first chat"]
    # A restored chat goes on, and its context is counted.
    ask(page, "still there?")
    assert page.tab.locator(".turn").count() == 6
    page.tab.get_by_text("Context:").wait_for()
    titles.nth(1).click()
    page.tab.locator(".turn.user", has_text="The first chat").wait_for()
    assert page.tab.locator(".turn").count() == 2
    with page.tab.expect_download() as download:
        page.tab.get_by_role("button", name="Export JSON").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert [len(chat["turns"]) for chat in exported["chats"]] == [6, 2]
    with page.tab.expect_download() as download:
        page.tab.get_by_role("button", name="Export Markdown").click()
    assert "## You\n\nand more of it\n" in Path(download.value.path()).read_text()
    page.tab.on("dialog", lambda dialog: dialog.accept())
    page.tab.get_by_role("button", name="Delete “The first chat”").click()
    page.tab.wait_for_function("() => document.querySelectorAll('.chat-title').length === 1")
    assert page.tab.locator(".turn").count() == 0
    page.tab.get_by_role("button", name="Delete all chats").click()
    page.tab.wait_for_function("() => document.querySelectorAll('.chat-title').length === 0")
    page.open().wait("idle")
    assert titles.count() == 0
    assert page.complaints == []


# The reload begins from within the page, because an answer of the toy takes about a second.
RELOAD_AFTER_A_FEW_WORDS = """() => {
  new MutationObserver((_, observer) => {
    if ((document.querySelector("#answer")?.textContent.length ?? 0) <= 20) return;
    observer.disconnect();
    location.reload();
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


def test_an_answer_that_a_reload_interrupts_is_kept(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(temperature=0, max_tokens=900)
    page.wait("idle")
    page.tab.evaluate(RELOAD_AFTER_A_FEW_WORDS)
    page.tab.fill("#prompt", "Tell me a long story")
    with page.tab.expect_navigation():
        page.tab.keyboard.press("Enter")
    page.wait("idle")
    assert turns_of(page)[0] == "Tell me a long story"
    assert len(page.text) > 20
    assert "Interrupted" in page.tab.locator(".turn.assistant").inner_text()


def test_settings_are_kept_but_not_those_of_a_link(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(system="I am a link's", temperature="0.3")
    page.wait("idle")
    page.tab.get_by_text("Settings", exact=True).click()
    page.tab.get_by_label("Max tokens").fill("7")
    page.tab.get_by_label("Max tokens").press("Tab")
    page.open().wait("idle")
    kept = {name: page.tab.input_value(f"#{name}") for name in ("max-tokens", "system", "temperature")}
    assert kept == {"max-tokens": "7", "system": "", "temperature": ""}


def test_without_a_cloud_there_is_no_choice_of_one(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(temperature=0, max_tokens=6)
    page.wait("idle")
    ask(page, "Hello")
    assert "cloud" not in page.tab.locator("body").inner_text().lower()
    assert not page.tab.locator("#mode").is_visible()
    assert page.tab.locator(".badge:visible").count() == 0
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    assert page.tab.locator("#mode").is_visible()
    # With "Cloud only" and then no cloud, the device answers again.
    page.tab.evaluate(SET_CLOUD, ["", ""])
    ask(page, "Hello again")


def test_json_is_asked_for_where_somebody_holds_to_it(chromium: Any, address: str) -> None:
    pieces = ['{"tot', 'al": 12, "note": "```', ' <b>"}']
    page, asked = cloud_page(chromium, address, pieces=pieces)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    page.tab.get_by_text("Settings", exact=True).click()
    page.tab.get_by_label("Answers are").select_option("JSON")
    ask(page, "The bill, please")
    assert json.loads(asked[-1].post_data)["response_format"] == {"type": "json_object"}
    assert page.tab.locator("#answer pre").inner_text() == "".join(pieces)
    page.tab.get_by_label("Answers are").select_option("JSON by a schema")
    page.tab.get_by_label("JSON schema").fill('{"type": "object", "required": ["total"]}')
    ask(page, "Once more")
    sent = json.loads(asked[-1].post_data)["response_format"]
    assert sent["json_schema"]["schema"] == {"type": "object", "required": ["total"]}
    # An invalid schema is reported, and no request is sent.
    page.tab.get_by_label("JSON schema").fill("[")
    page.tab.fill("#prompt", "And now?")
    page.tab.keyboard.press("Enter")
    page.tab.locator("#notice").get_by_text("must be a JSON object").wait_for()
    assert not [request for request in asked if "And now" in request.post_data]
    assert page.tab.input_value("#prompt") == "And now?"


def test_a_key_is_kept_on_the_device_only_when_asked(chromium: Any, address: str) -> None:
    context = chromium.new_context(service_workers="block")
    page, _ = cloud_page(chromium, address, context)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", "sk-kept"])
    page.tab.get_by_text("Use a server as well").click()
    for keep in (True, False):
        page.tab.get_by_label("Keep the key on this device").set_checked(keep)
        other, _ = cloud_page(chromium, address, context)
        other.open().wait("idle")
        assert other.tab.input_value("#cloud-key") == ("sk-kept" if keep else "")


def test_the_download_is_deleted(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    page.tab.get_by_role("button", name="Delete the download").click()
    page.tab.locator("#kept-model").wait_for(state="hidden")
    assert page.open().wait("idle") == "idle"
    assert page.shards != []


def test_a_narrow_screen_folds_chats_model_and_settings_into_a_menu(chromium: Any, address: str) -> None:
    page = new_page(chromium, address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page.open().wait("idle")
    assert page.tab.locator("#side").bounding_box()["height"] < 80
    assert "Esc" not in page.tab.locator("#keys").inner_text()
    menu = page.tab.get_by_role("button", name="Menu")
    menu.click()
    assert page.tab.get_by_role("region", name="toy").is_visible()
    assert menu.get_attribute("aria-expanded") == "true"
    page.tab.keyboard.press("Escape")
    assert not page.tab.get_by_role("region", name="toy").is_visible()
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_wide_table_of_a_narrow_screen_scrolls(chromium: Any, address: str) -> None:
    """The table's words stay whole, and the page stays as wide as the screen."""
    words = ("considerable", "extraordinary", "circumstances", "notwithstanding")
    table = f"|{'|'.join(words)}|\n|-|-|-|-|\n|1|2|3|4|\n"
    page, _ = cloud_page(
        chromium, address, pieces=[table], viewport={"width": 390, "height": 844}, has_touch=True
    )
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    ask(page, "A table, please")
    box = "document.querySelector('.table-scroller')"
    assert page.tab.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
    heights = page.tab.evaluate("[...document.querySelectorAll('th')].map((cell) => cell.offsetHeight)")
    assert max(heights) < 50, "a heading of one word takes one line"
    assert page.tab.evaluate("document.documentElement.scrollWidth") == 390
