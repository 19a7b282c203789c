"""Snapshots: files with the keys and values of a prompt's beginning, for a fast next start
(docs/snapshots.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.snapshots import file
from nearfar.edge_runtime.snapshots.file import Progress
from nearfar.edge_runtime.snapshots.record import Snapshot, key_rounding, origin
from nearfar.edge_runtime.snapshots.seam import chat_prefix, text_prefix, whole_pages
from nearfar.edge_runtime.snapshots.transfer import (
    Array,
    capture,
    head_dim_of,
    kv_dtype,
    quantized_bits,
    restore,
)
from nearfar.errors import RequestError, SnapshotError

if TYPE_CHECKING:
    from nearfar.edge_runtime.engine.core import EngineCore
    from nearfar.edge_runtime.text.codec import TextCodec

__all__ = ["Progress", "Snapshot", "load", "save"]


async def save(
    core: EngineCore,
    codec: TextCodec,
    path: Path,
    messages: Seq[Mapping[str, Any]] | None,
    prompt: str | None,
    tokens: Seq[int] | None,
    force: bool,
    progress: Progress | None,
) -> Snapshot:
    """See AsyncEngine.save_cache."""
    if sum(given is not None for given in (messages, prompt, tokens)) != 1:
        raise RequestError(
            "give one of messages, prompt and tokens: what the snapshot is to hold", "messages"
        )
    file.check_target(path, force)
    checked = checked_messages(messages) if messages is not None else None
    model, page_size = origin(core.manifest, core.context), core.scheduler.table.page_size
    if checked is not None:
        tokens = chat_prefix(codec, checked)
    elif prompt is not None:
        tokens = text_prefix(codec, prompt)
    kept = whole_pages(tokens if tokens is not None else (), page_size)
    content = await capture(core, kept)
    bits = quantized_bits(content, head_dim_of(core.manifest))
    made = Snapshot(
        path=path,
        bytes=0,
        origin=model,
        tokens=len(kept),
        page_size=page_size,
        kv_dtype=kv_dtype(content),
        kv_bits=bits,
        keys=key_rounding(core.manifest, bits),
        messages=tuple(checked) if checked is not None else None,
        prompt=prompt,
    )
    await _write(made, {"tokens": np.array(kept, np.int32), **content}, force, progress)
    return replace(made, bytes=path.stat().st_size)


async def load(core: EngineCore, path: Path, progress: Progress | None) -> Snapshot:
    """See AsyncEngine.load_cache."""
    snapshot, tensors = await asyncio.to_thread(_read, path, progress)
    ours = origin(core.manifest, core.context)
    if snapshot.origin.fingerprint != ours.fingerprint:
        raise SnapshotError(
            f"the snapshot {path} was made with {snapshot.origin}, this model is {ours}: "
            "load it with that model, or save one with this"
        )
    keys = key_rounding(core.manifest, snapshot.kv_bits)
    if snapshot.keys != keys:
        raise SnapshotError(
            f"the keys of the snapshot {path} are rounded by a calibration on {snapshot.keys or 'no text'}, "
            f"those of this artifact on {keys or 'no text'}: save it again here, or build both artifacts "
            "with the same --calibrate"
        )
    tokens = tensors.pop("tokens")
    if tokens.max() >= core.manifest.model.vocab_size:
        raise SnapshotError(f"the snapshot {path} has token {tokens.max()}, which is outside the vocabulary")
    await restore(core, tokens.tolist(), tensors)
    return snapshot


def _read(path: Path, progress: Progress | None) -> tuple[Snapshot, dict[str, Array]]:
    fields, tensors = file.read(path, progress)
    snapshot = Snapshot.parse(path, path.stat().st_size, fields)
    tokens = tensors.get("tokens")
    if (
        tokens is None
        or tokens.dtype != np.int32
        or tokens.shape != (snapshot.tokens,)
        or not len(tokens)
        or tokens.min() < 0
    ):
        raise SnapshotError(
            f"the snapshot {path} does not hold the {snapshot.tokens} tokens that it names. Save it again"
        )
    return snapshot, tensors


async def _write(
    made: Snapshot, tensors: Mapping[str, Array], force: bool, progress: Progress | None
) -> None:
    """Write in a thread, so that requests continue. Cancelling the task stops the thread, which removes the
    file.
    """
    stop = threading.Event()
    write = partial(
        file.write, made.path, made.metadata(), tensors, force=force, progress=progress, stop=stop
    )
    job = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(job)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([job])
        raise
