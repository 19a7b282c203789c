"""Models with short convolutions, recurrent states and experts, compared with transformers: conversations,
several requests at once, prefixes and snapshots, on each target that supports them and in the JavaScript
engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.cli.inspect import describe
from nearfar.edge_runtime import Engine, devices
from nearfar.edge_runtime.artifact.budget import windows
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import Settings
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.executors.cpu import DEVICE
from nearfar.edge_runtime.executors.cpu.executor import CpuExecutor
from nearfar.errors import DeviceError
from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.buckets import Buckets
from tests.support import tiny
from tests.support.architectures import CASES as ALL
from tests.support.architectures import checkpoint, prompt, reference
from tests.support.backends import WASM, require
from tests.support.browser import browser, new_page, serve
from tests.support.cases import Case
from tests.support.faults import Faults, Faulty
from tests.support.parity import TOLERANCE, only
from tests.support.turns import in_turns, paired
from tests.support.wasm_executor import open_wasm

WEB = Path(__file__).parents[2] / "web"
RECURRENT = ("qwen3_5_moe_text-plain", "granitemoehybrid-mamba")
NAMES = ("lfm2_moe-plain", *RECURRENT, "gpt_oss-plain")
CASES = {str(case): case for case in ALL if str(case) in NAMES}
LITTLE = dict(zip(NAMES, ("200KB", "500KB", "300KB", "100KB"), strict=True))
"""Memory of a cache that holds some of the requests of a test."""
ANSWER = 20
"""Tokens of an answer: more than a page."""
BUCKETS = Buckets((1, 64), (1, 4))


Built = Callable[[str, str], Path]
"""A function that gives the artifact of a case for a target, built at first use."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folders = {name: tmp_path_factory.mktemp(name) for name in CASES}

    def made(name: str, target: str) -> Path:
        if not (folders[name] / target).exists():
            with only(target, "f32"):
                build(BuildOptions(
                    str(checkpoint(CASES[name])), folders[name], (target,), "none", buckets=BUCKETS,
                    cpu_features=("native",), device_classes=("software",),
                ))  # fmt: skip
        return folders[name] / target

    return made


@pytest.fixture
def engine(built: Built, name: str, backend: str) -> Iterator[Engine]:
    require(backend)
    if backend in WASM:
        with open_wasm(built(name, "wasm"), WASM[backend]) as opened:
            yield opened
        return
    with Engine.load(built(name, backend), kv_memory="8MB") as opened:
        yield opened


PLAIN, SHADERS = ("cpu", "mlx", "wasm-threads"), ("vulkan", "webgpu")
NAMED = pytest.mark.parametrize("name", NAMES)


