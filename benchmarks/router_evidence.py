"""Does a fitted router beat chance? A small and a larger model answer questions with known results.

    python benchmarks/router_evidence.py answer out/small/cpu small.jsonl --questions DIR
    python benchmarks/router_evidence.py answer out/large/cpu large.jsonl --questions DIR
    python benchmarks/router_evidence.py show out/small/cpu small.jsonl large.jsonl --questions DIR

DIR has `test.jsonl` of GSM8K. To these come arithmetic problems from templates in English, German and Chinese. An
answer is right if its last number is. `answer` continues where it stopped. `show` reads each prompt with the small
model, fits routers to parts of the questions, and prints how they order the others.
"""

# ruff: noqa: E501
# Questions stand on lines of their own, as long as they are.
from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.openai.knowledge import knowledge
from nearfar.routing.confidence import entropy
from nearfar.routing.difficulty import score as english
from nearfar.routing.fitted import FEATURES, feature
from nearfar.routing.fitting import curve_of, held_out, model

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
AT_ONCE, TOKENS, HELD = 12, 420, 8


def questions(folder: Path, reasoning: int = 170, each: int = 28) -> list[dict[str, str]]:
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
    random.Random(5).shuffle(made)
    return made


def asked(question: dict[str, str]) -> list[dict[str, str]]:
    """The prompt."""
    return [{"role": "user", "content": f"{question['question']}\n{END[question['language']]}"}]


def is_right(question: dict[str, str], text: str) -> bool:
    """Whether the number that a text ends with is the result."""
    said = SAID.findall(text) or NUMBER.findall(text) or ["none"]
    try:
        return abs(float(re.sub(r"[,$\s]", "", said[-1])) - float(question["truth"])) < 1e-6
    except ValueError:
        return False


def read(path: Path) -> dict[str, Any]:
    """Answers by question."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["id"]: line for line in map(json.loads, lines)}


async def answer(artifact: Path, output: Path, given: list[dict[str, str]]) -> None:
    """Answer the questions that have no answer yet, greedily."""
    known = read(output)
    left = iter([question for question in given if question["id"] not in known])
    engine = await AsyncEngine.load(artifact, context=1024, kv_memory="600MB")

    async def work() -> None:
        for question in left:
            params: Any = {"max_tokens": TOKENS, "temperature": 0.0, "logprobs": True, "top_logprobs": 5}
            choice = (await engine.chat.completions.create(asked(question), **params)).choices[0]
            tokens = choice.logprobs.content if choice.logprobs else []
            shown = [[t.logprob, [other.logprob for other in t.top_logprobs]] for t in tokens[:64]]
            line = {"id": question["id"], "text": choice.message.content or "", "logprobs": shown}
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    await engine.close()


async def read_prompts(artifact: Path, given: list[dict[str, str]]) -> tuple[list[dict[str, Any]], float]:
    """What the model shows about each prompt, and the time for its own question as a share of reading."""
    engine = await AsyncEngine.load(artifact, context=1024, kv_memory="600MB")
    made, reading, asking = [], 0.0, 0.0
    for question in given:
        engine.core.scheduler.table.forget()
        began = time.perf_counter()
        plain = await knowledge(engine, asked(question), ask=False)
        middle = time.perf_counter()
        whole = await knowledge(engine, asked(question))
        reading, asking = reading + middle - began, asking + time.perf_counter() - middle
        made.append({**plain.model_dump(), "sure": whole.sure})
    await engine.close()
    return made, asking / reading


def held(line: dict[str, Any]) -> list[float]:
    """What the first tokens of an answer show: log-probability and entropy, mean and extreme."""
    first = line["logprobs"][:HELD]
    logprobs, entropies = [each[0] for each in first], [entropy(each[1]) for each in first]
    return [float(np.mean(logprobs)), min(logprobs), float(np.mean(entropies)), max(entropies)]


def show(small: dict[str, Any], large: dict[str, Any], given: list[dict[str, str]], told: list[Any]) -> None:
    """Print a line for each way to order prompts; the outcomes are the answers, never the features."""
    device = np.array([is_right(q, small[q["id"]]["text"]) for q in given], float)
    cloud = np.array([is_right(q, large[q["id"]]["text"]) for q in given], float)
    gains, fails = cloud > device, device == 0
    of = {key: np.array([q[key] for q in given]) for key in ("kind", "language")}
    table = np.array([[feature(one, name) or 0.0 for name in FEATURES] for one in told])
    later = np.array([held(small[q["id"]]) for q in given])
    both = np.hstack([table, later])
    print(
        f"{len(given)} questions; device {device.mean():.3f}, cloud {cloud.mean():.3f}, gains {gains.mean():.3f}"
    )
    print(f"{'':26}  gains  GSM8K  templ.  {'en':>5} {'de':>6} {'zh':>6}  APGR   20 %   50 %   80 %   fails")
    orders = {
        "prompt's length": table[:, 0],
        'today\'s "english" score': np.array([english(asked(q)[0]["content"]) for q in given]),
        f"low logprob, {HELD} tokens": -later[:, 0],
        f"high entropy, {HELD} tokens": later[:, 3],
        "fitted: prompt": held_out(table, gains),
        "fitted: prompt, not asked": held_out(table[:, :-1], gains),
        f"fitted: prompt, {HELD} tokens": held_out(both, gains),
    }
    for name, scores in orders.items():
        parts = [of["kind"] == "gsm8k", of["kind"] == "template", *(of["language"] == x for x in TEMPLATES)]
        aurocs = [roc_auc_score(gains[part], scores[part]) for part in (gains == gains, *parts)]
        curve = curve_of(scores, list(device), list(cloud))
        low, high = curve[0].quality, curve[-1].quality
        closed = [(point.quality - low) / (high - low) for point in curve]
        row = [*aurocs, float(np.mean(closed)), closed[4], closed[10], closed[16]]
        # The same way, fitted to "the device fails", which is what decides where the cloud is always right.
        own = (
            held_out({"fitted: prompt": table}.get(name, both), fails)
            if name.startswith("fitted")
            else scores
        )
        print(f"{name:26}  " + "  ".join(f"{x:5.2f}" for x in row) + f"  {roc_auc_score(fails, own):5.2f}")
    for train, test in (("gsm8k", "template"), ("template", "gsm8k")):
        scores = _trained_on(both, gains, of["kind"] == train)
        part = of["kind"] == test
        print(f"fitted to {train}, asked {test}: AUROC {roc_auc_score(gains[part], scores[part]):.2f}")


def _trained_on(table: Any, gains: Any, part: Any) -> Any:
    mean, scale, weights, _ = model(table[part], gains[part])
    return ((table - mean) / scale) @ weights


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("answer", "show"))
    parser.add_argument("artifact", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--questions", type=Path, required=True)
    given = parser.parse_args()
    every = questions(given.questions)
    if given.what == "answer":
        asyncio.run(answer(given.artifact, given.files[0], every))
        return
    small, large = map(read, given.files)
    every = [q for q in every if q["id"] in small and q["id"] in large]
    told, share = asyncio.run(read_prompts(given.artifact, every))
    print(f"the model's own question takes {share:.0%} of the time of reading the prompt")
    assert math.isfinite(share)
    show(small, large, every, told)


if __name__ == "__main__":
    main()
