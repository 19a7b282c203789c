"""`nearfar serve --ray`: two replicas, one killed under load, and every request gets its answer."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import device
from tests.shared_data import shared_data
from tests.support.artifacts import Built
from tests.support.processes import descendants_that_run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: nearfar[ray]"
)

STREAMS = 20
TOKENS = 199
BEGUN = 0.05
"""CPU seconds after which a replica counts as computing answers: its share of them takes about 0.2."""


class RayServer:
    """`nearfar serve --ray` with two replicas, on a Ray cluster of its own."""

    def __init__(self, artifact: Path) -> None:
        arguments = ["--threads", "1", "--replicas", "2", "--cpus-per-replica", "0.1", "--port", "0"]
        command = [sys.executable, "-m", "nearfar", "serve", str(artifact), "--ray", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"at (https?://\S+)", self.process.stdout.readline())
        assert found, "the server did not start; its errors are above"
        self.url = found[1]

    def replicas(self) -> list[psutil.Process]:
        """The processes of the engine's replicas."""
        return descendants_that_run(psutil.Process(self.process.pid), "ServeReplica:nearfar:Engine")


@pytest.fixture(scope="module")
def server(built: Built) -> Iterator[RayServer]:
    server = RayServer(built("stories260K", "none") / "cpu")
    children = psutil.Process(server.process.pid).children(recursive=True)
    yield server
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=20)
    for process in alive:
        process.kill()
    assert status == 0
    assert not alive


async def stream(client: httpx.AsyncClient, body: dict[str, object], started: asyncio.Event) -> str:
    """The text of an answer, after checking that it is complete and without an error."""
    lines, text = [], ""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            started.set()
            text += "".join(re.findall(r'"text":\s?"((?:[^"\\]|\\.)*)"', line))
    assert not [line for line in lines if '"error"' in line]
    assert "data: [DONE]" in lines
    return text.encode().decode("unicode_escape")


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def golden() -> str:
    """The expected text of the greedy streams."""
    return shared_data("models", "stories260K", "golden_greedy.txt").read_text(encoding="utf-8").strip()


def test_the_program_of_replicas_is_told_before_the_first_request(server: RayServer, built: Built) -> None:
    name = Artifact.open(built("stories260K", "none") / "cpu").able_programs(device("cpu").probe())[0].name
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(
        rf'^nearfar:program_info\{{device="cpu",.*program="{name}",.*\}} 1', metrics, re.MULTILINE
    )


async def test_a_replica_dies_under_load_and_no_request_is_lost(server: RayServer) -> None:
    greedy = {"model": "stories260K", "prompt": [1], "max_tokens": TOKENS, "temperature": 0}
    # The request has a seed, and a penalty that counts generated tokens: such an answer is computed again and
    # compared.
    drawn = {**greedy, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    penalized = {**drawn, "presence_penalty": 0.5}
    async with httpx.AsyncClient(base_url=server.url, timeout=90) as client:
        before = {
            name: (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            for name, body in {"drawn": drawn, "penalized": penalized}.items()
        }
        assert before["drawn"] != before["penalized"]
        replicas = server.replicas()
        assert len(replicas) == 2
        kinds = ["greedy"] * (STREAMS - 6) + ["drawn"] * 3 + ["penalized"] * 3
        bodies = {"greedy": greedy, "drawn": drawn, "penalized": penalized}
        started = [asyncio.Event() for _ in kinds]
        before_work = [cpu_seconds(replica) for replica in replicas]
        tasks = [asyncio.create_task(stream(client, bodies[kind], event))
                 for kind, event in zip(kinds, started, strict=True)]  # fmt: skip
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started[: STREAMS // 2])), 60)
        # Requests that a replica has not begun when it dies go to another one without a loss.
        while any(cpu_seconds(r) < was + BEGUN for r, was in zip(replicas, before_work, strict=True)):
            await asyncio.sleep(0.005)
        assert not all(task.done() for task in tasks)
        replicas[0].kill()
        texts = await asyncio.gather(*tasks)
        wanted = {**before, "greedy": golden()}
        assert [text.strip() for text in texts] == [wanted[kind].strip() for kind in kinds]
        metrics = (await client.get("/metrics")).text
        lost = re.search(r"^nearfar:engine_restarts_total\{.*\} (\S+)", metrics, re.MULTILINE)
        assert lost is not None
        assert float(lost[1]) >= 1  # requests were really in progress on the killed replica
        assert (await client.get("/ready")).status_code == 200


def test_the_killed_replica_is_replaced_and_prompts_go_where_they_are_known(server: RayServer) -> None:
    deadline = time.monotonic() + 60
    while len(server.replicas()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(server.replicas()) == 2
    body = {"model": "stories260K", "max_tokens": 1, "temperature": 0, "prompt": [1, *range(300, 396)]}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answers = [client.post("/v1/completions", json=body).json() for _ in range(6)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert all(tokens > 0 for tokens in cached[1:])


async def test_a_server_told_to_end_answers_first_however_long_it_takes(server: RayServer) -> None:
    """The answer takes longer than the 3 s after which Ray's native signal handler would abort the
    process.
    """
    body = {"model": "stories260K", "prompt": [1], "max_tokens": TOKENS, "temperature": 0}
    started = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        streams = [asyncio.create_task(stream(client, body, started)) for _ in range(STREAMS)]
        await asyncio.wait_for(started.wait(), 30)
        replicas = server.replicas()
        for replica in replicas:
            replica.suspend()
        assert not all(task.done() for task in streams)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(4)
        for replica in replicas:
            replica.resume()
        assert {text.strip() for text in await asyncio.gather(*streams)} == {golden()}
    assert await asyncio.to_thread(server.process.wait, 60) == 0


def test_what_ray_cannot_run_is_said() -> None:
    for arguments, message in (
        (["http://127.0.0.1:1"], "not addresses"),
        (["folder", "--replicas", "3:2"], "MIN <= MAX"),
    ):
        command = [sys.executable, "-m", "nearfar", "serve", *arguments, "--ray"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert message in done.stderr
