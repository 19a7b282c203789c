"""The limits of keys in a Redis that several fronts share."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import EngineRequest, Prepared
from nearfar.fallback_server.http.counts import Account, OwnCounts
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.keys import Key, add_key, hashed
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.http.shared_counts import PATIENCE, PROBE_SECONDS, SharedCounts, open_store
from nearfar.fallback_server.serve import ServeOptions, check_access
from tests.support.redis import RedisServer
from tests.support.servers import MODEL, Front, RunningServer, tiny_engine

REQUESTS, TOKENS = 6, 40
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Hi",
    "max_tokens": 1,
    "temperature": 0,
    "logit_bias": {"257": -100},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tiny")
    made = RunningServer(lambda: tiny_engine(folder))
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path)
    yield made
    made.kill()


def client(store: RedisServer) -> Any:
    import redis

    return redis.Redis(port=store.port)


@dataclass
class House:
    """Two processes of `nearfar serve` with the same keys and store."""

    fronts: list[Front]
    started: float

    def ask(self, front: int, key: str, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}-secret"}
        return httpx.post(
            f"{self.fronts[front].url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60
        )

    @property
    def filled(self) -> float:
        """Requests that have become available since the first one."""
        return (time.monotonic() - self.started) * REQUESTS / 60

    def log(self) -> str:
        return "".join(front.log.read_text(encoding="utf-8") for front in self.fronts)


@pytest.fixture
def house(server: RunningServer, store: RedisServer, tmp_path: Path) -> Iterator[House]:
    keys = tmp_path / "keys.toml"
    add_key(keys, Key("alice", hashed("alice-secret"), requests_per_minute=REQUESTS))
    add_key(keys, Key("bob", hashed("bob-secret"), tokens_per_minute=TOKENS))
    with ExitStack() as stack:
        fronts = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            arguments = ("--keys", str(keys), "--fronts", "2", "--limits-store", store.url)
            fronts.append(Front(server, tmp_path / name, *arguments))
            stack.callback(fronts[-1].close)
        yield House(fronts, time.monotonic())


def code(response: httpx.Response) -> object:
    return response.json()["error"]["code"]


def test_two_fronts_grant_a_key_its_whole_limit_once(house: House, store: RedisServer) -> None:
    """The first front grants more than its share; the second one grants only the rest."""
    assert [house.ask(0, "alice").status_code for _ in range(4)] == [200] * 4
    rest = [house.ask(index % 2, "alice") for index in range(1, 8)]
    granted = 4 + sum(response.status_code == 200 for response in rest)
    assert REQUESTS <= granted <= REQUESTS + house.filled
    for front in (0, 1):
        refused = house.ask(front, "alice")
        assert (refused.status_code, code(refused)) == (429, "requests_per_minute")
        assert 1 <= int(refused.headers["Retry-After"]) <= 60 / REQUESTS + 1

    kept = client(store)
    names = kept.keys("*")
    told = b" ".join([*names, *(value for name in names for value in kept.hvals(name))])
    assert names
    assert not any(secret in told for secret in (b"alice", b"secret", hashed("alice-secret").encode()))
    # a key that is not used leaves nothing behind
    assert all(0 < kept.pttl(name) <= 120_000 for name in names)


def test_answers_that_one_front_gave_are_paid_for_at_the_other(house: House, store: RedisServer) -> None:
    """The length of an answer is known only afterwards, so an answer overdraws the account."""
    assert house.ask(0, "bob", max_tokens=3 * TOKENS, ignore_eos=True).status_code == 200
    kept, deadline = client(store), time.monotonic() + 10
    while not any(float(kept.hget(name, "level")) < 0 for name in kept.keys("*tokens")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    refused = house.ask(1, "bob")
    assert (refused.status_code, code(refused)) == (429, "tokens_per_minute")
    assert int(refused.headers["Retry-After"]) > 60


def test_answers_go_on_without_the_store(house: House, store: RedisServer) -> None:
    assert [house.ask(front, "alice").status_code for front in (0, 1)] == [200, 200]
    store.kill()
    statuses = [house.ask(front, "alice").status_code for _ in range(6) for front in (0, 1)]
    assert set(statuses) == {200, 429}
    assert (
        REQUESTS <= statuses.count(200) <= REQUESTS + house.filled
    )  # each front has its own part of a minute
    assert house.log().count("each server counts for itself") == 2  # each front writes one line


# Without processes


async def test_the_store_counts_as_a_server_by_itself_does(store: RedisServer) -> None:
    """Replays the same events in the store's script and in Python: claims and debts, also larger than a
    bucket, while limits are edited.
    """
    shared, own, began = (
        await open_store(store.url, OwnCounts(1)),
        OwnCounts(1, lambda: 0.0),
        time.monotonic(),
    )
    chance = random.Random(7)
    for index in range(400):
        account = Account(f"tenant {index // 40}", "tokens", chance.choice((1, 1, 2)))
        amount = chance.choice((0.25, 0.5, 1, 2, 3))
        if chance.random() < 0.2:
            amount = chance.choice((-amount, amount))
            own.take(account, amount)
            shared.take(account, amount)
            await shared.settled()
        else:
            wait = await own.claim(account, amount)
            got = await shared.claim(account, amount)
            # the store's bucket fills with time, and `own` has a clock that stands
            passed = 2 * (time.monotonic() - began)
            assert (got > 0) == (wait > 0)
            assert wait - passed - 0.01 <= got <= wait + 0.01
    await shared.close()


async def test_claims_at_the_same_time_get_no_more_than_there_is(store: RedisServer) -> None:
    fronts = [await open_store(store.url, OwnCounts(2)) for _ in range(2)]
    account = Account("alice", "requests", 50)
    began = time.monotonic()
    waits = await asyncio.gather(*(fronts[index % 2].claim(account, 1) for index in range(200)))
    filled = (time.monotonic() - began) * 50 / 60  # claims that have become available since the first one
    assert 50 <= waits.count(0) <= 51 + filled
    for front in fronts:
        await front.close()


async def test_a_budget_for_a_day_is_counted_together_and_ends_at_midnight(store: RedisServer) -> None:
    fronts = [await open_store(store.url, OwnCounts(2)) for _ in range(2)]
    account = Account("alice", "day", 100)
    assert [await fronts[at % 2].claim(account, 30) for at in range(3)] == [0, 0, 0]
    wait = await fronts[0].claim(account, 30)
    left = 86_400 - time.time() % 86_400
    assert abs(wait - left) < 60
    fronts[1].take(account, -30)
    await fronts[1].settled()
    assert await fronts[0].claim(account, 30) == 0
    (name,) = client(store).keys("*:day")
    assert 0 < client(store).pttl(name) <= (left + 60) * 1000
    for front in fronts:
        await front.close()


async def test_a_store_that_was_started_again_is_connected_to_again(
    store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that were cut while idle are not failures."""
    shared, account = await open_store(store.url, OwnCounts(10)), Account("alice", "requests", 10)
    waits = await asyncio.gather(*(shared.claim(account, 1) for _ in range(4)))
    store.kill()
    store.start()
    waits += [await shared.claim(account, 1) for _ in range(6)]  # alone, this front would grant one request
    assert waits == [0] * 10
    assert not caplog.records
    await shared.close()


