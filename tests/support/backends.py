"""Builds artifacts for the backend suite, once a session, and opens them on each device that is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.devices import device, device_names
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.executors.base import Executor
from nearfar.errors import DeviceError
from nearfar.format.sizes import STEP_BUCKETS
from tests.support.artifacts import Built, Reference
from tests.support.tiny import edit_manifest
from tests.support.turns import paired
from tests.support.wasm_executor import open_wasm, require_node

Array = npt.NDArray[Any]

VARIANTS = {"vulkan": tuple(of[1] for of in paired(("vulkan",), ("vulkan-f32", "vulkan-f16")))}
"""Devices that run more programs than the one that they would choose. The programs run in turns, because a
software GPU takes 60 CPU seconds to compile the shaders of each precision. Kernels of both precisions run
each time (test_gpu_kernels).
"""

WASM = {"wasm": 1, "wasm-threads": 3}
"""Backends of the target wasm, with their number of threads. Python does not run this target, so tests run it
in Node.
"""

BACKENDS = (*(backend for name in device_names() for backend in VARIANTS.get(name, (name,))), *WASM)
"""Names of all backends: a target, followed by the precision of its program where the device does not choose
it.
"""

FAST = ("cpu", "wasm")
"""Backends on which an answer of a hundred tokens takes less than a CPU second; on the others 2 to 6."""

MODELS = {"stories": ("stories260K", "none"), "q4": ("classics-7M", "q4"), "q8": ("classics-7M", "q8")}


ON_SOFTWARE = ("webgpu", "vulkan")
"""Targets that tests run on software GPUs: compiling a program and computing a long prompt take seconds."""
SOFTWARE = [name for name in BACKENDS if name.partition("-")[0] in ON_SOFTWARE]
SOME = {STEP_BUCKETS[1], *(rows for _, rows in paired(("",), (0, *STEP_BUCKETS[2:-1])))}
"""Rows of the steps that artifacts for software GPUs have in this run, beside the fewest and the most. The
second fewest are always among them: otherwise two answers at once took steps of 64 rows, 200 CPU seconds in
test_structured_output alone.
"""


class Lab:
    """Artifacts by model and target, and engines by model and backend. `folder`: for artifacts with fewer
    steps.
    """

    def __init__(self, built: Built, folder: Path) -> None:
        self._built, self._folder = built, folder
        self._engines: dict[tuple[str, str], Engine] = {}

    def artifact(self, model: str, target: str) -> Path:
        """The artifact of a model, built at first use."""
        return self._built(*MODELS[model]) / target

    def _opened(self, model: str, target: str) -> Path:
        """The artifact that engines open. For a software GPU it has only some of the five step sizes:
        compiling the kernels of one size takes 2 to 5 CPU seconds, for each model and backend.
        """
        whole = self.artifact(model, target)
        if target not in ON_SOFTWARE:
            return whole
        made = self._folder / model / target
        return made if made.exists() else with_some_steps(whole, made, SOME)

    def engine(self, model: str, backend: str) -> Engine:
        """An engine that all tests of the session share; skips where the device is absent."""
        if (model, backend) not in self._engines:
            self._engines[model, backend] = self.open(model, backend)
        return self._engines[model, backend]

    def open(self, model: str, backend: str, **options: Any) -> Engine:
        """Open an engine for one test, which closes it; skips where the device is absent."""
        require(backend)
        target, _, precision = backend.partition("-")
        path = self._opened(model, target)
        if backend in WASM:
            return open_wasm(path, WASM[backend], verify=options.get("verify", True))
        return Engine.load(path, kv_memory="64MB", precision=precision or None, **options)

    def close(self) -> None:
        """Free the devices."""
        for engine in self._engines.values():
            engine.close()


def with_some_steps(whole: Path, made: Path, sizes: Collection[int]) -> Path:
    """Copy an artifact to the folder `made` with some of its steps: the fewest rows, the most, and
    `sizes`.
    """

    def fewer(manifest: dict[str, Any]) -> None:
        for program in manifest["programs"]:
            steps = program["functions"]["step"]
            kept = [step for step in steps if step in (steps[0], steps[-1]) or step["size"] in sizes]
            program["functions"]["step"] = kept

    made.mkdir(parents=True)
    for each in whole.iterdir():
        if each.name != "manifest.json":
            (made / each.name).symlink_to(each)
    (made / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    edit_manifest(made, fewer)
    return made


def require(backend: str) -> None:
    """Skip the test where the backend cannot run, saying why."""
    target = backend.partition("-")[0]
    if backend in WASM:
        require_node()
        return
    if target not in device_names():
        pytest.skip(f"{backend}: no executor in this nearfar")
    try:
        device(target).probe()
    except (DeviceError, ImportError) as error:
        pytest.skip(f"{backend}: {error}")


def executor(engine: Engine) -> Executor:
    """The executor under an engine."""
    return engine.asynchronous.core.executor


def kv_dtype(engine: Engine) -> str:
    """The dtype of the engine's KV cache."""
    name = executor(engine).program_name
    return next(program.kv_dtype for program in engine.manifest.programs if program.name == name)


def forget(engine: Engine, keep: int = 0) -> None:
    """Empty the prefix cache, except for the `keep` pages of each group that would be evicted last."""
    table = engine.asynchronous.core.scheduler.table
    for group, allocator in enumerate(table.allocators):
        while table.index.idle_count(group) > keep:
            allocator.free(table.index.evict(group))


def cached_pages(engine: Engine, tokens: Sequence[int]) -> list[int]:
    """The pages of group 0 that hold the longest cached prefix of the tokens."""
    found = engine.asynchronous.core.scheduler.table.index.lookup(tokens, len(tokens))
    return [page for node in found if (page := node.pages[0]) is not None]


def greedy(engine: Engine, tokens: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens, whether or not the end token comes."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return [event.token for event in engine.generate(list(tokens), params)]


def last_logits(engine: Engine, tokens: Sequence[int]) -> Array:
    """Logits after a prompt."""
    greedy(engine, tokens, 1)
    return np.asarray(executor(engine).fetch("logits", 1)()[0])


class Transformers(Reference):
    """The reference of a model, with its logits, and with greedy tokens beyond the end token.

    Results are kept: every backend asks for the same ones, which take 5 CPU seconds.
    """

    def __init__(self, model: str, quant: str) -> None:
        super().__init__(model, quant)
        self._said: dict[tuple[object, ...], Any] = {}

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits after every token, in one pass; not to be written to."""
        key = tuple(tokens)
        if key not in self._said:
            with self._torch.no_grad():
                made = np.asarray(self.model(self._torch.tensor([list(tokens)])).logits[0].numpy())
            made.flags.writeable = False
            self._said[key] = made
        return np.asarray(self._said[key])

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens, whether or not the end token comes; computed once."""
        key = (*tokens, "greedy", count)
        if key not in self._said:
            self._said[key] = self._greedy(tokens, count)
        return list(self._said[key])

    def _greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        out = list(tokens)
        past = None
        feed = out
        with self._torch.no_grad():
            for _ in range(count):
                made = self.model(self._torch.tensor([feed]), past_key_values=past, use_cache=True)
                past, feed = made.past_key_values, [int(made.logits[0, -1].argmax())]
                out += feed
        return out[len(tokens) :]


@cache
def transformers_of(model: str) -> Transformers:
    """The reference of one of MODELS, made once a process: all backends are compared with it."""
    return Transformers(*MODELS[model])
