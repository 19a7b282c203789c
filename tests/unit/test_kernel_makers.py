"""The source files that determine a cached program: all files that could change it, and no others."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.build import manifest
from nearfar.build.options import BuildOptions
from nearfar.build.program import fingerprint
from nearfar.build.program.compile import Compilation
from nearfar.build.program.kept import KernelCache, ObjectCache
from nearfar.build.program.makers import IDLE, ROOT, makers, makers_digest
from nearfar.build.source import open_source
from nearfar.build.targets import target_names, target_of
from nearfar.build.targets.planned import PlannedTarget
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Variant
from nearfar.kernels.emission import EmitContext
from nearfar.targets.cpu import codegen
from nearfar.targets.cpu.kernels.vec import prim_func
from nearfar.targets.cpu.units import UNITS
from nearfar.targets.llvm import objects
from nearfar.targets.llvm.objects import PIPELINES, compile_object
from tests.support.paths import ROOT as REPOSITORY

SAMPLE = REPOSITORY / "examples" / "sample-model"
OWN = {
    "cpu": {"targets/cpu", "targets/llvm"},
    "wasm": {"targets/wasm", "targets/cpu", "targets/llvm"},
    "webgpu": {"targets/webgpu", "targets/gpu"},
    "vulkan": {"targets/vulkan", "targets/gpu"},
}
"""Folders with the code generator and the kernels of a target whose programs are kept."""
SHARED = {"build/program", "format", "kernels", "step"}
SINGLE = {"build/__init__.py", "strict_json.py", "targets/__init__.py"}
"""Makers outside those folders."""
NO_MAKERS = {
    "build/program/beside.py": "starts a process that compiles what compile.py compiles here",
    "build/program/fingerprint.py": "the key",
    "build/program/kept.py": "the folder of what is kept",
    "build/program/makers.py": "the key's sources",
    "kernels/planned.py": "says which programs there are: values of the key",
    "step/causal.py": "says which models PyTorch runs",
    "step/builder.py": "the model that it makes is a value of the key, as with all that reads models",
    "step/decoder.py": "reads models",
    "step/defaults.py": "reads models",
    "step/experts.py": "reads models",
    "step/kinds.py": "refuses models",
    "step/mamba.py": "reads models",
    "step/models/*": "reads models",
    "step/reading.py": "reads models",
    "targets/*/target.py": "says which weights, programs and buckets there are: values of the key",
}
"""Files of the folders above (except format/) that do not determine a program, with the reason."""

OBSERVED = """
import json, pickle, sys
sys.modules["torch"] = None  # which TVM imports where it can
opened = set()
sys.addaudithook(lambda event, args: event == "open" and opened.add(str(args[0])))
import tvm
from nearfar.build.program.compile import compiled
for job, variant, target, emit, context in pickle.loads(open(sys.argv[1], "rb").read()):
    compiled(job, variant, tvm.target.Target(target), emit, context)
