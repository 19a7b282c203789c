r"""Does a fitted router beat chance? A small and a larger model answer questions with known results.

    python benchmarks/router_evidence.py answer out/small/cpu small.jsonl --questions DIR
    python benchmarks/router_evidence.py answer out/large/cpu large.jsonl --questions DIR
    python benchmarks/router_evidence.py read out/small/cpu known.jsonl --questions DIR
    python benchmarks/router_evidence.py show small.jsonl large.jsonl known.jsonl --questions DIR --picture curve.svg
    python benchmarks/router_evidence.py time out/small/cpu --questions DIR
    python benchmarks/router_evidence.py turns out/small/cpu out/large/cpu known.jsonl small.jsonl large.jsonl \
        --questions DIR --turns DIR

DIR has `test.jsonl` of GSM8K. To these come arithmetic problems from templates in English, German and Chinese, and
short questions of many kinds (router_questions.py). `answer` and `read` continue where they stopped. `show` fits
routers to parts of the questions, and prints how they order the others; outcomes are the answers, compared with the
results or executed. With `--recorded FILE`, a table of RouteLLM, the cloud is GPT-4 as recorded there, on GSM8K.
`time` compares the time to the first token with and without reading the prompt for a router. `turns` answers the
turns of MT-Bench whose result is a number (`question.jsonl` and `reference_answer` are in the folder), which no fit
has seen: the other turns need a judge.
"""

# ruff: noqa: E501
# Questions stand on lines of their own, as long as they are.
from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from router_questions import Row, checked, turns_of, varied
from sklearn.metrics import roc_auc_score

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.openai.knowledge import Knowledge, read_prompt
from nearfar.fallback_server.bench.svg import Line, picture
from nearfar.routing.confidence import entropy
from nearfar.routing.difficulty import score as english
from nearfar.routing.fitted import answer_features, row_tokens
from nearfar.routing.fitting import Example, ExampleTable, closed_gap, curve_of, held_out

END = {
    "en": 'Think in short steps. End with the line "Answer: <number>".',
    "de": 'Denke in kurzen Schritten. Schließe mit der Zeile "Antwort: <Zahl>".',
    "zh": "请简短地分步思考，最后一行写“答案：<数字>”。",
}
TEMPLATES = {
    "en": (
        "A shop sells pens for {a} dollars each and notebooks for {b} dollars each. Anna buys {c} pens and {d} "
        "notebooks. How many dollars does she pay?",
        "A train travels {a} kilometres an hour for {c} hours, then {b} kilometres an hour for {d} hours. How many "
        "kilometres does it travel in total?",
        "Tom has {e} apples. He gives {c} apples to each of {d} friends and then buys {a} more. How many apples "
        "does he have now?",
        "What is {a} + {b}?",
        "What is {a} * {d}?",
        "What is {a} * {b} - {c} * {d}?",
        "A farmer has {a} cows and {b} times as many sheep. He sells {c} sheep and buys {d} cows. How many animals "
        "does he have now?",
    ),
    "de": (
        "Ein Laden verkauft Stifte für {a} Euro und Hefte für {b} Euro das Stück. Anna kauft {c} Stifte und {d} "
        "Hefte. Wie viele Euro bezahlt sie?",
        "Ein Zug fährt {c} Stunden lang {a} Kilometer in der Stunde, dann {d} Stunden lang {b} Kilometer in der "
        "Stunde. Wie viele Kilometer fährt er insgesamt?",
        "Tom hat {e} Äpfel. Er gibt jedem seiner {d} Freunde {c} Äpfel und kauft dann {a} dazu. Wie viele Äpfel hat "
        "er jetzt?",
        "Was ist {a} + {b}?",
        "Was ist {a} * {d}?",
        "Was ist {a} * {b} - {c} * {d}?",
        "Ein Bauer hat {a} Kühe und {b}-mal so viele Schafe. Er verkauft {c} Schafe und kauft {d} Kühe. Wie viele "
        "Tiere hat er jetzt?",
    ),
    "zh": (
        "一家商店每支笔卖{a}元，每本笔记本卖{b}元。小安买了{c}支笔和{d}本笔记本。她一共付多少元？",
        "一列火车以每小时{a}公里的速度行驶{c}小时，然后以每小时{b}公里的速度行驶{d}小时。它一共行驶多少公里？",
        "小汤有{e}个苹果。他给{d}个朋友每人{c}个苹果，然后又买了{a}个。他现在有多少个苹果？",
        "{a} + {b} 等于多少？",
        "{a} * {d} 等于多少？",
        "{a} * {b} - {c} * {d} 等于多少？",
        "一位农民有{a}头牛，羊的数量是牛的{b}倍。他卖掉{c}只羊，又买了{d}头牛。他现在一共有多少头动物？",
    ),
}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SAID = re.compile(r"(?:Answer|Antwort|答案|ANSWER)\W{0,12}?(-?\$?\s*\d[\d,]*(?:\.\d+)?)")
AT_ONCE, TOKENS, SHORT, HELD = 12, 420, 220, 8
GPT4 = "gpt-4-1106-preview"


