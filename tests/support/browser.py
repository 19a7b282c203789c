"""A real Chromium with WebGPU on its software device, and the real `nearfar web` behind it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.paths import WEB

ARGUMENTS = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
# The software device on a busy machine: a shader takes seconds to compile.
PATIENCE_MS = 240_000


def chromium() -> str:
    """The browser's executable; the calling test is skipped where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("needs Chromium (apt-get install chromium)")


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium. Playwright runs only as long as the block, for its event loop would stop
    asyncio tests.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        started = launch(running.chromium, ARGUMENTS)
        yield started
        started.close()


def launch(kind: Any, arguments: list[str]) -> Any:
    """A browser of that kind (`browser.browser_type`); without ARGUMENTS it has no WebGPU adapter."""
    return kind.launch(executable_path=chromium(), args=arguments)


@contextmanager
def serve(artifact: Path, *options: str, target: str | None = "webgpu") -> Iterator[str]:
    """`nearfar web` for an artifact; gives the address that it prints. Of a folder with several, the one for
    `target`; None: the folder, and the browser chooses.
    """
    if target is not None and (artifact / target).is_dir():
        artifact = artifact / target
    if not (WEB / "dist" / "page" / "index.html").is_file():
        pytest.skip("the chat page is not built (run `make setup`)")
    command = [sys.executable, "-m", "nearfar", "web", str(artifact), "--no-open", "--port", "0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found, "nearfar web ended without naming its address"
            yield found[0]
        finally:
            server.terminate()


@dataclass
class Page:
    """A tab on the chat page: what it shows, and which files it asked for."""

    tab: Any
    address: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, **parameters: object) -> "Page":
        """Go to the page with these link parameters; the log of requests begins again."""
        self.requests.clear()
        self.tab.goto(f"{self.address}?{urlencode(parameters)}" if parameters else self.address)
        return self

    def wait(self, *states: str) -> str:
        """Wait until the page is in one of the states; gives which."""
        self.tab.wait_for_function(
            "states => states.includes(document.body?.dataset.state)", arg=list(states), timeout=PATIENCE_MS
        )
        return self.state

    def send(self) -> "Page":
        """Send what the box holds, once somebody can answer."""
        assert self.wait("idle", "error") == "idle", self.notice
        self.tab.get_by_role("button", name="Send").click()
        return self

    def answer(self, **parameters: object) -> str:
        """The text that the page's link with these parameters gives, once it is sent."""
        state = self.open(**parameters).send().wait("done", "error")
        assert state == "done", self.notice
        return self.text

    @property
    def state(self) -> str:
        return str(self.tab.evaluate("document.body.dataset.state"))

    @property
    def text(self) -> str:
        """What #answer holds, to the byte: innerText would fold white space."""
        return str(self.tab.evaluate("document.querySelector('#answer .text, #answer').textContent"))

    @property
    def notice(self) -> str:
        return str(self.tab.locator("#notice").inner_text())

    @property
    def shards(self) -> list[str]:
        """Names of the weight files asked for since `open`."""
        return [url.rsplit("/", 1)[-1] for url in self.requests if "/weights/" in url]

    def faults(self) -> list[list[str]]:
        """What axe-core finds that screen readers and keyboards would stumble over: rule and element. For a
        page with bypass_csp, since axe is put into it.
        """
        axe = WEB / "node_modules" / "axe-core" / "axe.min.js"
        if not axe.is_file():
            pytest.skip("axe-core is not installed (run `make setup`)")
        self.tab.add_script_tag(path=str(axe))
        rules = "({ violations }) => violations.map(({ id, nodes }) => [id, nodes[0].html])"
        return list(self.tab.evaluate(f"() => axe.run().then({rules})"))

    def run(self, script: str, argument: object = None) -> Any:
        """Run a piece of JavaScript with `engine` (the page's own), `createEngine` and `artifact` (its
        URL) in scope.
        """
        body = (
            f"async argument => {{ const {{ engine, createEngine, artifact }} = window.nearfar; {script} }}"
        )
        return self.tab.evaluate(body, argument)


def new_page(running: Any, address: str, context: Any = None, **options: Any) -> Page:
    """Open a tab in a fresh profile (no shards stored), or in `context`. The page publishes its engine as
    `window.nearfar` there, which it does only where somebody has asked for it before it begins.
    """
    tab = (context or running.new_context(**options)).new_page()
    tab.add_init_script("window.nearfar = {}")
    page = Page(tab, address)
    tab.on("request", lambda request: page.requests.append(request.url))
    tab.on("pageerror", lambda error: page.complaints.append(str(error)))
    return page
