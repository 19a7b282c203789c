"""The Vulkan runtime on a device: staging, recording, errors, recovery, leaks. test_backends.py tests the
results of kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nearfar.cli import typer_app
from nearfar.edge_runtime import Engine, SamplingParams, devices
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.steps import StepWork, Write, launch
from nearfar.edge_runtime.executors.vulkan import binding, commands, device, instance
from nearfar.edge_runtime.executors.vulkan.binding import DEVICE_LOST, fail
from nearfar.edge_runtime.executors.vulkan.blocks import Memory
from nearfar.edge_runtime.executors.vulkan.executor import VulkanExecutor
from nearfar.errors import DeviceError, DeviceLost
from nearfar.format.manifest import Requires
from tests.shared_data import shared_data
from tests.support.artifacts import Built
from tests.support.backends import Lab, cached_pages, executor, greedy, require

ENGINES = int(os.environ.get("NEARFAR_TEST_ENGINES", "200"))
"""Number of engines that are opened and closed to find leaks."""

PAGES = 40


@pytest.fixture(autouse=True, scope="module")
def _there() -> None:
    require("vulkan")


@pytest.fixture(scope="module")
def artifact(built: Built) -> Artifact:
    return Artifact.open(built("stories260K", "none") / "vulkan")


def open_executor(
    artifact: Artifact, precision: str = "f32", debug: bool = False, **options: Any
) -> VulkanExecutor:
    program = next(p for p in artifact.manifest.programs if p.precision == precision)
    return VulkanExecutor(artifact, program, Settings((PAGES,), 512, debug=debug), **options)


@pytest.fixture
def plain(artifact: Artifact) -> Iterator[VulkanExecutor]:
    made = open_executor(artifact)
    yield made
    made.close()


def test_a_fetch_that_is_read_twice_lends_its_memory_once(plain: VulkanExecutor) -> None:
    """Otherwise the next two fetches would share memory, and the later one would overwrite the earlier."""
    again = plain.fetch("tokens", 4)
    assert (again() == again()).all()
    reads = []
    for value in (1, 2):
        plain.write("tokens", np.full(4, value, np.int32))
        reads.append(plain.fetch("tokens", 4))
    assert [read().tolist() for read in reads] == [[1] * 4, [2] * 4]


def test_where_little_can_be_mapped_the_rest_is_staged(
    artifact: Artifact, plain: VulkanExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card with 85 GB in a virtual machine had only 42 GB of mappable memory."""
    take = Memory._block

    def block(memory: Memory, group: Any, size: int, kind: int, mapped: bool) -> Any:
        if (
            mapped
            and kind == memory.kinds.large
            and memory.kinds.large_mapped
            and memory.held + size > 1 << 20
        ):
            fail("the GPU", f"reserving {size} bytes", "VkErrorOutOfDeviceMemory", memory.held)
        return take(memory, group, size, kind, mapped)

    assert plain._memory.kinds.large_mapped
    monkeypatch.setattr(Memory, "_block", block)
    made = open_executor(artifact)
    try:
        assert not made._memory.kinds.large_mapped
        assert made._memory.held > 1 << 20
        made.write("tokens", np.arange(4, dtype=np.int32))
        assert made.fetch("tokens", 4)().tolist() == [0, 1, 2, 3]
    finally:
        made.close()