def questions(folder: Path, reasoning: int = 170, each: int = 28) -> list[Row]:
    """Questions with their results, in an order that does not change."""
    rows = [json.loads(line) for line in (folder / "test.jsonl").open(encoding="utf-8")]
    made = []
    for at in random.Random(41).sample(range(len(rows)), reasoning):
        truth = rows[at]["answer"].split("####")[1].strip().replace(",", "")
        row = {"id": f"gsm8k-{at}", "kind": "gsm8k", "language": "en"}
        made.append({**row, "question": rows[at]["question"], "truth": truth})
    for language, templates in TEMPLATES.items():
        numbers = random.Random(f"templates-{language}")
        for at in range(each):
            high = (9, 30, 120)[at // 7 % 3]
            a, b, c, d = (numbers.randint(2, high) for _ in range(4))
            e = c * d + numbers.randint(1, high)
            sums = (
                a * c + b * d,
                a * c + b * d,
                e - c * d + a,
                a + b,
                a * d,
                a * b - c * d,
                a + a * b - c + d,
            )
            text = templates[at % 7].format(a=a, b=b, c=c, d=d, e=e)
            row = {"id": f"template-{language}-{at}", "kind": "template", "language": language}
            made.append({**row, "question": text, "truth": str(sums[at % 7])})
    made += varied()
    random.Random(5).shuffle(made)
    return made


def long(question: Row) -> bool:
    """Whether the answer shall be reasoned."""
    return question["kind"] in ("gsm8k", "template", "mt-bench")


def asked(question: Row) -> list[dict[str, str]]:
    """The prompt."""
    end = f"\n{END[question['language']]}" if long(question) else ""
    return [{"role": "user", "content": f"{question['question']}{end}"}]


def is_right(question: Row, text: str) -> bool:
    """Whether an answer is right: a reasoned one if the number that it ends with is the result."""
    if not long(question):
        return checked(question, text)
    said = SAID.findall(text) or NUMBER.findall(text) or ["none"]
    try:
        return abs(float(re.sub(r"[,$\s]", "", said[-1])) - float(question["truth"])) < 1e-6
    except ValueError:
        return False


def read(path: Path) -> dict[str, Any]:
    """Lines of a file by question."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["id"]: line for line in map(json.loads, lines)}


async def look(engine: AsyncEngine, messages: list[dict[str, str]], tokens: tuple[int, ...]) -> Knowledge:
    """What the model shows about a conversation, which is not kept."""
    prompt = await read_prompt(engine, messages, ask=False, tokens=tokens)
    await prompt.release()
    return prompt.knowledge


async def work(artifact: Path, output: Path, given: list[Row], *, answers: bool) -> None:
    """Answer the questions that the file does not have greedily, or write what the model shows about each."""
    known = read(output)
    left = iter([question for question in given if question["id"] not in known])
    engine = await AsyncEngine.load(artifact, context=1024, kv_memory="600MB")
    tokens = row_tokens(engine.manifest.model.vocab_size)

    async def one(question: Row) -> dict[str, Any]:
        if not answers:
            shown = await look(engine, asked(question), tokens)
            return {"knowledge": shown.model_dump()}
        most = TOKENS if long(question) else SHORT
        params: Any = {"max_tokens": most, "temperature": 0.0, "logprobs": True, "top_logprobs": 5}
        choice = (await engine.chat.completions.create(asked(question), **params)).choices[0]
        content = choice.logprobs.content if choice.logprobs else []
        first = [[t.logprob, [other.logprob for other in t.top_logprobs]] for t in content[:64]]
        return {"text": choice.message.content or "", "logprobs": first}

    async def some() -> None:
        for question in left:
            line = {"id": question["id"], **await one(question)}
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    await engine.close()


async def measure(artifact: Path, given: list[Row], count: int = 40) -> None:
    """Print the time to the first token of plain answers, and of answers after a look at the prompt."""
    engine = await AsyncEngine.load(artifact, context=1024, kv_memory="600MB")
    tokens = row_tokens(engine.manifest.model.vocab_size)
    ratios = []
    for at, question in enumerate(given[:count]):
        seconds = {}
        for looks in (at % 2 == 0, at % 2 == 1):
            engine.core.scheduler.table.forget()
            began = time.perf_counter()
            read = await read_prompt(engine, asked(question), ask=False, tokens=tokens) if looks else None
            await engine.chat.completions.create(asked(question), max_tokens=1, temperature=0.0)
            seconds[looks] = time.perf_counter() - began
            if read is not None:
                await read.release()
        ratios.append(seconds[True] / seconds[False])
    await engine.close()
    print(f"time to the first token with a look, over without: median {statistics.median(ratios):.3f}")


async def turns(small: Path, large: Path, folder: Path, examples: list[Example], gains: Any) -> None:
    """Print the turns of MT-Bench with a number as result: who answers right, and where they stand among the
    examples in the order of a router that was fitted to these.
    """
    given = turns_of(folder)
    engines = [await AsyncEngine.load(each, context=2048, kv_memory="600MB") for each in (small, large)]
    tokens = row_tokens(engines[0].manifest.model.vocab_size)
    new, sides = [], []
    for question in given:
        messages: Any = question["messages"]
        params: Any = {"max_tokens": TOKENS, "temperature": 0.0}
        texts = [
            (await engine.chat.completions.create(messages, **params)).choices[0].message.content or ""
            for engine in engines
        ]
        device, cloud = (is_right(question, text) for text in texts)
        shown = await look(engines[0], messages, tokens)
        new.append(Example(shown.model_dump(), float(device), float(cloud), "", "", ()))
        sides.append((device, cloud))
    for engine in engines:
        await engine.close()
    print(f"{len(given)} turns; device {sum(d for d, _ in sides)} right, cloud {sum(c for _, c in sides)}")
    for probing in (False, True):
        columns = ExampleTable.of([*examples, *new], None, probing)
        seen = np.arange(len(examples) + len(new)) < len(examples)
        scores = columns.scores(columns[seen].fit(gains))
        middle = np.median(scores[seen])
        wanted = [score > middle for score in scores[~seen]]
        right = sum(cloud if sent else device for sent, (device, cloud) in zip(wanted, sides, strict=True))
        print(f"probe {probing}: {sum(wanted)} to the cloud at the examples' median, {right} right")


def examples_of(
    small: dict[str, Any], right: dict[str, bool], known: dict[str, Any], given: list[Row]
) -> list[Example]:
    """The questions as examples for a fit."""
    made = []
    for question in given:
        line = small[question["id"]]
        first = tuple((logprob, entropy(top)) for logprob, top in line["logprobs"][:HELD])
        device = float(is_right(question, line["text"]))
        made.append(
            Example(known[question["id"]]["knowledge"], device, float(right[question["id"]]), "", "", first)
        )
    return made


def show(examples: list[Example], given: list[Row]) -> dict[str, Any]:
    """Print a line for each way to order prompts. Returns the curves."""
    device, cloud = (np.array([getattr(each, name) for each in examples]) for name in ("device", "cloud"))
    gains, fails = cloud > device, device == 0
    first = [answer_features(each.first) for each in examples]
    print(
        f"\n{len(given)} questions; device {device.mean():.3f}, cloud {cloud.mean():.3f}, gains {gains.mean():.3f}"
    )
    print(f"{'':22}  gains  {'en':>5} {'de':>6} {'zh':>6}   APGR   20 %   50 %   80 %  fails")
    prompt, answer = ExampleTable.of(examples, None, False), ExampleTable.of(examples, HELD, False)
    fitted = {
        "fitted: prompt": prompt,
        f"fitted: {HELD} tokens": answer,
        "fitted: probe": ExampleTable.of(examples, None, True),
        f"fitted: probe, {HELD} tokens": ExampleTable.of(examples, HELD, True),
    }
    orders = {
        "length": prompt.table[:, 0],
        '"english"': np.array([english(asked(q)[0]["content"]) for q in given]),
        f"low logprob, {HELD}": -np.array([each["mean_logprob"] or 0.0 for each in first]),
        f"high entropy, {HELD}": np.array([each["highest_entropy"] or 0.0 for each in first]),
        **{name: held_out(columns, gains) for name, columns in fitted.items()},
    }
    languages = [np.array([q["language"] == name for q in given]) for name in END]
    curves = {}
    for name, scores in orders.items():
        parts = [gains == gains, *(part for part in languages)]
        several = [_auroc(gains[part], scores[part]) for part in parts]
        curve = curves[name] = curve_of(scores, examples)
        low, high = curve[0].quality, curve[-1].quality
        closed = [(curve[at].quality - low) / (high - low) for at in (4, 10, 16)]
        # The same way, fitted to "the device fails", which is what counts where the cloud is always right.
        own = held_out(fitted[name], fails) if name in fitted else scores
        row = [*several, closed_gap(curve), *closed, _auroc(fails, own)]
        print(f"{name:22}  " + "  ".join(f"{x:5.2f}" for x in row))
    kinds = np.array([q["kind"].split("-")[0] for q in given])
    for name, columns in fitted.items() if len(set(kinds.tolist())) > 1 else ():
        scores = np.zeros(len(given))
        for kind in set(kinds.tolist()):
            scores[kinds == kind] = columns[kinds == kind].scores(
                columns[kinds != kind].fit(gains[kinds != kind])
            )
        within = [_auroc(gains[kinds == kind], scores[kinds == kind]) for kind in sorted(set(kinds.tolist()))]
        print(f"{name}, on kinds that it never saw: {np.nanmean(within):.2f} (mean of the AUROC within each)")
    return curves


def _auroc(truth: Any, scores: Any) -> float:
    return float(roc_auc_score(truth, scores)) if 0 < truth.sum() < len(truth) else float("nan")


def draw(curves: dict[str, Any], path: Path) -> None:
    """Draw the quality by the cloud's share."""
    names = {
        "random": None,
        "length": "length",
        "fitted: 8 tokens": f"fitted: {HELD} tokens",
        "fitted: probe": "fitted: probe",
    }
    lines = []
    for name, key in names.items():
        curve = curves[key or "length"]
        points = curve if key else (curve[0], curve[-1])
        lines.append(
            Line(name, tuple((point.share, point.quality) for point in points), dots=key is not None)
        )
    path.write_text(
        picture("Quality by share of the cloud", "share to the cloud", "right answers", lines),
        encoding="utf-8",
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=("answer", "read", "show", "time", "turns"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--turns", type=Path, help="the folder mt_bench")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    every = questions(given.questions)
    if given.what in ("answer", "read"):
        asyncio.run(work(given.files[0], given.files[1], every, answers=given.what == "answer"))
        return
    if given.what == "time":
        asyncio.run(measure(given.files[0], every))
        return
    files = given.files
    if given.what == "turns":
        small, large, known = read(files[3]), read(files[4]), read(files[2])
        every = [q for q in every if q["id"] in small and q["id"] in large and q["id"] in known]
        right = {q["id"]: is_right(q, large[q["id"]]["text"]) for q in every}
        examples = examples_of(small, right, known, every)
        gains = np.array([each.cloud > each.device for each in examples])
        asyncio.run(turns(files[0], files[1], given.turns, examples, gains))
        return
    small, large, known = map(read, files)
    every = [q for q in every if q["id"] in small and q["id"] in known]
    if given.recorded:
        with given.recorded.open(encoding="utf-8") as file:
            told = {f"gsm8k-{at}": row[GPT4] == "True" for at, row in enumerate(csv.DictReader(file))}
        asked_there = [q for q in every if q["id"] in told]
        show(examples_of(small, told, known, asked_there), asked_there)
        return
    every = [q for q in every if q["id"] in large]
    right = {q["id"]: is_right(q, large[q["id"]]["text"]) for q in every}
    several = [q for q in every if not long(q)]
    show(examples_of(small, right, known, every), every)
    curves = show(examples_of(small, right, known, several), several)
    if given.picture:
        draw(curves, given.picture)


if __name__ == "__main__":
    main()
