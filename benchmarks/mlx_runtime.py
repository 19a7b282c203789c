"""The mlx executor against mlx-lm: the same files, weights and dtype, in one process, turn about.

    python benchmarks/mlx_runtime.py [--shape smollm2-135m] [--rounds 5] [--json FILE]
    python benchmarks/mlx_runtime.py --checkpoint DIR [--context 4096]   a checkpoint, its context stretched
    python benchmarks/mlx_runtime.py ARTIFACT                              an artifact for mlx that is there
    python benchmarks/mlx_runtime.py … --measure decode,batch    of: decode, prefill, turn, system, batch

Each round measures one side, then the other; the table gives medians and the median of the rounds' ratios
(above 1: nearfar is faster). Times are wall time from the call to the token on the host. Greedy on both
sides, and the first tokens must agree.

    decode    tokens/s after a prompt of 64 tokens
    prefill   tokens/s of a prompt of --prompt tokens, up to the first token
    turn      TTFT of a second turn: the first and its answer, then 32 tokens. mlx-lm keeps its cache by hand
    system    TTFT of a --system-tokens prompt and 16 tokens more: cold, and from a file written before
              (Engine.save_cache; mlx-lm's save_prompt_cache), loading it included. --system-rounds, as cold
              takes long
    batch     tokens/s of four requests at once, prompts of 64 tokens included; mlx-lm's BatchGenerator
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from nearfar.edge_runtime import Engine, SamplingParams

MEASURES = ("decode", "prefill", "turn", "system", "batch")
SHORT, NEXT, QUESTION, REQUESTS = 64, 32, 16, 4


@dataclass
class Timed:
    """Tokens and when each was on the host, in seconds from the call."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.at[0]

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.at) - 1) / (self.at[-1] - self.at[0])


class Nearfar:
    """Our side."""

    def __init__(self, artifact: Path, kv_memory: str) -> None:
        self.engine = Engine.load(artifact, device="mlx", kv_memory=kv_memory, verify=False)
        self.precision = self.engine.asynchronous.core.executor.precision

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.engine.asynchronous.core.scheduler.table.clear()

    def generate(self, prompt: list[int], count: int, start: float | None = None) -> Timed:
        """Greedy tokens; what the cache knows of the prompt is used."""
        out, start = Timed(), start or time.perf_counter()
        for event in self.engine.generate(
            prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        ):
            out.tokens.append(event.token)
            out.at.append(time.perf_counter() - start)
        return out

    def cold(self, prompt: list[int], count: int) -> Timed:
        """Greedy tokens with nothing cached."""
        self.forget()
        return self.generate(prompt, count)

    def second_turn(self, first: list[int], answer: int, more: list[int]) -> Timed:
        """The second turn of a conversation."""
        made = self.cold(first, answer).tokens
        return self.generate([*first, *made, *more], 2)

    def save(self, file: Path, prompt: list[int]) -> None:
        """Write the keys and values of a prompt."""
        self.engine.save_cache(file, tokens=prompt)

    def restored(self, file: Path, prompt: list[int], more: list[int]) -> Timed:
        """Generate after a saved prompt; the times include loading it."""
        self.forget()
        start = time.perf_counter()
        self.engine.load_cache(file)
        return self.generate([*prompt, *more], 2, start)

    def batch(self, prompts: list[list[int]], count: int) -> float:
        """Tokens per second of requests at once."""
        self.forget()
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = list(pool.map(lambda prompt: len(self.generate(prompt, count).tokens), prompts))
        return sum(made) / (time.perf_counter() - start)


