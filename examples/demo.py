"""`make demo`: from a checkpoint to an answer in Python, in a real browser, and from the fallback server.

Builds the sample model for cpu, webgpu and wasm (for browsers that offer no GPU) and asks it a few questions
in Python, streamed; has it write JSON that keeps to a schema; asks the page in Chromium the same as Python;
then lets a hybrid client decide between the device and a server, and says what was decided and why.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import httpx
from playwright.sync_api import sync_playwright

from nearfar.children import child_environment, keys_hidden
from nearfar.edge_runtime import Engine
from nearfar.routing import HybridClient, Policy

ROOT = Path(__file__).resolve().parents[1]
NEARFAR = [sys.executable, "-m", "nearfar"]
BUILD = [*NEARFAR, "build"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# WebGPU on a machine without a GPU: Chromium's own software device.
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
# Sampled, not greedy: with one seed Python and the page still give the same text.
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
QUESTIONS = ("What is nearfar?", "What is 17 + 25?", "What is the capital of Norway?")
SENTENCE = "As JSON: Ida is 34 years old and lives in Oslo."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}


@dataclass(frozen=True)
class Answer:
    """The answer of one runtime, with its speed."""

    text: str
    speed: str


def build(checkpoint: Path, out: Path) -> None:
    """`nearfar build`."""
    began = time.monotonic()
    options = ["--target", "cpu,webgpu,wasm", "--cpu-features", "native", "--quant", "q4"]
    arguments = [str(checkpoint), *options, "-o", str(out)]
    print(f"$ nearfar build {' '.join(arguments)}", flush=True)
    subprocess.run([*BUILD, *arguments], check=True, env=child_environment())
    print(f"built in {time.monotonic() - began:.1f} s\n", flush=True)


def user(content: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def streamed(engine: Engine, prompt: str, max_tokens: int) -> Answer:
    """Print an answer as it comes."""
    print(f"> {prompt}")
    text, tokens = "", 0
    began = first = time.monotonic()
    for chunk in engine.chat.completions.create(
        messages=user(prompt),
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        **SAMPLING,
    ):
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            first = first if text else time.monotonic()
            text += piece
            print(piece, end="", flush=True)
    rate = (tokens - 1) / (time.monotonic() - first)
    answer = Answer(text, f"first token after {1000 * (first - began):.0f} ms, {rate:.0f} tokens/s")
    print(f"\n  ({answer.speed})\n")
    return answer


def as_json(engine: Engine) -> None:
    """Print what a sentence says, as JSON that keeps to a schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = engine.chat.completions.create(
        messages=user(SENTENCE), max_tokens=60, temperature=0, response_format=wanted
    )
    print(f"> {SENTENCE}\n{json.dumps(json.loads(answer.choices[0].message.content))}\n")


def routed(artifact: Path, address: str) -> None:
    """Print what a hybrid client decides: it has the artifact, and the server as its cloud."""
    print("── A hybrid client between this device and the server")
    asked = (("auto", {}), ("cloud_only", {}), ("auto", {"private": True}))
    for mode, more in asked:
        with HybridClient(device=artifact, cloud=address, policy=Policy(mode=mode)) as client:
            answer = client.chat.completions.create(
                messages=user(QUESTIONS[1]), max_tokens=30, temperature=0, x_nearfar=more
            )
        told = answer.x_nearfar
        why = told.reasons[0].code if told.reasons else "nothing speaks against it"
        named = f"{mode}{', private' if more else ''}"
        print(f"{named:14} → {told.route} ({why}): {answer.choices[0].message.content}")
    print()


@contextmanager
def running(*command: object) -> Iterator[str]:
    """Run a serving command of nearfar in the background; gives the address that it prints."""
    arguments = [*NEARFAR, *map(str, command)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env=child_environment(PYTHONUNBUFFERED="1")
    ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if address := re.search(r"https?://\S+?/?(?=\s|$)", line):
                    yield address[0].rstrip("/")
                    return
            raise SystemExit(f"error: `nearfar {command[0]}` ended without naming its address")
        finally:
            server.terminate()


def in_browser(address: str, prompt: str, max_tokens: int) -> Answer:
    """Open the page with the prompt filled in, in headless Chromium, send it as a person would, and read
    the answer.
    """
    with keys_hidden(), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        tab = browser.new_page()
        tab.goto(f"{address}/?{urlencode({'prompt': prompt, 'max_tokens': max_tokens, **SAMPLING})}")
        tab.wait_for_function(
            "() => ['idle', 'error'].includes(document.body.dataset.state)", timeout=300_000
        )
        tab.press("#prompt", "Enter")
        tab.wait_for_function(
            "() => ['done', 'error'].includes(document.body.dataset.state)", timeout=300_000
        )
        text = tab.locator("#answer").inner_text()
        if tab.evaluate("document.body.dataset.state") == "error":
            raise SystemExit(f"error: the page says: {tab.locator('body').inner_text()}")
        speed = " ".join(tab.locator("#stats").inner_text().split())
        browser.close()
    return Answer(text, speed)


def from_server(address: str, prompt: str, max_tokens: int) -> Answer:
    """One chat completion over HTTP, as any OpenAI client asks for it."""
    body = {
        "model": "sample-model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        **SAMPLING,
    }
    began = time.monotonic()
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    rate = reply["usage"]["completion_tokens"] / (time.monotonic() - began)
    return Answer(reply["choices"][0]["message"]["content"], f"{rate:.0f} tokens/s with the prompt")


def main() -> None:
    """Build, answer three times, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", default="Tell me a story about the fox.")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "sample")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    out = Path(os.path.relpath(arguments.out))
    build(Path("examples/sample-model"), out)
    print("── Python, cpu\n")
    with Engine.load(out / "cpu") as engine:
        for question in QUESTIONS:
            streamed(engine, question, 80)
        as_json(engine)
        streamed(engine, arguments.prompt, arguments.max_tokens)
    if CHROMIUM:
        with running("web", out / "webgpu", "--no-open", "--port", 0) as address:
            said = in_browser(address, arguments.prompt, arguments.max_tokens)
        print(f"── Chromium, webgpu\n\n> {arguments.prompt}\n{said.text}\n  ({said.speed})\n")
    with running("serve", "examples/sample-model", "--port", 0, "--log-level", "warning") as address:
        said = from_server(address, arguments.prompt, arguments.max_tokens)
        print(f"── Fallback server, torch, not quantized\n\n> {arguments.prompt}\n{said.text}")
        print(f"  ({said.speed})\n")
        routed(out / "cpu", address)
    if not CHROMIUM:
        raise SystemExit("error: no chromium here, so the page was not tried: apt-get install chromium")
    print(f"Open the page yourself:   .venv/bin/nearfar web {out}")
    print("Start the server:         .venv/bin/nearfar serve examples/sample-model")


if __name__ == "__main__":
    main()
