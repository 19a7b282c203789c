"""The chat page in headless Chromium as device and `nearfar`'s own server as cloud: one browser and one
server for all tests.

Both run the same weights, so a greedy answer is the same text, whichever side gives which part of it; one
test has a larger model in the cloud. The tests build on each other: the last ones stop the servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import pytest

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.openai.knowledge import read_prompt
from nearfar.fallback_server.engines.local import TextOptions
from nearfar.fallback_server.engines.opening import EngineOptions, open_engine
from nearfar.fallback_server.http.app import AppOptions
from nearfar.routing.device import artifact_of
from nearfar.routing.fitted import FittedRouter, Point, Probe, Regression, row_tokens
from tests.support.artifacts import Built
from tests.support.browser import PATIENCE_MS, Page, browser, new_page, serve
from tests.support.proxy import Proxy
from tests.support.servers import RunningServer

EASY = "And the king?"
SECRET = "Tell me of the hidden letter."
HARD = (
    "A train leaves at 9:15 and covers 240 km in 2.5 hours. How many km/h is that, if it stops 3 times for "
    "4 minutes?"
)
OPTIONS = EngineOptions(
    threads=1, kv_memory="32MB", text=replace(TextOptions(), text_processes=1, template_timeout=10)
)
CLIENT = """
const { client } = window.nearfar;
const { content, setup, own, tokens } = argument;
if (setup.policy) client.setPolicy(setup.policy);
if (setup.cloud) client.setCloud({ baseURL: setup.cloud, model: setup.model ?? "classics-1M" });
const request = { messages: [{ role: "user", content }], temperature: 0, max_tokens: tokens, x_nearfar: own };
request.stream_options = { include_usage: true };
let text = "", told = null, usage = null;
try {
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
    told = chunk.x_nearfar ?? told;
    usage = chunk.usage ?? usage;
  }
} catch (error) { return { text, error: `${error.name}: ${error.message}` }; }
return { text, told, usage, free: (await client.device?.stats())?.freeTokens };
"""
READ = """
const [content, ...tokens] = argument;
return engine.readPrompt([{ role: "user", content }], { tokens });
"""
LOSE_THE_DEVICE = """
steps => {
  const original = GPUDevice.prototype.createCommandEncoder;
  GPUDevice.prototype.createCommandEncoder = function (...given) {
    if (--steps === 0) {
      GPU.prototype.requestAdapter = async () => null;
      this.destroy();
    }
    return original.apply(this, given);
  };
}
"""


@dataclass
class Stage:
    """The page, the server behind the network, and the requests of the page."""

    page: Page
    server: RunningServer
    allowed: AppOptions
    network: Proxy
    servers: ExitStack
    page_server: ExitStack

    def ask(
        self, content: str = EASY, tokens: int = 12, setup: dict[str, Any] | None = None, **own: Any
    ) -> Any:
        """An answer of the page's client: {text, told} or {text, error}."""
        argument = {"content": content, "setup": setup or {}, "own": own, "tokens": tokens}
        return self.page.run(CLIENT, argument)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The decision records of the page's client."""
        return list(self.page.run("return window.nearfar.client.records;", None))

    @property
    def sent(self) -> list[str]:
        """The requests that the page has sent to the cloud so far."""
        return [url for url in self.page.requests if "/v1/" in url]

    def lose_device(self, steps: int) -> None:
        """Call GPUDevice.destroy() in the engine's worker after `steps` steps; the worker finds no other
        device.
        """
        self.page.tab.workers[-1].evaluate(LOSE_THE_DEVICE, steps)

    def wait_for_device(self) -> None:
        """Wait until the page has loaded the model again by itself."""
        script = "() => window.nearfar.engine !== null && window.nearfar.client.device !== null"
        self.page.tab.wait_for_function(script, timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def stage(built: Built) -> Iterator[Stage]:
    artifact = built("classics-1M", "q4", "cpu", "wasm", "webgpu")
    with ExitStack() as servers, ExitStack() as page_server, browser() as chromium:
        # The server must know the page's origin, and the page the server's address.
        network = Proxy(0)
        servers.callback(network.close)
        address = page_server.enter_context(serve(artifact, "--cloud", network.address))
        allowed = AppOptions(cors=(address.rstrip("/"),))
        server = RunningServer(lambda: open_engine([str(artifact / "cpu")], "artifact", OPTIONS), allowed)
        servers.callback(server.close)
        network.target = server.port
        page = new_page(chromium, address).open(difficulty="english")
        assert page.wait("idle", "error") == "idle", page.notice
        yield Stage(page, server, allowed, network, servers, page_server)


@pytest.fixture(scope="module")
def expected(stage: Stage) -> str:
    """The answer where nothing fails."""
    text: str = stage.ask(tokens=24, mode="device_only")["text"]
    assert len(text) > 20
    return text


@pytest.fixture(autouse=True)
def _fresh(stage: Stage) -> None:
    stage.page.requests.clear()
    stage.network.connections = 0
    setup = {"policy": {"ttft": None, "retry": {"base": 0.01}}, "cloud": stage.network.address}
    stage.ask(tokens=1, setup=setup, mode="device_only")


def codes(told: dict[str, Any]) -> list[str]:
    return [reason["code"] for reason in told["reasons"]]


def test_easy_stays_long_goes_hard_goes(stage: Stage, expected: str) -> None:
    easy = stage.ask(tokens=24)
    script = "return [client.records.at(-1).request.prompt_tokens, await engine.countTokens(argument)];"
    counted = stage.page.run(
        f"const {{ client }} = window.nearfar; {script}", [{"role": "user", "content": EASY}]
    )
    assert counted[0] == counted[1] > 5
    assert (easy["text"], easy["told"]["path"], codes(easy["told"])) == (expected, ["device"], ["easy"])
    assert (stage.sent, stage.network.connections) == ([], 0)
    score = stage.ask(HARD, tokens=2)["told"]["reasons"][0]["value"]
    assert score > easy["told"]["reasons"][0]["value"], "the model finds it harder"
    hard = stage.ask(HARD, setup={"policy": {"difficulty_threshold": score}})
    assert (hard["told"]["path"], codes(hard["told"])) == (["cloud"], ["hard"])
    assert hard["told"]["spent"] > 0
    assert stage.sent
    # A device with a short context.
    small = (
        "window.small = await createEngine(artifact, { contextLength: 128 }); window.nearfar.client.device "
        "= small;"
    )
    stage.page.run(small)
    long = stage.ask("Tell me of the fox and the crow. " * 16)
    assert (long["told"]["path"], codes(long["told"])) == (["cloud"], ["context"])
    assert long["text"]
    stage.page.run("window.nearfar.client.device = engine; await window.small.dispose();")


def test_a_router_fitted_in_python_sees_the_same_in_the_tab(stage: Stage, built: Built) -> None:
    cpu = built("classics-1M", "q4", "cpu", "wasm", "webgpu") / "cpu"
    with Engine.load(cpu, threads=1, kv_memory="8MB") as engine:
        tokens = row_tokens(engine.asynchronous.manifest.model.vocab_size)
        asked = [{"role": "user", "content": EASY}]
        shown = engine.loop.run(read_prompt(engine.asynchronous, asked, tokens=tokens)).knowledge
        artifact = artifact_of(engine.asynchronous)
    with serve(built("classics-1M", "q4", "cpu", "wasm", "webgpu"), target="wasm") as address:
        page = new_page(stage.page.tab.context.browser, address).open()
        assert page.wait("idle", "error") == "idle", page.notice
        rows = [each.run(READ, [EASY, *tokens]) for each in (stage.page, page)]
        page.tab.context.close()
    for row in rows:
        assert row["prompt_tokens"] == shown.prompt_tokens
        assert row["top"] == pytest.approx(shown.top, abs=2e-3)
        assert row["logprobs"] == pytest.approx([each for _, each in shown.row], abs=2e-3)
    features = ("length", "entropy", "best", "margin", "sure")
    zeros, ones = (0.0,) * len(features), (1.0,) * len(features)
    prompt = Regression(features, zeros, ones, (-0.5, 0.3, -0.4, 0.2, 0.3), 0.1, 0.5, None)
    half = len(tokens) // 2
    probe = Probe(tokens, (0.01,) * half + (-0.01,) * (len(tokens) - half), 0.0)
    prompt = replace(prompt, probe=probe)
    assert abs(probe.value(shown.row)) > 0.05, "the probe must count"
    made = FittedRouter("classics", artifact, 50, prompt, 0.0, None, None, 8, (Point(0, 1, None, 0, None),))
    data = {"format": "nearfar-router", "version": 2, **asdict(made)}
    before = stage.ask(tokens=1, mode="device_only")
    answer = stage.ask(setup={"policy": {"ttft": None, "router": data}})
    (reason,) = answer["told"]["reasons"]
    assert (answer["told"]["route"], reason["code"]) == ("cloud", "hard")
    assert answer["free"] == before["free"], "no prompt that was read is still held"
    assert reason["value"] == pytest.approx(made.gain(shown.model_dump()), abs=0.002)
    assert [token for token, _ in stage.records[-1]["knowledge"]["row"]] == list(tokens)
    # An answer on the device starts from the prompt that was read, which is not a whole number of pages.
    kept = {**data, "threshold": 1.0}
    read = stage.ask("Tell me of the goose that read.", setup={"policy": {"ttft": None, "router": kept}})
    assert (read["told"]["path"], codes(read["told"])) == (["device"], ["easy"])
    usage = read["usage"]
    assert usage["prompt_tokens"] % 16 > 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert read["free"] == before["free"], "no prompt that was read is still held"
    again = stage.ask("Tell me of the goose that read.", mode="device_only")
    assert read["text"] == again["text"], "the answer is that of a prompt which nothing holds"
    other = stage.ask(setup={"policy": {"router": {**data, "artifact": "0/q4"}}})
    assert "the router was fitted to classics (checkpoint 0, q4), but the device runs" in other["error"]


def test_the_page_shows_who_answered_and_why(stage: Stage) -> None:
    tab = stage.page.tab
    tab.evaluate("document.querySelector('#max-tokens').value = 6")
    for mode, path, label in (("device_only", "device", "Device"), ("cloud_only", "cloud", "Cloud")):
        tab.select_option("#mode", mode)
        tab.fill("#prompt", EASY)
        before = tab.locator(".turn.assistant").count()
        tab.keyboard.press("Enter")
        tab.wait_for_function(
            "count => document.querySelectorAll('.turn.assistant').length > count", arg=before
        )
        assert stage.page.wait("done", "error") == "done", stage.page.notice
        badge = tab.locator(".badge").last
        assert (badge.get_attribute("data-path"), badge.locator("button").inner_text()) == (path, label)
    assert not badge.locator(".tip").is_visible()
    badge.hover()
    assert "the mode is cloud_only" in badge.locator(".tip").inner_text()
    assert "cloud tokens used" in badge.locator(".tip").inner_text()
    assert "127.0.0.1" in tab.locator("#privacy").inner_text()
    tab.select_option("#mode", "auto")
    assert stage.page.complaints == []


def test_a_browser_without_webgpu_is_answered_by_the_cloud(stage: Stage) -> None:
    page = new_page(stage.page.tab.context.browser, stage.page.address)
    page.tab.add_init_script("Object.defineProperty(Navigator.prototype, 'gpu', { value: undefined })")
    assert page.answer(prompt=EASY, max_tokens=6, temperature=0)
    assert page.tab.locator(".badge").get_attribute("data-path") == "cloud"
    assert page.shards == []
    page.tab.context.close()


def test_the_network_is_cut_in_mid_stream_and_the_text_is_whole(stage: Stage, expected: str) -> None:
    network = Proxy(stage.server.port)
    network.cut_after = 3500
    policy = {"mode": "prefer_cloud", "ttft": None, "retry": {"attempts": 0}}
    answer = stage.ask(tokens=24, setup={"policy": policy, "cloud": network.address})
    assert network.cut_after is None, "the cut must happen"
    assert answer["text"] == expected
    assert (answer["told"]["path"], answer["told"]["degraded"]) == (["cloud", "device"], True)
    assert codes(answer["told"]) == ["preferred", "cut"]
    network.close()


def test_the_gpu_device_is_destroyed_in_mid_answer_and_the_text_is_whole(stage: Stage, expected: str) -> None:
    stage.lose_device(16)
    answer = stage.ask(tokens=24)
    assert answer["text"] == expected
    assert (answer["told"]["path"], answer["told"]["degraded"]) == (["device", "cloud"], False)
    assert codes(answer["told"])[-1] == "cut"
    stage.wait_for_device()
    again = stage.ask(tokens=24)
    assert (again["text"], again["told"]["path"]) == (expected, ["device"]), "the device is back"


def test_a_larger_model_takes_over_what_is_hard_and_what_is_lost(
    stage: Stage, built: Built, expected: str
) -> None:
    larger = str(built("classics-7M", "q4") / "cpu")
    server = RunningServer(lambda: open_engine([larger], "artifact", OPTIONS), stage.allowed)
    try:
        with httpx.Client(base_url=server.address, timeout=60) as http:

            def answer_of_larger(content: str, begun: str, tokens: int) -> str:
                messages = [{"role": "user", "content": content}]
                own: dict[str, Any] = {"model": "classics-7M", "temperature": 0, "max_tokens": tokens}
                if begun:
                    messages.append({"role": "assistant", "content": begun})
                    own |= {"continue_final_message": True, "add_generation_prompt": False}
                reply = (
                    http.post("/v1/chat/completions", json={**own, "messages": messages})
                    .raise_for_status()
                    .json()
                )
                return str(reply["choices"][0]["message"]["content"])

            setup = {
                "policy": {"ttft": None, "difficulty_threshold": 0.0},
                "cloud": server.address,
                "model": "classics-7M",
            }
            hard = stage.ask(HARD, setup=setup)
            assert (hard["told"]["path"], hard["text"]) == (["cloud"], answer_of_larger(HARD, "", 12))
            stage.lose_device(16)
            lost = stage.ask(tokens=24, setup={"policy": {"ttft": None, "difficulty_threshold": 1.0}})
            assert lost["told"]["path"] == ["device", "cloud"]
            text = lost["text"]
            shown = [text[:end] for end in range(1, len(text)) if expected.startswith(text[:end])]
            wholes = (begun + answer_of_larger(EASY, begun, 24) for begun in reversed(shown))
            assert any(whole.startswith(text) for whole in wholes), (
                "the device's beginning, and what 7M makes of it"
            )
    finally:
        server.close()
    stage.wait_for_device()


def test_private_never_causes_a_request(stage: Stage) -> None:
    policy = {
        "mode": "prefer_cloud",
        "ttft": None,
        "escalation": "continue",
        "monitor": {"logprob": -1e-6, "min_tokens": 2},
    }
    expected = stage.ask(SECRET, tokens=24, mode="device_only")["text"]
    answer = stage.ask(SECRET, tokens=24, setup={"policy": policy}, private=True)
    assert (answer["text"], codes(answer["told"])) == (expected, ["private"])
    again = stage.ask(SECRET, tokens=24)
    assert (again["text"], codes(again["told"])) == (expected, ["private"]), "the text stays private"
    stage.lose_device(16)
    lost = stage.ask(SECRET, tokens=24, private=True)
    assert expected.startswith(lost["text"])
    assert "offers no GPU" in lost["error"]
    stage.wait_for_device()
    refused = stage.ask("Tell me of the fox and the crow. " * 300, private=True)
    assert "the request is private" in refused["error"]
    assert (stage.sent, stage.network.connections) == ([], 0)


def test_the_server_is_stopped_and_answers_go_on_here(stage: Stage, expected: str) -> None:
    policy = {"mode": "prefer_cloud", "ttft": None, "retry": {"attempts": 0}}
    before = stage.ask(tokens=24, setup={"policy": policy})
    assert (before["text"], before["told"]["path"]) == (expected, ["cloud"])
    stage.server.kill()
    for _ in range(4):
        after = stage.ask(tokens=24)
        assert (after["text"], after["told"]["path"], after["told"]["degraded"]) == (
            expected,
            ["device"],
            True,
        )
    assert codes(after["told"]) == ["preferred", "breaker_open"]


def test_the_page_works_without_its_server(stage: Stage, expected: str) -> None:
    tab = stage.page.tab
    tab.wait_for_function("() => document.body.dataset.offline === 'ready'", timeout=PATIENCE_MS)
    stage.page_server.close()
    stage.page.open(max_tokens=24, temperature=0)
    assert stage.page.wait("idle", "error") == "idle", stage.page.notice
    assert stage.page.shards == []
    # The earlier chat is open again.
    tab.get_by_role("button", name="New chat").click()
    tab.fill("#prompt", EASY)
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => document.querySelector('#answer') !== null")
    assert stage.page.wait("done", "error") == "done", stage.page.notice
    assert stage.page.text == expected
