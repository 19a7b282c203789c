"""Properties that only the wasm target has: its modules, their size, their imports, and failures in them. The
suites over all backends compare their results.
"""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import tirx as T

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import DeviceError
from nearfar.format.sizes import WASM_RESERVED
from nearfar.kernels.buckets import Buckets
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.half import widen
from nearfar.targets.wasm import UNIT
from nearfar.targets.wasm.codegen import link_modules
from tests.support.architectures import CASES, checkpoint
from tests.support.backends import Lab, executor
from tests.support.parity import check_answers
from tests.support.turns import in_turns
from tests.support.wasm_executor import (
    ARGUMENT,
    LAUNCH,
    Node,
    Space,
    Tables,
    WasmExecutor,
    open_wasm,
    require_node,
)

MOST_BYTES = 130_000
"""Bytes of a module as a server sends it, gzip."""
EXPORTS = {
    "__stack_pointer": "global",
    "nf_error": "function",
    "nf_kernels": "global",
    "nf_pool_fail": "function",
    "nf_pool_free": "function",
    "nf_pool_new": "function",
    "nf_pool_work": "function",
    "nf_replay": "function",
}
DOT = b"\xfd\xba\x01"
"""The opcode of i32x4.dot_i16x8_s."""


def modules(artifact: Path) -> dict[str, Path]:
    """The module of each program of an artifact."""
    programs = Artifact.open(artifact).manifest.programs
    return {program.name: artifact / str(program.library) for program in programs}