class MlxLm:
    """The peer, on the same files, cast to the dtype that we compute in."""

    def __init__(self, artifact: Path, precision: str) -> None:
        self.model = load(str(artifact))[0]
        dtype = mx.float16 if precision == "f16" else mx.float32
        cast = tree_map(
            lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, self.model.parameters()
        )
        self.model.update(cast)
        mx.eval(self.model.parameters())

    def generate(self, prompt: list[int], count: int, cache: Any = None, start: float | None = None) -> Timed:
        """Greedy tokens after what is in `cache`."""
        out, start = Timed(), start or time.perf_counter()
        for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=count, prompt_cache=cache):
            out.tokens.append(int(token))
            out.at.append(time.perf_counter() - start)
        return out

    def cold(self, prompt: list[int], count: int) -> Timed:
        """Greedy tokens with nothing cached."""
        return self.generate(prompt, count)

    def second_turn(self, first: list[int], answer: int, more: list[int]) -> Timed:
        """The second turn of a conversation, in the same prompt_cache."""
        cache = make_prompt_cache(self.model)
        made = self.generate(first, answer, cache).tokens
        fed = cache[0].offset - len(first)  # the last token may not have been fed yet
        return self.generate([*made[fed:], *more], 2, cache)

    def save(self, file: Path, prompt: list[int]) -> None:
        """Write the keys and values of a prompt."""
        cache = make_prompt_cache(self.model)
        self.model(mx.array(prompt)[None], cache=cache)
        save_prompt_cache(str(file), cache)

    def restored(self, file: Path, prompt: list[int], more: list[int]) -> Timed:
        """Generate after a saved prompt; the times include loading it."""
        start = time.perf_counter()
        return self.generate(more, 2, load_prompt_cache(str(file)), start)

    def batch(self, prompts: list[list[int]], count: int) -> float:
        """Tokens per second of requests at once."""
        start, made = time.perf_counter(), 0
        generator = BatchGenerator(self.model)
        generator.insert(prompts, [count] * len(prompts))
        while responses := generator.next_generated():
            made += len(responses)
        generator.close()
        return made / (time.perf_counter() - start)


@dataclass
class Bench:
    """Both sides of the comparison, and the sizes of prompts and answers."""

    ours: Nearfar
    theirs: MlxLm
    args: argparse.Namespace
    folder: Path
    rng: np.random.Generator

    def prompt(self, count: int) -> list[int]:
        """Random tokens, so that no prompt begins as an earlier one."""
        return list(self.rng.integers(5, self.ours.engine.manifest.model.vocab_size, count).tolist())

    def decode(self) -> dict[str, tuple[float, float]]:
        """Decode rate."""
        prompt = self.prompt(SHORT)
        ours, theirs = self.ours.cold(prompt, self.args.tokens), self.theirs.cold(prompt, self.args.tokens)
        agree(ours, theirs)
        return {"decode tokens/s": (ours.rate, theirs.rate)}

    def prefill(self) -> dict[str, tuple[float, float]]:
        """Prefill rate."""
        prompt = self.prompt(self.args.prompt)
        ours, theirs = self.ours.cold(prompt, 2), self.theirs.cold(prompt, 2)
        agree(ours, theirs)
        return {"prefill tokens/s": (len(prompt) / ours.ttft, len(prompt) / theirs.ttft)}

    def turn(self) -> dict[str, tuple[float, float]]:
        """Second turn."""
        first, more = self.prompt(self.args.prompt), self.prompt(NEXT)
        ours, theirs = (side.second_turn(first, NEXT, more) for side in (self.ours, self.theirs))
        agree(ours, theirs)
        return {"second turn TTFT, s": (ours.ttft, theirs.ttft)}

    def system(self) -> dict[str, tuple[float, float]]:
        """System prompt, cold and from a file."""
        system, more = self.prompt(self.args.system_tokens), self.prompt(QUESTION)
        cold = [side.cold([*system, *more], 2) for side in (self.ours, self.theirs)]
        agree(*cold)
        ours, theirs = self.folder / "ours.safetensors", self.folder / "theirs.safetensors"
        self.ours.save(ours, system)
        self.theirs.save(theirs, system)
        saved = self.ours.restored(ours, system, more), self.theirs.restored(theirs, system, more)
        agree(saved[0], cold[0])
        agree(*saved)
        ours.unlink()
        theirs.unlink()
        return {
            "system prompt TTFT cold, s": (cold[0].ttft, cold[1].ttft),
            "system prompt TTFT from file, s": (saved[0].ttft, saved[1].ttft),
            "cold / from file (first: nearfar, second: mlx-lm)": (
                cold[0].ttft / saved[0].ttft, cold[1].ttft / saved[1].ttft,
            ),
        }  # fmt: skip

    def batch(self) -> dict[str, tuple[float, float]]:
        """Requests at once."""
        prompts = [self.prompt(SHORT) for _ in range(REQUESTS)]
        rates = self.ours.batch(prompts, self.args.tokens), self.theirs.batch(prompts, self.args.tokens)
        return {f"{REQUESTS} requests tokens/s": rates}


