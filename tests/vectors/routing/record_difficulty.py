"""Records difficulty.json: prompts, and the results of the Python implementation. TypeScript must agree to
1e-6.

    PYTHONPATH=src:. python tests/vectors/routing/record_difficulty.py

A case's prompt is `prompt` repeated `times` times. Run it after the model was trained again, and read the
diff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nearfar.routing.difficulty import messages_to_prompt, score

FILE = Path(__file__).with_name("difficulty.json")

CAPITAL = "Which of the following is the capital of France?"
STATEMENTS = "Statement 1 | Every group of prime order is cyclic. Statement 2 | Z_6 is a field."
PROBLEM = (
    "Ann buys three boxes of 12 eggs for $4 each, breaks 5 and sells the rest at $0.50 apiece. How much "
    "does she earn?"
)
TRIAL = (
    'A man was charged with murder. At trial the defendant\'s lawyer said: "He was at home." The court '
    "did NOT believe him, "
    "because three witnesses had seen him near the house. If the jury finds him guilty, which argument "
    "is best on appeal?"
)

PROMPTS: list[tuple[str, str, int]] = [
    ("empty", "", 1),
    ("one letter", "a", 1),
    ("spaces", " ", 40),
    ("newlines only", "\n", 7),
    ("punctuation only", "?!... --- ;;", 1),
    ("digits only", "1234567890", 3),
    ("a greeting", "Hi!", 1),
    ("thanks", "Thanks, that's all.", 1),
    ("a fact", "What is the capital of France?", 1),
    ("a task", "Write a poem about the sea.", 1),
    (
        "a task with detail",
        "Write a short story, in the first person, about a keeper of a lighthouse who finds a letter.",
        1,
    ),
    ("arithmetic", "What is 17 * 23 + 4?", 1),
    ("algebra", "Solve x^2 - 5x + 6 = 0 for x, then compute the sum of the squares of the roots.", 1),
    ("word problem", PROBLEM, 1),
    ("number words", "If twenty people share two dozen apples, how many does each get, and what is left?", 1),
    ("decimals and thousands", "Add 1,234.56 and 7.890 and round to 0.1.", 1),
    ("proof", "Prove that sqrt(2) is irrational; assume the contrary.", 1),
    (
        "logic",
        "If every premise is true and the argument is valid, is the conclusion true? Symbolize: (P -> "
        "Q) | ~R.",
        1,
    ),
    (
        "code in Python",
        "Why does this fail?\n\ndef f(xs):\n    return [x for x in xs if x % 2 == 0][0]\n\nprint(f([]))",
        1,
    ),
    ("code in C", "int main(void) { int *p = 0; return *p; } // what happens, and why?", 1),
    ("JSON", '{"name": "x", "list": [1, 2, 3], "nested": {"a_b": null}}', 1),
    ("LaTeX", "Evaluate $\\int_0^\\infty e^{-x^2} dx$ and show each step.", 1),
    ("a URL", "Summarize https://example.org/a/b?c=d&e=f#g for me", 1),
    (
        "a long instruction",
        "Read the text, list each claim, check it, and say which are wrong, and why. ",
        25,
    ),
    ("shouting", "PLEASE DO NOT ANSWER THIS, EXCEPT WITH YES OR NO", 1),
    ("typographic quotes", "“What’s the difference,” she asked — “between ‘affect’ and ‘effect’…?”", 1),
    ("guillemets", "Que veut dire « l’esprit de l’escalier » ?", 1),
    ("no-break spaces", "Combien\u00a0coûte\u00a0le\u00a0billet\u00a0?", 1),
    ("German", "Wie viele Züge fahren an Werktagen zwischen München und Nürnberg, und warum gerade dann?", 1),
    ("Turkish dotted I", "İstanbul'da IŞIK ılık mı, sıcak mı?", 1),
    ("Greek final sigma", "Ο ΟΔΥΣΣΕΥΣ ΚΑΙ Ο ΣΙΣΥΦΟΣ", 1),
    ("Russian", "Сколько будет, если сложить 12 и 30? Объясни по шагам.", 1),
    ("Arabic", "ما هي عاصمة فرنسا؟ ولماذا، في رأيك؟", 1),
    ("Hebrew", "מה בירת צרפת?", 1),
    ("Hindi", "फ़्रांस की राजधानी क्या है?", 1),
    ("Chinese", "法国的首都是哪里？请解释，为什么。", 1),
    ("Japanese", "フランスの首都はどこですか。３つの理由を述べてください！", 1),
    ("Korean", "프랑스의 수도는 어디입니까?", 1),
    ("emoji", "🙂👍🏽 explain this joke 👨‍👩‍👧‍👦 please 🚀🚀", 1),
    ("combining marks", "e\u0301te\u0301 or été: are they equal?", 1),
    ("astral letters", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 is it a number?", 1),
    ("lone high surrogate", "a \ud800 b", 1),
    ("lone low surrogate", "\udc00 is this text?", 1),
    ("surrogates the wrong way round", "\udc00\ud800", 3),
    ("a NUL and other controls", "a\u0000b\u0001c\u001fd\u007fe\u0085f", 1),
    ("Windows line ends", "First.\r\nSecond?\r\nThird!\r\n", 1),
    ("a byte order mark", "\ufeffWhat is this?", 1),
    ("multiple choice", f"{CAPITAL}\nA. Paris\nB. Lyon\nC. Lille\nD. Nice\nAnswer:", 1),
    ("multiple choice without Answer:", f"{CAPITAL}\nA. Paris\nB. Lyon", 1),
    ("one option is none", f"{CAPITAL}\nA. Paris", 1),
    ("options in parentheses", "Pick one.\n(A) all of the above\n(B) none of the above\n(C) both of them", 1),
    ("options with bracket", "2 + 2 = ?\n  A) 3\n  B) 4\n  C) 5", 1),
    (
        "twelve options",
        "Choose." + "".join(f"\n{letter}. {at} x" for at, letter in enumerate("ABCDEFGHIJKL")),
        1,
    ),
    ("empty options", "Choose.\nA. \nB. \nC. ", 1),
    (
        "numeric options",
        "A ball falls for 3 s. How far?\nA. 44.1 m\nB. 29.4 m\nC. 14.7 m\nD. 4.9 m\nAnswer:",
        1,
    ),
    (
        "statements",
        f"{STATEMENTS}\nA. True, True\nB. False, False\nC. True, False\nD. False, True\nAnswer:",
        1,
    ),
    (
        "a trial",
        f"{TRIAL}\nA. The verdict is contrary to law.\nB. The evidence was hearsay.\nC. None.\nD. The "
        "statute is void.",
        1,
    ),
    ("options in Chinese", "哪个城市是法国的首都？\nA. 巴黎\nB. 里昂\nC. 里尔\nD. 尼斯\nAnswer:", 1),
    ("blank to fill", "Water boils at ____ degrees Celsius.\nA. 90\nB. 100\nC. 110\nD. 120\nAnswer: ", 1),
    ("exactly at the limit", "ab cd. ef", 910),
    ("one beyond the limit", "x", 8193),
    ("astral text at the limit", "🚀", 8192),
    ("astral text beyond the limit", "🚀 12? ", 2000),
    ("mixed text beyond the limit", "é🚀x, \ud83d y. ", 1500),
    ("a megabyte", "How many words are there? ", 40000),
    ("a megabyte without a space", "x", 1_000_000),
]

MESSAGES: list[list[dict[str, Any]]] = [
    [],
    [{"role": "system", "content": "Be brief."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "What is a monad?"},
        {"role": "assistant", "content": "…"},
        {"role": "user", "content": "Why?"},
    ],
    [
        {"role": "user", "content": "Hello"},
        {
            "role": "user",
            "content": "Explain, step by step, how a compiler turns a loop into machine code, and why.",
        },
    ],
    [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is in"},
                {"type": "image_url", "image_url": {"url": "data:,"}},
                {"type": "text", "text": "the picture?"},
            ],
        }
    ],
    [{"role": "user", "content": None}, {"role": "assistant"}],
    [{"role": "user", "content": "first"}, {"role": "user", "content": "🚀" * 79}],
    [{"role": "user", "content": "first"}, {"role": "user", "content": "🚀" * 80}],
]


def main() -> None:
    """Write the file."""
    prompts = [
        {"name": name, "prompt": prompt, "times": times, "score": score(prompt * times)}
        for name, prompt, times in PROMPTS
    ]
    messages = [{"messages": some, "prompt": messages_to_prompt(some)} for some in MESSAGES]
    first, second = (",\n".join(f"  {json.dumps(case)}" for case in cases) for cases in (prompts, messages))
    FILE.write_text(f'{{"prompts": [\n{first}\n],\n"messages": [\n{second}\n]}}\n', encoding="utf-8")
    print(f"wrote {len(prompts)} prompts and {len(messages)} conversations to {FILE}")


if __name__ == "__main__":
    main()
