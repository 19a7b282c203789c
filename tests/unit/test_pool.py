"""The thread pool and replayer of CPU artifacts."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

tvm = pytest.importorskip("tvm")

from tvm.script.ir_builder import tirx as T  # noqa: E402

from nearfar.edge_runtime.executors.cpu import library as records  # noqa: E402
from nearfar.edge_runtime.executors.cpu.library import DlTensor, Library, LoadedPlan, aligned  # noqa: E402
from nearfar.errors import ArtifactError, DeviceError  # noqa: E402
from nearfar.targets.cpu.codegen import compile_library  # noqa: E402
from nearfar.targets.cpu.kernels import vec as v  # noqa: E402
from nearfar.targets.cpu.link import FLAGS, RUNTIME, compile_runtime, zig  # noqa: E402
from nearfar.targets.cpu.platforms import host  # noqa: E402
from nearfar.targets.cpu.units import UNITS  # noqa: E402
from tests.support.processes import asleep, eventually, forked, pool_thread_ids, pool_threads, ran  # noqa: E402

N = 1000


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A library with two kernels: `mirror`, x[i] += i + x[i - 1 of the last launch], of which every launch
    needs all of the previous one; and `halve`, which halves float32 numbers.
    """

    def body(x, y):
        with v.parallel(N) as i:
            v.put1(y, [i], x[i] + x[N - 1 - i] + i)

    def halves(x, y):
        with v.parallel(N) as i:
            v.put1(y, [i], x[i] * v.f32(0.5))

    functions = {
        "mirror": v.prim_func("mirror", [("x", (N,), "int32"), ("y", (N,), "int32")], body),
        "halve": v.prim_func("halve", [("x", (N,), "float32"), ("y", (N,), "float32")], halves),
    }
    file = tmp_path_factory.mktemp("pool") / "model.so"
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    compile_library(tvm.IRModule(named), file)
    return file


def expected(steps: int) -> np.ndarray:
    x = np.zeros(N, np.int32)
    for _ in range(steps):
        x = x + x[::-1] + np.arange(N, dtype=np.int32)
    return x


def mirror(library: Library, repeats: int = 1) -> tuple[LoadedPlan, np.ndarray]:
    """A plan of 2 · `repeats` launches, and the array that holds its result (set it to zero before each
    replay).
    """
    a, b = aligned((N,), np.int32), aligned((N,), np.int32)
    return library.bind(
        [("mirror", [DlTensor(a), DlTensor(b)]), ("mirror", [DlTensor(b), DlTensor(a)])] * repeats
    ), a


def shared_library(folder: Path) -> None:
    """Link old.so from old.c, which needs no C library: zig would build one for this very processor, for 20
    s.
    """
    zig(["cc", "-target", host().zig, "-shared", "-fPIC", "-nostdlib", "-o", "old.so", "old.c"], folder)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_launch_sees_the_one_before(path, threads):
    library = Library(path)
    pool = library.pool(threads)
    assert pool.threads == threads
    plan, a = mirror(library, 20)
    for _ in range(20):
        a[:] = 0
        pool.replay(plan)
        assert (a == expected(40)).all()
    pool.close()
    assert pool.threads == 0
    with pytest.raises(DeviceError, match="it is closed"):
        pool.replay(plan)
    pool.close()


@pytest.mark.skipif(host().architecture != "x86_64", reason="only on x86 are subnormal numbers slow")
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_take_subnormal_numbers_as_zero_and_their_caller_does_not(path, threads):
    library = Library(path)
    pool = library.pool(threads)
    x, y = aligned((N,), np.float32), aligned((N,), np.float32)
    smallest = np.finfo(np.float32).tiny
    plan = library.bind([("halve", [DlTensor(x), DlTensor(y)])])
    for value, half in ((smallest, 0), (smallest / 2, 0), (2 * smallest, smallest)):
        x[...], y[...] = value, 7
        pool.replay(plan)
        np.testing.assert_array_equal(y, np.float32(half))
        assert (x * np.float32(0.5) == np.full(N, value, np.float64) / 2).all()
    pool.close()


def test_a_profile_runs_the_plan_and_times_every_launch(path):
    library = Library(path)
    pool, (plan, a) = library.pool(2), mirror(library, 20)
    start = time.perf_counter()
    times = pool.profile(plan)
    wall = time.perf_counter() - start
    assert (a == expected(40)).all()
    assert len(times) == 40
    assert min(times) > 0
    assert sum(times) <= wall
    pool.close()


def test_a_library_without_a_clock_is_named_when_it_is_to_be_timed(tmp_path):
    """A library that an earlier version built still runs."""
    (tmp_path / "old.c").write_text(
        "const int nf_launch_bytes = 40;\n"
        "void *nf_pool_new(int count) { static char pool; return count ? &pool : 0; }\n"
        "int nf_pool_threads(void *pool) { return 1; }\n"
        "void nf_pool_free(void *pool) {}\n"
        "int nf_replay(void *pool, void *launches, int count) { return -1; }\n"
    )
    shared_library(tmp_path)
    library = Library(tmp_path / "old.so")
    pool, plan = library.pool(1), library.bind([])
    pool.replay(plan)
    with pytest.raises(ArtifactError, match="cannot time its launches: build the artifact again"):
        pool.profile(plan)
    pool.close()


