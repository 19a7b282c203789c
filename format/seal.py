"""The manifest's own digest: `manifest_sha256` is the SHA-256 of the file with the digest's digits replaced
by zeros.

It needs no canonical JSON: a reader, in any language, hashes the bytes that it got. A matching digest shows
that the manifest, and through its hashes every other file, is as the build wrote it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

FIELD = "manifest_sha256"
BLANK = "0" * 64


def seal(document: Mapping[str, Any]) -> str:
    """The text of manifest.json, with its digest in the last line but one."""
    facts = {key: value for key, value in document.items() if key != FIELD}
    text = json.dumps({**facts, FIELD: BLANK}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    before, _, after = text.rpartition(BLANK)
    return before + hashlib.sha256(text.encode()).hexdigest() + after


def is_sealed(text: str, stated: object) -> bool:
    """Whether `stated`, the value of FIELD in `text`, is the digest of `text`."""
    if not isinstance(stated, str) or not re.fullmatch("[0-9a-f]{64}", stated) or text.count(stated) != 1:
        return False
    return hashlib.sha256(text.replace(stated, BLANK).encode()).hexdigest() == stated
