"""Kernels compiled in the background: each once, several at a time, the needed ones first; and an engine that
waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.executors.compiling import Compiler, unfinished
from nearfar.edge_runtime.snapshots.transfer import capture, restore
from nearfar.errors import DeviceError, OutOfMemory
from nearfar.format.manifest import Kernel
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor
from tests.unit.test_engine_recovery import MIXED, PAGES, collect, prompt

PATIENCE = 20
"""Seconds after which a test that waits for another thread fails."""

Named = tuple[str, Kernel]


def kernel(name: str, file: str | None = None, entry: str = "main") -> Named:
    return name, Kernel(file=f"{name}.wgsl", entry=entry, access=("read",), sha256=file or name)


def test_kernels_of_one_content_are_compiled_once() -> None:
    made: list[str] = []

    def make(name: str, _: Kernel) -> str:
        made.append(name)
        return name

    compiler = Compiler(make, 2)
    first = compiler.begin([kernel("a", "same"), kernel("b", "same"), kernel("c", "same", "other")])
    again = compiler.begin([kernel("b", "same")])
    assert [future.result(PATIENCE) for future in [*first, *again]] == ["a", "a", "c", "a"]
    assert sorted(made) == sorted(compiler.made()) == ["a", "c"]
    assert unfinished(compiler.begin([kernel("a", "same")])) == []
    compiler.close()


def test_what_was_made_last_is_rested_on_though_it_is_closed_at_once() -> None:
    gate, rested = threading.Event(), []
    compiler = Compiler(
        lambda _, __: gate.wait(PATIENCE), 1, rest=lambda: rested.append(len(compiler.made()))
    )
    (first,) = compiler.begin([kernel("a")])
    while not first.running():
        pass  # a kernel that has not begun is cancelled
    closing = threading.Thread(target=compiler.close)
    closing.start()
    while not compiler.begin([kernel("b")])[0].cancelled():
        pass  # the compiler is not closed yet
    gate.set()
    closing.join(PATIENCE)
    assert first.result(0)
    assert rested == [1]


def test_several_are_compiled_at_a_time_and_the_threads_end_when_all_is_done() -> None:
    meeting = threading.Barrier(3, timeout=PATIENCE)
    compiler = Compiler(lambda _, __: meeting.wait(), 3)
    for future in compiler.begin([kernel(str(i)) for i in range(6)]):
        future.result(PATIENCE)
    while any(thread.name == "nearfar-compile" for thread in threading.enumerate()):
        pass
    compiler.close()


def test_what_is_wanted_comes_before_what_may_be() -> None:
    gate, made = threading.Event(), list[str]()

    def make(name: str, _: Kernel) -> None:
        gate.wait(PATIENCE)
        made.append(name)

    compiler = Compiler(make, 1)
    first = compiler.begin([kernel("running")])
    while not first[0].running():
        pass
    later = compiler.begin([kernel(name) for name in "abcd"], later=True)
    wanted = compiler.begin([kernel("wanted"), kernel("c")])
    gate.set()
    for future in [*later, *wanted]:
        future.result(PATIENCE)
    assert made == ["running", "wanted", "c", "a", "b", "d"]
    compiler.close()


def test_a_kernel_that_failed_is_tried_again() -> None:
    errors = [OutOfMemory("no room")]

    def make(name: str, _: Kernel) -> str:
        if errors:
            raise errors.pop()
        return name

    compiler = Compiler(make, 1)
    (failed,) = compiler.begin([kernel("a")])
    assert isinstance(failed.exception(PATIENCE), OutOfMemory)
    assert compiler.made() == []
    (made,) = compiler.begin([kernel("a")])
    assert made.result(PATIENCE) == "a"
    compiler.close()


def test_closing_waits_for_what_runs_and_begins_nothing_more() -> None:
    running, gate, made = threading.Event(), threading.Event(), list[str]()

    def make(name: str, _: Kernel) -> None:
        running.set()
        gate.wait(PATIENCE)
        made.append(name)

    compiler = Compiler(make, 1)
    futures = compiler.begin([kernel("a"), kernel("b")])
    running.wait(PATIENCE)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    gate.set()
    closing.join(PATIENCE)
    assert made == ["a"]
    with pytest.raises(CancelledError):
        futures[1].result(PATIENCE)
    assert compiler.begin([kernel("c")])[0].cancelled()


def test_closing_beside_a_beginning_waits_for_its_threads() -> None:
    for _ in range(100):
        begun = threading.Event()
        compiler = Compiler(lambda _, __, told=begun: told.set(), 8)
        beginning = threading.Thread(target=compiler.begin, args=([kernel(str(i)) for i in range(8)],))
        beginning.start()
        assert begun.wait(PATIENCE)
        compiler.close()
        beginning.join(PATIENCE)
        assert not any(thread.name == "nearfar-compile" for thread in threading.enumerate())


class Lingering(threading.Thread):
    """A thread that runs a moment longer than its work, as on a busy machine."""

    def run(self) -> None:
        super().run()
        time.sleep(0.05)


def test_closing_waits_for_a_thread_that_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", Lingering)
    compiler = Compiler(lambda name, _: name, 1)
    (made,) = compiler.begin([kernel("a")])
    assert made.result(PATIENCE) == "a"
    while compiler._working:
        pass
    compiler.close()
    assert not any(thread.name == "nearfar-compile" for thread in threading.enumerate())


class Compiled(NumpyExecutor):
    """Two kernels for each size of `step`, which `make` compiles in threads."""

    def __init__(self, make: Callable[[str, Kernel], object]) -> None:
        super().__init__(tiny.CONFIG, tiny.weights(), pages=PAGES, page_size=16, slots=8)
        self.compiler = Compiler(make, 1)

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        if later or function != "step":
            return ()
        return unfinished(self.compiler.begin([kernel(f"{size}.{part}") for part in "ab"]))

    def run(self, function: str, size: int) -> None:
        assert not self.prepare(function, size), "a step is taken before its kernels are compiled"
        super().run(function, size)

    def close(self) -> None:
        self.compiler.close()
        super().close()


def engine(open_one: Callable[[], NumpyExecutor]) -> EngineCore:
    description = tiny.manifest()
    return EngineCore(open_one(), description, description.programs[0], (PAGES,), reopen=open_one)


async def test_answers_wait_for_their_kernels_and_it_is_told_how_far_they_are() -> None:
    calm = tiny.core()
    expected = await asyncio.gather(*(collect(calm, *request) for request in MIXED))
    await calm.close()
    looked = threading.Semaphore(0)  # compiling a kernel takes until its progress has been told
    core = engine(lambda: Compiled(lambda _, __: looked.acquire(timeout=PATIENCE)))
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        looked.release()

    core.compiling.tell = tell
    assert await collect(core, *MIXED[2]) == expected[2]
    assert told[0] == (0, 2)
    assert (2, 2) in told
    assert told[-1][0] == told[-1][1]
    assert all(done <= total for done, total in told)
    told.clear()
    assert await collect(core, *MIXED[2]) == expected[2]
    assert told == []
    await core.close()


async def test_a_request_that_ends_while_its_kernels_are_compiled_holds_up_no_other() -> None:
    """Compiling does not hold up the thread that calls the device either."""
    gate = threading.Event()

    def make(name: str, _: Kernel) -> None:
        if name.startswith("256"):
            assert gate.wait(PATIENCE)

    core = engine(lambda: Compiled(make))
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    waiting = asyncio.Event()
    core.compiling.tell = lambda done, total: waiting.set()
    long = core.generate(prompt(150), short)
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    assert await asyncio.wait_for(core.on_device(lambda: "reached"), PATIENCE) == "reached"
    await long.aclose()
    other = asyncio.create_task(collect(core, prompt(3), short))
    await asyncio.sleep(0)
    gate.set()
    assert len(await asyncio.wait_for(other, PATIENCE)) == 3
    assert 256 not in core.executor.steps  # type: ignore[attr-defined]
    await core.close()


async def test_kernels_that_there_is_no_memory_for_leave_the_device_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(name: str, _: Kernel) -> None:
        if int(name.partition(".")[0]) > 16:
            raise OutOfMemory(f"no room to compile {name}")

    opened: list[NumpyExecutor] = []

    def open_one() -> NumpyExecutor:
        opened.append(Compiled(make))
        return opened[-1]

    calm = tiny.core()
    expected = await asyncio.gather(*(collect(calm, *request) for request in MIXED))
    await calm.close()
    core = engine(open_one)
    with caplog.at_level(logging.WARNING):
        assert await asyncio.gather(*(collect(core, *request) for request in MIXED)) == expected
    assert core.largest_step == 16
    assert len(opened) == 1
    assert core.epoch == 0
    assert any("steps of at most 16 rows" in record.message for record in caplog.records)
    await core.close()


async def test_fewer_requests_run_at_once_than_the_smaller_step_has_rows() -> None:
    """Ten requests are decoding when the bucket that holds them all has to be given up."""

    def make(name: str, _: Kernel) -> None:
        if name.startswith("16."):
            raise OutOfMemory("no room")

    core = engine(lambda: Compiled(make))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    calm = tiny.core()
    prompts = [prompt(70, seed) for seed in range(8)]
    expected = [await collect(calm, tokens, params) for tokens in prompts]
    await calm.close()
    assert await asyncio.gather(*(collect(core, tokens, params) for tokens in prompts)) == expected
    assert core.largest_step == 4
    await core.close()


async def test_a_kernel_that_does_not_compile_fails_its_requests_and_the_next_one_tries_again() -> None:
    errors = [DeviceError("kernel 64.a is refused")]

    def make(name: str, _: Kernel) -> None:
        if name == "64.a" and errors:
            raise errors.pop()

    core = engine(lambda: Compiled(make))
    with pytest.raises(DeviceError, match=r"64\.a is refused"):
        await collect(core, *MIXED[0])
    assert len(await collect(core, *MIXED[0])) == 20
    await core.close()


@pytest.mark.parametrize("leaves", ["borrower", "lender"])
async def test_a_snapshot_loaded_while_a_step_waits_for_kernels_mixes_with_no_page_of_that_step(
    leaves: str,
) -> None:
    """The step begins with the copy of a page that two requests share. One of them leaves, and the snapshot
    gets its page.
    """
    gate, waiting = threading.Event(), asyncio.Event()

    def make(name: str, _: Kernel) -> None:
        if name.startswith("256."):
            assert gate.wait(PATIENCE)

    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 40))
    first, saved = prompt(20), prompt(48, seed=7)
    second = [*first, *prompt(130, seed=8)]
    calm = tiny.core()
    tensors = await capture(calm, saved)
    expected = [await collect(calm, tokens, short) for tokens in (first, second, [*saved, 3])]
    await calm.close()
    core = engine(lambda: Compiled(make))
    lender = core.generate(first, long)
    await anext(lender)
    core.compiling.tell = lambda done, total: waiting.set()
    borrower = core.generate(second, short)
    await asyncio.wait_for(waiting.wait(), PATIENCE)
    await (borrower if leaves == "borrower" else lender).aclose()
    await restore(core, saved, tensors)
    gate.set()
    if leaves == "borrower":
        assert [event.token async for event in lender][:3] == expected[0][1:]
    else:
        assert [event.token async for event in borrower] == expected[1]
    assert await collect(core, [*saved, 3], short) == expected[2]
    await core.close()
