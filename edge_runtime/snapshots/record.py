"""The metadata of a snapshot, and the model that it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.errors import SnapshotError
from nearfar.format.conversion import plain
from nearfar.format.kv import OF_BITS, ROUNDED
from nearfar.format.manifest import Manifest
from nearfar.version import __version__


@dataclass(frozen=True)
class Origin:
    """The model that keys and values were computed with, whatever the target and the precision.

    `fingerprint` decides; the other fields are for messages.
    """

    fingerprint: str
    model: str
    quantization: str
    checkpoint: str

    def __str__(self) -> str:
        return f"{self.model} ({self.quantization}; checkpoint {self.checkpoint[:12]})"


def key_rounding(manifest: Manifest, kv_bits: int | None) -> str | None:
    """The text whose keys gave the offsets that a cache of `kv_bits` bits subtracts (provenance.keys); None
    if it subtracts none.
    """
    told = manifest.provenance.get("keys")
    rounded = kv_bits is not None and OF_BITS.get(kv_bits) in ROUNDED
    return str(told) if rounded and told is not None else None


def origin(manifest: Manifest, context: int) -> Origin:
    """Identify the model of an artifact by a SHA-256 over the checkpoint's hash, the quantization and the
    model's shape.

    With LongRoPE it also covers whether an engine of this `context` rotates keys by the short factors. The
    checkpoint's hash covers its config.json, and so everything else that keys and values depend on (rope,
    norms, biases).
    """
    checkpoint = manifest.provenance.get("checkpoint_sha256")
    if not checkpoint:
        raise SnapshotError(
            f"the artifact of {manifest.model.name} does not say which checkpoint it was made from "
            "(provenance.checkpoint_sha256), so no snapshot can be tied to it. Build the artifact again"
        )
    quant = manifest.quantization
    facts = {
        "checkpoint_sha256": str(checkpoint),
        "quantization": [
            quant.scheme,
            quant.method,
            *([m.name, m.bits, m.group_size] for m in quant.matrices),
            *([m.name, plain(m.scales), plain(m.pieces)] for m in quant.matrices if m.newer),
        ],
        "step": [list(manifest.step.ops), [rope.scale for rope in manifest.ropes.values()]],
    }
    if any(rope.frequencies(context) != rope.inv_freq for rope in manifest.ropes.values()):
        facts["rope"] = "short"
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    shown = "not quantized" if quant.scheme == "none" else quant.scheme
    return Origin(hashlib.sha256(text.encode()).hexdigest(), manifest.model.name, shown, str(checkpoint))


@dataclass(frozen=True)
class Snapshot:
    """A snapshot in a file.

    `tokens`: the number of its tokens, a multiple of `page_size`. `kv_dtype`: the type of keys and values, or
    of scales and biases if `kv_bits` is 8 or 4 (else None). `keys`: see `key_rounding`. `messages` or
    `prompt`: the source, if known.
    """

    path: Path
    bytes: int
    origin: Origin
    tokens: int
    page_size: int
    kv_dtype: str
    kv_bits: int | None
    keys: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    nearfar: str = __version__

    def metadata(self) -> dict[str, str]:
        """The fields as metadata of the file, which has only strings."""
        fields = {
            "model": self.origin.fingerprint,
            "model_name": self.origin.model,
            "quantization": self.origin.quantization,
            "checkpoint_sha256": self.origin.checkpoint,
            "tokens": str(self.tokens),
            "page_size": str(self.page_size),
            "kv_dtype": self.kv_dtype,
            "nearfar": self.nearfar,
        }
        if self.kv_bits is not None:
            fields["kv_bits"] = str(self.kv_bits)
        if self.keys is not None:
            fields["keys"] = self.keys
        if self.messages is not None:
            fields["messages"] = json.dumps(self.messages, ensure_ascii=False)
        if self.prompt is not None:
            fields["prompt"] = self.prompt
        return fields

    @classmethod
    def parse(cls, path: Path, size: int, fields: Mapping[str, str]) -> Snapshot:
        """Make a snapshot record of the metadata of a file."""
        try:
            return cls(
                path=path,
                bytes=size,
                origin=Origin(
                    fields["model"], fields["model_name"], fields["quantization"], fields["checkpoint_sha256"]
                ),
                tokens=int(fields["tokens"]),
                page_size=int(fields["page_size"]),
                kv_dtype=fields["kv_dtype"],
                kv_bits=int(fields["kv_bits"]) if "kv_bits" in fields else None,
                keys=fields.get("keys"),
                messages=_messages(fields["messages"]) if "messages" in fields else None,
                prompt=fields.get("prompt"),
                nearfar=fields["nearfar"],
            )
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise SnapshotError(
                f"the snapshot {path} lacks or misstates {error}. Save it again with nearfar cache save"
            ) from error


def _messages(text: str) -> tuple[Mapping[str, Any], ...]:
    found = json.loads(text)
    texts = (
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in found
    )
    if not isinstance(found, list) or not all(texts):
        raise ValueError("its messages")
    return tuple(found)
