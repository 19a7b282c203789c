"""Quality against the share of cloud tokens, as the limit of the confidence monitor moves.

    python benchmarks/routing/escalation.py [--prompts N] [--json FILE] [--plot FILE.png]

classics-1M is the device and classics-7M the cloud, both through the real engine with CPU artifacts (built here unless
given). A prompt is a stretch of text/heldout.txt, which neither model has seen. The device answers it by sampling, and the
monitor of nearfar.routing watches that answer; where its mean falls below the limit, the cloud takes over from that token on.

Quality is the mean log-probability, in nats a token, that the side in charge gives to the text's true continuation: the
device up to the token of the takeover, the cloud from there, each behind the true text so far. So the judge is the author,
neither of the two models; a mark by the larger model of what the larger model wrote would only measure resemblance. The
monitor sees nothing of the true text: it decides by the device's own answer, as it must in use.

Compared with: the device always, the cloud always, and the same takeovers dealt to the prompts at random (the same share of
cloud tokens at the same places; mean of 500 deals and the middle 95 % of them). A limit earns its place only above that band.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearfar.edge_runtime import Engine, SamplingParams
from nearfar.routing.confidence import Monitor, Token
from nearfar.routing.policy import MonitorOptions

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ENTROPY_OF = 20
"""How many alternatives the entropy is estimated from: as many as OpenAI's interface gives."""
DEALS = 500

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """One prompt: what the monitor saw of the device's answer, and both sides' logprobs of the true text [answer]."""

    watched: tuple[Token, ...]
    device: tuple[float, ...]
    cloud: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One limit: the share of prompts that were escalated, of tokens from the cloud, the quality, and that of random deals."""

    watch: str
    limit: float
    escalated: float
    cloud_share: float
    quality: float
    random: float
    random_low: float
    random_high: float


def artifact(given: Path | None, name: str, work: Path) -> Path:
    """The artifact of a model, built for the CPU if none was given."""
    if given is not None:
        return given
    command = [sys.executable, "-m", "nearfar", "build", str(DATA / "models" / name), "--target", "cpu", "-o", str(work / name)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return work / name


def true_logprobs(engine: Engine, prompt: Sequence[int], truth: Sequence[int]) -> tuple[float, ...]:
    """The model's logprob of each token of the true text behind what precedes it.

    The engine gives logprobs of the tokens that it samples; a bias makes it sample the true one, and logprobs are those of the
    model before any bias. Pages of the prefix stay cached, so a token costs a few rows.
    """
    found = []
    for at, token in enumerate(truth):
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True, logit_bias={int(token): 100.0})
        event = next(iter(engine.generate([*prompt, *truth[:at]], params)))
        if event.token != token or event.logprob is None:
            raise RuntimeError(f"the engine was made to take token {token} and took {event.token}")
        found.append(event.logprob)
    return tuple(found)


def own_answer(engine: Engine, prompt: Sequence[int], length: int, seed: int) -> tuple[Token, ...]:
    """What the monitor would see: the device's sampled answer with its logprobs."""
    params = SamplingParams(temperature=1, max_tokens=length, logprobs=ENTROPY_OF, seed=seed, ignore_eos=True)
    return tuple(
        Token(str(event.token), event.logprob, tuple(top.logprob for top in event.top_logprobs))
        for event in engine.generate(list(prompt), params)
    )


def takeover(case: Case, options: MonitorOptions) -> int:
    """The token from which the cloud answers; the answer's length if it never does."""
    monitor = Monitor(options)
    for at, token in enumerate(case.watched):
        if monitor.push(token) is not None:
            return at + 1
    return len(case.device)


def quality(device: Array, cloud: Array, taken: npt.NDArray[np.int64]) -> float:
    """The mean logprob [prompts, answer] with the cloud in charge from token taken[prompt] on."""
    late = np.arange(device.shape[1]) >= taken[:, None]
    return float(np.where(late, cloud, device).mean())