print(json.dumps([sorted(sys.modules), sorted(opened)]))
"""


def planned(name: str) -> PlannedTarget:
    target = target_of(name)
    assert isinstance(target, PlannedTarget)
    return target


def variant(name: str) -> Variant:
    options = BuildOptions(str(SAMPLE), Path("out"), cpu_features=("baseline",))
    return planned(name).variants(options)[-1]  # a GPU target's program for the software class


@pytest.fixture(scope="module")
def job() -> Compilation:
    source = open_source(BuildOptions(str(SAMPLE), Path("out")))
    return Compilation(source.model, source.matrices, manifest.CACHE, Buckets((1,), (1,)))


@pytest.fixture(scope="module")
def context(job: Compilation) -> EmitContext:
    return EmitContext(Path(), {each.name: each for each in manifest.buffers(job.model)}, 1)


@pytest.fixture(scope="module")
def files(job: Compilation, context: EmitContext) -> dict[str, set[str]]:
    """For each target, the files that the key of its programs covers, as paths in the package."""
    found: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in OWN:

            def noted(modules: frozenset[str], name: str = name) -> str:
                found[name] = {path.relative_to(ROOT).as_posix() for path in makers(modules)}
                return ""

            patch.setattr(fingerprint, "makers_digest", noted)
            planned(name)._key(job, variant(name), context)
    return found


def test_all_targets_whose_programs_are_kept_are_tested() -> None:
    assert set(OWN) == {name for name in target_names() if isinstance(target_of(name), PlannedTarget)}


@pytest.mark.parametrize("target", OWN)
def test_nothing_else_than_what_compiles_for_a_target_decides_its_programs(
    target: str, files: dict[str, set[str]]
) -> None:
    """A change of weights, calibration, other targets or the runtime recompiles nothing."""
    folders = SHARED | OWN[target]
    strange = {file for file in files[target] - SINGLE if not any(map(Path(file).is_relative_to, folders))}
    assert not strange


@pytest.mark.parametrize("target", OWN)
def test_all_files_of_what_compiles_decide_a_target_s_programs(
    target: str, files: dict[str, set[str]]
) -> None:
    """Kernels, code generators, passes, jobs, the step's operations, and the runtime in C; also the names of
    machine features that LLVM gets.
    """
    there = {
        path.relative_to(ROOT).as_posix()
        for folder in (SHARED | OWN[target]) - {"format"}
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h")
    }
    left = {file for file in there if not any(map(Path(file).match, NO_MAKERS))}
    assert left <= files[target]
    assert not (there - left) & files[target], "which are not makers"
    words = {"format/machines.py", "format/processor.py"} if "targets/cpu" in OWN[target] else set()
    assert words | {"format/kv.py", "kernels/emission.py", "kernels/contract.py"} <= files[target]


def test_what_is_imported_and_read_while_a_program_is_compiled_decides_it(
    job: Compilation, context: EmitContext, files: dict[str, set[str]], tmp_path: Path
) -> None:
    """Detects an import or a file that makers.py does not find."""
    given = [(job, variant(name), planned(name).tvm_target, planned(name).emit, context) for name in OWN]
    (tmp_path / "given.pickle").write_bytes(pickle.dumps(given))
    command = [sys.executable, "-c", OBSERVED, str(tmp_path / "given.pickle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules, opened = json.loads(done.stdout)
    known = set.union(*files.values())
    assert "targets/cpu/runtime/pool.c" in known
    imported = {
        f"{name.partition('.')[2].replace('.', '/')}": name for name in modules if name.startswith("nearfar.")
    }
    idle = {each.partition(".")[2].replace(".", "/") for each in IDLE if each != "nearfar"}
    inside = {path for path in imported if not {f"{path}.py", f"{path}/__init__.py"} & known}
    assert inside - idle - {"version"} <= {str(above) for each in idle for above in Path(each).parents}
    folders = {ROOT.resolve(), *(each.resolve() for each in ROOT.iterdir() if each.is_dir())}
    # Folders are left out: a temporary folder is deleted by names relative to it.
    read = {
        Path(path).resolve() for path in opened if not path.endswith((".py", ".pyc")) and Path(path).is_file()
    }
    of_ours = {path for path in read if any(map(path.is_relative_to, folders))}
    assert {path.name for path in of_ours} >= {"pool.c"}, "the hook sees what is read"
    assert of_ours <= {(ROOT / file).resolve() for file in known}


def test_the_object_file_of_a_kernel_depends_on_its_tir_and_on_what_compiles_tir_alone() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in makers([compile_object.__module__])}
    packages = {"kernels/__init__.py", "kernels/keep.py", "targets/__init__.py"}
    assert found - packages == {
        f"targets/llvm/{name}.py" for name in ("__init__", "exponential", "objects", "passes")
    }


@pytest.mark.parametrize("target", ["cpu", "wasm"])
def test_a_program_that_is_not_kept_is_linked_from_kept_object_files(
    target: str, job: Compilation, context: EmitContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = dataclasses.replace(context, keep=ObjectCache.beside(KernelCache()))
    before = planned(target).compiled(job, variant(target), keeping)
    codegen._object.cache_clear()
    monkeypatch.setattr(tvm.tirx, "build", lambda *_, **__: pytest.fail("a kernel is compiled again"))
    assert planned(target).compiled(job, variant(target), keeping) == before


def test_another_number_target_or_pass_is_another_object_file() -> None:
    """Each value that decides an object file is in its key."""

    def key(**changed: Any) -> tuple[object, ...]:
        given = {"value": 1.0, "unit": UNITS["avx2"], "pipeline": PIPELINES[0], "name": "kernel"} | changed
        told: list[tuple[object, ...]] = []

        def keep(make: Callable[[], bytes], /, *decides: object) -> bytes:
            told.append(decides)
            return b""

        func = prim_func(
            given["name"],
            [("out", (4,), "float32")],
            lambda out: T.buffer_store(out, tirx.const(given["value"], "float32"), [0]),
        ).with_attr("global_symbol", given["name"])
        objects.object_of(func, codegen.llvm_target(given["unit"]), given["pipeline"], keep)
        return told[0]

    keys = {
        fingerprint.fingerprint(*key(**changed))
        for changed in (
            {},
            {"value": 1.0 + 2**-23},
            {"unit": UNITS["avxvnni"]},
            {"pipeline": PIPELINES[1]},
            {"name": "other"},
        )
    }
    assert len(keys) == 5
    assert fingerprint.fingerprint(*key()) in keys


def package(root: Path, **changed: str) -> Path:
    """A package that stands for nearfar: modules that compile, modules that they import, and a module that
    none imports.
    """
    texts = {
        "kernels/__init__.py": "",
        "kernels/emit.py": "from . import codegen\ndef emit():\n    from nearfar.words import KNOWN\n",
        "kernels/codegen.py": "if TYPE_CHECKING:\n    import nearfar.types\n",
        "kernels/runtime/pool.c": "int pool;\n",
        "kernels/left.py": "import nearfar.kernels.emit\n",
        "words.py": '"""Words."""\nKNOWN = 1\n"""What is known."""\n',
        "types.py": "",
        "other/pool.c": "int other;\n",
    }
    for name, text in (texts | {name: changed.get(name, text) for name, text in texts.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text", "another"),
    [
        ("kernels/codegen.py", "import nearfar.missing\n", True),
        ("kernels/__init__.py", "A = 1\n", True),  # the import runs this code
        ("kernels/runtime/pool.c", "int pool; // another\n", True),
        ("words.py", "KNOWN = 2\n", True),  # a function imports this file
        ("words.py", "KNOWN = 1.0\n", True),
        ("words.py", '"""More words.\n\nOf machines.\n"""\n\nKNOWN = (1)  # a comment\n', False),
        ("types.py", "A = 1\n", False),  # the file is imported for types alone
        ("kernels/left.py", "A = 1\n", False),
        ("other/pool.c", "int another;\n", False),
    ],
)
def test_a_digest_changes_with_what_is_imported_and_with_nothing_else(
    file: str, text: str, another: bool, tmp_path: Path
) -> None:
    def digest(root: Path) -> str:
        return makers_digest(frozenset({"nearfar.kernels.emit"}), root)

    before = digest(package(tmp_path / "before"))
    assert digest(package(tmp_path / "same")) == before
    assert (digest(package(tmp_path / "after", **{file: text})) != before) is another
