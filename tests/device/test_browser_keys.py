"""The chat page by keyboard alone and with a screen reader, in a real headless Chromium."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared_data
from tests.support.browser import Page, browser, new_page, serve
from tests.support.made_up_cloud import CLOUD, SET_CLOUD, cloud_page
from tests.support.toy_artifact import heldout_script, write_toy_artifact

FOCUS = """
() => {
  const { activeElement: node } = document;
  if (node === document.body) return "";
  return node.id || node.getAttribute("aria-label") || node.textContent.trim();
}
"""

# Records what a screen reader reads out: each text that a live region gets.
LISTEN = """
addEventListener("DOMContentLoaded", () => {
  window.heard = [];
  const live = (node) => node?.closest?.("[aria-live], [role=status], [role=alert], [role=log], output");
  new MutationObserver((changes) => {
    for (const { target } of changes) {
      const region = live(target instanceof Element ? target : target.parentElement);
      const said = region?.textContent ?? "";
      if (said !== "" && region.getAttribute("aria-live") !== "off" && region.tagName !== "OUTPUT")
        window.heard.push(said);
    }
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
});
"""

ANSWER = ["# Three th", "ings\n\nOne **bo", "ld** word.\n\n```py\nprint", "(1)\n```\n\n- one\n", "- two"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("toy")
    artifact = write_toy_artifact(folder, shared_data("models", "classics-7M"), heldout_script(6000)[1])
    with serve(artifact) as running:
        yield running


def focus(page: Page) -> str:
    return str(page.tab.evaluate(FOCUS))


def tab_to(page: Page, wanted: str | Callable[[str], bool], key: str = "Tab") -> None:
    """Press the key until the focus is on the wanted element, as a person would."""
    seen = []
    for _ in range(60):
        page.tab.keyboard.press(key)
        seen.append(focus(page))
        if seen[-1] == wanted if isinstance(wanted, str) else wanted(seen[-1]):
            return
    pytest.fail(f"{key} does not lead to {wanted}, but to {seen}")


def ask(page: Page, text: str) -> None:
    """Write a message where the focus is, send it, and wait for the end of its answer."""
    turns = page.tab.locator(".turn.assistant").count()
    page.tab.keyboard.type(text)
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_function(
        "count => document.querySelectorAll('.turn.assistant').length > count", arg=turns
    )
    assert page.wait("done", "error") == "done", page.notice


def with_cloud(chromium: Any, address: str, **options: Any) -> Page:
    page, _ = cloud_page(chromium, address, pieces=ANSWER, **options)
    page.tab.add_init_script(LISTEN)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    return page


def with_slow_cloud(chromium: Any, address: str, **options: Any) -> Page:
    """A page whose cloud never answers: on a busy machine an answer of the toy ends between two key
    presses.
    """
    page, _ = cloud_page(chromium, address, **options)

    def hang(route: Any) -> None:
        if route.request.method != "POST":
            route.fallback()

    page.tab.route(f"{CLOUD}/**", hang)
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    page.tab.focus("#prompt")
    return page


def test_the_first_key_skips_to_the_prompt(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    assert focus(page) == "prompt"
    page.tab.evaluate("document.activeElement.blur()")
    tab_to(page, "Skip to the prompt")
    page.tab.keyboard.press("Enter")
    assert focus(page) == "prompt"


def test_sending_and_stopping_keep_the_focus(chromium: Any, address: str) -> None:
    """After Enter the focus stays in the box; after a click on a button it moves to the next button, and is
    never lost.
    """
    page = with_slow_cloud(chromium, address)
    page.tab.keyboard.type("Tell me")
    page.tab.keyboard.press("Enter")
    page.wait("generating")
    assert focus(page) == "prompt"
    page.tab.keyboard.type("Tell me")
    page.tab.keyboard.press("Enter")
    assert "sent when this answer is complete" in page.tab.inner_text("#waiting")
    page.tab.keyboard.press("Escape")
    assert page.wait("done", "error") == "done", page.notice
    assert focus(page) == "prompt"
    assert page.tab.input_value("#prompt") == "Tell me"
    assert page.tab.locator("#waiting").is_hidden()
    page.tab.keyboard.type(" more")
    tab_to(page, "send")
    page.tab.keyboard.press("Space")
    page.wait("generating")
    assert focus(page) == "stop"
    page.tab.keyboard.press("Space")
    assert page.wait("done", "error") == "done", page.notice
    assert focus(page) == "prompt"
    assert "Stopped" in page.tab.locator(".turn.assistant").last.inner_text()


def test_who_is_elsewhere_when_an_answer_ends_stays_there(chromium: Any, address: str) -> None:
    page = with_slow_cloud(chromium, address)
    page.tab.keyboard.type("Tell me")
    page.tab.keyboard.press("Enter")
    page.wait("generating")
    tab_to(page, "Settings", "Shift+Tab")
    page.tab.keyboard.press("Escape")
    assert page.wait("done", "error") == "done", page.notice
    assert focus(page) == "Settings"


def test_an_answer_is_said_once_when_it_is_whole(chromium: Any, address: str) -> None:
    page = with_cloud(chromium, address)
    ask(page, "Hello")
    page.tab.wait_for_timeout(300)
    heard = [" ".join(str(text).split()) for text in page.tab.evaluate("window.heard")]
    whole = "Three things One bold word. py print(1) one two"
    assert [text for text in heard if "Three" in text] == [whole]
    assert "Writing an answer" in heard
    # A screen reader does not read out a chat that is opened.
    page.tab.evaluate("window.heard = []")
    page.tab.reload()
    page.wait("idle")
    assert page.tab.locator(".turn.assistant").count() == 1
    assert not [text for text in page.tab.evaluate("window.heard") if "Three" in text]


def test_a_message_is_edited_and_asked_again_by_keys(chromium: Any, address: str) -> None:
    page = with_cloud(chromium, address)
    ask(page, "Hello")
    tab_to(page, "Edit", "Shift+Tab")
    page.tab.keyboard.press("Enter")
    assert focus(page) == "Edit your message"
    page.tab.keyboard.press("Escape")
    assert focus(page) == "Edit"
    page.tab.keyboard.press("Enter")
    page.tab.keyboard.press("End")
    page.tab.keyboard.type(" again")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_function(
        "() => document.querySelector('.turn.user .text')?.textContent === 'Hello again'"
    )
    assert page.wait("done", "error") == "done", page.notice
    assert focus(page) == "prompt"
    tab_to(page, "Answer again", "Shift+Tab")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_function("() => document.activeElement.id === 'prompt'")
    assert page.wait("done", "error") == "done", page.notice


def test_chats_are_opened_and_deleted_by_keys(chromium: Any, address: str) -> None:
    page = with_cloud(chromium, address)
    page.tab.on("dialog", lambda dialog: dialog.accept())
    for name in ("First", "Second", "Third"):
        ask(page, name)
        tab_to(page, "new-chat", "Shift+Tab")
        page.tab.keyboard.press("Enter")
        assert focus(page) == "prompt"
    tab_to(page, "Delete “Second”", "Shift+Tab")
    page.tab.keyboard.press("Enter")
    page.tab.locator(".chats li").nth(2).wait_for(state="detached")
    page.tab.wait_for_function("() => document.activeElement !== document.body")
    assert focus(page) == "Delete “First”"
    tab_to(page, "Third", "Shift+Tab")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_function("() => document.querySelectorAll('.turn').length === 2")
    assert focus(page) == "prompt"


def test_page_keys_scroll_the_chat_from_the_prompt(chromium: Any, address: str) -> None:
    page, _ = cloud_page(chromium, address, pieces=["line\n\n" * 200])
    page.open().wait("idle")
    page.tab.evaluate(SET_CLOUD, [f"{CLOUD}/v1", ""])
    ask(page, "Hello")
    # Each key scrolls at once, so nothing is waited for but the end of the answer's own layout.
    rest = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)"
    left = f"{rest}(document.querySelector('#scroller'))"
    page.tab.wait_for_function(f"() => {left} < 2")
    page.tab.keyboard.press("PageUp")
    assert page.tab.evaluate(left) > 100
    # Lines below the chat (speed, context) may come between the keys: the chat's height is then another.
    page.tab.set_viewport_size({"width": 1280, "height": 700})
    page.tab.keyboard.press("PageDown")
    assert page.tab.evaluate(left) < 2
    page.tab.keyboard.press("PageUp")
    page.tab.keyboard.press("PageUp")
    page.tab.keyboard.press("PageDown")
    assert page.tab.evaluate(left) > 100, "only the last page goes to the end"
    # Text that grows right after a key does not take the reader back.
    page.tab.evaluate(
        """() => {
          const page = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key }));
          page("PageDown");
          page("PageUp");
          document.querySelector("#log").append(document.createElement("p"), "more");
          return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        }"""
    )
    assert page.tab.evaluate(left) > 100
    assert focus(page) == "prompt"


def test_the_menu_of_a_narrow_screen_by_keys(chromium: Any, address: str) -> None:
    page = with_slow_cloud(chromium, address, viewport={"width": 390, "height": 800})
    page.tab.keyboard.type("Tell me")
    page.tab.keyboard.press("Enter")
    page.wait("generating")
    tab_to(page, "menu", "Shift+Tab")
    page.tab.keyboard.press("Enter")
    assert page.tab.locator("#menu").get_attribute("aria-expanded") == "true"
    tab_to(page, "Settings")
    page.tab.keyboard.press("Escape")
    assert focus(page) == "menu"
    assert page.tab.locator("#menu").get_attribute("aria-expanded") == "false"
    assert page.state == "generating", "the first Escape closes the menu alone"
    page.tab.keyboard.press("Escape")
    assert page.wait("done", "error") == "done", page.notice