def points(cases: Sequence[Case], watch: str, count: int) -> list[Point]:
    """The curve: limits from the strictest that changes anything to the loosest, evenly by how often they strike."""
    device, cloud = (np.array([getattr(case, side) for case in cases]) for side in ("device", "cloud"))
    extremes = []
    for case in cases:
        monitor = Monitor(MonitorOptions(repeats=None))
        for token in case.watched:
            monitor.push(token)
        extremes.append(monitor.lowest_logprob if watch == "logprob" else monitor.highest_entropy)
    ends = np.array(extremes, dtype=float)
    shares = np.linspace(0.02, 1, count)
    limits = [*np.quantile(ends, shares if watch == "logprob" else 1 - shares)]
    # Beyond the extremes of every answer: earlier and earlier takeovers, up to the first token that is watched at all.
    spread = float(ends.std())
    limits += [limits[-1] + (spread if watch == "logprob" else -spread) * step for step in (0.5, 1, 1.5, 2, 3, 4)]
    random, found = np.random.default_rng(0), []
    for limit in limits:
        logprob, entropy = (float(limit), None) if watch == "logprob" else (None, float(limit))
        taken = np.array([takeover(case, MonitorOptions(logprob=logprob, entropy=entropy, repeats=None)) for case in cases])
        deals = [quality(device, cloud, random.permutation(taken)) for _ in range(DEALS)]
        low, high = np.percentile(deals, [2.5, 97.5])
        length = device.shape[1]
        found.append(
            Point(
                watch, float(limit), float((taken < length).mean()), float((length - taken).sum() / device.size),
                quality(device, cloud, taken), float(np.mean(deals)), float(low), float(high),
            )
        )  # fmt: skip
    return found


def collect(options: argparse.Namespace, device: Path, cloud: Path) -> list[Case]:
    """Run both engines over stretches of the text, evenly spaced."""
    text = options.text.read_text(encoding="utf-8")
    with Engine.load(device, device="cpu", threads=options.threads) as small, Engine.load(
        cloud, device="cpu", threads=options.threads
    ) as large:
        tokens = small.asynchronous.codec.encode(text)
        if tokens != large.asynchronous.codec.encode(text):
            raise SystemExit("error: device and cloud need the same tokenizer for a comparison by token")
        span = options.prompt_tokens + options.answer_tokens
        starts = np.linspace(0, len(tokens) - span, options.prompts).astype(int)
        cases = []
        for number, start in enumerate(track(starts, "answering", console=Console(stderr=True), transient=True)):
            prompt = tokens[start : start + options.prompt_tokens]
            truth = tokens[start + options.prompt_tokens : start + span]
            watched = own_answer(small, prompt, options.answer_tokens, options.seed + number)
            cases.append(Case(watched, true_logprobs(small, prompt, truth), true_logprobs(large, prompt, truth)))
    return cases


def plot(found: Sequence[Point], ends: tuple[float, float], path: Path) -> None:
    """The curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    axes.plot([0, 1], ends, "ko", label="always device, always cloud")
    for watch, colour in (("logprob", "tab:blue"), ("entropy", "tab:orange")):
        curve = sorted((point for point in found if point.watch == watch), key=lambda point: point.cloud_share)
        x = [point.cloud_share for point in curve]
        axes.plot(x, [point.quality for point in curve], "o-", ms=3, color=colour, label=f"monitor: {watch}")
        if watch == "logprob":
            axes.plot(x, [point.random for point in curve], "--", color="grey", label="the same, dealt at random")
            axes.fill_between(
                x, [p.random_low for p in curve], [p.random_high for p in curve], color="grey", alpha=0.2, label="95 % of deals"
            )
    axes.set_xlabel("share of tokens from the cloud")
    axes.set_ylabel("log-probability of the true text, nats a token")
    axes.set_title("escalation: classics-1M on the device, classics-7M in the cloud")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, show, and write --json and --plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=Path, default=None, help="artifact of classics-1M")
    parser.add_argument("--cloud", type=Path, default=None, help="artifact of classics-7M")
    parser.add_argument("--text", type=Path, default=DATA / "text" / "heldout.txt")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--points", type=int, default=12, help="limits between which the curve is drawn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        device = artifact(options.device, "classics-1M", Path(work))
        cloud = artifact(options.cloud, "classics-7M", Path(work))
        cases = collect(options, device, cloud)
    found = [point for watch in ("logprob", "entropy") for point in points(cases, watch, options.points)]
    ends = float(np.mean([case.device for case in cases])), float(np.mean([case.cloud for case in cases]))
    table = Table(title=f"{len(cases)} prompts; always device {ends[0]:.4f}, always cloud {ends[1]:.4f} nats a token")
    for heading in ("monitor", "limit", "escalated", "cloud tokens", "quality", "at random [95 %]", "of the gap"):
        table.add_column(heading, justify="right")
    for point in found:
        gap = (point.quality - ends[0]) / (ends[1] - ends[0])
        band = f"{point.random:.4f} [{point.random_low:.4f}, {point.random_high:.4f}]"
        table.add_row(
            point.watch, f"{point.limit:.3f}", f"{point.escalated:.0%}", f"{point.cloud_share:.1%}", f"{point.quality:.4f}", band, f"{gap:.1%}"
        )
    Console(width=130).print(table)
    if options.json:
        report = {"prompts": len(cases), "always_device": ends[0], "always_cloud": ends[1], "points": [asdict(p) for p in found]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(found, ends, options.plot)


if __name__ == "__main__":
    main()