def test_pools_over_one_library_have_threads_of_their_own(path):
    """Two engines over one artifact share the library, but neither uses or ends the other's threads."""
    first, second, count = Library(path), Library(path), pool_threads()
    ours, theirs = first.pool(4), second.pool(3)
    assert (ours.threads, theirs.threads) == (4, 3)
    assert eventually(count, 3 + 2)
    ours.close()
    assert (ours.threads, theirs.threads) == (0, 3)
    assert eventually(count, 2)
    plan, a = mirror(second)
    theirs.replay(plan)
    assert (a == expected(2)).all()
    theirs.close()
    assert eventually(count, 0)


def test_pools_run_side_by_side(path):
    """Replays of two pools, at the same time in two threads, do not see each other's launches."""
    library = Library(path)

    def run(threads: int) -> bool:
        pool, (plan, a) = library.pool(threads), mirror(library, 20)
        right = True
        for _ in range(200):
            a[:] = 0
            pool.replay(plan)
            right = right and bool((a == expected(40)).all())
        pool.close()
        return right

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(run, (1, 2, 3)))


def test_a_pool_that_is_dropped_ends_its_threads(path):
    count = pool_threads()
    pool = Library(path).pool(3)
    assert eventually(count, 2)
    del pool
    gc.collect()
    assert eventually(count, 0)


def test_threads_may_sleep_between_replays(path):
    library = Library(path)
    before, count = pool_thread_ids(), pool_threads()
    pool, (plan, a) = library.pool(4), mirror(library)
    assert eventually(count, 3)
    for _ in range(4):
        assert asleep(pool_thread_ids() - before)
        a[:] = 0
        pool.replay(plan)
        assert (a == expected(2)).all()
    pool.close()


def test_idle_workers_take_no_cpu(path):
    others, count = pool_thread_ids(), pool_threads()
    pool = Library(path).pool(4)
    assert eventually(count, 3)
    workers = pool_thread_ids() - others
    assert asleep(workers)
    before = ran(workers)
    time.sleep(0.1)
    assert ran(workers) == before
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_computes_alone_and_closes(path):
    """fork() copies a pool without its threads: the child must not wait for them."""
    library = Library(path)
    pool, (plan, a) = library.pool(4), mirror(library)

    def child() -> bool:
        a[:] = 0
        pool.replay(plan)
        right = pool.threads == 1 and bool((a == expected(2)).all())
        pool.close()
        return right

    assert forked(child)
    a[:] = 0
    pool.replay(plan)
    assert (pool.threads, bool((a == expected(2)).all())) == (4, True), "the parent goes on as before"
    pool.close()


def test_memory_that_kernels_free_is_used_again(tmp_path):
    count = 1 << 19

    def body(x, y):
        first, second = T.alloc_buffer((count,), "int32"), T.alloc_buffer((count,), "int32")
        with T.serial(0, count) as i:
            v.put1(first, [i], x[0] + i)
        with T.serial(0, count) as i:
            v.put1(second, [i], first[count - 1 - i])
        with T.serial(0, 16) as i:
            v.put1(y, [i], second[i])

    func = v.prim_func("twice", [("x", (16,), "int32"), ("y", (16,), "int32")], body)
    file = tmp_path / "model.so"
    compile_library(tvm.IRModule({"twice": func.with_attr("global_symbol", "twice")}), file)
    library, x, y = Library(file), aligned((16,), np.int32), aligned((16,), np.int32)
    x[:] = 0
    pool, plan = library.pool(1), library.bind([("twice", [DlTensor(x), DlTensor(y)])])
    process = psutil.Process()
    pool.replay(plan)
    before = process.memory_info().rss
    for _ in range(30):
        pool.replay(plan)
    assert y.tolist() == list(range(count - 1, count - 17, -1))
    grown = process.memory_info().rss - before
    assert grown < 4 * count, f"{grown / 1e6:.0f} MB for launches that need {8 * count / 1e6:.0f} MB each"


def test_a_failing_launch_is_named_with_the_kernels_message(path):
    library = Library(path)
    pool = library.pool(2)
    good, short = aligned((N,), np.int32), aligned((N - 1,), np.int32)
    plan = library.bind(
        [("mirror", [DlTensor(good), DlTensor(good)]), ("mirror", [DlTensor(good), DlTensor(short)])]
    )
    with pytest.raises(
        DeviceError, match=r"kernel mirror \(launch 1\) rejected its arguments: Invalid y.shape"
    ):
        pool.replay(plan)
    pool.close()


def test_a_library_of_another_version_is_refused(tmp_path):
    source = tmp_path / "old.c"
    source.write_text("void *nf_pool_new(int count) { static char pool; return count ? &pool : 0; }")
    shared_library(tmp_path)
    with pytest.raises(ArtifactError, match="another version of nearfar: build the artifact again"):
        Library(tmp_path / "old.so")


