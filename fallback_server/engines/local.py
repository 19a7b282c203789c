"""Text-level engine over any token backend: chat templates, tokens, stop strings, tools, reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nearfar.edge_runtime.engine.requests import outside
from nearfar.edge_runtime.engine.together import together
from nearfar.edge_runtime.grammars.compiler import ends_of
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.stream import TextStream
from nearfar.edge_runtime.tools.affordable import affordable
from nearfar.edge_runtime.tools.asking import answer_grammar, offered
from nearfar.edge_runtime.tools.messages import prepared
from nearfar.edge_runtime.tools.parts import PartReader
from nearfar.edge_runtime.tools.reading import AnswerReader, reasoning_opened
from nearfar.errors import ContextError, RequestError
from nearfar.fallback_server.backend import (
    Backend,
    BackendStats,
    EmbedRequest,
    LabelScores,
    Sampling,
    ScoreRequest,
    TokenRequest,
)
from nearfar.fallback_server.engines.answers import AnswerPieces, AskedTokens, LocalAnswers, PromptEcho
from nearfar.fallback_server.engines.base import (
    GENERATES_NOTHING,
    EmbeddingVectors,
    EngineRequest,
    ModelInfo,
    Prepared,
    Prompt,
    Scores,
    Unready,
)
from nearfar.fallback_server.engines.hints import followed
from nearfar.fallback_server.engines.questions import Questions, counted
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec
from nearfar.fallback_server.tenants import Shares
from nearfar.format.answers import AnswerFormat, ReasoningMarks
from nearfar.format.conversion import plain


@dataclass(frozen=True)
class TextOptions:
    """How text is handled. `reasoning`: "auto" (as the chat template shows), "off", or the two marks as
    "BEGIN,END".

    `template_timeout`: seconds of processor time that rendering and tokenizing may take for one request.
    """

    reasoning: str = "auto"
    template_timeout: float = 2.0
    text_processes: int = 2


@dataclass(frozen=True)
class TextSource:
    """The model facts that the text side needs: the folder of its tokenizer files (a checkpoint's own
    folder), the token that begins a text, how the model marks its answers (None: as these files show), and
    how its embeddings are pooled (None: the files do not say).
    """

    directory: Path
    bos: int | None
    answers: AnswerFormat | None = None
    pooling: Literal["mean", "last"] | None = None


class LocalEngine:
    """A model with its text side in this process. `names` are the names that clients may use for it.

    `here`: its backend computes on this machine, and the server says so to clients that check before they
    send private text.
    """

    passes_on = False

    def __init__(
        self,
        backend: Backend,
        source: TextSource,
        options: TextOptions | None = None,
        names: Seq[str] = (),
        *,
        here: bool = False,
    ) -> None:
        options = options or TextOptions()
        self._here = here
        self.backend = backend
        directory, bos = source.directory, source.bos
        self.codec = TextCodec.open_directory(directory, bos, source.answers)
        self.form = _with_reasoning(options.reasoning, self.codec.answers)
        # marks of reasoning are text even if they are special tokens
        if options.reasoning not in ("auto", "off"):
            self.codec = TextCodec.open_directory(directory, bos, self.form)
        self._pooling = source.pooling
        self._names = tuple(names) or (backend.info.model,)
        self._live: dict[str, int] = {}
        self._questions = Questions(self)
        self._shares = Shares()
        settings = {"directory": str(directory), "bos": bos, "answers": plain(self.codec.answers)}
        self.text = ChildPool(
            ChildSpec(
                "nearfar.fallback_server.sandbox.text_child",
                settings,
                "chat template and tokens of the prompt",
                count=options.text_processes,
                timeout=options.template_timeout,
                waiting=1024,
            )
        )

    async def start(self) -> None:
        """Start the processes that a request needs, so that the first request does not wait for them."""
        await self.text.warm()

    def models(self) -> tuple[ModelInfo, ...]:
        """The model under each of its names."""
        return tuple(ModelInfo(name, self.backend.info.context_length, self._here) for name in self._names)

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Render, tokenize and check a request."""
        if request.questions:
            return await self._questions.prepare(request)
        if request.most_tokens is not None:
            return await self._measured(request, request.most_tokens)
        self._check_stops(request)
        prompts, tail, ignored = await self._prompts(request)
        context = self.backend.info.context_length
        at, longest = max(enumerate(map(len, prompts)), key=lambda each: each[1])
        total = sum(len(prompt) for prompt in prompts)
        if request.pooling is not None:
            self._check_input(longest, _place("input", at, request))
            asked = replace(request, pooling=self._pooled_by(request.pooling))
            return Prepared(asked, prompts, total)
        if longest >= context:
            param = "messages" if request.chat else "prompt"
            raise ContextError(longest, context, param, place=_place(param, at, request))
        self._check_least(request, context - longest)
        opened = reasoning_opened(self.form, tail)
        grammar = (
            answer_grammar(self.form, affordable(request.tools), request.tool_choice, request.grammar, opened)
            if request.chat
            else request.grammar
        )
        return Prepared(request, prompts, total, grammar, opened, ignored)

    async def submit(self, prepared: Prepared) -> LocalAnswers:
        """Start the request, with one sequence per answer."""
        request = prepared.request
        choices: list[AnswerPieces] = []
        late = [self._shares.late(request.tenant) for _ in range(request.choices)]
        try:
            for at, prompt in enumerate(prepared.prompts):
                for number in range(request.n):
                    index = at * request.n + number
                    token_request = self._token_request(prepared, prompt, index, number)
                    events = self.backend.submit(replace(token_request, late=late[index]))
                    choices.append(self._choice(prepared, index, prompt, events))
        except Exception:
            self._shares.leave(request.tenant, len(late))
            for choice in choices:
                await choice.aclose()
            raise
        self._live[request.id] = len(choices)
        return LocalAnswers(choices, prepared.prompt_tokens, lambda: self._ended(request))

    def _ended(self, request: EngineRequest) -> None:
        if (sequences := self._live.pop(request.id, None)) is not None:
            self._shares.leave(request.tenant, sequences)

    async def cancel(self, request_id: str) -> None:
        """End all answers of a request."""
        for index in range(self._live.get(request_id, 0)):
            await self.backend.cancel(f"{request_id}-{index}")

    async def embed(self, prepared: Prepared) -> EmbeddingVectors:
        """Return one vector per input. At most as many inputs of a request are queued at once as can run at
        once, so that a long list does not fill the queue.
        """
        vectors = dict[int, Vector]()
        waiting = iter(enumerate(prepared.prompts))

        async def work() -> None:
            for index, tokens in waiting:
                vectors[index] = await self._embed(prepared.request, index, tokens)

        await together(work, min(len(prepared.prompts), self.backend.info.max_running))
        return EmbeddingVectors([vectors[index] for index in sorted(vectors)], prepared.prompt_tokens)

    async def _embed(self, request: EngineRequest, index: int, tokens: tuple[int, ...]) -> Vector:
        assert request.pooling is not None
        late = self._shares.late(request.tenant)
        try:
            return await self.backend.embed(
                EmbedRequest(
                    f"{request.id}-{index}",
                    tokens,
                    request.pooling,
                    request.priority,
                    request.tenant.salt,
                    late,
                )
            )
        finally:
            self._shares.leave(request.tenant, 1)

    async def score(self, prepared: Prepared) -> Scores:
        """Return the log-probabilities of the labels of each question. The first question is computed alone:
        the others often begin with the same messages, and find them in the cache.
        """
        every = list(zip(prepared.prompts, prepared.labels, strict=True))
        found = {0: await self._score(prepared.request, 0, *every[0])}
        waiting = iter(list(enumerate(every))[1:])

        async def work() -> None:
            for index, (tokens, labels) in waiting:
                found[index] = await self._score(prepared.request, index, tokens, labels)

        await together(work, min(len(every) - 1, self.backend.info.max_running))
        return Scores([found[at] for at in sorted(found)], prepared.labels, prepared.prompt_tokens)

    async def _score(
        self,
        request: EngineRequest,
        index: int,
        tokens: tuple[int, ...],
        labels: tuple[tuple[int, ...], ...],
    ) -> LabelScores:
        tenant = request.tenant
        late = self._shares.late(tenant)
        try:
            return await self.backend.score(
                ScoreRequest(f"{request.id}-{index}", tokens, labels, request.priority, tenant.salt, late)
            )
        finally:
            self._shares.leave(tenant, 1)

    def _pooled_by(self, asked: Literal["mean", "last", "model"]) -> Literal["mean", "last", "model"]:
        """The requested pooling. For "model" it is the checkpoint's, or "model" where the checkpoint names
        none.
        """
        return self._pooling or asked if asked == "model" else asked

    async def text_of(self, tokens: Seq[int]) -> str:
        """Return the text of tokens, special tokens included. Raises RequestError for ids outside the
        vocabulary.
        """
        vocab = self.backend.info.vocab_size
        if (wrong := outside(tokens, vocab)) is not None:
            raise RequestError(
                f"tokens.{wrong}: token id {tokens[wrong]} is outside the vocabulary of {vocab} tokens",
                "tokens",
            )
        return await asyncio.to_thread(self.codec.decode, tokens, True)

    async def names_of(self, tokens: Seq[int]) -> list[str]:
        """Return each token in the vocabulary's spelling."""
        return await asyncio.to_thread(lambda: [self.codec.name(token) for token in tokens])

    def stats(self) -> BackendStats:
        """The backend's figures."""
        return self.backend.stats()

    async def ready(self) -> bool:
        """Whether the backend generates."""
        return await self.backend.alive()

    def unready(self) -> Unready:
        """See ServerEngine."""
        return GENERATES_NOTHING

    async def close(self, drain: float = 0.0) -> None:
        """Stop the backend and the helper processes."""
        await self.backend.close(drain)
        await self.text.close()

    async def _prompts(
        self, request: EngineRequest
    ) -> tuple[tuple[tuple[int, ...], ...], str, tuple[str, ...]]:
        """Return the token ids of each prompt. For a chat, also return the end of the rendered text and the
        hints that the template ignores.
        """
        if not request.chat:
            param = "prompt" if request.pooling is None else "input"
            found = [
                await self._tokens(prompt, param, _place(param, at, request))
                for at, prompt in enumerate(request.prompts)
            ]
            return tuple(found), "", ()
        answer, ignored = await self._rendered(request, self.backend.info.context_length)
        if not answer["tokens"]:
            raise RequestError("the chat template makes an empty prompt of these messages", "messages")
        return (counted(answer["tokens"]),), answer["tail"], ignored

    async def _rendered(self, request: EngineRequest, most: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return what a text process makes of a conversation, and the hints that the template ignores."""
        job, ignored = self.chat_job(request)
        return await self.text.run({**job, "most": most}), ignored

    async def _measured(self, request: EngineRequest, most: int) -> Prepared:
        """Return the tokens of a prompt for a request that asks for nothing else, or their number alone where
        `most` is 0. Raises RequestError for more tokens than `most`.
        """
        param, ignored = "prompt", tuple[str, ...]()
        if request.chat:
            param = "messages"
            answer, ignored = await self._rendered(request, most)
        else:
            (text,) = request.prompts
            answer = await self.text.run({"op": "measure", "text": text, "most": most})
        tokens = answer["tokens"]
        if not isinstance(tokens, list):
            if most:
                raise RequestError(
                    f"{param} has {tokens:,} tokens, and an answer lists {most:,} at most: send less text",
                    param,
                )
            return Prepared(request, (), tokens, ignored=ignored)
        return Prepared(request, (tuple(tokens),), len(tokens), ignored=ignored)

    def chat_job(self, request: EngineRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the job for a text process, and the hints that the chat template does not follow."""
        may = offered(request.tools, request.tool_choice)
        source = self.codec.template_source(bool(may))
        if source is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        hinted, left = followed(request.hints, source, self.form.reasoning is not None)
        messages, given = prepared(request.messages, may, self.form, source)
        job = {
            "op": "chat",
            "messages": messages,
            "variables": {**hinted, **request.template, **given},
            "continue_last": request.continue_last,
            "begin_answer": request.begin_answer,
        }
        return job, left

    async def _tokens(self, prompt: Prompt, param: str, place: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            job = {"op": "encode", "text": prompt, "most": self.backend.info.context_length}
            try:
                tokens = counted((await self.text.run(job))["tokens"])
            except RequestError as error:
                raise RequestError(str(error), param) from error
            if not tokens:
                raise RequestError(f"{place} is empty, and this model has no token to begin with", param)
            return tokens
        vocab = self.backend.info.vocab_size
        if not prompt:
            raise RequestError(f"{place} is empty; give at least one token", param)
        if len(prompt) <= self.backend.info.context_length:  # a longer prompt is rejected for its length
            wrong = outside(prompt, vocab)
            if wrong is not None:
                raise RequestError(
                    f"{place}: token id {prompt[wrong]} is outside the vocabulary of {vocab} tokens", param
                )
        return prompt

    def _check_stops(self, request: EngineRequest) -> None:
        """Raise RequestError for a token at which an answer can never stop."""
        vocab = self.backend.info.vocab_size
        if (wrong := outside(request.stop_token_ids, vocab)) is not None:
            token = request.stop_token_ids[wrong]
            raise RequestError(
                f"stop_token_ids: token id {token} is outside the vocabulary of {vocab} tokens",
                "stop_token_ids",
            )

    def _check_least(self, request: EngineRequest, room: int) -> None:
        """Raise RequestError if an answer must have more tokens than the context has room for."""
        if request.min_tokens > room:
            raise RequestError(
                f"min_tokens is {request.min_tokens}, and after this prompt the context has room for {room} "
                "tokens: lower min_tokens",
                "min_tokens",
            )

    def _check_input(self, longest: int, place: str) -> None:
        context = self.backend.info.context_length
        if longest > context:
            raise ContextError(longest, context, "input", what="input", place=place)

    def _limit(self, request: EngineRequest, prompt: Seq[int]) -> int:
        """Tokens that an answer to the prompt may have. A request for 0 (with echo) still takes a step."""
        room = self.backend.info.context_length - len(prompt)
        return room if request.max_tokens is None else max(min(request.max_tokens, room), 1)

    def _token_request(
        self, prepared: Prepared, prompt: tuple[int, ...], index: int, number: int
    ) -> TokenRequest:
        request = prepared.request
        sampling = Sampling(**{**self.backend.info.sampling.given, **request.sampling})
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + number) & (2**64 - 1))
        eos: Seq[int] = () if request.ignore_eos else self.backend.info.eos_token_ids
        held: Seq[int] = ()
        if prepared.grammar is not None:
            # The end of a grammar is a token, whatever end tokens the request names.
            eos = ends_of(self.codec, self.backend.info.vocab_size, self.backend.info.eos_token_ids)
            held = eos if request.ignore_eos else ()
        scored = (request.logprobs if request.echo else None, self._prompt_logprobs(request, index))
        return TokenRequest(
            id=f"{request.id}-{index}",
            tokens=prompt,
            max_tokens=self._limit(request, prompt),
            sampling=sampling,
            stop_token_ids=frozenset((*eos, *request.stop_token_ids)),
            held_token_ids=frozenset(held),
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=max((most for most in scored if most is not None), default=None),
            grammar=prepared.grammar,
            priority=request.priority,
            salt=request.tenant.salt,
        )

    def _choice(self, prepared: Prepared, index: int, prompt: tuple[int, ...], events: Any) -> AnswerPieces:
        request = prepared.request
        reader = None
        if request.chat:
            form = self.form if request.split_reasoning else replace(self.form, reasoning=None)
            only = request.tool_choice.required and bool(request.tools)
            reader = PartReader(
                AnswerReader(
                    form,
                    offered(request.tools, request.tool_choice),
                    reasoning_open=prepared.reasoning_open,
                    calls_only=only,
                    # Text in a requested format may look like a call.
                    loose=request.grammar is None and not only,
                )
            )
        context = () if request.chat and not request.continue_last else prompt
        stream = TextStream(self.codec, request.stop, context)
        ids = prompt if request.token_ids else None
        asked = AskedTokens(ids, request.tokens_as_ids, self._prompt_logprobs(request, index))
        echo = self._echo(request, index, prompt)
        return AnswerPieces(index, events, self.codec, stream, reader, echo, asked)

    def _prompt_logprobs(self, request: EngineRequest, index: int) -> int | None:
        """How many likeliest tokens an answer tells for each token of the prompt. Answers of a chat have one
        prompt: the first answer tells them.
        """
        return None if request.chat and index else request.prompt_logprobs

    def _echo(self, request: EngineRequest, index: int, prompt: tuple[int, ...]) -> PromptEcho | None:
        if not request.echo:
            return None
        given = request.prompts[index // request.n]
        text = given if isinstance(given, str) else self.codec.decode(prompt)
        return PromptEcho(text, prompt, answer=request.max_tokens != 0, logprobs=request.logprobs)


def _with_reasoning(setting: str, form: AnswerFormat) -> AnswerFormat:
    """Return the answer format with the reasoning marks of a setting. Raises RequestError for an unknown
    setting.
    """
    if setting == "auto":
        return form
    if setting == "off":
        return replace(form, reasoning=None)
    begin, comma, end = setting.partition(",")
    if not (begin and comma and end):
        raise RequestError(f"reasoning must be auto, off or BEGIN,END, not {setting!r}", "reasoning")
    return replace(form, reasoning=ReasoningMarks(begin, end))


def _place(param: str, at: int, request: EngineRequest) -> str:
    """Return where a request has its prompt `at`: among several by its index."""
    return f"{param}.{at}" if len(request.prompts) > 1 else param
