"""API keys: stored as SHA-256, compared in constant time, read again when their file changes.

A key is 256 random bits and cannot be guessed, so its hash needs neither salt nor stretching.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nearfar.errors import RequestError
from nearfar.fallback_server.tenants import MAX_PRIORITY, Tenant, TenantLimits, digest
from nearfar.folders import write_whole

log = logging.getLogger(__name__)

PREFIX = "sha256:"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}")
"""Names that a new key may have. They appear in logs, and in commands that search the logs."""
CHECK_SECONDS = 1.0
"""Least seconds between two checks of the file."""


@dataclass(frozen=True)
class Key:
    """One key, as in the file. A limit of None means no limit. `models`: ids, or "*" for all.

    An admin key opens /admin and nothing else. Keys with the same `cache_group` share prompts in the prefix
    cache; a key without one finds only its own. `priority`: the most urgent priority of its requests (-10 is
    before 0).
    """

    name: str
    hash: str = ""
    models: tuple[str, ...] = ("*",)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    admin: bool = False
    cache_group: str | None = None
    priority: int = 0
    tokens_per_day: int | None = None

    @property
    def tenant(self) -> Tenant:
        """The tenant of requests with this key.

        The salt of a key contains its hash, which is unknown to anyone who cannot read the file: upstream
        servers may be open to others. A group's salt is as hard to guess as its name.
        """
        group = self.cache_group
        salt = digest("key", self.name, self.hash) if group is None else digest("group", group)
        limits = TenantLimits(
            self.requests_per_minute, self.tokens_per_minute, self.concurrent, self.tokens_per_day
        )
        return Tenant(self.name, salt, self.priority, limits, self.models)


def new_secret() -> str:
    """Make a new key, which is shown once."""
    return "nf-" + secrets.token_urlsafe(32)


def hashed(secret: str) -> str:
    """Return the hash of a key for the file."""
    return PREFIX + hashlib.sha256(secret.encode()).hexdigest()


class KeyStore:
    """The keys of a file. If the file becomes invalid, an error is logged and the earlier keys stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = (0, 0)
        self._checked = 0.0
        self.keys: tuple[Key, ...] = ()
        self.reload()

    def bearer(self, authorization: str) -> Key | None:
        """The key in an Authorization header; None without a valid one."""
        scheme, _, secret = authorization.partition(" ")
        return self.find(secret.strip()) if scheme.lower() == "bearer" and secret else None

    def opens_admin(self, authorization: str) -> bool:
        """Whether an Authorization header has an admin's key."""
        key = self.bearer(authorization)
        return key is not None and key.admin

    @property
    def has_admin(self) -> bool:
        """Whether one of the keys is an admin's, which then is needed for the metrics."""
        return any(key.admin for key in self.keys)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret. A wrong secret takes as long as any right one."""
        self._refresh()
        wanted = hashed(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.hash, wanted):
                found = key
        return found

    def reload(self) -> None:
        """Read the file now."""
        self._stamp = _stamp(self.path)
        self.keys = read_keys(self.path)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        try:
            if _stamp(self.path) != self._stamp:
                self.reload()
                log.info("%d keys read again from %s", len(self.keys), self.path)
        except RequestError as error:
            log.error("the keys stay as they were: %s", error)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise RequestError(f"the keys file {path} cannot be read: {error}") from error
    return stat.st_mtime_ns, stat.st_size


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read the keys of a TOML (`[[keys]]`) or JSON (`{"keys": [...]}`) file. Raises RequestError for an
    invalid one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"the keys file {path} cannot be read: {error}") from error
    return _keys(text, path)


def _keys(text: str, path: Path) -> tuple[Key, ...]:
    """Parse the keys in the text of a file."""
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise RequestError(f"the keys file {path} cannot be read: {error}") from error
    records = data.get("keys") if isinstance(data, dict) else None
    if not isinstance(records, list):
        raise RequestError(f"the keys file {path} must have a list named keys")
    keys = tuple(_key(record, f"{path}: key {index + 1}") for index, record in enumerate(records))
    names = [key.name for key in keys]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"{path}: the name {twice[0]!r} stands for two keys; give each its own")
    return keys


_HASH = re.compile(re.escape(PREFIX) + "[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent", "tokens_per_day")


def _key(record: Any, where: str) -> Key:
    known = {field.name for field in fields(Key)}
    if not isinstance(record, dict) or not set(record) <= known:
        unknown = sorted(set(record) - known) if isinstance(record, dict) else record
        raise RequestError(f"{where}: unknown {unknown!r}; a key has {', '.join(sorted(known))}")
    name, digest = record.get("name"), record.get("hash")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} needs a name")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise RequestError(f"{where} ({name}) needs a hash like {PREFIX}… ; make one with `nearfar keys`")
    models = record.get("models", ["*"])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise RequestError(f"{where} ({name}): models must be a list of model ids, not {models!r}")
    for limit in _LIMITS:
        value = record.get(limit)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RequestError(f"{where} ({name}): {limit} must be a number of at least 1, not {value!r}")
    priority = record.get("priority", 0)
    if (
        isinstance(priority, bool)
        or not isinstance(priority, int)
        or not -MAX_PRIORITY <= priority <= MAX_PRIORITY
    ):
        raise RequestError(
            f"{where} ({name}): priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {priority!r}"
        )
    group = record.get("cache_group")
    if group is not None and (not isinstance(group, str) or not group):
        raise RequestError(f"{where} ({name}): cache_group must be the name of a group, not {group!r}")
    if not isinstance(record.get("admin", False), bool):
        raise RequestError(f"{where} ({name}): admin must be true or false")
    return Key(**{**record, "models": tuple(models)})


def add_key(path: Path, key: Key) -> None:
    """Add a key to a file, which is created, readable by its owner only, if needed. Other lines are
    unchanged.
    """
    if not NAME.fullmatch(key.name):
        raise RequestError(
            f"{key.name!r:.80} is not a name for a key: take 1 to 64 letters, digits and . _ @ + -, "
            "beginning with a letter, a digit or _",
            "name",
        )
    existing = read_keys(path) if path.exists() else ()
    if any(key.name == other.name for other in existing):
        raise RequestError(
            f"{path} has a key named {key.name!r} already; take another name or remove that one"
        )
    values = {f.name: getattr(key, f.name) for f in fields(Key)}
    record = {
        name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v not in (None, False)
    }
    _key(record, str(path))
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if path.suffix == ".json":
        data = json.loads(old) if old else {"keys": []}
        new = json.dumps({**data, "keys": [*data["keys"], record]}, indent=1, ensure_ascii=False) + "\n"
    else:
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in record.items()]
        new = old + ("\n" if old else "") + "[[keys]]\n" + "\n".join(lines) + "\n"
    _keys(new, path)  # checked before the file is replaced
    try:
        write_whole(path, new.encode())
    except OSError as error:
        raise RequestError(f"the keys file {path} cannot be written: {error.strerror}") from error
