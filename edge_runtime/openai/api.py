"""OpenAI's interface over the engine. Each of its doors has a module of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Self, Unpack

from nearfar.edge_runtime import snapshots
from nearfar.edge_runtime.artifact.loading import load
from nearfar.edge_runtime.artifact.options import LoadKeywords, load_options
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.openai.chat import Chat
from nearfar.edge_runtime.openai.completions import Completions
from nearfar.edge_runtime.openai.context import ContextPolicy, check_policy
from nearfar.edge_runtime.openai.embeddings import Embeddings
from nearfar.edge_runtime.openai.loaded import Loaded
from nearfar.edge_runtime.progress import Tell, Teller
from nearfar.edge_runtime.snapshots import Progress, Snapshot
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError


class AsyncEngine(Loaded):
    """A model on a device. All requests share its cache and its steps."""

    def __init__(
        self, core: EngineCore, codec: TextCodec, *, context_policy: ContextPolicy = "error"
    ) -> None:
        super().__init__(core, codec, context_policy=context_policy)
        self.chat = Chat(self)
        self.completions = Completions(self)
        self.embeddings = Embeddings(self)

    @classmethod
    async def load(
        cls,
        path: str | Path,
        *,
        context_policy: ContextPolicy = "error",
        progress: Tell | None = None,
        **options: Unpack[LoadKeywords],
    ) -> AsyncEngine:
        """Load an artifact, or the best target of a directory of artifacts. The options are those of
        LoadOptions.

        `device`: a kind of device (`nearfar devices` lists them) or "auto"; "KIND:1" or "KIND:radeon" for one
        of several. `kv_memory`: bytes for the KV cache, such as "512MB"; default half of what is free.
        `context`: no more positions than these; default as many as the model and the memory allow.
        `threads`: cpu threads, default one a core, within the quota of the container. `verify`: check the
        SHA-256 of every file first. `kv_bits`: keep the KV cache in so many bits a value, where the device
        can; default as the program computes. `precision`: "f16" or "f32"; default the best that the device
        has. `program`: a program by its name. `debug`: check every call with the driver's validation layer,
        where it has one (slow). `trust`: run the native code of an artifact that was not built here, now and
        later (docs/artifact.md).

        `context_policy`: what becomes of conversations that do not fit the context: "error",
        "truncate-oldest" (whole turns go, the oldest first; the system prompt stays), or a function that is
        given an Overflow and gives the messages that are left.

        `ready`: "all" (the default): no answer waits for a compiler; "decode", "no": the load is done sooner
        (see LoadOptions.ready). `progress`: told of what the load is at, and later of what answers wait for,
        from other threads (see Progress).
        """
        check_policy(context_policy)
        if not isinstance(path, str | Path):
            raise RequestError(f"path must be the folder of an artifact, not {path!r:.80}", "path")
        if progress is not None and not callable(progress):
            raise RequestError(f"progress must be a function, not {progress!r:.80}", "progress")
        wanted, tell = load_options(options), Teller(progress)
        core, codec = await asyncio.to_thread(load, Path(path), wanted, tell)
        core.tell(tell)
        try:
            await core.make_ready(wanted.ready)
            made = cls(core, codec, context_policy=context_policy)
        except BaseException:
            await core.close()
            raise
        tell("ready")
        return made

    def generate(self, tokens: Seq[int], params: SamplingParams | None = None) -> Generation:
        """Token ids in, token events out."""
        return self.core.generate(tokens, params)

    async def save_cache(
        self,
        path: str | Path,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        tokens: Seq[int] | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Snapshot:
        """Save the keys and values of a prompt's beginning, computed first if need be: docs/snapshots.md.

        One of `messages` (the beginning of a conversation, such as its system prompt), `prompt` (the
        beginning of a raw prompt), `tokens`. `force`: overwrite a file that is not a snapshot.
        `progress(done, total)`: bytes written, from another thread. SnapshotError where the file cannot be
        written, RequestError for a prompt too short (under a page) or too long.
        """
        return await snapshots.save(
            self.core, self.codec, _path(path), messages, prompt, tokens, force, progress
        )

    async def load_cache(self, path: str | Path, *, progress: Progress | None = None) -> Snapshot:
        """Put a snapshot into the cache, where prompts that begin with its tokens find it, as after a request
        with them.

        SnapshotError, and nothing has changed, where it is damaged, of another model, or does not fit the
        cache.
        """
        return await snapshots.load(self.core, _path(path), progress)

    async def close(self) -> None:
        """Stop all requests and free the device."""
        self.grammars.close()
        await self.core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _path(path: str | Path) -> Path:
    return Path(path).expanduser()
