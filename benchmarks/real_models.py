"""Real trained models on each target: seconds to load, and whether their greedy texts equal those of others.

    python benchmarks/real_models.py FILE.gguf… [--targets cpu,onnx,vulkan,webgpu] [--tokens 48]
    python benchmarks/real_models.py FILE.gguf… --folder DIR --json FILE

Each model is built once for each target, into DIR/<model>/<target> or a folder that is deleted afterwards; a
target that cannot run here is left out with its reason. The texts are those of eight prompts, continued by
the token that is most likely each time. Two others read the same file (pip install 'nearfar[bench]'; what is
not installed is left out): llama.cpp, and transformers with all weights and sums in float32, which is what
the file says. Where two tokens are nearly as likely, rounding decides: so the table also has how many
characters were equal before the first that was not. llama.cpp attends with flash attention, as llama-server
does where it can: without it llama.cpp sums in float16, and 4 of its 8 texts of Qwen2.5-Coder-0.5B are others
than in float32.

A load is that of a process which has loaded the libraries, with the file in the system's cache: the median of
three.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nearfar.edge_runtime import Engine
from nearfar.errors import NearfarError

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a little fox who",
    "Water boils at a temperature of",
    "SELECT name, age FROM users WHERE",
    "The three primary colours are",
    '{"name": "Ann", "age": ',
    "In 1969, Neil Armstrong",
)
TARGETS = ("cpu", "onnx", "vulkan", "webgpu")
LOADS = 3
PEER = "llama.cpp"
EXACT = "float32"
NEEDED = {PEER: ("llama_cpp",), EXACT: ("torch", "transformers", "accelerate")}
Texts = dict[str, list[str]]
Continue = Callable[[str], str]


def main() -> None:
    """See the docstring of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="keeps what is built: DIR/<model>/<target>")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, told = Console(), {}
    for model in args.models:
        with folder(args.folder) as base:
            told[model.name] = measured(
                model, base / model.stem, args.targets.split(","), args.tokens, console
            )
    if args.json:
        args.json.write_text(json.dumps(told, indent=1))


@contextmanager
def folder(kept: Path | None) -> Iterator[Path]:
    """Where artifacts are built."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def measured(model: Path, base: Path, targets: list[str], tokens: int, console: Console) -> dict[str, Any]:
    """Loads and texts of one model, printed as a table."""
    texts: Texts = {}
    loads: dict[str, float] = {}
    for other, text_of in ((PEER, with_llama), (EXACT, with_transformers)):
        if all(importlib.util.find_spec(name) for name in NEEDED[other]):
            loads[other], texts[other] = text_of(model, tokens)
        else:
            console.print(f"{other}: left out (pip install 'nearfar\\[bench]')")
    for target in targets:
        try:
            loads[target], texts[target] = with_nearfar(model, base, target, tokens)
        except (NearfarError, subprocess.CalledProcessError) as error:
            console.print(f"{target}: left out ({error})")
    others = [name for name in (PEER, EXACT) if name in texts] or list(texts)[:1]
    table = Table("", "load (s)", title=model.name)
    for other in others:
        table.add_column(f"equal to {other}")
        table.add_column("equal beginnings (characters)")
    for name, made in texts.items():
        cells = (cell for other in others for cell in compared(made, texts[other]))
        table.add_row(name, f"{loads[name]:.2f}", *cells)
    console.print(table)
    return {"loads": loads, "texts": texts}


def with_nearfar(model: Path, base: Path, target: str, tokens: int) -> tuple[float, list[str]]:
    """Seconds of a load, and the texts."""
    path = base / target
    if not path.is_dir():
        build = [sys.executable, "-m", "nearfar", "build", str(model), "--target", target, "-o", str(base)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)

    def opened() -> Engine:
        return Engine.load(path, device=target)

    def continued(engine: Engine) -> Continue:
        def go(prompt: str) -> str:
            made = engine.completions.create(prompt=prompt, max_tokens=tokens, temperature=0)
            return made.choices[0].text

        return go

    return run(opened, continued, Engine.close)


def with_llama(model: Path, tokens: int) -> tuple[float, list[str]]:
    """Load seconds and texts by llama.cpp."""
    from llama_cpp import Llama

    def continued(llama: Any) -> Continue:
        def go(prompt: str) -> str:
            llama.reset()
            made = llama.create_completion(prompt, max_tokens=tokens, temperature=0, top_k=1)
            return str(made["choices"][0]["text"])

        return go

    def opened() -> Any:
        return Llama(str(model), n_ctx=1024, verbose=False, flash_attn=True)

    return run(opened, continued, lambda llama: llama.close())


def with_transformers(model: Path, tokens: int) -> tuple[float, list[str]]:
    """The same by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = time.perf_counter()
    read: dict[str, Any] = {"gguf_file": model.name}
    tokenizer = AutoTokenizer.from_pretrained(model.parent, **read)
    loaded = AutoModelForCausalLM.from_pretrained(model.parent, dtype=torch.float32, **read).eval()
    seconds = time.perf_counter() - start

    def go(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        made = loaded.generate(**ids, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.0)
        return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    with torch.inference_mode():
        return seconds, [go(prompt) for prompt in PROMPTS]


def run(
    opened: Callable[[], Any], continued: Callable[[Any], Continue], close: Callable[[Any], None]
) -> tuple[float, list[str]]:
    """The median of the loads, and what the last of the engines says."""
    seconds = []
    for left in range(LOADS, 0, -1):
        start = time.perf_counter()
        engine = opened()
        seconds.append(time.perf_counter() - start)
        if left > 1:
            close(engine)
    go = continued(engine)
    texts = [go(prompt) for prompt in PROMPTS]
    close(engine)
    return statistics.median(seconds), texts


def compared(made: list[str], others: list[str]) -> tuple[str, str]:
    """How many texts are equal, and how far each is."""
    pairs = list(zip(made, others, strict=True))
    equal = sum(ours == theirs for ours, theirs in pairs)
    return f"{equal} of {len(pairs)}", " ".join(str(common(*pair)) for pair in pairs)


def common(ours: str, theirs: str) -> int:
    """Characters that two texts begin with alike."""
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)))  # fmt: skip


if __name__ == "__main__":
    main()