async def test_a_store_that_hangs_is_waited_for_but_once(store: RedisServer) -> None:
    shared, account = await open_store(store.url, OwnCounts(1)), Account("alice", "requests", 10)
    store.hang()
    began = time.monotonic()
    assert await asyncio.gather(*(shared.claim(account, 1) for _ in range(5))) == [0] * 5
    assert [await shared.claim(account, 1) for _ in range(5)] == [0] * 5
    assert PATIENCE * 0.9 <= time.monotonic() - began < PATIENCE + 2
    await shared.close()


async def test_a_request_that_the_server_has_no_room_for_costs_its_key_nothing(store: RedisServer) -> None:
    shared = await open_store(store.url, OwnCounts(1))
    admission = Admission(ServerLimits(tokens=8), shared)
    key = Key("k", tokens_per_minute=10).tenant
    first, second = await admission.enter(Key("other").tenant), await admission.enter(key)
    await first.charge(Prepared(EngineRequest("a", MODEL), (), 5))
    with pytest.raises(ApiError, match="tokens under way"):
        await second.charge(Prepared(EngineRequest("b", MODEL), (), 10))
    await shared.settled()
    first.leave()
    await second.charge(Prepared(EngineRequest("b", MODEL), (), 10))
    await shared.close()


class Script:
    """Stands for the store: fails, hangs, or grants everything."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.calls = 0

    async def __call__(self, keys: list[str], args: list[object]) -> bytes:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return b"0"


@pytest.mark.parametrize(
    "error", [OSError("cut"), TimeoutError(), ValueError("garbled"), RuntimeError("anything")]
)
async def test_a_store_that_fails_is_left_alone_and_asked_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    now, script = [0.0], Script()
    shared = SharedCounts(script, OwnCounts(2, lambda: now[0]), "redis.example:6379", lambda: now[0])
    account = Account("alice", "requests", 4)
    assert [await shared.claim(account, 1) for _ in range(9)] == [0] * 9
    script.error, script.calls = error, 0
    with caplog.at_level(logging.INFO):
        waits = [await shared.claim(account, 1) for _ in range(4)]
        shared.take(account, 1)
        await shared.settled()
        assert waits[:2] == [0, 0]
        assert min(waits[2:]) > 0  # without the store, the front grants only its own part
        assert script.calls == 1
        now[0] += PROBE_SECONDS
        assert await shared.claim(account, 1) >= 0
        assert script.calls == 2
        script.error = None
        now[0] += PROBE_SECONDS
        assert [await shared.claim(account, 1) for _ in range(5)] == [0] * 5
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert all("redis.example:6379" in record.message for record in caplog.records)


async def test_a_client_that_leaves_says_nothing_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    shared = SharedCounts(script, OwnCounts(1), "redis.example:6379")
    script.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await shared.claim(Account("alice", "requests", 4), 1)
    admission = Admission(ServerLimits(), shared)
    with pytest.raises(asyncio.CancelledError):
        await admission.enter(Key("alice", requests_per_minute=4, concurrent=1).tenant)
    assert admission.under_way("alice") == 0
    assert not caplog.records


async def test_a_store_that_cannot_be_used_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnCounts(1)
    pytest.importorskip("redis")
    for url in (
        "http://127.0.0.1:1/0",
        "127.0.0.1:6379",
        "redis://:pa55@127.0.0.1:port/0",
        "redis://",
        "redis://:pa55@h:1/x",
    ):
        with pytest.raises(RequestError, match="redis://HOST:PORT/0") as refused:
            await open_store(url, own)
        assert "pa55" not in str(refused.value)
    with pytest.raises(RequestError, match=r"127\.0\.0\.1:1 cannot be used.*start it") as refused:
        await open_store("redis://:pa55@127.0.0.1:1/0", own)
    assert "pa55" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(RequestError, match=r"pip install 'nearfar\[limits\]'"):
        await open_store("redis://127.0.0.1:1/0", own)


def test_a_store_without_keys_has_nothing_to_count() -> None:
    with pytest.raises(RequestError, match="--limits-store counts for keys"):
        check_access(ServeOptions(limits_store="redis://127.0.0.1:1/0"))
