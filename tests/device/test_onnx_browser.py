"""The directory of an onnx artifact, unmodified, in Transformers.js: in headless Chromium, on WebAssembly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import shared_data
from tests.support.artifacts import Built, reference
from tests.support.browser import browser
from tests.support.paths import WEB

PAGE = """<!doctype html><script type="module">
import { env, pipeline, Tensor } from "/transformers/transformers.min.js";
env.allowLocalModels = true;
env.allowRemoteModels = false;
env.localModelPath = "/models/";
env.backends.onnx.wasm.wasmPaths = "/onnxruntime/";
window.tell = async (model, options) => {
  const generate = await pipeline("text-generation", model);
  const ids = new Tensor("int64", options.prompt.map(BigInt), [1, options.prompt.length]);
  const mask = new Tensor("int64", options.prompt.map(() => 1n), [1, options.prompt.length]);
  const made = await generate.model.generate({
    inputs: ids, attention_mask: mask, max_new_tokens: options.count, do_sample: false,
  });
  return generate.tokenizer.decode(made.tolist()[0], { skip_special_tokens: true });
};
window.ready = true;
</script>"""


class Files(SimpleHTTPRequestHandler):
    """Serves the page, the packages' files and the model, each under its own folder."""

    def __init__(self, folders: dict[str, Path], *args: Any, **options: Any) -> None:
        self.folders = folders
        super().__init__(*args, **options)

    def translate_path(self, path: str) -> str:
        first, _, rest = path.split("?")[0].removeprefix("/").partition("/")
        return str(self.folders[first] / rest) if first in self.folders else "/nothing"

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folders: dict[str, Path]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, folders)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def packages() -> dict[str, Path]:
    folders = {
        "transformers": WEB / "node_modules" / "@huggingface" / "transformers" / "dist",
        "onnxruntime": WEB / "node_modules" / "onnxruntime-web" / "dist",
    }
    if missing := [name for name, folder in folders.items() if not folder.is_dir()]:
        pytest.skip(f"{', '.join(missing)} of npm is not installed (run `make setup`)")
    return folders


def told(root: Path, packages: dict[str, Path], prompt: list[int], count: int) -> str:
    """The greedy text of `count` tokens after a prompt, from the package's default build."""
    with served({**packages, "models": root}) as address, browser() as chromium:
        tab = chromium.new_page()
        tab.goto(address)
        tab.wait_for_function("window.ready")
        return str(tab.evaluate("options => tell('onnx', options)", {"prompt": prompt, "count": count}))


def test_transformers_js_tells_the_golden_story(built: Built, packages: dict[str, Path]) -> None:
    golden = shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8")
    assert told(built("stories260K", "none"), packages, [1], 199).strip() == golden.strip()


def test_transformers_js_reads_quantized_matrices(built: Built, packages: dict[str, Path]) -> None:
    """Embedding and head are quantized too: their rows and products are read by operators of their own."""
    expected = reference("classics-7M", "q4")
    ids = expected.tokenizer.encode("It was the best of", add_special_tokens=False)
    text = told(built("classics-7M", "q4"), packages, ids, 40)
    assert text == "It was the best of" + expected.continuation(ids, 40)
