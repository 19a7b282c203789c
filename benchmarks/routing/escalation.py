"""Quality against the share of cloud tokens, as the limit of the confidence monitor moves.

    python benchmarks/routing/escalation.py [--prompts N] [--json FILE] [--plot FILE.png]

classics-1M is the device and classics-7M the cloud, both through the real engine with CPU artifacts (built
here unless given). A prompt is a stretch of text/heldout.txt, which neither model has seen. The device
answers it greedily, and the monitor of nearfar.routing watches that answer; where its mean passes the limit,
the cloud takes over and continues the text so far, at the next multiple of 8 tokens (so that every
continuation can be made beforehand).

Two marks, both in nats a token, higher is better:

true     log-probability that the side in charge gives to the true continuation, behind the true text.
         The judge is the author, so it favours neither side; it asks whether the monitor finds where the
         cloud knows more.
emitted  the log-probability that classics-7M gives to the text that the user sees. It favours the cloud's own
words, so the
         distance between always-device and always-cloud means little; but whether a curve lies above random
         does: it asks whether the monitor finds the answers that have gone wrong.

Compared with: the device always, the cloud always, and the same takeovers dealt to the prompts at random (the
same share of cloud tokens at the same places; mean of 500 deals and the middle 95 % of them). A limit earns
its place only above that band.

With --temperature 1 the curves hardly leave the band: the mean of 16 sampled tokens is then mostly the luck
of the draw.
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
"""The number of alternatives that the entropy is estimated from: the most that OpenAI's interface gives."""
DEALS = 500
STEP = 8
"""The cloud takes over at multiples of this many tokens."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """One prompt: the monitor's view of the device's answer, and the marks if the cloud takes over at token
    STEP × index.
    """

    watched: tuple[Token, ...]
    true: tuple[float, ...]
    emitted: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """One limit: the share of prompts that were escalated, of tokens from the cloud, the quality, and the
    quality of random deals.
    """

    mark: str
    watch: str
    limit: float
    escalated: float
    cloud_share: float
    quality: float
    random: float
    random_low: float
    random_high: float


def artifact(given: Path | None, model: Path, work: Path) -> Path:
    """The artifact of a model, built for the CPU if none was given."""
    if given is not None:
        return given
    command = [
        sys.executable,
        "-m",
        "nearfar",
        "build",
        str(model),
        "--target",
        "cpu",
        "-o",
        str(work / model.name),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return work / model.name


def true_logprobs(engine: Engine, prompt: Sequence[int], truth: Sequence[int]) -> tuple[float, ...]:
    """The model's logprob of each token of the true text behind what precedes it.

    The engine gives logprobs of the tokens that it samples; a bias makes it sample the true one, and logprobs
    are those of the model before any bias. Pages of the prefix stay cached, so a token costs a few rows.
    """
    found = []
    for at, token in enumerate(truth):
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=0, ignore_eos=True, logit_bias={int(token): 100.0}
        )
        event = next(iter(engine.generate([*prompt, *truth[:at]], params)))
        if event.token != token or event.logprob is None:
            raise RuntimeError(f"the engine was made to take token {token} and took {event.token}")
        found.append(event.logprob)
    return tuple(found)


def own_answer(
    engine: Engine, prompt: Sequence[int], length: int, seed: int, heat: float
) -> tuple[list[int], tuple[Token, ...]]:
    """The device's answer, and what the monitor sees of it."""
    params = SamplingParams(
        temperature=heat, max_tokens=length, logprobs=ENTROPY_OF, seed=seed, ignore_eos=True
    )
    events = list(engine.generate(list(prompt), params))
    tops = [tuple(top.logprob for top in event.top_logprobs) for event in events]
    watched = tuple(
        Token(str(event.token), event.logprob, top) for event, top in zip(events, tops, strict=True)
    )
    return [event.token for event in events], watched


def continued(engine: Engine, prompt: Sequence[int], length: int, seed: int, heat: float) -> list[float]:
    """The logprobs of what the cloud writes behind a text: also what it thinks of it."""
    if length == 0:
        return []
    params = SamplingParams(temperature=heat, max_tokens=length, logprobs=0, seed=seed, ignore_eos=True)
    return [event.logprob or 0.0 for event in engine.generate(list(prompt), params)]