def agree(ours: Timed, theirs: Timed) -> None:
    """Check that both sides computed the same tokens: otherwise their speeds cannot be compared."""
    if ours.tokens[:2] != theirs.tokens[:2]:
        raise SystemExit(f"the sides differ: {ours.tokens[:8]} and {theirs.tokens[:8]}")


def run(bench: Bench, measures: list[str]) -> dict[str, dict[str, float]]:
    """Run all measures, one after the other; the first round of each warms up."""
    results: dict[str, dict[str, float]] = {}
    for name in measures:
        measure: Callable[[], dict[str, tuple[float, float]]] = getattr(bench, name)
        count = bench.args.system_rounds if name == "system" else bench.args.rounds
        rounds = [measure() for _ in range(count + (name != "system"))]
        rounds = rounds[-count:]
        for title in rounds[0]:
            pairs = [round_[title] for round_ in rounds]
            faster = [b / a if title.endswith(", s") else a / b for a, b in pairs]
            row = {
                "nearfar": statistics.median(a for a, _ in pairs),
                "mlx-lm": statistics.median(b for _, b in pairs),
            }
            results[title] = {**row, "ratio": statistics.median(faster), "rounds": len(pairs)}
            print(
                f"{title:52}{row['nearfar']:12.3f}{row['mlx-lm']:12.3f}{results[title]['ratio']:8.2f}",
                flush=True,
            )
    return results


def prepare(folder: Path, args: argparse.Namespace) -> Path:
    """The artifact to measure."""
    nearfar = [sys.executable, "-m", "nearfar"]
    if args.artifact is not None:
        inside: Path = args.artifact / "mlx"
        return inside if inside.exists() else args.artifact
    checkpoint = args.checkpoint
    if checkpoint is None:
        checkpoint = folder / args.shape
        subprocess.run([*nearfar, "synth", args.shape, "-o", str(checkpoint)], check=True)
    elif args.context is not None:
        checkpoint = folder / checkpoint.name
        checkpoint.mkdir()
        for file in args.checkpoint.resolve().iterdir():
            (checkpoint / file.name).symlink_to(file)
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").unlink()
        (checkpoint / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": args.context})
        )
    out = folder / "artifact"
    command = [*nearfar, "build", str(checkpoint), "--target", "mlx", "--quant", args.quant, "-o", str(out)]
    subprocess.run(command, check=True)
    return out / "mlx"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument(
        "--shape", default="smollm2-135m", help="a shape of `nearfar synth`, where nothing else is given"
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument(
        "--context", type=int, help="with --checkpoint: positions to build for; weights do not depend on it"
    )
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--measure", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--system-rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="to decode")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--system-tokens", type=int, default=2000)
    parser.add_argument("--kv-memory", default="512MB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measures = args.measure.split(",")
    if unknown := set(measures) - set(MEASURES):
        parser.error(f"--measure takes {', '.join(MEASURES)}, not {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as name:
        artifact = prepare(Path(name), args)
        ours = Nearfar(artifact, args.kv_memory)
        if "system" in measures and ours.engine.context < args.system_tokens + QUESTION + 2:
            parser.error(
                f"--system-tokens {args.system_tokens} do not fit this model's context of "
                f"{ours.engine.context}: fewer, or --checkpoint with --context, or --measure without system"
            )
        theirs = MlxLm(artifact, ours.precision)
        print(
            f"{ours.precision} on {mx.default_device()}, mlx {mx.__version__}\n"
            f"{'':52}{'nearfar':>12}{'mlx-lm':>12}{'ratio':>8}"
        )
        results = run(Bench(ours, theirs, args, Path(name), np.random.default_rng(0)), measures)
        ours.engine.close()
    if args.json:
        args.json.write_text(
            json.dumps({"precision": ours.precision, "mlx": mx.__version__, **results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
