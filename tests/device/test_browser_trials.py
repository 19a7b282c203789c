"""Trials of programs for classes of GPUs in a real headless Chromium, whose software device pretends to be
unknown.

The runtime has no code for these tests. The worker's file is served with a few additional lines in front,
which change the browser's description of its adapter, and break a kernel where a test wants that.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nearfar.format.adapters import DeviceClass
from tests.shared_data import shared_data
from tests.support.browser import PATIENCE_MS, Page, browser, new_page, serve
from tests.support.toy_artifact import heldout_script, write_toy_artifact

FINALISTS = ["integrated-f32", "discrete-f32"]
CLASSES: dict[DeviceClass, int] = {"software": 0, "mobile": 250, "integrated": 1000, "discrete": 0}
"""For each class, the rounds that each of its steps wastes: the finalist of the next class is the fastest."""
HANG = "return new Promise(() => undefined);"

# A machine that is busy with other tests must not end a trial, so the page's clock is slowed down.
UNKNOWN_GPU = """
const told = { vendor: "", architecture: "", device: "", description: "unknown", isFallbackAdapter: false };
Object.defineProperty(GPUAdapter.prototype, "info", { get: () => told });
const now = performance.now.bind(performance);
performance.now = () => now() / 1000;
"""
BREAK_A_KERNEL = """
const compile = GPUDevice.prototype.createComputePipelineAsync;
GPUDevice.prototype.createComputePipelineAsync = function (descriptor) {
  if (descriptor.label === "recite_KIND") { BROKEN }
  return compile.call(this, descriptor);
};
"""
WAIT_FOR_THE_LOCK = """
const request = LockManager.prototype.request;
LockManager.prototype.request = async function (name, ...given) {
  const isHeld = async () => (await this.query()).held.some((lock) => lock.name === name);
  if (name.startsWith("nearfar-variants")) {
    console.log("wants to try programs");
    while (await isHeld()) await new Promise((resolve) => setTimeout(resolve, 10));
  }
  return request.call(this, name, ...given);
};
"""
COUNT_DEVICES = """
const open = GPUAdapter.prototype.requestDevice;
GPUAdapter.prototype.requestDevice = function (...given) {
  console.log("opens a device");
  return open.apply(this, given);
};
"""
BREAK_BINDINGS = """
const bind = GPUDevice.prototype.createBindGroup;
GPUDevice.prototype.createBindGroup = function (given) {
  if (given.label === "recite_discrete") throw new TypeError("no such bindings");
  return bind.call(this, given);
};
"""
READ_NOTES = """
const root = await navigator.storage.getDirectory();
const folder = await root.getDirectoryHandle("nearfar-variants", { create: true });
const notes = [];
for await (const handle of folder.values())
  if (!handle.name.endsWith(".part")) notes.push(JSON.parse(await (await handle.getFile()).text()));
return notes;
"""
LOAD = """
const told = [];
const loaded = await createEngine(artifact, { ...argument, onProgress: (event) => told.push(event) });
const stats = await loaded.stats();
const { choices } = await loaded.completions.create({ prompt: "", max_tokens: 20, temperature: 0 });
await loaded.dispose();
const of = (phase) => told.filter((event) => event.phase === phase).map(({ program }) => program);
return { stats, trying: of("trying"), programs: of("program"), text: choices[0].text };
"""


def breaking(kind: str, broken: str) -> str:
    """Lines for the worker that replace the code for compiling a kernel of kind KIND by `broken`."""
    return BREAK_A_KERNEL.replace("KIND", kind).replace("BROKEN", broken)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def context(chromium: Any) -> Iterator[Any]:
    # Playwright sees no requests of a page that has a service worker.
    made = chromium.new_context(service_workers="block")
    yield made
    made.close()


@pytest.fixture(scope="module")
def recital() -> tuple[Any, list[int]]:
    return heldout_script(2000)


@pytest.fixture(scope="module")
def address(recital: tuple[Any, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    out: Path = tmp_path_factory.mktemp("toy")
    checkpoint = shared_data("models", "classics-7M")
    with serve(write_toy_artifact(out, checkpoint, recital[1], CLASSES)) as running:
        yield running


@pytest.fixture(scope="module")
def recited(recital: tuple[Any, list[int]]) -> str:
    tokenizer, script = recital
    return str(tokenizer.decode(script[1:21]))


def open_page(context: Any, address: str, before: str = UNKNOWN_GPU, *, broken: str = "") -> Page:
    """A tab whose workers begin with these lines. The page loads the model at once."""
    page = new_page(None, address, context)
    change_worker(page, before + broken)
    return page.open()


def change_worker(page: Page, before: str) -> None:
    """Make workers that start from now on begin with these lines."""

    def answer(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, body=before + response.text())

    page.tab.route("**/worker.js", answer)


def load(page: Page, **options: object) -> Any:
    """The result of another load on the page, beside the page's own."""
    page.wait("idle")
    return page.run(LOAD, options)