def takeover(case: Case, options: MonitorOptions) -> int:
    """The index of the mark: the takeover in steps; the last one if the device answers to the end."""
    monitor = Monitor(options)
    for at, token in enumerate(case.watched):
        if monitor.push(token) is not None:
            return -(-(at + 1) // STEP)
    return len(case.watched) // STEP


def limits_of(cases: Sequence[Case], watch: str, count: int) -> list[float]:
    """Limits that strike 2 % to 100 % of the answers, then some that strike ever earlier."""
    extremes = []
    for case in cases:
        monitor = Monitor(MonitorOptions(repeats=None))
        for token in case.watched:
            monitor.push(token)
        extremes.append(monitor.lowest_logprob if watch == "logprob" else monitor.highest_entropy)
    ends, shares = np.array(extremes, dtype=float), np.linspace(0.02, 1, count)
    low = watch == "logprob"
    limits = [float(limit) for limit in np.quantile(ends, shares if low else 1 - shares)]
    spread = float(ends.std()) if low else -float(ends.std())
    return limits + [limits[-1] + spread * step for step in (0.5, 1, 2, 4)]


def points(cases: Sequence[Case], mark: str, watch: str, count: int) -> list[Point]:
    """The curve of one mark under one watch."""
    marks: Array = np.array([getattr(case, mark) for case in cases])
    rows, last = np.arange(len(cases)), marks.shape[1] - 1
    random, found = np.random.default_rng(0), []
    for limit in limits_of(cases, watch, count):
        limits = {"logprob": None, "entropy": None} | {watch: limit}
        taken = np.array([takeover(case, MonitorOptions(**limits, repeats=None)) for case in cases])  # type: ignore[arg-type]
        deals = [float(marks[rows, random.permutation(taken)].mean()) for _ in range(DEALS)]
        low, high = (float(value) for value in np.percentile(deals, [2.5, 97.5]))
        share, quality = float(1 - taken.mean() / last), float(marks[rows, taken].mean())
        found.append(
            Point(
                mark,
                watch,
                limit,
                float((taken < last).mean()),
                share,
                quality,
                float(np.mean(deals)),
                low,
                high,
            )
        )
    return found


def marked(small: Engine, large: Engine, prompt: list[int], truth: list[int], seed: int, heat: float) -> Case:
    """Run one prompt, and mark every takeover."""
    answer, watched = own_answer(small, prompt, len(truth), seed, heat)
    device, cloud = (np.array(true_logprobs(engine, prompt, truth)) for engine in (small, large))
    seen = np.array(true_logprobs(large, prompt, answer))
    starts = range(0, len(truth) + 1, STEP)
    true = [np.concatenate([device[:at], cloud[at:]]).mean() for at in starts]
    rests = [continued(large, [*prompt, *answer[:at]], len(truth) - at, seed, heat) for at in starts]
    emitted = [np.concatenate([seen[:at], rest]).mean() for at, rest in zip(starts, rests, strict=True)]
    return Case(watched, tuple(map(float, true)), tuple(map(float, emitted)))


def collect(options: argparse.Namespace, device: Path, cloud: Path) -> list[Case]:
    """Run both engines over stretches of the text, evenly spaced."""
    text = options.text.read_text(encoding="utf-8")
    with (
        Engine.load(device, device="cpu", threads=options.threads) as small,
        Engine.load(cloud, device="cpu", threads=options.threads) as large,
    ):
        tokens = small.asynchronous.codec.encode(text)
        if tokens != large.asynchronous.codec.encode(text):
            raise SystemExit("error: device and cloud need the same tokenizer for a comparison by token")
        span = options.prompt_tokens + options.answer_tokens
        starts = np.linspace(0, len(tokens) - span, options.prompts).astype(int)
        cases = []
        for number, start in enumerate(
            track(starts, "answering", console=Console(stderr=True), transient=True)
        ):
            prompt = tokens[start : start + options.prompt_tokens]
            truth = tokens[start + options.prompt_tokens : start + span]
            cases.append(marked(small, large, prompt, truth, options.seed + number, options.temperature))
    return cases


def ends_of(cases: Sequence[Case], mark: str) -> tuple[float, float]:
    """The marks of the device always, and of the cloud always."""
    marks: Array = np.array([getattr(case, mark) for case in cases])
    return float(marks[:, -1].mean()), float(marks[:, 0].mean())


def plot(found: Sequence[Point], ends: dict[str, tuple[float, float]], path: Path) -> None:
    """The curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for axes, mark in zip(panels, ends, strict=True):
        axes.plot([0, 1], ends[mark], "ko", label="always device, always cloud")
        for watch, colour in (("logprob", "tab:blue"), ("entropy", "tab:orange")):
            curve = [point for point in found if (point.mark, point.watch) == (mark, watch)]
            curve.sort(key=lambda point: point.cloud_share)
            x = [point.cloud_share for point in curve]
            axes.plot(
                x, [point.quality for point in curve], "o-", ms=3, color=colour, label=f"monitor: {watch}"
            )
            low, high = [point.random_low for point in curve], [point.random_high for point in curve]
            axes.fill_between(
                x, low, high, color=colour, alpha=0.15, label=f"{watch}, dealt at random (95 %)"
            )
        axes.set_xlabel("share of tokens from the cloud")
        axes.set_ylabel("nats a token")
        axes.set_title(f"mark: {mark} text")
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.suptitle("escalation: classics-1M on the device, classics-7M in the cloud")
    figure.savefig(path, dpi=150)


def show(found: Sequence[Point], ends: dict[str, tuple[float, float]], prompts: int) -> None:
    """The table on the terminal."""
    fixed = "; ".join(f"{mark}: device {low:.4f}, cloud {high:.4f}" for mark, (low, high) in ends.items())
    table = Table(title=f"{prompts} prompts; nats a token, always one side: {fixed}")
    for heading in (
        "mark",
        "monitor",
        "limit",
        "escalated",
        "cloud tokens",
        "quality",
        "at random [95 %]",
        "of the gap",
    ):
        table.add_column(heading, justify="right")
    for point in found:
        low, high = ends[point.mark]
        band = f"{point.random:.4f} [{point.random_low:.4f}, {point.random_high:.4f}]"
        shares = f"{point.escalated:.0%}", f"{point.cloud_share:.1%}"
        gap = f"{(point.quality - low) / (high - low):.1%}"
        table.add_row(
            point.mark, point.watch, f"{point.limit:.3f}", *shares, f"{point.quality:.4f}", band, gap
        )
    Console(width=130).print(table)


def main() -> None:
    """Measure, show, and write --json and --plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=Path, default=None, help="artifact of classics-1M")
    parser.add_argument("--cloud", type=Path, default=None, help="artifact of classics-7M")
    parser.add_argument(
        "--models", type=Path, default=DATA / "models", help="the folder with both checkpoints"
    )
    parser.add_argument("--text", type=Path, default=DATA / "text" / "heldout.txt")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64, help=f"a multiple of {STEP}")
    parser.add_argument("--points", type=int, default=10, help="limits between which the curve is drawn")
    parser.add_argument("--temperature", type=float, default=0.0, help="of both sides' answers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    options = parser.parse_args()
    if options.answer_tokens % STEP or options.answer_tokens <= 0:
        parser.error(f"--answer-tokens {options.answer_tokens} is not a multiple of {STEP}")
    with tempfile.TemporaryDirectory() as work:
        device = artifact(options.device, options.models / "classics-1M", Path(work))
        cloud = artifact(options.cloud, options.models / "classics-7M", Path(work))
        cases = collect(options, device, cloud)
    ends = {mark: ends_of(cases, mark) for mark in ("true", "emitted")}
    found = [
        point
        for mark in ends
        for watch in ("logprob", "entropy")
        for point in points(cases, mark, watch, options.points)
    ]
    show(found, ends, len(cases))
    if options.json:
        report = {
            "prompts": len(cases),
            "always_device_and_cloud": ends,
            "points": [asdict(point) for point in found],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        plot(found, ends, options.plot)


if __name__ == "__main__":
    main()
