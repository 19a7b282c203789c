"""The privacy contract: private texts stay on the device, in every part of the client. TypeScript passes the
same cases.

The cloud is a real server on this machine that records every connection; the policy prefers it, so whatever
may go to the cloud goes there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError, NearfarError, RequestError
from nearfar.routing import AsyncHybridClient, Policy
from nearfar.routing.privacy import PrivateTexts
from tests.support import tiny
from tests.support.routing_vectors import VECTORS
from tests.support.scripted import ScriptedServer
from tests.support.servers import RunningServer, tiny_core, tiny_engine

LONG = "Dear diary, the word for my account is quokka, and nobody may know it."
SHORT = "pin quokka"
SECRET = "quokka"  # the secret has letters alone, because digits occur in ids and times by chance
CASES: list[dict[str, Any]] = json.loads((VECTORS / "privacy.json").read_text(encoding="utf-8"))
SETUP = (
    "expect",
    "content",
    "parts",
    "before",
    "system",
    "carry",
    "message",
    "device",
    "policy",
    "leave",
    "restart",
)
QUIET: dict[str, Any] = {"mode": "prefer_cloud", "retry": {"attempts": 0}, "timeouts": {"connect": 5}}


class Tripwire:
    """A cloud that never answers, and records connections."""

    def __init__(self) -> None:
        self.touched = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.touched += 1
                connection.close()

    def close(self) -> None:
        """Stop. The thread that accepts connections is woken, and ends."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def cloud() -> Iterator[Tripwire]:
    made = Tripwire()
    yield made
    made.close()


class Device:
    """A real engine that can be told to fail."""

    def __init__(self) -> None:
        config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
        self.engine = AsyncEngine(tiny_core(), TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256))
        self._executor: Any = self.engine.core.executor
        self._run = self._executor.run
        self.resume = threading.Event()

    def behave(self, how: str) -> None:
        steps = {"lost": 0, "cut": 10, "stalls": 0}.get(how)
        self._executor.run = self._run
        if steps is None:
            return
        left = steps

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                return self._run(*args, **kwargs)
            if how == "stalls":
                self.resume.wait(20)
                return self._run(*args, **kwargs)
            self._executor.run = self._run
            raise DeviceError(f"lost, in the middle of: {LONG}")

        self._executor.run = failing


def merged(*policies: dict[str, Any]) -> Policy:
    made: dict[str, Any] = {}
    for policy in policies:
        for name, value in policy.items():
            made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    return Policy.parse(made)


def filled(value: Any) -> Any:
    return json.loads(json.dumps(value).replace("LONG", LONG).replace("SHORT", SHORT))


def messages_of(turn: dict[str, Any], before: list[Any]) -> list[Any]:
    made = [*before] if turn.get("carry") else []
    if "system" in turn:
        made.append({"role": "system", "content": turn["system"]})
    if "before" in turn:
        made += [{"role": "user", "content": turn["before"]}, {"role": "assistant", "content": "Hi."}]
    content = [{"type": "text", "text": turn["parts"]}] if "parts" in turn else turn["content"]
    return [*made, {"role": "user", "content": content, **turn.get("message", {})}]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_case(case: dict[str, Any], cloud: Tripwire, tmp_path: Path) -> None:
    case, device = filled(case), Device()
    said: list[str] = []
    options: dict[str, Any] = {
        "device": None if case.get("device") == "absent" else device.engine, "cloud": cloud.address,
        "state": tmp_path / "state.json", "records": tmp_path / "records.jsonl",
    }  # fmt: skip
    async with device.engine:
        client = AsyncHybridClient(policy=merged(QUIET, case.get("policy", {})), **options)
        messages: list[Any] = []
        for turn in case["turns"]:
            if "policy" in turn or turn.get("restart"):
                policy = merged(QUIET, case.get("policy", {}), turn.get("policy", {}))
                if turn.get("restart"):
                    await client.close()
                    client = AsyncHybridClient(policy=policy, **options)
                else:
                    client.router.policy = policy
            device.behave(turn.get("device", case.get("device", "ok")))
            messages = messages_of(turn, messages)
            if turn["expect"] == "device":
                messages = [
                    *messages,
                    {"role": "assistant", "content": await answered(client, messages, turn)},
                ]
            else:
                with pytest.raises(NearfarError) as raised:
                    await answered(client, messages, turn)
                said += [str(raised.value), str(raised.value.__cause__)]
        device.resume.set()
        await client.close()
    await asyncio.sleep(0)
    assert bool(cloud.touched) == case.get("touched", False), (
        "the cloud was asked" if cloud.touched else "the cloud was not asked"
    )
    kept = [path.read_text() for path in tmp_path.iterdir()]
    if not case.get("touched"):
        assert SECRET not in "\n".join([*said, *kept])
    written = tmp_path / "records.jsonl"
    lines = written.read_text().splitlines() if written.exists() else []
    records = [json.loads(line) for line in lines]
    unsaid = {record["private_by"] for record in records} & {"earlier", "quote"}
    assert bool(unsaid) == earlier(case) or case.get("touched")
    assert all((record["private_by"] is None) != record["request"]["private"] for record in records)