LAYOUTS = """
#include <stddef.h>
#include <tvm/ffi/c_api.h>
_Static_assert(sizeof(TVMFFIAny) == {any_size} && offsetof(TVMFFIAny, v_ptr) == {any_value}, "TVMFFIAny");
_Static_assert(sizeof(DLTensor) == {tensor_size} && offsetof(DLTensor, byte_offset) == {byte_offset}, "size");
_Static_assert(kTVMFFIDLTensorPtr == {tensor_pointer}, "kTVMFFIDLTensorPtr");
_Static_assert(sizeof(TVMFFIObject) + offsetof(TVMFFIErrorCell, message) == {message}, "TVMFFIErrorCell");
"""


def test_records_are_laid_out_as_tvm_ffi_publishes_them(tmp_path):
    """Compiles the header of the installed tvm-ffi, and compares the offsets of the fields that our code
    reads and writes.
    """
    folder = Path(importlib.util.find_spec("tvm_ffi").origin).parent / "include"
    facts = {
        "any_size": ctypes.sizeof(records._Any),
        "any_value": records._Any.value.offset,
        "tensor_size": ctypes.sizeof(records._DLTensor),
        "byte_offset": records._DLTensor.byte_offset.offset,
        "tensor_pointer": records._TENSOR_POINTER,
        "message": records._Error.message.offset,
    }
    source = LAYOUTS
    for name, value in facts.items():
        source = source.replace(f"{{{name}}}", str(value))
    (tmp_path / "layouts.c").write_text(source)
    zig(["cc", "-std=c11", f"-I{folder}", "-c", "layouts.c", "-o", "layouts.o"], tmp_path)


@pytest.mark.parametrize("target", ["arm-linux-gnueabihf", "wasm32-freestanding"])
def test_the_runtime_compiles_for_32_bits(tmp_path, target):
    """With 32-bit pointers an argument of a kernel still has a value of 64 bits, and a launch has 32 bytes:
    static assertions of runtime.h check this.
    """
    assert compile_runtime(target, tmp_path) == ["pool.c.o", "replay.c.o", "hooks.c.o"]


def test_an_unknown_kernel_is_named(path):
    with pytest.raises(ArtifactError, match="nothing_like_it"):
        Library(path).bind([("nothing_like_it", [])])


def test_the_same_module_gives_the_same_bytes(path, tmp_path):
    def body(x):
        with v.parallel(N) as i:
            v.put1(x, [i], x[i] * 2)

    func = v.prim_func("double", [("x", (N,), "int32")], body).with_attr("global_symbol", "double")
    for name in "ab":
        compile_library(tvm.IRModule({"double": func}), tmp_path / name, UNITS["avx2"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "a").read_bytes()


TRACE = """
#include "runtime.h"

int32_t nf_extent(int32_t extent);
enum { MOST = 4096 };
static int32_t tasks, empty;
static _Atomic int32_t done[MOST];

static int turn(int task, nf_group *group, void *data) {
  int32_t extent = *(int32_t *)data, step = (extent + group->num_task - 1) / group->num_task;
  tasks = group->num_task;
  if (task * step >= extent) empty = 1;
  for (int32_t i = task * step; i < (task + 1) * step && i < extent; i++) done[i]++;
  return 0;
}

NF_EXPORT int32_t trace(nf_pool *pool, int32_t extent, int32_t told) {
  for (int i = 0; i < MOST; i++) done[i] = 0;
  tasks = empty = 0;
  nf_enter(pool);
  if (told) nf_extent(extent);
  int failed = nf_parallel_launch(turn, &extent, 0);
  nf_leave(pool);
  for (int i = 0; i < MOST; i++)
    if (done[i] != (i < extent)) return -1;
  return failed || (told && empty) ? -2 : tasks;
}
"""


def test_every_turn_of_a_loop_is_made_once_and_no_thread_gets_tasks_without_any(tmp_path):
    (tmp_path / "trace.c").write_text(TRACE)
    target = host().zig
    objects = compile_runtime(target, tmp_path, options=["-fPIC"])
    options = ["-target", target, "-shared", "-fPIC", *FLAGS, f"-I{RUNTIME}", "-pthread"]
    zig(["cc", *options, "trace.c", *objects, "-o", "t.so"], tmp_path)
    lib = ctypes.CDLL(str(tmp_path / "t.so"))
    lib.nf_pool_new.restype = ctypes.c_void_p
    for threads in (1, 2, 3, 7):
        pool = ctypes.c_void_p(lib.nf_pool_new(threads, 2))
        for extent in (1, 2, 5, 31, 36, 60, 100, 1000, 4096):
            for told in (1, 0):
                tasks = lib.trace(pool, extent, told)
                assert tasks > 0, (threads, extent, told, tasks)
                if told and threads > 1:
                    assert min(extent, threads * 8) <= tasks <= extent, "small enough to even out"
        lib.nf_pool_free(pool)
