"""Reads and writes conversations in files: a JSON list of messages, as in OpenAI's interface."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.errors import RequestError
from nearfar.folders import write_whole
from nearfar.strict_json import loads


def read_text(path: Path) -> str:
    """Read a file's text. Raises RequestError where it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}", "file") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}", "file"
        ) from error


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Read and check the messages of a file. Raises RequestError for an invalid file."""
    try:
        found = loads(read_text(path))
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}", "messages") from error
    if not isinstance(found, list):
        raise RequestError(
            f"{path} must hold a list of messages such as {{'role': 'system', 'content': '…'}}", "messages"
        )
    try:
        return checked_messages(found)
    except RequestError as error:
        raise RequestError(f"{path}: {error}", "messages") from error


def write_messages(path: Path, messages: Sequence[Mapping[str, Any]]) -> None:
    """Write a conversation, completely or not at all. An existing conversation is replaced. Raises
    RequestError for any other existing file, and for a missing folder.
    """
    if path.exists():
        try:
            read_messages(path)
        except RequestError as error:
            raise RequestError(
                f"{path} exists and is not a conversation: give another name ({error})"
            ) from error
    try:
        write_whole(path, (json.dumps([*messages], indent=1, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from error