def test_free_memory_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory plan of a second engine must not use the free memory from before the first one."""
    vk = binding.require_vulkan()
    # the description of a card with memory of its own
    gpu = replace(device.gpus()[0], budgeted=True, shared=False)
    monkeypatch.setattr(device, "gpus", lambda _debug=False: (gpu,))
    ask, left = vk.vkGetPhysicalDeviceMemoryProperties2, 3 << 20

    def told(handle: Any, both: Any) -> None:
        ask(handle, both)
        if both.pNext != vk.ffi.NULL:
            budget = vk.ffi.cast("VkPhysicalDeviceMemoryBudgetPropertiesEXT*", both.pNext)
            for heap in range(both.memoryProperties.memoryHeapCount):
                budget.heapBudget[heap], budget.heapUsage[heap] = 8 << 20, (8 << 20) - left

    monkeypatch.setattr(vk, "vkGetPhysicalDeviceMemoryProperties2", told)
    assert devices.device("vulkan").probe().memory == 3 << 20
    left = 1 << 20
    assert devices.device("vulkan").probe().memory == 1 << 20
    left = -1
    assert devices.device("vulkan").probe().memory == 0


def engine(artifact: Artifact, made: VulkanExecutor, **options: Any) -> Engine:
    """An engine around a given executor."""
    from nearfar.edge_runtime.openai.api import AsyncEngine
    from nearfar.edge_runtime.text.codec import TextCodec

    program = next(p for p in artifact.manifest.programs if p.precision == made.precision)
    core = EngineCore(made, artifact.manifest, program, (PAGES,), **options)
    return Engine(AsyncEngine(core, TextCodec.open(artifact)))


def test_memory_out_of_the_hosts_reach_gives_the_same_text(artifact: Artifact) -> None:
    """As on a GPU without mapped memory, all data passes through the staging ring, and returns through mapped
    memory.
    """
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    staged = open_executor(artifact, direct=False)
    assert not staged._memory.kinds.small_mapped
    with engine(artifact, staged) as made:
        assert made.completions.create("", max_tokens=199, temperature=0).choices[0].text == golden
        pages = cached_pages(made, [1] * 16) or [0]
        content = staged.read_pages(0, [*pages, 3])
        rng = np.random.default_rng(0)
        fresh = {name: rng.random(array.shape).astype(array.dtype) for name, array in content.items()}
        staged.write_pages(0, [5, 7], fresh)
        staged.copy_page(0, 7, 6)
        staged.copy_page(0, 6, 8)
        for name, array in staged.read_pages(0, [5, 8]).items():
            np.testing.assert_array_equal(array, fresh[name])


def test_writes_never_overtake_and_are_never_overtaken(artifact: Artifact) -> None:
    """A hundred steps are enqueued before the first result is read; each must read its own inputs."""
    for direct in (True, False):
        made = open_executor(artifact, direct=direct)
        vocab = artifact.manifest.model.vocab_size
        ints = np.full((16, 8), -1, np.int32)
        ints[0, 0] = 0
        made.write("sample_i32", ints)
        reads = []
        for i in range(100):
            logits = np.zeros((1, vocab), np.float32)
            logits[0, i * 5 % vocab] = 1
            made.write("logits", logits)
            made.run("greedy", 1)
            reads.append((i * 5 % vocab, made.fetch("sampled", 1)))
            if i % 10 == 3:  # a second write of the same rows before a run
                made.write("logits", logits)
                made.write("logits", np.roll(logits, 1))
                made.run("greedy", 1)
                reads.append(((i * 5 + 1) % vocab, made.fetch("sampled", 1)))
        assert [int(read()[0]) for _, read in reads] == [token for token, _ in reads]
        made.close()


def test_a_step_is_one_submit_and_records_only_its_writes(plain: VulkanExecutor) -> None:
    queue = plain._queue
    kept, submits = [], []
    record, submit = queue.kept, queue.submit_call
    queue.kept = lambda: kept.append(1) or record()  # type: ignore[method-assign, func-returns-value]
    queue.submit_call = lambda *args: submits.append(args[2].commandBufferCount) or submit(*args)
    ints = np.full((16, 8), -1, np.int32)
    ints[0, 0] = 0

    def step(position: int) -> Any:
        writes = [Write("positions", np.array([position], np.int32)), Write("sample_i32", ints)]
        return launch(plain, StepWork(1, (), writes, sampler="greedy", sampler_size=1, sampled=1))

    before = step(0)
    for position in range(1, 40):
        after = step(position)
        before.read()
        before = after
    before.read()
    assert len(submits) == 40
    assert max(submits) == 4, "writes, step, sampler, copy of the result"
    assert len(kept) <= 4, "the plans of step and sampler, and a copy for each of two steps in flight"


def lose(made: VulkanExecutor, after: int) -> None:
    """Make the queue report a lost device from the given submit on."""
    left, submit = [after], made._queue.submit_call

    def call(*args: Any) -> Any:
        left[0] -= 1
        return submit(*args) if left[0] >= 0 else DEVICE_LOST

    made._queue.submit_call = call


def test_an_engine_goes_on_where_its_device_was_lost(artifact: Artifact) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, max_tokens=25, ignore_eos=True),
    ]
    prompts = [[1, 50, 70, 9] * 10, [1, 300, 20]]

    def ask(made: Engine) -> list[list[int]]:
        streams = [made.generate(tokens, p) for tokens, p in zip(prompts, params, strict=True)]
        return [[event.token for event in stream] for stream in streams]

    with engine(artifact, open_executor(artifact)) as calm:
        expected = ask(calm)
    opened = []

    def reopen() -> VulkanExecutor:
        opened.append(open_executor(artifact))
        if len(opened) == 2:
            lose(opened[-1], 8)
        return opened[-1]

    first = open_executor(artifact)
    lose(first, 12)
    with engine(artifact, first, reopen=reopen) as made:
        assert ask(made) == expected
        assert (made.asynchronous.core.epoch, len(opened)) == (1, 1)
        assert first.memory_used() == 0, "what was lost is freed"
        lose(opened[0], 0)
        assert ask(made) == expected, "lost at the first submit, and again in the middle"
        assert (made.asynchronous.core.epoch, len(opened)) == (3, 3)


def test_without_recovery_the_error_names_the_device(artifact: Artifact) -> None:
    made = open_executor(artifact)
    name = device.gpus()[0].name
    lose(made, 2)
    with engine(artifact, made) as broken, pytest.raises(DeviceLost, match="was lost while") as error:
        greedy(broken, [1, 2, 3], 10)
    assert name in str(error.value)
    assert "nearfar devices" in str(error.value)


def test_loading_recovers_by_itself(lab: Lab) -> None:
    with lab.open("stories", "vulkan-f32", verify=False) as made:
        expected = greedy(made, [1, 9, 8], 12)
        lose(executor(made), 3)  # type: ignore[arg-type]
        assert greedy(made, [1, 9, 8], 12) == expected
        assert made.asynchronous.core.epoch == 1


def test_the_validation_layer_finds_nothing(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer does not overlook a missing barrier: it reports one where the test leaves barriers out."""
    layers = {layer.layerName for layer in binding.require_vulkan().vkEnumerateInstanceLayerProperties()}
    if instance.VALIDATION not in layers:
        pytest.skip("the Vulkan validation layer is not installed (vulkan-validationlayers)")
    messages = instance.instance(True).messages
    for options in ({"direct": True}, {"direct": False}):
        made = open_executor(artifact, debug=True, **options)
        made.write_pages(0, [1], {name: page for name, page in made.read_pages(0, [2]).items()})
        made.copy_page(0, 1, 3)
        with engine(artifact, made) as checked:
            greedy(checked, [1] * 20, 5)
    assert messages == []
    monkeypatch.setattr(commands, "barriers", lambda launches: [False] * len(launches))
    made = open_executor(artifact, debug=True)
    made.run("step", 1)
    made.close()
    assert any("SYNC-HAZARD" in message for message in messages)
    messages.clear()