def earlier(case: dict[str, Any]) -> bool:
    """Whether a request of the case is private only because of an earlier request's text."""
    unsaid = [turn for turn in case["turns"] if '"private": true' not in json.dumps(turn)]
    return not case.get("touched") and any(turn["expect"] != "refused" for turn in unsaid)


QUOTES: list[dict[str, Any]] = json.loads((VECTORS / "quotes.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", QUOTES, ids=[case["name"] for case in QUOTES])
def test_a_quotation(case: dict[str, Any]) -> None:
    texts, params = PrivateTexts(), case.get("params", {})
    texts.remember(texts.marks(case["private"], params), None)
    assert texts.known(texts.marks(case["request"], params), None) == case["found"]


async def answered(client: AsyncHybridClient, messages: list[Any], turn: dict[str, Any]) -> str:
    """The answer, which must come from the device."""
    asked = {name: value for name, value in turn.items() if name not in SETUP}
    stream = asked.pop("stream", False)
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **asked}
    if not stream:
        whole = await client.chat.completions.create(messages, **params)
        assert whole.x_nearfar.path == ["device"]
        return whole.choices[0].message.content or ""
    text = ""
    chunks = await client.chat.completions.create(messages, stream=True, **params)
    async for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if turn.get("leave") and text:
            await chunks.close()
            break
    return text


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path_factory.mktemp("home")))


async def test_a_server_on_this_machine_must_say_that_it_computes_here(
    tmp_path: Path, cloud: Tripwire
) -> None:
    ask: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "x_nearfar": {"private": True}}
    private: list[Any] = [{"role": "user", "content": LONG}]
    here = RunningServer(lambda: tiny_engine(tmp_path))
    try:
        async with AsyncHybridClient(device=here.address, cloud=cloud.address) as client:
            answer = await client.chat.completions.create(private, **ask)
            assert answer.x_nearfar.path == ["device"]
    finally:
        here.close()
    with ScriptedServer([["piece device 1 =stop", "ended device"]]) as relay:
        async with AsyncHybridClient(device=relay.address, cloud=cloud.address) as client:
            with pytest.raises(
                RequestError,
                match=r"elsewhere .*does not say that it computes.*nearfar serve ARTIFACT",
            ):
                await client.chat.completions.create(private, **ask)
            assert relay.bodies == []
            answer = await client.chat.completions.create([{"role": "user", "content": "Hello"}])
            assert answer.x_nearfar.path == ["device"], "what is not private may go there"
    assert cloud.touched == 0


async def test_a_cloud_that_quotes_the_prompt_is_not_repeated(tmp_path: Path) -> None:
    class Quoting(ScriptedServer):
        def _whole(self, handler: Any, status: str, data: Any) -> bool:
            if "error" in data:
                data = {"error": {"message": f"cannot read: {LONG}", "param": LONG}}
            return super()._whole(handler, status, data)

    for part in ("failed cloud 500", "refused cloud seed"):
        with Quoting([[part]]) as quoting:
            records = tmp_path / "records.jsonl"
            async with AsyncHybridClient(
                cloud=quoting.address, policy=merged(QUIET), records=records
            ) as client:
                with pytest.raises(NearfarError, match="quotes the prompt") as raised:
                    await client.chat.completions.create([{"role": "user", "content": LONG}], max_tokens=3)
        assert SECRET not in f"{raised.value} {getattr(raised.value, 'param', '')} {records.read_text()}"
        assert raised.value.__suppress_context__
