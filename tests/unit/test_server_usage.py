"""The usage of a key: its daily budget of tokens, its figures in the metrics, its cost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.counts import DAY, Account, OwnCounts
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.prices import Price, parse_prices, price_of
from tests.unit.test_server_requests import MODEL, EchoEngine

PRICES = parse_prices([f"{MODEL}=2,10,0.5"])


def app_of(folder: Path, *keys: Key) -> TestClient:
    """A server whose prompts have 5 tokens, and its answers as many as the message says."""
    file = folder / "keys.toml"
    for key in keys:
        add_key(file, key)
    options = AppOptions(keys=KeyStore(file), prices=PRICES)
    return TestClient(create_app(EchoEngine(), options), raise_server_exceptions=False)


def ask(http: TestClient, key: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **more}
    headers = {"Authorization": f"Bearer {key}-secret"}
    made: Any = http.post("/v1/chat/completions", json=body, headers=headers)
    return made  # type: ignore[no-any-return]


def test_a_key_that_has_used_its_day_is_told_when_it_begins_anew(tmp_path: Path) -> None:
    day, small = Key("day", hashed("day-secret"), tokens_per_day=14), Key("small", hashed("small-secret"))
    http = app_of(tmp_path, day, Key("few", hashed("few-secret"), tokens_per_day=4), small)
    assert [ask(http, "day").status_code for _ in range(2)] == [200, 200]  # 2 × (5 + 1) of 14
    refused = ask(http, "day")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "tokens_per_day")
    assert "14 tokens a day" in error["message"]
    assert "00:00 UTC" in error["message"]
    assert 0 < int(refused.headers["retry-after"]) <= DAY
    never = ask(http, "few")
    assert (never.status_code, never.json()["error"]["code"]) == (400, "tokens_per_day")
    assert ask(http, "small").status_code == 200


def test_a_budget_is_of_one_day_and_of_one_of_several_fronts() -> None:
    now = 10.5 * DAY
    counts, account = OwnCounts(2, calendar=lambda: now), Account("k", "day", 100)
    claim = lambda amount: asyncio.run(counts.claim(account, amount))  # noqa: E731
    assert claim(40) == 0
    counts.take(account, 30)  # an answer that became longer
    assert claim(1) == DAY / 2
    now = 11.0 * DAY
    assert claim(50) == 0
    assert claim(1) == DAY
    counts.take(account, -50)
    assert claim(50) == 0
    account = Account("k", "day", 200)  # edited: what was used stays used
    assert claim(50) == 0
    assert claim(1) > 0


def test_metrics_tell_what_each_key_has_used(tmp_path: Path) -> None:
    admin = Key("root", hashed("root-secret"), admin=True)
    http = app_of(tmp_path, Key("alice", hashed("alice-secret")), Key("bob", hashed("bob-secret")), admin)
    for _ in range(3):
        ask(http, "alice")
    ask(http, "bob", n=2, stream=True)
    bob = {"Authorization": "Bearer bob-secret"}
    http.post("/v1/score", json={"items": ["a"], "labels": ["x", "y"]}, headers=bob)
    http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x"}]}, headers=bob)
    text = http.get("/metrics", headers={"Authorization": "Bearer root-secret"}).text

    def value(name: str, **labels: str) -> float:
        shown = ",".join(
            f'{label}="{each}"' for label, each in sorted({"model_name": MODEL, **labels}.items())
        )
        line = next(line for line in text.splitlines() if line.startswith(f"nearfar:{name}{{{shown}}} "))
        return float(line.rpartition(" ")[2])

    assert value("key_tokens_total", key="alice", kind="prompt") == 15
    assert value("key_tokens_total", key="alice", kind="generation") == 3
    assert value("key_tokens_total", key="bob", kind="generation") == 2
    assert value("key_tokens_total", key="bob", kind="prompt") == 5 + 1  # counting tokens costs nothing
    assert value("cost_total", key="alice") == pytest.approx((15 * 2 + 3 * 10) / 1e6)
    assert value("key_seconds_total", key="bob", phase="decode") >= 0
    assert value("request_decode_time_seconds_count") == 4
    assert value("request_queue_time_seconds_count") == 0  # this engine does not tell


def test_metrics_that_everybody_may_read_name_no_keys(tmp_path: Path) -> None:
    http = app_of(tmp_path, Key("alice", hashed("alice-secret")))
    ask(http, "alice")
    text = http.get("/metrics").text
    assert f'nearfar:key_tokens_total{{key="",kind="prompt",model_name="{MODEL}"}} 5.0' in text
    assert "alice" not in text


def test_prices_are_of_a_million_tokens() -> None:
    prices = parse_prices(["org/model=v=1,2", "*=3,4,0.5"])
    assert prices == {"org/model=v": Price(1, 2, 1), "*": Price(3, 4, 0.5)}
    assert price_of(prices, "other") == Price(3, 4, 0.5)
    assert price_of({}, "other") is None
    assert Price(3, 4, 0.5).cost(TokenUsage(100, 10, 60)) == pytest.approx((40 * 3 + 60 * 0.5 + 40) / 1e6)


@pytest.mark.parametrize("text", ["m", "=1,2", "m=1", "m=1,2,3,4", "m=a,b", "m=-1,2", "m=nan,2", "m=inf,1"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="MODEL=PROMPT,ANSWER"):
        parse_prices([text])
    with pytest.raises(RequestError, match="two prices"):
        parse_prices(["m=1,2", "m=1,2"])
