"""A secret of this user on this machine: a key in a file, and the proofs and hashes made with it."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import logging
import os
import secrets
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

from nearfar.folders import data_folder

log = logging.getLogger(__name__)

NONCE_HEADER = "x-nearfar-nonce"
"""The header of a request for the list of models with which a client asks for a proof."""
KEY_BYTES, NONCE_BYTES = 32, 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def key_file() -> Path:
    """The path of this user's key file (below NEARFAR_HOME, if that is set)."""
    return data_folder() / "machine.key"


def user_key() -> bytes | None:
    """The key of this user, made when it is first needed. None, with a line in the log, where it cannot be
    made, or where others can read the file.
    """
    path = key_file()
    try:
        if not path.exists():
            _make(path)
        state = path.stat()
        if sys.platform != "win32" and (state.st_mode & 0o077 or state.st_uid != os.geteuid()):
            _warn(
                f"{path} can be read or changed by other users, so it is not used: run chmod 600 on it, or "
                "remove it"
            )
            return None
        key = path.read_bytes()
    except OSError as error:
        _warn(f"the key of this user, {path}, cannot be read or made: {error}")
        return None
    if len(key) != KEY_BYTES:
        _warn(f"{path} is not a key of {KEY_BYTES} bytes, so it is not used: remove it")
        return None
    return key


def key_for(purpose: str) -> bytes | None:
    """Derive a separate key for each purpose, so that none reveals another."""
    key = user_key()
    return None if key is None else hmac.digest(key, purpose.encode(), "sha256")


def proof(nonce: str, port: int) -> str | None:
    """Make the proof that a server at this port runs as this user on this machine, for the client that made
    the nonce.

    It covers the port: a process that forwards requests from another port has no proof for its own. It covers
    the machine: a home on a network drive has one key for several machines.
    """
    key = key_for("computes here")
    if key is None or not _is_nonce(nonce):
        return None
    return hmac.new(key, f"{nonce}\0{port}\0{_machine()}".encode(), sha256).hexdigest()


def proves(given: object, nonce: str, port: int) -> bool:
    """Whether a proof is the right one for nonce and port."""
    wanted = proof(nonce, port)
    return (
        wanted is not None and isinstance(given, str) and hmac.compare_digest(given.encode(), wanted.encode())
    )


@cache
def _warn(message: str) -> None:
    """Log a warning once, so that clients that ask for proofs cannot fill the log."""
    log.warning("%s", message)


def _is_nonce(nonce: str) -> bool:
    return len(nonce) == 2 * NONCE_BYTES and all(letter in "0123456789abcdef" for letter in nonce)


def _make(path: Path) -> None:
    """Write the key to a temporary file and link it in place, so that of two processes only one makes it, and
    nobody reads half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()


def _machine() -> str:
    """An id of the machine: on Linux its boot id (also in its containers), else the system's id."""
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"SOFTWARE\Microsoft\Cryptography") as folder:
            return str(winreg.QueryValueEx(folder, "MachineGuid")[0])
    if sys.platform == "darwin":
        made, patience = ctypes.create_string_buffer(16), (ctypes.c_long * 2)(1, 0)
        ctypes.CDLL(None).gethostuuid(made, patience)
        return made.raw.hex()
    return _BOOT.read_text().strip() if _BOOT.exists() else ""
