"""The thread pool and replayer of CPU artifacts."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from tvm.script.ir_builder import tirx as T  # noqa: E402

from nearfar.edge_runtime.executors.library import Library, Tensor, aligned  # noqa: E402
from nearfar.errors import ArtifactError, DeviceError  # noqa: E402
from nearfar.targets.cpu.codegen import compile_library  # noqa: E402
from nearfar.targets.cpu.kernels import vec as v  # noqa: E402

N = 1000


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A library with one kernel, x[i] += i + x[i - 1 of the last launch]: every launch needs all of the one before."""

    def body(x, y):
        with T.parallel(0, N) as i:
            v.put1(y, [i], x[i] + x[N - 1 - i] + i)

    func = v.prim_func("mirror", [("x", (N,), "int32"), ("y", (N,), "int32")], body)
    file = tmp_path_factory.mktemp("pool") / "model.so"
    compile_library(tvm.IRModule({"mirror": func.with_attr("global_symbol", "mirror")}), file)
    return file


def expected(steps: int) -> np.ndarray:
    x = np.zeros(N, np.int32)
    for _ in range(steps):
        x = x + x[::-1] + np.arange(N, dtype=np.int32)
    return x


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_launch_sees_the_one_before(path, threads):
    library = Library(path)
    assert library.start(threads) == threads
    a, b = aligned((N,), np.int32), aligned((N,), np.int32)
    launches = [("mirror", [Tensor(a), Tensor(b)]), ("mirror", [Tensor(b), Tensor(a)])] * 20
    plan = library.bind(launches)
    for _ in range(20):
        a[:] = 0
        library.replay(plan)
        assert (a == expected(40)).all()
    library.stop()


def test_threads_may_change_and_may_sleep_between_replays(path):
    library = Library(path)
    a, b = aligned((N,), np.int32), aligned((N,), np.int32)
    plan = library.bind([("mirror", [Tensor(a), Tensor(b)])])
    for threads in (2, 1, 4, 2):
        library.start(threads)
        time.sleep(0.02)  # long enough for the workers to sleep
        library.replay(plan)
        assert (b == expected(1)).all()
    library.stop()
    library.replay(plan)  # without workers the caller does all the work


def test_idle_workers_take_no_cpu(path):
    library = Library(path)
    library.start(4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    library.stop()


def test_a_failing_launch_is_named(path):
    library = Library(path)
    library.start(2)
    good, short = aligned((N,), np.int32), aligned((N - 1,), np.int32)
    plan = library.bind([("mirror", [Tensor(good), Tensor(good)]), ("mirror", [Tensor(good), Tensor(short)])])
    with pytest.raises(DeviceError, match="launch 1"):
        library.replay(plan)
    library.stop()


def test_an_unknown_kernel_is_named(path):
    with pytest.raises(ArtifactError, match="nothing_like_it"):
        Library(path).bind([("nothing_like_it", [])])


def test_the_same_module_gives_the_same_bytes(path, tmp_path):
    def body(x):
        with T.parallel(0, N) as i:
            v.put1(x, [i], x[i] * 2)

    func = v.prim_func("double", [("x", (N,), "int32")], body).with_attr("global_symbol", "double")
    for name in "ab":
        compile_library(tvm.IRModule({"double": func}), tmp_path / name, "baseline")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "a").read_bytes()