def test_what_a_device_lacks_is_named(artifact: Artifact) -> None:
    gpu = device.gpus()[0]
    with pytest.raises(DeviceError, match=f"{gpu.name.split()[0]}.* lacks shaderFloat128"):
        device.open_device(gpu, Requires(("shaderInt64", "shaderFloat128")))
    with pytest.raises(DeviceError, match=r"maxComputeSharedMemorySize [\d,]+ of 1,000,000,000"):
        device.open_device(gpu, Requires((), {"maxComputeSharedMemorySize": 10**9}))


def test_out_of_memory_says_what_to_do() -> None:
    opened = device.open_device(device.gpus()[0], Requires(()))
    memory = Memory(opened)
    try:
        with pytest.raises(DeviceError, match=r"allocates at most .*--kv-memory"):
            memory.reserve([1 << 50], memory.kinds.large, False)
        assert memory.held == 0
        with pytest.raises(
            DeviceError, match=r"is out of memory while loading, with 5,000 bytes .*--kv-memory"
        ):
            fail(opened.gpu.name, "loading", "VkErrorOutOfDeviceMemory", 5000)
    finally:
        memory.close()
        opened.close()


def test_a_device_without_compute_or_with_an_old_driver_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device._gpus.cache_clear()
    try:
        monkeypatch.setattr(device, "_queue_family", lambda _handle: None)
        with pytest.raises(DeviceError, match="has no queue for compute"):
            device.gpus()
        monkeypatch.undo()
        monkeypatch.setattr(device, "API", (9, 0))
        with pytest.raises(DeviceError, match=r"has Vulkan 1\.\d, and 1\.2 is needed"):
            device.gpus()
    finally:
        device._gpus.cache_clear()


