"""Features of the chat page besides chatting, in a real headless Chromium: answers in JSON and calls of its
tools, from the device; and a message that is still being written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.shared_data import shared_data
from tests.support.artifacts import Built
from tests.support.browser import PATIENCE_MS, Page, browser, new_page, serve
from tests.support.toy_artifact import heldout_script, write_toy_artifact

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bear", "fox"]},
        "most": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["kind", "most"],
    "additionalProperties": False,
}
FORCE = """
() => {
  const chat = window.nearfar.client.chat.completions;
  const create = chat.create.bind(chat);
  window.asked = [];
  chat.create = (request) => {
    window.asked.push(JSON.parse(JSON.stringify(request)));
    const choice = { type: "function", function: { name: "current_time" } };
    // A model that was not taught to call: its call is as long as it is drawn, and this one ends.
    const drawn = { temperature: 1, top_p: 1, top_k: 0, min_p: 0 };
    const forced = window.asked.length === 1 ? { tool_choice: choice } : window.later;
    return create({ ...request, ...drawn, ...forced });
  };
}
"""
KEPT = """
async () => {
  const found = [];
  for (const name of await caches.keys())
    for (const { url } of await (await caches.open(name)).keys()) found.push(url);
  return found.filter((url) => url.includes("/chunks/lib-")).length;
}
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def address(built: Built) -> Iterator[str]:
    # WebAssembly is used, because a software GPU would take 40 CPU seconds for shaders, which do not matter
    # here.
    with serve(built("classics-7M", "q4"), target="wasm") as running:
        yield running


def opened(page: Page, tokens: int) -> Page:
    """The loaded page with open settings, and a limit of `tokens` for answers."""
    page.open().wait("idle")
    page.tab.locator("#settings > summary").click()
    page.tab.locator("#max-tokens").fill(str(tokens))
    page.tab.locator("#seed").fill("1")
    return page


def said(page: Page, text: str) -> None:
    page.tab.locator("#prompt").fill(text)
    page.tab.get_by_role("button", name="Send").click()
    assert page.wait("done", "error") == "done", page.notice


def test_an_answer_in_json_comes_from_the_device(chromium: Any, address: str) -> None:
    page = opened(new_page(chromium, address), 300)
    page.tab.wait_for_function("() => document.body.dataset.offline === 'ready'", timeout=PATIENCE_MS)
    assert page.tab.evaluate(KEPT) == 0, "what nobody has asked for is not downloaded"
    assert page.tab.locator("#schema").is_hidden()
    page.tab.locator("#format").select_option("json_schema")
    page.tab.locator("#schema").fill(json.dumps(SCHEMA))
    said(page, "Who lives in the forest?")
    Draft202012Validator(SCHEMA).validate(json.loads(page.tab.locator("#answer pre code").inner_text()))
    page.tab.wait_for_function(f"async () => (await ({KEPT})()) === 1", timeout=PATIENCE_MS)
    assert page.complaints == []


def test_a_tool_is_called_in_the_page_and_told_of(chromium: Any, address: str) -> None:
    page = opened(new_page(chromium, address, bypass_csp=True), 120)
    page.tab.locator("#tools").check()
    page.tab.evaluate(FORCE)
    said(page, "What time is it?")
    line = page.tab.locator("details.call")
    assert line.count() == 1
    summary = line.locator("summary").text_content()
    assert summary.startswith("current_time → ")
    line.locator("summary").click()
    first, second = page.tab.evaluate("window.asked")[:2]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculate", "current_time", "convert"]
    called, told = second["messages"][-2:]
    [call] = called["tool_calls"]
    assert (told["role"], told["tool_call_id"]) == ("tool", call["id"])
    assert summary == f"current_time → {told['content']}"
    shown = line.locator("pre").text_content()
    given = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"), ensure_ascii=False)
    assert shown == f"current_time({given})\n→ {told['content']}"
    assert page.faults() == []
    # With the next question the model reads its calls; a reload and an export have them too.
    said(page, "Thank you")
    assert page.tab.evaluate("window.asked.at(-1).messages").count(told) == 1
    page.tab.locator("#settings > summary").click()
    with page.tab.expect_download() as download:
        page.tab.evaluate("document.getElementById('export-markdown').click()")
    exported = Path(download.value.path()).read_text(encoding="utf-8")
    assert f"> current_time({call['function']['arguments']}) → {told['content']}" in exported
    page.open().wait("idle")
    assert page.tab.locator("details.call summary").text_content() == summary
    assert page.complaints == []


def test_a_call_stays_where_no_answer_follows(chromium: Any, address: str) -> None:
    page = opened(new_page(chromium, address), 120)
    page.tab.locator("#tools").check()
    page.tab.evaluate(FORCE)
    # the answer and the descriptions of the tools together exceed the context
    page.tab.evaluate("window.later = { max_tokens: 500 }")
    page.tab.locator("#prompt").fill("What time is it?")
    page.tab.get_by_role("button", name="Send").click()
    assert page.wait("done", "error") == "error"
    assert "do not fit" in page.notice
    assert page.tab.locator("details.call").count() == 1
    assert "Broken off" in page.tab.locator("#log").inner_text()


def test_json_and_tools_at_once_are_refused_by_name(chromium: Any, address: str) -> None:
    page = opened(new_page(chromium, address), 20)
    page.tab.locator("#tools").check()
    page.tab.locator("#format").select_option("json_object")
    page.tab.locator("#prompt").fill("Hello")
    page.tab.get_by_role("button", name="Send").click()
    assert page.wait("done", "error") == "error"
    assert "calls no tools" in page.notice
    assert page.tab.locator("#prompt").input_value() == "Hello"


def test_a_model_without_tools_is_offered_none_and_a_draft_stays(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, script = heldout_script(6000)
    artifact = write_toy_artifact(
        tmp_path_factory.mktemp("toy"), shared_data("models", "classics-7M"), script
    )
    manifest = json.loads((artifact / "webgpu" / "manifest.json").read_text())
    assert not manifest.get("answers")
    with serve(artifact) as toy:
        page = opened(new_page(chromium, toy), 20)
        assert page.tab.locator("#tools").is_disabled()
        assert page.tab.locator("#tools-hint").inner_text() == "This model cannot call tools."
        page.tab.locator("#prompt").fill("Half a thought")
        page.open().wait("idle")
        assert page.tab.locator("#prompt").input_value() == "Half a thought"
        page.tab.get_by_role("button", name="Send").click()
        page.wait("done", "error")
        page.open().wait("idle")
        assert page.tab.locator("#prompt").input_value() == ""
        assert page.complaints == []
