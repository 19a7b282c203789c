"""A server is proven to compute on this machine only if it runs as this user and at the requested port."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearfar import machine
from nearfar.routing.endpoint import Endpoint, EndpointSide
from nearfar.routing.policy import Timeouts
from tests.support.proxy import Proxy
from tests.support.servers import RunningServer, tiny_engine


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    made = RunningServer(lambda: tiny_engine(tmp_path_factory.mktemp("tokenizer")))
    yield made
    made.close()


async def why(address: str) -> str | None:
    """The reason why the server at an address counts as elsewhere; None: it does not."""
    side = EndpointSide(Endpoint(address), Timeouts(connect=5), use_key=False)
    try:
        await side.describe()
        return await side.elsewhere()
    finally:
        await side.close()


async def test_a_server_of_this_user_is_here(server: RunningServer) -> None:
    assert await why(server.address) is None
    assert await why(f"{server.address}/v1") is None
    assert await why(server.address.replace("127.0.0.1", "localhost")) is None


async def test_a_relay_is_not(server: RunningServer) -> None:
    """The relay stands for ssh, a container's published port, or a proxy that forwards only some paths."""
    relay = Proxy(server.port)
    assert "another port" in str(await why(relay.address))
    relay.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not an address of this machine")
@pytest.mark.parametrize(("other", "host"), [("user", "127.0.0.2"), ("machine", "127.0.0.3")])
async def test_a_relay_at_the_same_port_of_another_machine_is_not(
    server: RunningServer, other: str, host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example with `ssh -L 8000:localhost:8000`. "machine": both have the same home, on a
    network drive.
    """
    relay = Proxy(server.port, (host, server.port))
    theirs = machine.proof
    assert await why(relay.address) is None, "a relay to this very server hides nothing: it computes here"

    def there(nonce: str, port: int) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            if other == "machine":
                patch.setattr(machine, "_machine", lambda: "another")
            else:
                patch.setenv("NEARFAR_HOME", str(tmp_path / "other"))
            return theirs(nonce, port)

    monkeypatch.setattr("nearfar.fallback_server.http.apis.models_routes.proof", there)
    assert "another machine" in str(await why(relay.address))
    assert "another machine" in str(await why(server.address))
    relay.close()


async def test_an_older_server_and_one_without_a_key_are_not(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearfar.fallback_server.http.apis.models_routes.proof", lambda nonce, port: None)
    assert "older nearfar" in str(await why(server.address))


def test_a_proof_is_for_one_nonce_and_port() -> None:
    nonce, other = secrets.token_hex(16), secrets.token_hex(16)
    made = machine.proof(nonce, 8000)
    assert machine.proves(made, nonce, 8000)
    assert not machine.proves(made, nonce, 8001)
    assert not machine.proves(made, other, 8000)
    for wrong in (None, "", "é", "0" * 64, 7):
        assert not machine.proves(wrong, nonce, 8000)
    for wrong in ("", "x" * 32, "0" * 31, nonce.upper() + "g"):
        assert machine.proof(wrong, 8000) is None


def test_the_key_is_this_users_alone(caplog: pytest.LogCaptureFixture) -> None:
    key = machine.user_key()
    assert key is not None
    assert machine.user_key() == key
    path = machine.key_file()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    if sys.platform != "win32":
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)
        assert machine.user_key() is None
        assert "chmod 600" in caplog.text
        path.chmod(0o600)
    path.write_bytes(b"short")
    assert machine.user_key() is None


def test_without_a_place_for_a_key_nothing_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEARFAR_HOME", os.fspath(tmp_path / "file"))
    assert machine.user_key() is None
    assert machine.proof(secrets.token_hex(16), 8000) is None