async def answer(core: EngineCore, tokens: list[int]) -> tuple[list[int], int]:
    """Greedy tokens, and the number of prompt tokens that were in the cache."""
    generation = core.generate(tokens, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
    return [event.token async for event in generation], generation.stats.cached_tokens


def check(case: Case, tokens: list[int], found: list[int]) -> None:
    """Check that each token is as good as transformers' best one."""
    expected = reference(case)([*tokens, *found])[len(tokens) - 1 : -1]
    close = 2 * TOLERANCE["f32"] * np.abs(expected).max()
    for row, token in zip(expected, found, strict=True):
        assert row.max() - row[token] < close


def ask(engine: Engine, case: Case, *prompts: list[int]) -> list[tuple[list[int], int]]:
    """Answer prompts that come at the same time, and compare the answers with transformers'."""
    core = engine.asynchronous.core

    async def together() -> list[tuple[list[int], int]]:
        return list(await asyncio.gather(*(answer(core, tokens) for tokens in prompts)))

    found = engine._loop.run(together())
    for tokens, (text, _) in zip(prompts, found, strict=True):
        check(case, tokens, text)
    return found


@pytest.mark.parametrize(("name", "backend"), [*itertools.product(NAMES, PLAIN), *paired(NAMES, SHADERS)])
def test_a_conversation_goes_on_from_its_last_page(engine: Engine, name: str) -> None:
    case, longest = CASES[name], 330 if name.startswith(("qwen", "granite")) else 80
    talk = prompt(case, longest - 60)
    for turn in range(2):
        computed = len(talk) - 1 if turn else 0
        talk += prompt(case, 5)
        ((text, cached),) = ask(engine, case, talk)
        assert computed - 16 <= cached <= computed
        talk += text


@in_turns("backend")
@pytest.mark.parametrize(("name", "backend"), [*itertools.product(NAMES, [*PLAIN, *SHADERS])])
def test_requests_that_begin_alike_come_at_once(engine: Engine, name: str) -> None:
    """Two prompts share pages up to a border, another one shares none; then all are asked again."""
    case = CASES[name]
    shared = prompt(case, 50)
    prompts = [[*shared, *prompt(case, count)] for count in (3, 9)] + [shared[:33], prompt(case, 40)]
    ask(engine, case, *prompts)
    for tokens, (_, cached) in zip(prompts, ask(engine, case, *prompts), strict=True):
        assert len(tokens) - 17 <= cached < len(tokens)


@in_turns("target")
@pytest.mark.parametrize("target", ["cpu", "mlx", *SHADERS])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_snapshot_brings_the_state(built: Built, name: str, target: str, tmp_path: Path) -> None:
    require(target)
    case = CASES[name]
    tokens, path = prompt(case, 70), built(name, target)
    with Engine.load(path, kv_memory="8MB") as first:
        assert first.save_cache(tmp_path / "a.snap", tokens=tokens).tokens == 64
    with Engine.load(path, kv_memory="8MB") as second:
        second.load_cache(tmp_path / "a.snap")
        ((_, cached),) = ask(second, case, tokens)
    assert cached == 64


@in_turns("target")
@pytest.mark.parametrize("target", ["mlx", *SHADERS])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_for_some_of_the_requests_gives_the_same_answers(
    built: Built, name: str, target: str
) -> None:
    """Forks, waiting and eviction: of what is asked again, less is there than in a large cache."""
    require(target)
    case = CASES[name]
    shared = prompt(case, 60)
    prompts = [[*shared, *prompt(case, count)] for count in (3, 9, 30)] + [prompt(case, 70), prompt(case, 41)]
    with Engine.load(built(name, target), kv_memory=LITTLE[name]) as opened:
        ask(opened, case, *prompts)
        again = ask(opened, case, *prompts)
    assert any(cached < len(tokens) - 17 for tokens, (_, cached) in zip(prompts, again, strict=True))


@in_turns("target")
@pytest.mark.parametrize("target", ["mlx", *SHADERS])
@pytest.mark.parametrize("name", RECURRENT)
def test_nothing_of_a_failed_step_is_a_state(
    built: Built, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second turn of a talk fails at its first step, between two steps, and at its last call."""
    require(target)
    case, device, faults = CASES[name], devices.device(target), Faults(None)
    faulty = replace(device, open=lambda *given: Faulty(device.open(*given), faults))
    monkeypatch.setattr(f"nearfar.edge_runtime.executors.{target}.DEVICE", faulty)
    talk = prompt(case, 70)
    with Engine.load(built(name, target), kv_memory="8MB") as opened:
        talk += ask(opened, case, talk)[0][0]
        for place in (0, 0.5, 1):
            talk += prompt(case, 5)
            faults.calls.clear()
            ask(opened, case, [*talk, 7])
            runs = [at for at, call in enumerate(faults.calls) if call.startswith("run")]
            faults.at = runs[int(place * (len(runs) - 1))]
            faults.calls.clear()
            with pytest.raises(DeviceError, match="injected"):
                ask(opened, case, [*talk, 9])
            assert faults.happened
            faults.at = None
            ask(opened, case, [*talk, 9])
    assert not faults.misused


ASK = """
  const ask = async (prompt) => {
    const asked = { prompt, max_tokens: 20, temperature: 0, ignore_eos: true, logprobs: 0 };
    const made = await engine.completions.create(asked);
    const [{ logprobs }] = made.choices;
    return [logprobs.token_logprobs, made.usage.prompt_tokens_details?.cached_tokens ?? 0];
  };
  const found = await Promise.all([ask(first), ask(second)]);
  return [...found, await ask(first + "!")];
"""
IN_NODE = f"""
const answers = async (engine, first, second) => {{{ASK}}};
async function main(dist, model, first, second) {{
  const {{ createEngine }} = await import(`file://${{dist}}/node/index.js`);
  const engine = await createEngine(model, {{}});
  console.log(JSON.stringify(await answers(engine, first, second)));
  await engine.dispose();
}}
main(...process.argv.slice(1));
"""


@pytest.mark.parametrize("name", CASES)
def test_the_engine_in_javascript_answers_as_transformers(built: Built, name: str) -> None:
    if not (WEB / "dist" / "node" / "index.js").is_file():
        pytest.skip("the web package is not built (run `make setup`)")
    command = ["node", "-e", IN_NODE, str(WEB / "dist"), str(built(name, "wasm")), *texts(name)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert made.returncode == 0, made.stderr
    check_texts(name, json.loads(made.stdout))


@in_turns("name")
@NAMED
def test_a_browser_answers_through_webgpu(built: Built, name: str) -> None:
    with browser() as chromium, serve(built(name, "webgpu")) as address:
        page = new_page(chromium, address).open()
        assert page.wait("idle", "error") == "idle", page.notice
        check_texts(name, page.run(f"const [first, second] = argument; {ASK}", texts(name)))


def texts(name: str) -> list[str]:
    """Two prompts, the first longer than a column of states."""
    return [
        "The state of a layer is a page. " * (10 if name.startswith(("qwen", "granite")) else 2),
        "Another prompt, shorter.",
    ]


def check_texts(name: str, answers: list[tuple[list[float], int]]) -> None:
    """Check that the log-probabilities of each answer are those of transformers' best tokens, and that the
    last answer continued from a page of the first prompt.
    """
    first, second = texts(name)
    length = len(first)
    assert answers[-1][1] == length // 16 * 16 if length % 16 else length - 16
    best: list[list[float]] = []
    for text in (first, second, first + "!"):
        tokens, found = list(tiny.tokenizer().encode(text).ids), list[float]()
        for _ in range(ANSWER):
            row = reference(CASES[name])(tokens)[-1]
            found.append(float(row.max() - np.logaddexp.reduce(row)))
            tokens.append(int(row.argmax()))
        best.append(found)
    for found, _ in answers:
        assert min(np.abs(np.subtract(found, each)).max() for each in best) < 2e-2


@NAMED
def test_the_memory_is_that_of_the_prediction(built: Built, name: str) -> None:
    """What `inspect` says for one sequence of the whole context: weights, caches of all kinds, workspaces."""
    require("cpu")
    artifact = Artifact.open(built(name, "cpu"))
    program, context = artifact.able_programs(DEVICE.probe(None))[0], artifact.manifest.model.context_length
    predicted = describe(artifact.path)["memory"][program.name][str(context)]
    pages = tuple(window.most_columns(MAX_STEP, context) for window in windows(artifact.manifest))
    executor = CpuExecutor(artifact, program, Settings(pages, context, 1))
    assert abs(executor.memory_used() - predicted) < 0.05 * predicted
