"""The device side: an edge engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.grammars.compiler import available
from nearfar.edge_runtime.openai.knowledge import ReadPrompt, read_prompt
from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.openai.parameters import ChatParams, template_variables
from nearfar.edge_runtime.openai.prompts import ChatEncoder
from nearfar.edge_runtime.openai.records import ChatCompletionChunk
from nearfar.edge_runtime.openai.stream import AsyncStream
from nearfar.edge_runtime.openai.tooling import asked_choice, asked_tools
from nearfar.edge_runtime.text.beside import beside, characters
from nearfar.edge_runtime.tools.asking import offered
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.errors import DeviceError, NearfarError, RequestError
from nearfar.format.service_fields import SERVICE_FIELDS
from nearfar.routing.fitted import row_tokens
from nearfar.routing.policy import Timeouts
from nearfar.routing.shapes import UsagePiece
from nearfar.routing.sides import SideCall, SideError, Size
from nearfar.routing.speed import Speeds
from nearfar.routing.types import DeviceState, Feature

FORMATS: tuple[Feature, ...] = ("tools", "json_schema", "json_object", "grammar")
"""Features of an engine if the grammar library is installed."""
CLOSING_SECONDS = 1.0
"""Seconds that a step under way gets to end."""


@dataclass(frozen=True)
class Told:
    """What a model shows about a prompt (Knowledge, as a dictionary), its name, and what a router for it is
    tied to (`artifact_of`). `read`: the prompt in the device's cache, held until the answer has begun.
    """

    knowledge: Mapping[str, Any]
    model: str
    artifact: str
    read: ReadPrompt

    def as_json(self) -> dict[str, Any]:
        """The fields of a decision record."""
        return {"knowledge": self.knowledge, "model": self.model, "artifact": self.artifact}

    async def release(self) -> None:
        """Let the device forget the prompt: the answer has begun, or comes from elsewhere."""
        await self.read.release()


class EngineDevice:
    """An engine, or the artifact that is loaded as one when it is first needed.

    A missing artifact raises ArtifactError. A device that lacks what the artifact needs counts as
    unavailable, which is not an error.
    """

    def __init__(self, source: AsyncEngine | str | Path, timeouts: Timeouts) -> None:
        self.speeds = Speeds()
        self.features: tuple[Feature, ...] = (*FORMATS, "logprobs") if available() else ("logprobs",)
        self._source = source
        self._engine = source if isinstance(source, AsyncEngine) else None
        self._why: str | None = None
        self._loading = asyncio.Lock()
        self._timeouts = timeouts
        self._closing: set[asyncio.Future[None]] = set()

    async def open(self) -> AsyncEngine | None:
        """Return the engine, loaded if needed; None if this device cannot run it."""
        async with self._loading:
            if self._engine is None and self._why is None:
                assert not isinstance(self._source, AsyncEngine)
                try:
                    self._engine = await AsyncEngine.load(self._source)
                except DeviceError as error:
                    self._why = str(error)
        return self._engine

    @property
    def opened(self) -> bool:
        """Whether loading has been tried. Requests for the cloud only need not wait for it."""
        return self._engine is not None or self._why is not None

    async def measure(
        self, messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any]
    ) -> Size | None:
        """Return the exact number of the prompt's tokens, and of those in the cache now. None where there is
        no engine or no chat template.
        """
        if (engine := await self.open()) is None or not engine.codec.has_template:
            return None
        may = offered(
            asked_tools(params.get("tools")),
            asked_choice(params.get("tool_choice"), params.get("parallel_tool_calls")),
        )
        variables = template_variables(cast(ChatParams, params))
        encode, checked = ChatEncoder(engine.codec, may, variables=variables), checked_messages(messages)
        tokens = await beside(lambda: encode(checked), characters(checked))
        table = engine.core.scheduler.table
        limit = max(len(tokens) - 1, 0) // table.page_size
        return Size(len(tokens), len(table.index.lookup(tokens, limit)) * table.page_size)

    async def knowledge(
        self,
        messages: tuple[Mapping[str, Any], ...],
        params: Mapping[str, Any],
        ask: bool,
        tokens: Seq[int] | None,
    ) -> Told | None:
        """Return what the model shows about a prompt, which stays in the cache until the caller releases it.
        None where there is no engine, where the prompt does not fit, and for prompts with tools. `ask`: also
        ask the model whether it can answer. `tokens`: those that show the last hidden row; None: as for
        records.
        """
        engine = await self.open()
        if engine is None or not engine.codec.has_template or params.get("tools"):
            return None
        variables = template_variables(cast(ChatParams, params))
        try:
            async with asyncio.timeout(self._timeouts.device_first_token):
                read = await read_prompt(
                    engine, messages, ask=ask, variables=variables,
                    tokens=row_tokens(engine.manifest.model.vocab_size) if tokens is None else tokens,
                )  # fmt: skip
        except (NearfarError, TimeoutError):  # the decision's own checks and the answer tell why
            return None
        return Told(read.knowledge.model_dump(), engine.manifest.model.name, artifact_of(engine), read)

    async def state(self) -> DeviceState:
        """Return the device's present state. `queue_seconds` is the time for the prompts of other
        requests.
        """
        if (engine := await self.open()) is None:
            return DeviceState(available=False, why=self._why)
        if not engine.codec.has_template:
            return DeviceState(available=False, why="the model has no chat template")
        scheduler = engine.core.scheduler
        ahead = sum(request.remaining for request in [*scheduler.waiting, *scheduler.running])
        return DeviceState(
            context=engine.context,
            free_kv_tokens=scheduler.free_tokens,
            features=self.features,
            prefill_tps=self.speeds.prefill_tps,
            decode_tps=self.speeds.decode_tps,
            queue_seconds=ahead / self.speeds.prefill_tps if self.speeds.prefill_tps else 0.0,
        )

    async def stream(self, call: SideCall) -> AsyncGenerator[UsagePiece, None]:
        """Yield the engine's answer. Raises SideError where the device stalls or fails, RequestError where it
        rejects the request.
        """
        if (engine := await self.open()) is None:
            raise SideError(f"the device cannot run the model: {self._why}", "unavailable")
        params: Any = {**_fields(call.body), "stream_options": {"include_usage": True}}
        limit = self._timeouts.device_first_token
        chunks: AsyncStream[ChatCompletionChunk] | None = None
        finished = False
        try:
            async with asyncio.timeout(limit):
                chunks = await engine.chat.completions.create(call.given, stream=True, **params)
            while True:
                async with asyncio.timeout(limit):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                self._learn(chunk)
                piece = _piece(chunk)
                if not piece.empty or piece.usage is not None:
                    limit = self._timeouts.device_between
                    finished = finished or piece.finish is not None
                    yield piece
        except TimeoutError as error:
            raise SideError(f"the device gave no token for {limit:g} s", "stalled") from error
        except RequestError:
            raise
        except Exception as error:  # a device's library may raise any error
            raise SideError(f"the device failed: {error}", "lost") from error
        finally:
            if chunks is not None:
                await self._end(chunks)
        if not finished:
            raise SideError("the device's answer ended before it was complete", "lost")

    async def close(self) -> None:
        """Close the engine if it was loaded here; an engine that was given belongs to its owner."""
        if self._engine is not None and not isinstance(self._source, AsyncEngine):
            await self._engine.close()

    async def _end(self, chunks: AsyncStream[ChatCompletionChunk]) -> None:
        """Stop the work. A hanging device does not end, so the wait is short."""
        closing = asyncio.ensure_future(chunks.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.wait([closing], timeout=CLOSING_SECONDS)

    def _learn(self, chunk: ChatCompletionChunk) -> None:
        for stats in chunk.timings or ():
            self.speeds.prefill(stats.prompt_tokens - stats.cached_tokens, stats.prefill)
            self.speeds.decode(stats.completion_tokens - 1, stats.decode)


def artifact_of(engine: AsyncEngine) -> str:
    """What a fitted router is tied to: the checkpoint's SHA-256 and the quantization scheme, which are the
    same for every target.
    """
    manifest = engine.manifest
    return f"{manifest.provenance.get('checkpoint_sha256', '')}/{manifest.quantization.scheme}"


def _piece(chunk: ChatCompletionChunk) -> UsagePiece:
    if not chunk.choices:
        return UsagePiece(usage=chunk.usage)
    choice = chunk.choices[0]
    logprobs = tuple(choice.logprobs.content) if choice.logprobs else ()
    delta = choice.delta
    text, reasoning = delta.content or "", delta.reasoning_content or ""
    calls = tuple(
        CallPart(call.index, call.id or "", call.function.name or "", call.function.arguments)
        for call in delta.tool_calls or ()
    )
    tokens = len(logprobs) or int(bool(text or reasoning or calls))
    return UsagePiece(0, text, reasoning, calls, logprobs, choice.finish_reason, tokens)


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for the engine, which rejects those that it does not know."""
    return {name: value for name, value in body.items() if name not in SERVICE_FIELDS}