def test_no_loader_and_no_package_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    binding.require_vulkan.cache_clear()
    try:
        for error, message in ((OSError("no lib"), "libvulkan1"), (ImportError("no module"), "pip install")):

            def gone(_name: str, error: Exception = error) -> None:
                raise error

            monkeypatch.setattr(binding, "import_module", gone)
            with pytest.raises(DeviceError, match=message):
                binding.require_vulkan()
    finally:
        binding.require_vulkan.cache_clear()


def test_the_command_line_chooses_device_and_precision(artifact: Artifact) -> None:
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    run = [
        "run",
        str(artifact.path),
        "",
        "--raw",
        "--temperature",
        "0",
        "--max-tokens",
        "20",
        "--precision",
        "f32",
    ]
    done = CliRunner().invoke(typer_app, [*run, "--device", "vulkan:0"])
    assert done.exit_code == 0, done.output
    assert done.stdout
    assert golden.startswith(done.stdout)
    wrong = CliRunner().invoke(typer_app, [*run, "--device", "vulkan:no such device"])
    assert "no Vulkan device 'no such device' here, only vulkan:0" in str(wrong.exception)


def test_no_driver_says_what_to_install(tmp_path: Path) -> None:
    empty = {
        **os.environ,
        "VK_ICD_FILENAMES": str(tmp_path / "none.json"),
        "VK_DRIVER_FILES": str(tmp_path / "none.json"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "nearfar", "devices", "--json"],
        env=empty,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    vulkan = json.loads(done.stdout)["vulkan"]
    assert vulkan["devices"] == []
    assert "mesa-vulkan-drivers" in vulkan["reason"]


def test_the_pipeline_cache_is_kept_and_a_damaged_one_ignored(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.bin"
    home = "nearfar.edge_runtime.executors.vulkan.pipelines.cache_file"
    monkeypatch.setattr(home, lambda _identity, _kernels: file)
    for damage in (None, b"nonsense", b""):
        if damage is not None:
            file.write_bytes(damage)
        made = open_executor(artifact)
        made.run("greedy", 1)
        made.fetch("sampled", 1)()
        made.close()
        assert len(file.read_bytes()) > 32


LEAKS = """
import gc, json, sys, threading, time, psutil
from nearfar.edge_runtime import Engine, SamplingParams, devices

def opened(number):
    with Engine.load(sys.argv[1], device="vulkan", precision="f32", kv_memory="1MB", verify=False) as made:
        if number % 20 == 0:  # not all compute: compiling kernels takes longer than all the rest
            assert len(list(made.generate([1, 5, 7], SamplingParams(temperature=0, max_tokens=2)))) == 2

def measure():
    # A thread of asyncio.to_thread that a busy processor holds up still has its result, the loaded engine.
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(60)
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), process.num_threads(), len(gc.get_objects())

def settled(before):
    # The system counts a thread that has ended for a moment longer.
    end = time.monotonic() + 60
    while True:
        found = measure()
        if found[1] <= before[1] and found[2] <= before[2] or time.monotonic() > end:
            return found
        time.sleep(0.05)

count = int(sys.argv[2])
for number in range(40):  # until allocators and caches have what they want
    opened(number)
found = [measure()]
for _ in range(2):
    for number in range(count):
        opened(number)
    found.append(settled(found[0]))
print(json.dumps(found))
"""


@pytest.mark.alone  # the test counts threads, objects and bytes of a process, so it runs alone
def test_engines_opened_and_closed_leak_nothing(built: Built) -> None:
    """A leak grows with each engine: objects and bytes that come once, in one half of the engines, are none.

    The process's threads share one heap: glibc's heap of each thread would grow over hundreds of engines
    and hide leaks.
    """
    half = ENGINES // 2
    command = [sys.executable, "-c", LEAKS, str(built("stories260K", "none") / "vulkan"), str(half)]
    done = subprocess.run(
        command, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size, handles, threads, objects = zip(*found, strict=True)
    assert handles[-1] <= handles[0], found
    assert threads[-1] <= threads[0], found
    assert min(later - before for before, later in pairwise(objects)) < half, found
    # less than one engine takes
    assert min(later - before for before, later in pairwise(size)) < 4 << 20, found