def node(script: str, *arguments: str) -> str:
    """The output of a script in Node."""
    command = [require_node(), "--input-type=module", "-e", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("model", ["stories", "q4"])
def test_two_programs_over_one_set_of_files(lab: Lab, model: str) -> None:
    artifact = Artifact.open(lab.artifact(model, "wasm"))
    threads, alone = artifact.manifest.programs
    assert (threads.name, alone.name) == ("wasm32-simd128-threads", "wasm32-simd128")
    assert threads.requires.features == ("simd128", "atomics")
    assert alone.requires.features == ("simd128",)
    assert threads.requires.arch == alone.requires.arch == "wasm32"
    assert threads.functions == alone.functions
    assert threads.kernels == alone.kernels
    artifact.verify()


@pytest.mark.parametrize("model", ["stories", "q4"])
def test_a_module_is_small_and_has_what_is_needed_only(lab: Lab, model: str) -> None:
    script = """
      import { readFileSync } from "node:fs";
      const module = new WebAssembly.Module(readFileSync(process.argv[1]));
      const told = {imports: WebAssembly.Module.imports(module), exports: WebAssembly.Module.exports(module)};
      console.log(JSON.stringify(told));
    """
    for file in modules(lab.artifact(model, "wasm")).values():
        content = file.read_bytes()
        assert len(gzip.compress(content, 9, mtime=0)) <= MOST_BYTES
        told = json.loads(node(script, str(file)))
        assert told["imports"] == [{"module": "env", "name": "memory", "kind": "memory"}]
        assert {each["name"]: each["kind"] for each in told["exports"]} == EXPORTS


def test_quantized_matrices_are_multiplied_by_the_dot_instruction(lab: Lab) -> None:
    for file in modules(lab.artifact("q4", "wasm")).values():
        assert file.read_bytes().count(DOT) > 100
    for file in modules(lab.artifact("stories", "wasm")).values():
        assert file.read_bytes().count(DOT) < 10, "the opcode's bytes are common by chance: look for another"


@pytest.mark.parametrize("finite", [True, False])
def test_every_float16_is_widened_exactly(finite: bool, tmp_path: Path) -> None:
    """Tests all numbers of either sign, also subnormal ones, infinities and NaN where there may be any."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = every[np.isfinite(every)] if finite else every

    def body(taken: Any, told: Any) -> None:
        with T.serial(0, halves.size // v.LANES) as i:
            first = i * v.LANES
            v.put(told, [first], widen(UNIT, v.lanes(taken, [first]), finite=finite))

    func = v.prim_func("widen", [("taken", halves.shape, "uint16"), ("told", halves.shape, "float32")], body)
    module, space, host = tmp_path / "model.wasm", Space(), Node()
    link_modules(tvm.IRModule({"widen": func.with_attr("global_symbol", "widen")}), {module: False})
    taken, told = space.take(halves.nbytes), space.take(2 * halves.nbytes)
    tables = Tables(space.take(0))
    arrays = [(taken, "uint16"), (told, "float32")]
    plan = tables.plan([("widen", [tables.tensor(at, halves.shape, dtype) for at, dtype in arrays])])
    try:
        opened, _ = host.ask("open", file=str(module), size=space.end + len(tables.content), shared=False)
        (function,) = struct.unpack("<I", host.ask("read", at=opened["kernels"], count=4)[1])
        struct.pack_into("<I", tables.content, tables.functions[0][0], function)
        host.ask("write", bytes(tables.content), at=tables.at)
        host.ask("write", halves.tobytes(), at=taken)
        pool = host.ask("threads", tops=[])[0]["pool"]
        assert host.ask("call", name="nf_replay", args=[pool, plan, 1])[0] == {"result": -1, "bytes": 0}
        got = np.frombuffer(host.ask("read", at=told, count=2 * halves.nbytes)[1], np.float32)
    finally:
        host.close()
    np.testing.assert_array_equal(got, halves.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got[got == 0]), [False, True])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernel_that_traps_ends_the_request(lab: Lab, threads: int) -> None:
    """The kernel may trap on any thread; no thread waits for the failed one any more."""
    with open_wasm(lab.artifact("q4", "wasm"), threads, verify=False) as engine:
        wasm = executor(engine)
        assert isinstance(wasm, WasmExecutor)
        assert engine.completions.create("", max_tokens=3, temperature=0).choices[0].text
        launches, _ = wasm.plans["step", 1]
        _, arguments, count, _, _ = wasm.unpack(LAUNCH, launches + LAUNCH.size)
        for i in range(count):
            tensor = wasm.unpack(ARGUMENT, arguments + i * ARGUMENT.size)[2]
            wasm.node.ask("write", struct.pack("<I", 0xFFFFFF00), at=tensor)
        with pytest.raises(DeviceError, match=r"memory access out of bounds|a thread was lost"):
            engine.completions.create("", max_tokens=3, temperature=0)


def test_a_memory_that_is_too_small_for_the_module_is_refused(lab: Lab) -> None:
    script = """
      import { readFileSync } from "node:fs";
      const [file, pages, shared] = process.argv.slice(1);
      const limits = {initial: Number(pages), maximum: Number(pages), shared: shared === "true"};
      const memory = new WebAssembly.Memory(limits);
      const module = new WebAssembly.Module(readFileSync(file));
      try { new WebAssembly.Instance(module, {env: {memory}}); console.log("ok"); }
      catch (error) { console.log(error.name); }
    """
    least = WASM_RESERVED // 65536
    for name, file in modules(lab.artifact("stories", "wasm")).items():
        shared = str(name.endswith("threads")).lower()
        assert node(script, str(file), str(least - 1), shared) == "LinkError\n"
        assert node(script, str(file), str(least), shared) == "ok\n"
        assert node(script, str(file), "65535", shared) == "ok\n", "4 GiB less a page are allowed"


def test_experts_answer_as_transformers(tmp_path: Path) -> None:
    require_node()
    case = next(case for case in CASES if str(case) == "gpt_oss-odd")
    buckets = Buckets((1, 16), (1,))
    (path,) = build(BuildOptions(str(checkpoint(case)), tmp_path, ("wasm",), "none", buckets=buckets))
    with open_wasm(path) as engine:
        check_answers(case, engine)


WIDE = {"lfm2": "conv", "qwen3_5_text": "linear_attention"}
"""Model types whose layers multiply rows element by element, and the type of such a layer."""


@in_turns("model_type")
@pytest.mark.parametrize("model_type", WIDE)
def test_a_long_prompt_of_wide_rows_needs_no_memory_inside_kernels(model_type: str, tmp_path: Path) -> None:
    """A module has 256 KiB for kernels that ask for memory, and here the rows of a step take as much."""
    require_node()
    found = next(case for case in CASES if str(case) == f"{model_type}-plain")
    sizes = {"hidden_size": 264, "head_dim": 64, "linear_value_head_dim": 72, "num_hidden_layers": 2}
    kinds = [WIDE[model_type], "full_attention"]
    config = {**found.config, **sizes, "layer_types": kinds, "max_position_embeddings": 300}
    case = replace(found, name="wide", config=config, prompts=(250,))
    buckets = Buckets((1, 256), (1,))
    (path,) = build(BuildOptions(str(checkpoint(case)), tmp_path, ("wasm",), "none", buckets=buckets))
    with open_wasm(path, 2) as engine:
        check_answers(case, engine)
