"""The choice of a model on the chat page, and the models that the browser keeps, in headless Chromium."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearfar.format.seal import seal
from tests.shared_data import shared_data
from tests.support.browser import Page, browser, new_page, serve
from tests.support.toy_artifact import copy_artifact, heldout_script, write_toy_artifact


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


def changed(toy: Path, to: Path, name: str, feature: str | None = None) -> Path:
    """A copy of the toy artifact with another name, that requires a feature of the GPU."""
    manifest = copy_artifact(toy, to) / "manifest.json"
    told = json.loads(manifest.read_text(encoding="utf-8"))
    told["model"]["name"] = name
    if feature is not None:
        told["programs"][0]["requires"]["features"] = [feature]
    manifest.write_text(seal(told), encoding="utf-8")
    return to


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("models")
    toy = write_toy_artifact(root, shared_data("models", "classics-7M"), heldout_script(6000)[1]) / "webgpu"
    second = changed(toy, root / "second", "Second & <b>best</b>")
    demanding = changed(toy, root / "demanding", "demanding", "float32-blendable-never")
    with serve(toy, str(second), str(demanding)) as running:
        yield running


def choices(page: Page) -> Any:
    page.tab.get_by_text("Choose a model").click()
    return page.tab.get_by_role("list", name="Models").get_by_role("button")


def test_a_model_is_chosen_by_size_and_fit_and_the_chat_stays(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open(temperature=0, max_tokens=6)
    page.wait("idle")
    assert page.tab.get_by_role("region", name="toy").is_visible()
    page.tab.fill("#prompt", "Hello")
    page.tab.keyboard.press("Enter")
    assert page.wait("done", "error") == "done", page.notice
    rows = choices(page)
    toy, second, demanding = (rows.nth(at) for at in range(3))
    demanding.get_by_text("Does not run here").wait_for()
    assert "float32-blendable-never" in demanding.inner_text()
    assert "Runs here" in second.inner_text()
    assert all(fact in second.inner_text() for fact in ("KB", "1,024 tokens of context", "Apache-2.0"))
    assert "kept in this browser" in toy.inner_text()
    assert "kept in this browser" not in second.inner_text()
    assert toy.get_attribute("aria-current") == "true"
    demanding.press("Enter")
    with page.tab.expect_navigation():
        second.click()
    assert page.wait("idle", "error") == "idle", page.notice
    assert page.tab.locator("#model-name").inner_text() == "Second & <b>best</b>"
    assert page.tab.locator(".turn.user .text").all_inner_texts() == ["Hello"]
    page.open().wait("idle")
    assert page.tab.locator("#model-name").inner_text() == "Second & <b>best</b>"
    assert page.complaints == []


def test_the_open_list_is_readable_by_all(chromium: Any, address: str) -> None:
    for scheme in ("light", "dark"):
        page = new_page(chromium, address, color_scheme=scheme, bypass_csp=True).open()
        page.wait("idle")
        choices(page).nth(2).get_by_text("Does not run here").wait_for()
        assert page.faults() == []


def test_downloads_of_other_models_are_deleted(chromium: Any, address: str) -> None:
    page = new_page(chromium, address).open()
    page.wait("idle")
    assert not page.tab.locator("#kept-others").is_visible()
    with page.tab.expect_navigation():
        choices(page).nth(1).click()
    page.wait("idle")
    page.tab.get_by_text("of 1 other model").wait_for()
    page.tab.get_by_role("button", name="Delete other downloads").click()
    page.tab.locator("#kept-others").wait_for(state="hidden")
    assert "kept in this browser" in page.tab.locator("#kept-model").inner_text()


def test_where_there_is_one_model_there_is_no_choice(chromium: Any, tmp_path: Path) -> None:
    toy = write_toy_artifact(tmp_path, shared_data("models", "classics-7M"), [1, 2, 3])
    with serve(toy) as address:
        page = new_page(chromium, address).open()
        assert page.wait("idle", "error") == "idle", page.notice
        assert not page.tab.get_by_text("Choose a model").is_visible()
