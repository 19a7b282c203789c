"""Models with short convolutions and recurrent states, beside transformers: conversations, several requests
at once, prefixes, snapshots, on cpu and in WebAssembly, and by the engine in JavaScript.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.kernels.buckets import Buckets
from tests.support import tiny
from tests.support.architectures import RECURRENT, Case, checkpoint, prompt, reference
from tests.support.backends import WASM, require
from tests.support.parity import TOLERANCE
from tests.support.turns import in_turns, paired
from tests.support.wasm_executor import open_wasm

WEB = Path(__file__).parents[2] / "web"
NAMES = ("lfm2-plain", "qwen3_5_text-plain", "granitemoehybrid-mamba")
CASES = {str(case): case for case in RECURRENT if str(case) in NAMES}
ANSWER = 20
"""Tokens of an answer: more than a page."""
BUCKETS = Buckets((1, 64), (1, 4))


Built = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Artifacts by the names of their cases and targets, each built when a test first asks for it."""

    @functools.cache
    def made(name: str, target: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        build(BuildOptions(
            str(checkpoint(CASES[name])), folder, (target,), "none", buckets=BUCKETS,
            cpu_features=("native",),
        ))  # fmt: skip
        return folder / target

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


WHERE = paired(NAMES, ("cpu", "wasm-threads"))
PLACES = pytest.mark.parametrize(("name", "backend"), WHERE)


async def answer(core: EngineCore, tokens: list[int]) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt were in the cache."""
    generation = core.generate(tokens, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
    return [event.token async for event in generation], generation.stats.cached_tokens


def check(case: Case, tokens: list[int], found: list[int]) -> None:
    """Each token is as good as transformers' best."""
    expected = reference(case)([*tokens, *found])[len(tokens) - 1 : -1]
    close = 2 * TOLERANCE["f32"] * np.abs(expected).max()
    for row, token in zip(expected, found, strict=True):
        assert row.max() - row[token] < close


def ask(engine: Engine, case: Case, *prompts: list[int]) -> list[tuple[list[int], int]]:
    """The answers to prompts that come at once, compared with transformers'."""
    core = engine.asynchronous.core

    async def together() -> list[tuple[list[int], int]]:
        return list(await asyncio.gather(*(answer(core, tokens) for tokens in prompts)))

    found = engine._loop.run(together())
    for tokens, (text, _) in zip(prompts, found, strict=True):
        check(case, tokens, text)
    return found


@PLACES
def test_a_conversation_goes_on_from_its_last_page(engine: Engine, name: str) -> None:
    case, longest = CASES[name], 80 if name.startswith("lfm2") else 330
    talk = prompt(case, longest - 60)
    for turn in range(2):
        computed = len(talk) - 1 if turn else 0
        talk += prompt(case, 5)
        ((text, cached),) = ask(engine, case, talk)
        assert computed - 16 <= cached <= computed
        talk += text


@PLACES
def test_requests_that_begin_alike_come_at_once(engine: Engine, name: str) -> None:
    """Two prompts that share pages, one that is theirs up to a border, and another; then all again."""
    case = CASES[name]
    shared = prompt(case, 50)
    prompts = [[*shared, *prompt(case, count)] for count in (3, 9)] + [shared[:33], prompt(case, 40)]
    ask(engine, case, *prompts)
    for tokens, (_, cached) in zip(prompts, ask(engine, case, *prompts), strict=True):
        assert len(tokens) - 17 <= cached < len(tokens)


def test_a_snapshot_brings_the_state(built: Built, tmp_path: Path) -> None:
    name = next(name for name, backend in WHERE if backend == "cpu")
    case = CASES[name]
    tokens, path = prompt(case, 70), built(name, "cpu")
    with Engine.load(path, kv_memory="8MB") as first:
        assert first.save_cache(tmp_path / "a.snap", tokens=tokens).tokens == 64
    with Engine.load(path, kv_memory="8MB") as second:
        second.load_cache(tmp_path / "a.snap")
        ((_, cached),) = ask(second, case, tokens)
    assert cached == 64


ASK = """
async function main(dist, model, first, second) {
  const { createEngine } = await import(`file://${dist}/node/index.js`);
  const engine = await createEngine(model, {});
  const ask = async (prompt) => {
    const asked = { prompt, max_tokens: 20, temperature: 0, ignore_eos: true, logprobs: 0 };
    const made = await engine.completions.create(asked);
    const [{ text, logprobs }] = made.choices;
    const cached = made.usage.prompt_tokens_details?.cached_tokens ?? 0;
    console.log(JSON.stringify([logprobs.token_logprobs, cached]));
    return text;
  };
  await Promise.all([ask(first), ask(second)]);
  await ask(first + "!");
  await engine.dispose();
}
main(...process.argv.slice(1));
"""


@in_turns("name")
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_in_javascript_answers_as_transformers(built: Built, name: str) -> None:
    if not (WEB / "dist" / "node" / "index.js").is_file():
        pytest.skip("the web package is not built (run `make setup`)")
    texts = [
        "The state of a layer is a page. " * (2 if name.startswith("lfm2") else 10),
        "Another prompt, shorter.",
    ]
    command = ["node", "-e", ASK, str(WEB / "dist"), str(built(name, "wasm")), *texts]
    made = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert made.returncode == 0, made.stderr
    answers = [json.loads(line) for line in made.stdout.splitlines()]
    length = len(texts[0])
    assert answers[-1][1] == length // 16 * 16 if length % 16 else length - 16
    best: list[list[float]] = []
    for text in (*texts, texts[0] + "!"):
        tokens, found = list(tiny.tokenizer().encode(text).ids), list[float]()
        for _ in range(ANSWER):
            row = reference(CASES[name])(tokens)[-1]
            found.append(float(row.max() - np.logaddexp.reduce(row)))
            tokens.append(int(row.argmax()))
        best.append(found)
    for found, _ in answers:
        assert min(np.abs(np.subtract(found, each)).max() for each in best) < 2e-2
