"""OpenAI's interface over the engine. Each endpoint has a module of its own."""

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
from nearfar.edge_runtime.openai.decisions import Asked, Decision, decide
from nearfar.edge_runtime.openai.embeddings import Embeddings
from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.responses.create import Responses
from nearfar.edge_runtime.progress import Tell, Teller
from nearfar.edge_runtime.snapshots import Progress, Snapshot
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError


class AsyncEngine(LoadedModel):
    """A model on a device. All requests share its cache and its steps."""

    def __init__(
        self, core: EngineCore, codec: TextCodec, *, context_policy: ContextPolicy = "error"
    ) -> None:
        super().__init__(core, codec, context_policy=context_policy)
        self.chat = Chat(self)
        self.completions = Completions(self)
        self.embeddings = Embeddings(self)
        self.responses = Responses(self.chat.completions)

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
        of several. `kv_memory`: bytes for the KV cache, for example "512MB"; the default is half of the free
        memory. `context`: the most positions of a sequence; the default is as many as the model and the
        memory allow. `threads`: CPU threads; the default is one for each core, within the container's quota.
        `verify`: check the SHA-256 of every file first. `kv_bits`: bits of a value in the KV cache, if the
        device supports it; the default is the program's dtype. `precision`: "f16" or "f32"; the default is
        the device's best. `program`: the name of a program. `debug`: check every call with the driver's
        validation layer, if it has one (slow). `trust`: run the native code of an artifact that was not built
        here, now and later (docs/artifact.md).

        `context_policy`: the handling of conversations that do not fit the context: "error",
        "truncate-oldest" (removes whole turns, oldest first, and keeps the system prompt), or a function that
        takes an Overflow and returns the messages to keep. `ready`: "all" (the default): no answer waits for
        a compiler; "decode", "no": the load returns sooner (see LoadOptions.ready). `progress`: called from
        other threads with the phases of the load, and later with what answers wait for (see Progress).
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
        """Generate token events from token ids."""
        return self.core.generate(tokens, params)

    async def decide(
        self,
        prompt: Asked,
        labels: Seq[str] | None = None,
        *,
        values: Seq[float] | None = None,
        neutral: Asked | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Decision:
        """Decide which of several labels, or which of several numbers (`values`), answers a prompt.

        The probabilities are the model's, computed in one batch after the prompt; nothing is generated. The
        prompt asks the question: it is a conversation, a text, or token ids. `neutral`: the same prompt
        without content (for example with "N/A" for the text to judge); what the model prefers after it is
        taken out of the probabilities. `chat_template_kwargs`: variables for the chat template. RequestError
        for fewer than 2 or more than 256 labels, equal ones, and what does not fit the context.
        """
        return await decide(
            self, prompt, labels, values=values, neutral=neutral, chat_template_kwargs=chat_template_kwargs
        )

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
        """Save the keys and values of a prompt's beginning, computed first if needed: docs/snapshots.md.

        Give one of `messages` (the beginning of a conversation, such as its system prompt), `prompt` (the
        beginning of a raw prompt) and `tokens`. `force`: overwrite a file that is not a snapshot.
        `progress(done, total)`: called from another thread with bytes written and bytes in all. SnapshotError
        if the file cannot be written; RequestError for a prompt that is too short (under a page) or too long.
        """
        return await snapshots.save(
            self.core, self.codec, _path(path), messages, prompt, tokens, force, progress
        )

    async def load_cache(self, path: str | Path, *, progress: Progress | None = None) -> Snapshot:
        """Load a snapshot into the cache: prompts that begin with its tokens then find it, as after a request
        with them.

        SnapshotError if it is damaged, of another model, or does not fit the cache; nothing has changed then.
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