def wait_for_trial(page: Page, program: str) -> None:
    """Wait until the page's load tries the program: it is noted, and its kernels are being compiled."""
    page.tab.wait_for_function(
        "told => document.querySelector('#loading-bytes').textContent === told",
        arg=f"Trying {program}",
        timeout=PATIENCE_MS,
    )


def kill_gpu_process() -> None:
    """Kill the GPU process of the browser that this process has started, as a failing driver would."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "--type=gpu-process" in process.cmdline():
                process.kill()


def test_finalists_are_tried_once_and_the_choice_is_kept(context: Any, address: str, recited: str) -> None:
    page = open_page(context, address)
    page.wait("idle")
    first = page.run("return [await engine.stats(), engine.model]")
    for told in first:
        assert told["program"] == "discrete-f32"
        assert (told["choice"]["why"], told["choice"]["deviceClass"]) == ("timed", "integrated")
        assert list(told["choice"]["measured"]) == FINALISTS
        assert all(each["decode"] > 0 and each["large"] > 0 for each in told["choice"]["measured"].values())
    card = page.tab.get_by_role("region", name="toy").inner_text()
    assert "discrete-f32; timed just now" in card
    shown = page.tab.locator("#loading-bytes").text_content()
    assert not shown.startswith("Trying"), "the page stopped saying so when the trial was over"
    again = load(page)
    assert (again["stats"]["program"], again["stats"]["choice"]["why"]) == ("discrete-f32", "kept")
    assert (again["trying"], again["programs"], again["text"]) == ([], ["discrete-f32"], recited)
    for key in ("gpuBuffers", "gpuBytes"):
        assert first[0][key] == again["stats"][key], "what trials took is given back"
    pinned = load(page, program="mobile-f32")
    assert (pinned["stats"]["program"], pinned["stats"]["choice"]["why"]) == ("mobile-f32", "pinned")
    assert pinned["text"] == recited
    assert page.complaints == []


def test_software_tries_nothing(context: Any, address: str) -> None:
    page = open_page(context, address, before="")
    told = load(page)
    assert (told["stats"]["program"], told["stats"]["choice"]["why"]) == ("software-f32", "software")
    assert (told["trying"], page.run(READ_NOTES)) == ([], [])


def test_a_program_whose_tab_died_is_never_tried_again(context: Any, address: str) -> None:
    dying = open_page(context, address, broken=breaking("discrete", HANG))
    wait_for_trial(dying, "discrete-f32")
    beside = open_page(context, address)
    told = load(beside)
    assert (told["stats"]["program"], told["stats"]["choice"]["why"]) == ("integrated-f32", "busy")
    assert beside.run(READ_NOTES)[0]["lost"] == [], "a live tab's note is not a death"
    beside.tab.close()
    with suppress(Exception):  # Playwright reports the crash
        dying.tab.goto("chrome://crash", timeout=10_000)
    dying.tab.close()
    later = open_page(context, address)
    later.wait("idle")
    choice = later.run("return engine.model")["choice"]
    assert (choice["why"], list(choice["measured"])) == ("timed", ["integrated-f32", "mobile-f32"])
    assert later.run(READ_NOTES)[0]["lost"] == ["discrete-f32"]


@pytest.mark.parametrize("leave", ["close", "go elsewhere"])
def test_a_page_that_is_left_speaks_against_no_program(context: Any, address: str, leave: str) -> None:
    leaving = open_page(context, address, broken=breaking("discrete", HANG))
    wait_for_trial(leaving, "discrete-f32")
    if leave == "close":
        leaving.tab.close()
    else:
        leaving.tab.goto(f"{address}style.css")
    later = open_page(context, address)
    later.wait("idle")
    choice = later.run("return engine.model")["choice"]
    assert (choice["why"], list(choice["measured"])) == ("timed", FINALISTS)


def test_a_page_that_is_left_while_another_opens_speaks_against_no_program(
    context: Any, address: str
) -> None:
    leaving = open_page(context, address, broken=breaking("discrete", HANG))
    wait_for_trial(leaving, "discrete-f32")
    later = new_page(None, address, context)
    change_worker(later, UNKNOWN_GPU + WAIT_FOR_THE_LOCK)
    with later.tab.expect_console_message(lambda said: said.text == "wants to try programs"):
        later.open()
    leaving.tab.close()
    later.wait("idle")
    choice = later.run("return engine.model")["choice"]
    assert (choice["why"], list(choice["measured"])) == ("timed", FINALISTS)
    assert later.run(READ_NOTES)[0]["lost"] == []


def test_loading_can_be_aborted_while_a_kernel_compiles(context: Any, address: str) -> None:
    page = open_page(context, address, before="")
    page.wait("idle")
    change_worker(page, UNKNOWN_GPU + breaking("discrete", HANG))
    name = page.run("""
        const controller = new AbortController();
        const onProgress = ({ phase, program }) => {
          if (phase === "trying" && program === "discrete-f32") controller.abort();
        };
        const loading = createEngine(artifact, { signal: controller.signal, onProgress });
        return loading.then(() => "no error", (error) => error.name);""")
    assert name == "AbortError"
    assert page.run(READ_NOTES) == [{"lost": [], "chosen": {}, "trying": None}]


def test_a_program_that_loses_the_device_is_out_for_good(context: Any, address: str, recited: str) -> None:
    page = open_page(context, address, broken=breaking("discrete", "this.destroy();"))
    page.wait("idle")
    assert page.complaints == []
    choice = page.run("return engine.model")["choice"]
    assert (choice["why"], list(choice["measured"])) == ("timed", ["integrated-f32", "mobile-f32"])
    assert page.run(READ_NOTES)[0]["lost"] == ["discrete-f32"]
    well = load(open_page(context, address))
    assert (well["stats"]["program"], well["stats"]["choice"]["why"]) == ("mobile-f32", "kept")
    assert well["text"] == recited


def test_a_program_that_takes_the_gpus_process_down_is_out_for_good(context: Any, address: str) -> None:
    until_lost = "return this.lost.then(() => compile.call(this, descriptor));"
    page = open_page(context, address, broken=breaking("discrete", until_lost))
    wait_for_trial(page, "discrete-f32")
    kill_gpu_process()
    page.wait("idle", "error")
    assert (page.state, page.run(READ_NOTES)[0]["lost"]) == ("idle", ["discrete-f32"])
    assert list(page.run("return engine.model")["choice"]["measured"]) == ["integrated-f32", "mobile-f32"]


def test_a_kernel_that_does_not_compile_is_passed_over_this_time(context: Any, address: str) -> None:
    broken = "return Promise.reject(new GPUPipelineError('no such thing', { reason: 'internal' }));"
    page = open_page(context, address, broken=breaking("discrete", broken))
    page.wait("idle")
    assert list(page.run("return engine.model")["choice"]["measured"]) == ["integrated-f32", "mobile-f32"]
    well = open_page(context, address)
    well.wait("idle")
    assert list(well.run("return engine.model")["choice"]["measured"]) == FINALISTS


@pytest.mark.parametrize(
    "broken", [breaking("discrete", "return Promise.reject(new Error('no such thing'));"), BREAK_BINDINGS]
)
def test_a_program_that_fails_is_passed_over_by_name(context: Any, address: str, broken: str) -> None:
    page = new_page(None, address, context)
    said: list[str] = []
    page.tab.on("console", lambda message: said.append(message.text))
    change_worker(page, UNKNOWN_GPU + COUNT_DEVICES + broken)
    assert page.open().wait("idle", "error") == "idle", page.notice
    assert list(page.run("return engine.model")["choice"]["measured"]) == ["integrated-f32", "mobile-f32"]
    assert said.count("opens a device") == 1, "what is on the device stays there"
    assert [text for text in said if "discrete-f32" in text and "passed over" in text]


def test_only_what_can_be_had_is_tried(context: Any, address: str, recited: str) -> None:
    page = new_page(None, address, context)
    page.tab.route("**/*", lambda route: route.abort() if lies_in_others(route) else route.fallback())
    change_worker(page, UNKNOWN_GPU)
    assert page.open().wait("idle", "error") == "idle", page.notice
    told = load(page)
    assert (told["stats"]["program"], told["stats"]["choice"]["why"]) == ("software-f32", "offline")
    assert (told["trying"], told["text"]) == ([], recited)
    well = open_page(context, address)
    well.wait("idle")
    assert list(well.run("return engine.model")["choice"]["measured"]) == FINALISTS


def lies_in_others(route: Any) -> bool:
    """Whether a file belongs to the programs that an offline visit does not have."""
    return any(name in route.request.url for name in ("integrated", "discrete", "mobile"))


def test_without_storage_programs_are_tried_at_every_load(context: Any, address: str) -> None:
    private = "StorageManager.prototype.getDirectory = async () => { throw new DOMException('no'); };"
    page = open_page(context, address, UNKNOWN_GPU + private)
    page.wait("idle")
    assert page.run("return engine.model")["choice"]["why"] == "timed"
    assert load(page)["stats"]["choice"]["why"] == "timed"
