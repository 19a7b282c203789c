"""Compiled programs kept across builds: what distinguishes them, and which are removed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nearfar.build.program.compiled import Compiled
from nearfar.build.program.fingerprint import fingerprint
from nearfar.build.program.kept import FOLDER, KernelCache, ObjectCache
from nearfar.errors import NearfarWarning
from nearfar.format.manifest import Kernel, Program, Requires
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.classes import CLASSES

KEYS = [letter * 64 for letter in "abcd"]


def program(name: str, data: bytes = b"code") -> Compiled:
    kernels = {"linear": Kernel("kernels/linear.wgsl", "main", ("read", "read_write"), "0" * 64)}
    made = Program(name, "float16", "float16", Requires(("shader-f16",), {"a": 1}), (256,), kernels, {})
    return Compiled(made, {"kernels/linear.wgsl": data, "plans/step.1.json": b"{}"})


def test_what_was_put_is_had_again_with_its_files(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "kernels")
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], program("first"))
    found = cache.get(KEYS[0])
    assert found == program("first")
    found.write(tmp_path / "root")
    assert (tmp_path / "root" / "kernels" / "linear.wgsl").read_bytes() == b"code"
    assert Compiled.of(found.record, tmp_path / "root") == found


@pytest.mark.parametrize("damage", ["cut", "changed", "another's", "empty"])
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(damage: str, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.put(KEYS[0], program("first"))
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    cache.put(KEYS[1], program("second"))
    (other,) = {*tmp_path.iterdir()} - {file}
    changed = data[:-1] + bytes([data[-1] ^ 1])
    made = {"cut": data[:-5], "changed": changed, "another's": other.read_bytes(), "empty": b""}
    file.write_bytes(made[damage])
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], program("first"))
    assert cache.get(KEYS[0]) == program("first")


def test_a_file_cannot_write_outside_of_the_artifact() -> None:
    for name in ("../outside", "/outside"):
        data = dataclasses.replace(program("first"), files={name: b"x"}).to_bytes(KEYS[0])
        assert Compiled.of_bytes(data, KEYS[0]) is None


def test_what_was_used_longest_ago_is_given_up(tmp_path: Path) -> None:
    size = len(program("first", os.urandom(5000)).to_bytes(KEYS[0]))
    cache = KernelCache(tmp_path, limit=3 * size + 500)
    for age, key in enumerate(KEYS[:3]):
        cache.put(key, program("first", os.urandom(5000)))
        (file,) = tmp_path.glob(f"{key}*")
        os.utime(file, (1000 + age, 1000 + age))
    assert cache.get(KEYS[0]) is not None  # the entry is used now
    abandoned = tmp_path / "half-written"
    abandoned.write_bytes(b"x")
    os.utime(abandoned, (1000, 1000))
    cache.put(KEYS[3], program("first", os.urandom(5000)))
    assert [cache.get(key) is not None for key in KEYS] == [True, False, True, True]
    assert not abandoned.exists()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3 * size + 500


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file")
    with pytest.warns(NearfarWarning, match="compiled kernels cannot be kept in .*file, so each build"):
        cache.put(KEYS[0], program("first"))
    assert cache.get(KEYS[0]) is None


def test_the_folder_is_the_one_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "named"))
    assert KernelCache().folder == tmp_path / "named"
    monkeypatch.delenv(FOLDER)
    monkeypatch.delenv("NEARFAR_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert KernelCache().folder == tmp_path / "cache" / "nearfar" / "kernels"


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    code = (
        "from nearfar.build.program.fingerprint import fingerprint; "
        "from nearfar.kernels.quantized import Matrix; "
        "print(fingerprint(Matrix(64, 32, 4, 32), {'a': frozenset}, ('b', 1.5)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(Matrix(64, 32, 4, 32), {"a": frozenset}, ("b", 1.5))


def test_whatever_differs_has_another_fingerprint() -> None:
    matrix, discrete = Matrix(64, 32, 4, 32), CLASSES["discrete"]
    values: list[object] = [
        matrix, dataclasses.replace(matrix, k=64), dataclasses.replace(matrix, bits=8),
        discrete, CLASSES["mobile"], dataclasses.replace(discrete, name="software"),
        1, 1.0, True, "1", (1,), ((1,),), {"a": 1}, {"a": 1.0}, None, "None", Matrix, CLASSES,
    ]  # fmt: skip
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint(1, 2) != fingerprint((1, 2))


def test_what_has_no_content_to_tell_has_no_fingerprint() -> None:
    held = 1
    # values that no key can contain, among them a function of the tests
    for value in (object(), lambda: held, len, program):
        with pytest.raises(TypeError):
            fingerprint(value)


def test_another_version_of_a_tool_is_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearfar.build.program import fingerprint as module

    before = module.fingerprint(1)
    with monkeypatch.context() as patch:
        for tool in ("apache-tvm", "apache-tvm-ffi", "numpy", "ziglang"):
            patch.setattr(module, "_version", lambda each, tool=tool: "99" if each == tool else "1")
            module._tools.cache_clear()
            assert module.fingerprint(1) != before
    module._tools.cache_clear()
    assert module.fingerprint(1) == before


def test_builds_at_once_never_find_half_a_program(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)

    def build(number: int) -> bytes:
        cache.put(KEYS[0], program("first", bytes([number]) * 100_000))
        found = cache.get(KEYS[0])
        assert found is not None
        return found.files["kernels/linear.wgsl"]

    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(build, range(64)))
    assert all(len(data) == 100_000 and len(set(data)) == 1 for data in read)
    assert len(list(tmp_path.iterdir())) == 1


def test_ctrl_c_while_it_is_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        KernelCache(tmp_path).put(KEYS[0], program("first"))
    assert list(tmp_path.iterdir()) == []


def test_an_object_file_is_made_once_for_the_same_values(tmp_path: Path) -> None:
    cache, made = ObjectCache(tmp_path / "objects"), iter((b"first", b"second", b"third"))
    assert cache(lambda: next(made), "kernel", "target") == b"first"
    assert cache(lambda: next(made), "kernel", "target") == b"first"
    assert cache(lambda: next(made), "kernel", "other target") == b"second"
    assert ObjectCache(tmp_path / "objects")(lambda: next(made), "kernel", "target") == b"first"


@pytest.mark.parametrize("damage", ["cut", "changed", "another's", "empty"])
def test_a_damaged_object_file_is_made_again(damage: str, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    cache(lambda: b"first" * 100, "one")
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    cache(lambda: b"second", "two")
    (other,) = {*tmp_path.iterdir()} - {file}
    changed = data[:-1] + bytes([data[-1] ^ 1])
    made = {"cut": data[:-5], "changed": changed, "another's": other.read_bytes(), "empty": b""}
    file.write_bytes(made[damage])
    assert cache(lambda: b"again", "one") == b"again"
    assert cache(lambda: b"never", "one") == b"again"


def test_object_files_used_longest_ago_are_deleted_and_programs_leave_them_alone(tmp_path: Path) -> None:
    programs = KernelCache(tmp_path)
    objects = ObjectCache.beside(programs)
    for age, name in enumerate("abc"):
        objects(lambda: os.urandom(1000), name)
        for file in objects.folder.iterdir():
            if file.stat().st_mtime > 2000:
                os.utime(file, (1000 + age, 1000 + age))
    os.utime(objects.folder, (1000, 1000))
    programs.put(KEYS[0], program("first"))
    assert len(list(objects.folder.iterdir())) == 3
    size = max(file.stat().st_size for file in objects.folder.iterdir())
    objects(lambda: b"never", "a")  # the entry is used now
    dataclasses.replace(objects, limit=2 * size).trim()
    assert [objects(lambda: b"made", name) == b"made" for name in "abc"] == [False, True, False]


def test_object_files_that_cannot_be_kept_are_made_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache, made = ObjectCache(tmp_path / "file"), iter((b"first", b"second"))
    assert [cache(lambda: next(made), "kernel") for _ in range(2)] == [b"first", b"second"]
