"""The inputs of the hand-over scripts: rules and events in time. record.py adds the results of Python's
table.

An event is a line: `KIND SIDE WORDS…`. piece: `3` tokens, `=stop` a finish, `calls` (not plain), `low` (the
monitor). failed: its code. refused: its parameter, `unwatched`. admitted and barred answer the last question
to the router.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

RULES: Json = {
    "max_tokens": 20,
    "plain": True,
    "private": False,
    "watched": False,
    "restart": False,
    "hold": 0,
    "hedge": None,
    "hedge_seconds": None,
    "after_cut": "device",
    "before_fallback": 0,
}


def _script(name: str, begin: str, events: list[str], **rules: Any) -> Json:
    return {"name": name, "begin": begin, "rules": {**RULES, **rules}, "events": ["start", *events]}


_WATCHED = {"watched": True}
_RESTART = {"watched": True, "restart": True, "hold": 4}
_HEDGED = {"hedge": "cloud", "hedge_seconds": 0.5}
_PRIVATE = {"private": True}

SCRIPTS: dict[str, list[Json]] = {
    "finish": [
        _script(
            "a whole answer",
            "device",
            ["piece device 1", "piece device 2", "piece device 0 =stop", "ended device"],
        ),
        _script(
            "after a finish a cut changes nothing",
            "cloud",
            ["piece cloud 5", "piece cloud 0 =stop", "failed cloud cut"],
        ),
        _script(
            "after a finish a timeout changes nothing",
            "cloud",
            ["piece cloud 5 =stop", "failed cloud timeout"],
        ),
        _script(
            "after a finish a lost device changes nothing",
            "device",
            ["piece device 5 =length", "failed device lost"],
        ),
        _script(
            "after a finish an error of the stream changes nothing",
            "cloud",
            ["piece cloud 5 =stop", "failed cloud error"],
        ),
        _script(
            "after a finish a refusal changes nothing",
            "device",
            ["piece device 5 =stop", "refused device seed"],
        ),
        _script(
            "after a finish more pieces are not shown",
            "cloud",
            ["piece cloud 5 =stop", "piece cloud 1", "ended cloud"],
        ),
        _script("nothing but a finish", "cloud", ["piece cloud 0 =content_filter", "ended cloud"]),
        _script(
            "a finish of tool calls",
            "cloud",
            ["piece cloud 3 calls", "piece cloud 0 =tool_calls", "failed cloud cut"],
        ),
        _script(
            "cut after all tokens that were asked for: whole", "cloud", ["piece cloud 20", "failed cloud cut"]
        ),
        _script(
            "ended after all tokens that were asked for: whole", "device", ["piece device 20", "ended device"]
        ),
        _script(
            "what comes after the end is late",
            "device",
            ["piece device 1 =stop", "ended device", "piece device 1", "failed device lost", "left"],
        ),
    ],
    "cut": [
        _script(
            "the cloud fails before a token: the device",
            "cloud",
            ["failed cloud connection", "admitted", "piece device 1 =stop", "ended device"],
        ),
        _script(
            "the cloud is cut: the device goes on, degraded",
            "cloud",
            ["piece cloud 7", "failed cloud cut", "admitted", "piece device 3 =stop", "ended device"],
        ),
        _script(
            "a stream that ends early is cut",
            "cloud",
            ["piece cloud 7", "ended cloud", "admitted", "piece device 3 =stop", "ended device"],
        ),
        _script(
            "the cloud falls silent: the device goes on",
            "cloud",
            ["piece cloud 4", "failed cloud timeout", "admitted", "piece device 1 =stop", "ended device"],
        ),
        _script(
            "the cloud is cut, the device may not: a retry, which is left",
            "cloud",
            ["piece cloud 7", "failed cloud cut", "barred", "barred"],
        ),
        _script(
            "by policy the cloud goes on",
            "cloud",
            ["piece cloud 7", "failed cloud cut", "admitted", "piece cloud 3 =stop", "ended cloud"],
            after_cut="cloud",
        ),
        _script(
            "by policy the cloud has chances first",
            "cloud",
            [
                "failed cloud 503",
                "admitted",
                "failed cloud 503",
                "admitted",
                "failed cloud 503",
                "admitted",
                "piece device 1 =stop",
                "ended device",
            ],
            before_fallback=2,
        ),
        _script(
            "no retry of what no retry changes", "cloud", ["failed cloud 401", "barred"], before_fallback=2
        ),
        _script(
            "nor of nonsense",
            "cloud",
            ["failed cloud shape", "admitted", "piece device 1 =stop", "ended device"],
            before_fallback=2,
        ),
        _script("both fail: an error", "cloud", ["failed cloud 500", "admitted", "failed device lost"]),
        _script(
            "the cloud fails twice without a device: an error",
            "cloud",
            ["failed cloud 500", "barred", "admitted", "failed cloud 500", "barred", "barred"],
        ),
        _script(
            "the device is lost: the cloud goes on, not degraded",
            "device",
            ["piece device 9", "failed device lost", "admitted", "piece cloud 3 =stop", "ended cloud"],
        ),
        _script(
            "the device stands still before its first token",
            "device",
            ["failed device stalled", "admitted", "piece cloud 3 =stop", "ended cloud"],
        ),
        _script(
            "a hidden tab: the device fell silent, the cloud may not",
            "device",
            ["piece device 2", "failed device stalled", "barred"],
        ),
        _script(
            "the device is lost, the budget bars the cloud: an error",
            "device",
            ["piece device 9", "failed device lost", "barred"],
        ),
        _script(
            "lost, cloud cut too: nobody is left but a retry",
            "device",
            [
                "piece device 9",
                "failed device lost",
                "admitted",
                "piece cloud 2",
                "failed cloud cut",
                "admitted",
                "piece cloud 1 =stop",
                "ended cloud",
            ],
        ),
        _script(
            "tools in mid-answer: nobody goes on", "cloud", ["piece cloud 2", "failed cloud cut"], plain=False
        ),
        _script(
            "tools before a token: the other may",
            "cloud",
            ["failed cloud cut", "admitted", "piece device 1 =stop", "ended device"],
            plain=False,
        ),
        _script(
            "shown calls: nobody goes on",
            "cloud",
            ["piece cloud 2", "piece cloud 1 calls", "failed cloud cut"],
        ),
        _script(
            "a piece of the side that failed is late",
            "cloud",
            ["failed cloud cut", "admitted", "piece cloud 1", "piece device 1 =stop", "ended device"],
        ),
    ],
    "refused": [
        _script(
            "the device refuses: the cloud takes it",
            "device",
            ["refused device min_tokens", "admitted", "piece cloud 1 =stop", "ended cloud"],
        ),
        _script(
            "the device refuses, and the cloud may not", "device", ["refused device min_tokens", "barred"]
        ),
        _script(
            "the device refuses in mid-answer: the caller's",
            "device",
            ["piece device 1", "refused device seed"],
        ),
        _script("the cloud refuses: the caller's", "cloud", ["refused cloud temperature"]),
        _script(
            "no logprobs, which only the monitor wanted: the device without them",
            "device",
            ["refused device logprobs unwatched", "admitted", "piece device 1 =stop", "ended device"],
            **_WATCHED,
        ),
        _script(
            "once only",
            "device",
            [
                "refused device logprobs unwatched",
                "admitted",
                "refused device logprobs unwatched",
                "admitted",
                "piece cloud 1 =stop",
                "ended cloud",
            ],
            **_WATCHED,
        ),
        _script(
            "no logprobs, which the caller wanted: the cloud",
            "device",
            ["refused device logprobs", "admitted", "piece cloud 1 =stop", "ended cloud"],
            **_WATCHED,
        ),
    ],
    "escalation": [
        _script(
            "the monitor calls the cloud, which continues",
            "device",
            ["piece device 5", "piece device 1 low", "admitted", "piece cloud 2 =stop", "ended cloud"],
            **_WATCHED,
        ),
        _script(
            "a short answer is doubted at its end: the cloud begins again",
            "device",
            [
                "piece device 1",
                "piece device 0 =stop low",
                "admitted",
                "piece cloud 2 =stop",
                "ended cloud",
            ],
            **_RESTART,
        ),
        _script(
            "a short answer is doubted at its end, but the cloud may not: it is shown, degraded",
            "device",
            ["piece device 1", "piece device 0 =stop low", "barred", "ended device"],
            **_RESTART,
        ),
        _script(
            "a complete answer is not continued",
            "device",
            ["piece device 1", "piece device 0 =stop low", "ended device"],
            **_WATCHED,
        ),
        _script(
            "the cloud may not: the device goes on, degraded",
            "device",
            [
                "piece device 5",
                "piece device 1 low",
                "barred",
                "piece device 1 low",
                "piece device 1 =stop",
                "ended device",
            ],
            **_WATCHED,
        ),
        _script(
            "held back and replaced: it begins again",
            "device",
            [
                "piece device 1",
                "piece device 1",
                "piece device 1 low",
                "admitted",
                "piece cloud 2 =stop",
                "ended cloud",
            ],
            **_RESTART,
        ),
        _script(
            "held back, and shown when there is enough",
            "device",
            [
                "piece device 2",
                "piece device 2",
                "piece device 1 low",
                "admitted",
                "piece cloud 2 =stop",
                "ended cloud",
            ],
            **_RESTART,
        ),
        _script(
            "held back, the cloud may not: all of it is shown",
            "device",
            ["piece device 2", "piece device 1 low", "barred", "piece device 1 =stop", "ended device"],
            **_RESTART,
        ),
        _script(
            "held back, and short: shown with the finish",
            "device",
            ["piece device 2", "piece device 0 =stop", "ended device"],
            **_RESTART,
        ),
        _script(
            "held back by continue: shown before the cloud goes on",
            "device",
            ["piece device 2", "piece device 1 low", "admitted", "piece cloud 1 =stop", "ended cloud"],
            watched=True,
            hold=4,
        ),
        _script(
            "held back and lost: nothing was shown, the cloud begins again",
            "device",
            ["piece device 2", "failed device lost", "admitted", "piece cloud 1 =stop", "ended cloud"],
            **_RESTART,
        ),
        _script(
            "nobody watches: nothing happens",
            "device",
            ["piece device 5", "piece device 1 low", "piece device 1 =stop", "ended device"],
        ),
        _script(
            "the cloud is not watched",
            "cloud",
            ["piece cloud 5", "piece cloud 1 low", "piece cloud 1 =stop", "ended cloud"],
            **_WATCHED,
        ),
        _script(
            "escalated, and the cloud is cut: the device ends it",
            "device",
            [
                "piece device 5",
                "piece device 1 low",
                "admitted",
                "piece cloud 2",
                "failed cloud cut",
                "admitted",
                "piece device 1 low",
                "piece device 1 =stop",
                "ended device",
            ],
            **_WATCHED,
        ),
        _script(
            "a finish is not questioned",
            "device",
            ["piece device 5", "piece device 1 low =stop", "ended device"],
            **_WATCHED,
        ),
    ],
    "hedging": [
        _script(
            "silence: the other starts too, and wins",
            "device",
            ["silent", "admitted", "piece cloud 1", "piece cloud 1 =stop", "ended cloud"],
            **_HEDGED,
        ),
        _script(
            "silence: the first wins after all",
            "device",
            ["silent", "admitted", "piece device 1", "piece cloud 1", "piece device 1 =stop", "ended device"],
            **_HEDGED,
        ),
        _script(
            "silence, and the other may not",
            "device",
            ["silent", "barred", "silent", "piece device 1 =stop", "ended device"],
            **_HEDGED,
        ),
        _script(
            "no silence",
            "device",
            ["piece device 1", "silent", "piece device 1 =stop", "ended device"],
            **_HEDGED,
        ),
        _script(
            "the first fails in the race",
            "device",
            ["silent", "admitted", "failed device lost", "piece cloud 1 =stop", "ended cloud"],
            **_HEDGED,
        ),
        _script(
            "the second fails in the race",
            "device",
            ["silent", "admitted", "failed cloud 500", "piece device 1 =stop", "ended device"],
            **_HEDGED,
        ),
        _script(
            "the device refuses in the race",
            "device",
            ["silent", "admitted", "refused device seed", "piece cloud 1 =stop", "ended cloud"],
            **_HEDGED,
        ),
        _script(
            "the cloud refuses in the race",
            "device",
            ["silent", "admitted", "refused cloud seed", "piece device 1 =stop", "ended device"],
            **_HEDGED,
        ),
        _script(
            "both fail in the race",
            "device",
            ["silent", "admitted", "failed device lost", "failed cloud 500", "barred"],
            **_HEDGED,
        ),
        _script(
            "the winner is cut",
            "device",
            [
                "silent",
                "admitted",
                "piece cloud 1",
                "failed cloud cut",
                "admitted",
                "piece device 1 =stop",
                "ended device",
            ],
            **_HEDGED,
        ),
        _script(
            "the winner is watched",
            "device",
            [
                "silent",
                "admitted",
                "piece device 5",
                "piece device 1 low",
                "admitted",
                "piece cloud 1 =stop",
                "ended cloud",
            ],
            **_HEDGED,
            **_WATCHED,
        ),
        _script(
            "the cloud is silent, the device starts too",
            "cloud",
            ["silent", "admitted", "piece device 1 =stop", "ended device"],
            hedge="device",
            hedge_seconds=0.0,
        ),
        _script("left in the race", "device", ["silent", "admitted", "left"], **_HEDGED),
    ],
    "leaving": [
        _script("before it began", "cloud", ["left"]),
        _script("in mid-answer", "cloud", ["piece cloud 3", "left", "piece cloud 1"]),
        _script("while the router is asked", "cloud", ["failed cloud 500", "left", "admitted"]),
        _script(
            "while the monitor asks", "device", ["piece device 3", "piece device 1 low", "left"], **_WATCHED
        ),
        _script("after the finish", "cloud", ["piece cloud 3 =stop", "left"]),
    ],
    "privacy": [
        _script(
            "private: a lost device is an error",
            "device",
            ["piece device 3", "failed device lost"],
            **_PRIVATE,
        ),
        _script(
            "private: a device that stands still is an error", "device", ["failed device stalled"], **_PRIVATE
        ),
        _script(
            "private: what the device refuses is refused", "device", ["refused device min_tokens"], **_PRIVATE
        ),
        _script(
            "private: no hedging, whatever the rules say",
            "device",
            ["silent", "piece device 1 =stop", "ended device"],
            **_PRIVATE,
            **_HEDGED,
        ),
        _script(
            "private: no escalation, whatever the rules say",
            "device",
            ["piece device 3", "piece device 1 low", "piece device 1 =stop", "ended device"],
            **_PRIVATE,
            **_WATCHED,
        ),
        _script(
            "private: held back, no restart elsewhere",
            "device",
            ["piece device 1", "piece device 1 low", "piece device 1 =stop", "ended device"],
            **_PRIVATE,
            **_RESTART,
        ),
        _script(
            "private: an early end is an error",
            "device",
            ["piece device 3", "ended device"],
            **_PRIVATE,
            after_cut="cloud",
            before_fallback=3,
        ),
    ],
}
