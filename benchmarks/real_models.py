"""Real trained models on each target: seconds to load, and whether their greedy texts equal llama.cpp's.

    python benchmarks/real_models.py FILE.gguf… [--targets cpu,onnx,vulkan,webgpu] [--tokens 48]
    python benchmarks/real_models.py FILE.gguf… --folder DIR --json FILE
    python benchmarks/real_models.py FILE.gguf… --targets cpu --exact

Each model is built once for each target, into DIR/<model>/<target> or a folder that is deleted afterwards; a
target that cannot run here is left out with its reason. The texts are those of eight prompts, continued by
the token that is most likely each time. llama.cpp reads the same file (pip install 'nearfar[bench]'); without
it the targets are compared with each other alone. With --exact all are compared with transformers instead,
which computes in float32 with the weights for which the file stands. Sums in another order decide differently
where two tokens are nearly as likely: so the table also has how many characters were equal before the first
that was not.

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
PEER, EXACT = "llama.cpp", "exact"
Texts = dict[str, list[str]]
Continue = Callable[[str], str]


def main() -> None:
    """Measure every given file, print the tables and write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="keeps what is built: DIR/<model>/<target>")
    parser.add_argument("--exact", action="store_true", help="compare with transformers in float32, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, told = Console(), {}
    for model in args.models:
        with folder(args.folder) as base:
            told[model.name] = measured(
                model, base / model.stem, args.targets.split(","), args.tokens, console, args.exact
            )
    if args.json:
        args.json.write_text(json.dumps(told, indent=1))


@contextmanager
def folder(kept: Path | None) -> Iterator[Path]:
    """The folder for artifacts: the given one, or a temporary one."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def measured(
    model: Path, base: Path, targets: list[str], tokens: int, console: Console, exact: bool = False
) -> dict[str, Any]:
    """Loads and texts of one model, printed as a table. `exact`: whether transformers computes texts, too."""
    texts: Texts = {}
    loads: dict[str, float] = {}
    if exact:
        loads[EXACT], texts[EXACT] = with_transformers(model, tokens)
    if importlib.util.find_spec("llama_cpp"):
        loads[PEER], texts[PEER] = with_llama(model, tokens)
    else:
        console.print(f"{PEER} is not installed (pip install 'nearfar\\[bench]'): targets are compared alone")
    for target in targets:
        try:
            loads[target], texts[target] = with_nearfar(model, base, target, tokens)
        except (NearfarError, subprocess.CalledProcessError) as error:
            console.print(f"{target}: left out ({error})")
    first, *_ = texts
    table = Table("", "load (s)", f"equal to {first}", "equal beginnings (characters)", title=model.name)
    for name, made in texts.items():
        equal = [ours == theirs for ours, theirs in zip(made, texts[first], strict=True)]
        begun = [common(*pair) for pair in zip(made, texts[first], strict=True)]
        table.add_row(name, f"{loads[name]:.2f}", f"{sum(equal)} of {len(equal)}", " ".join(map(str, begun)))
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

    return run(lambda: Llama(str(model), n_ctx=1024, verbose=False), continued, lambda llama: llama.close())


def with_transformers(model: Path, tokens: int) -> tuple[float, list[str]]:
    """Load seconds and texts by transformers, with the file's weights as float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = time.perf_counter()
    file = {"gguf_file": model.name}
    tokenizer = AutoTokenizer.from_pretrained(model.parent, **file)
    net = AutoModelForCausalLM.from_pretrained(model.parent, dtype=torch.float32, **file).eval()
    seconds = time.perf_counter() - start

    def go(prompt: str) -> str:
        asked = tokenizer(prompt, return_tensors="pt")
        made = net.generate(
            **asked, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.0, pad_token_id=0
        )
        return str(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))

    return seconds, [go(prompt) for prompt in PROMPTS]


def run(
    opened: Callable[[], Any], continued: Callable[[Any], Continue], close: Callable[[Any], None]
) -> tuple[float, list[str]]:
    """The median seconds of the loads, and the texts of the last engine."""
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


def common(ours: str, theirs: str) -> int:
    """The number of equal characters at the beginning of two texts."""
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)))  # fmt: skip


if __name__ == "__main__":
    main()
