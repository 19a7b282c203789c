"""Texts of a wasm artifact in Node, Deno and Bun (nearfar/node), in Chromium and in Firefox equal those of
the same weights on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared_data
from tests.support.artifacts import Built
from tests.support.browser import browser, launch, new_page, serve
from tests.support.paths import WEB, node

ANSWERS = WEB / "test" / "hosts" / "answers.mjs"
RUNTIMES = {"node": [], "bun": [], "deno": ["run", "--allow-all"]}
PROMPT = (
    "In the forest there lived a very old bear, and every morning the bear went down to the river to see "
    "the old king and the fox"
)


def golden() -> str:
    return shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")


def dist() -> Path:
    """The built package; skips the calling test where it is not built."""
    if not (WEB / "dist" / "node" / "index.js").is_file():
        pytest.skip("the web package is not built (run `make setup`)")
    return WEB / "dist"


def answers(runtime: str, artifact: Path, **given: object) -> dict[str, Any]:
    """The output of ANSWERS in a runtime."""
    packages = WEB / "node_modules" / ".bin"  # Deno comes with the tests' npm packages
    found = shutil.which(runtime) or shutil.which(runtime, path=packages)
    if found is None:
        pytest.skip(f"{runtime} is not installed")
    command = [found, *RUNTIMES[runtime], str(ANSWERS), str(dist()), str(artifact), json.dumps(given)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    told: dict[str, Any] = json.loads(made.stdout)
    return told


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_golden_story(built: Built, runtime: str, threads: int) -> None:
    told = answers(runtime, built("stories260K", "none") / "wasm", count=199, threads=threads)
    assert told["greedy"] == golden() == told["again"]
    assert told["threads"] == threads
    assert told["program"] == ("wasm32-simd128-threads" if threads > 1 else "wasm32-simd128")
    only = {"name": "wasm", "why": "only", "reason": "the artifact is for wasm alone"}
    assert (told["backend"], told["told"]) == (only, [only])


def test_seeds_logprobs_and_the_prefix_cache_are_the_cpus(built: Built) -> None:
    """Sums without fused multiply-adds are rounded differently: logprobs are near, texts are equal."""
    from nearfar.edge_runtime import Engine

    out = built("classics-7M", "q4")
    told = answers("node", out / "wasm", prompt=PROMPT, seed=7, count=40, threads=2)
    assert told["cached"] >= 16
    assert told["seeded"][0] == told["seeded"][1]
    with Engine.load(out / "cpu") as engine:

        def ask(**given: Any) -> Any:
            return engine.completions.create(prompt=PROMPT, **given).choices[0]

        assert told["greedy"] == told["again"] == ask(max_tokens=40, temperature=0).text
        assert told["seeded"][0] == ask(max_tokens=40, temperature=0.9, top_p=0.95, seed=7).text
        scored = ask(max_tokens=5, temperature=0, logprobs=2).logprobs.token_logprobs
    assert told["logprobs"] == pytest.approx(scored, abs=1e-3)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_bundled_program_says_the_golden_story(built: Built, tmp_path: Path, threads: int) -> None:
    """esbuild bundles an app with nearfar/node and nearfar/node/worker from node_modules."""
    dist()
    if not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("web/node_modules is missing (run `make setup`)")
    installed = tmp_path / "node_modules"
    installed.mkdir()
    (installed / "nearfar").symlink_to(WEB)
    made = [node(), WEB / "test" / "hosts" / "bundled" / "bundle.mjs", installed, tmp_path / "out"]
    subprocess.run(list(map(str, made)), check=True, timeout=60)
    app = [node(), tmp_path / "out" / "app.mjs", built("stories260K", "none") / "wasm", threads]
    ran = subprocess.run(list(map(str, app)), capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["text"] == golden()


def test_chromium_and_firefox_say_the_golden_story(built: Built) -> None:
    """The tests of web/test/browser/wasm.test.ts and wasm-threads.test.ts that need a real artifact."""
    vitest = WEB / "node_modules" / "vitest" / "vitest.mjs"
    if not vitest.is_file():
        pytest.skip("web/node_modules is missing (run `make setup`)")
    artifact = built("stories260K", "none") / "wasm"
    more = {"NEARFAR_WASM_ARTIFACT": str(artifact), "NEARFAR_WASM_TEXT": golden()}
    made = subprocess.run(
        [node(), vitest, "run", "test/browser/wasm.test.ts", "test/wasm-threads.test.ts", "-t", "a real"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=WEB,
        env={**os.environ, "NEARFAR_TEST_TIMES": "", **more},
    )
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("arguments", [["--no-sandbox"], None], ids=["without a GPU", "a software GPU"])
def test_the_page_takes_webassembly_of_a_folder_with_both(built: Built, arguments: list[str] | None) -> None:
    out = built("stories260K", "none")
    with browser() as running, serve(out, target=None) as address:
        started = running if arguments is None else launch(running.browser_type, arguments)
        page = new_page(started, address)
        assert page.answer(prompt="", max_tokens=199, temperature=0, raw=1) == golden()
        backend = page.run("return engine.model.backend;")
        assert backend["name"] == "wasm"
        assert backend["why"] == ("software" if arguments is None else "no-gpu")
        assert page.complaints == []
