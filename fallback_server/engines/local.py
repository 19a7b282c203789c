"""Text-level engine over any token backend: templates, tokens, stop strings, tools, reasoning."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.text.codec import TextCodec, TextStream
from nearfar.errors import RequestError
from nearfar.fallback_server.backend import Backend, BackendStats, TokenRequest
from nearfar.fallback_server.engines import tools
from nearfar.fallback_server.engines.answers import Choice, Echo, LocalAnswers
from nearfar.fallback_server.engines.base import (
    Embeddings,
    EngineRequest,
    ModelInfo,
    Prepared,
    Prompt,
    ToolChoice,
)
from nearfar.fallback_server.engines.markup import MarkupSplitter, call_format
from nearfar.fallback_server.marks import THINK, VISIBLE, Marks
from nearfar.fallback_server.sandbox import ChildPool, ChildSpec
from nearfar.fallback_server.tenants import Shares


@dataclass(frozen=True)
class TextOptions:
    """How text is handled. `reasoning`: auto (what the chat template shows), off, or the two marks as
    BEGIN,END.

    Times are seconds for one request.
    """

    reasoning: str = "auto"
    template_timeout: float = 2.0
    text_processes: int = 2


class LocalEngine:
    """A model of which the text side is here. `directory` holds its tokenizer files; `names` are what clients
    may call it.

    `here`: its backend computes on this machine, and says so to clients that ask before they send what is
    private.
    """

    def __init__(
        self,
        backend: Backend,
        directory: Path,
        bos: int | None,
        options: TextOptions | None = None,
        names: Seq[str] = (),
        *,
        here: bool = False,
    ) -> None:
        options = options or TextOptions()
        self._here = here
        self.backend = backend
        self.codec = TextCodec.open_directory(directory, bos, VISIBLE)
        self._names = tuple(names) or (backend.info.model,)
        self._live: dict[str, int] = {}
        self._shares = Shares()
        self._calls, self._template_has_tools = call_format(self.codec.template_source or "")
        self._reasoning = _marks(options.reasoning, self.codec.template_source or "")
        settings = {"directory": str(directory), "bos": bos, "visible": list(VISIBLE)}
        self._text = ChildPool(
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
        """Start the processes that a request needs, so that the first need not wait."""
        await self._text.warm()

    def models(self) -> tuple[ModelInfo, ...]:
        """The model under each of its names."""
        return tuple(ModelInfo(name, self.backend.info.context_length, self._here) for name in self._names)

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Render, tokenize, check."""
        prompts, tail = await self._prompts(request)
        context = self.backend.info.context_length
        longest = max(len(prompt) for prompt in prompts)
        total = sum(len(prompt) for prompt in prompts)
        if request.pooling is not None:
            self._check_input(longest)
            return Prepared(request, prompts, total, total)
        if longest >= context:
            raise RequestError(
                f"the prompt has {longest} tokens, but this model's context is {context} tokens, the answer "
                "included; shorten the prompt",
                "messages" if request.chat else "prompt",
            )
        opened = self._reasoning is not None and tail.rstrip().endswith(self._reasoning.begin)
        grammar = self._grammar(request, opened)
        cost = total + sum(self._limit(request, prompt) for prompt in prompts) * request.n
        return Prepared(request, prompts, total, cost, grammar, opened)

    async def submit(self, prepared: Prepared) -> LocalAnswers:
        """Start the request: one sequence an answer."""
        request = prepared.request
        choices: list[Choice] = []
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

    async def embed(self, model: str, inputs: Seq[Prompt], pooling: Literal["mean", "last"]) -> Embeddings:
        """One vector an input."""
        tokens = [await self._tokens(item, "input") for item in inputs]
        self._check_input(max(len(item) for item in tokens))
        return Embeddings(await self.backend.embed(tokens, pooling), sum(len(item) for item in tokens))

    def stats(self) -> BackendStats:
        """The backend's figures."""
        return self.backend.stats()

    async def ready(self) -> bool:
        """Whether the backend generates."""
        return await self.backend.alive()

    async def close(self, drain: float = 0.0) -> None:
        """Stop the backend and the helper processes."""
        await self.backend.close(drain)
        await self._text.close()

    async def _prompts(self, request: EngineRequest) -> tuple[tuple[tuple[int, ...], ...], str]:
        """Token ids of each prompt, and the end of the rendered text of a chat."""
        if not request.chat:
            param = "prompt" if request.pooling is None else "input"
            return tuple([tuple(await self._tokens(prompt, param)) for prompt in request.prompts]), ""
        answer = await self._text.run(self._chat_job(request))
        if not answer["tokens"]:
            raise RequestError("the chat template makes an empty prompt of these messages", "messages")
        return (tuple(answer["tokens"]),), answer["tail"]

    def _chat_job(self, request: EngineRequest) -> dict[str, Any]:
        if self.codec.template_source is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        variables = {**request.template, **self._hints(request)}
        messages: list[dict[str, Any]]
        offered = tools.offered(request.tools, request.tool_choice)
        if offered and not self._template_has_tools:
            messages = tools.described(request.messages, offered, self._calls)
        elif self._template_has_tools:
            messages = [tools.with_parsed_arguments(message) for message in request.messages]
        else:
            messages = tools.in_words(request.messages, self._calls)
        if offered and self._template_has_tools:
            variables["tools"] = [dict(tool) for tool in offered]
        return {
            "op": "chat",
            "messages": messages,
            "variables": variables,
            "continue_last": request.continue_last,
        }

    def _hints(self, request: EngineRequest) -> dict[str, str]:
        """The hints that the chat template follows. Others are refused, but for the values that change
        nothing.
        """
        source = self.codec.template_source or ""
        for name, value in request.hints.items():
            idle = value == "medium" or (
                name == "reasoning_effort" and value == "none" and self._reasoning is None
            )
            if name not in source and not idle:
                raise RequestError(
                    f"this model's chat template knows no {name}, so {value!r:.40} would change nothing; "
                    "leave it out",
                    name,
                )
        return {name: value for name, value in request.hints.items() if name in source}

    async def _tokens(self, prompt: Prompt, param: str) -> list[int]:
        if isinstance(prompt, str):
            try:
                tokens: list[int] = (await self._text.run({"op": "encode", "text": prompt}))["tokens"]
            except RequestError as error:
                raise RequestError(str(error), param) from error
            if not tokens:
                raise RequestError(f"{param} is empty, and this model has no token to begin with", param)
            return tokens
        vocab = self.backend.info.vocab_size
        if not prompt:
            raise RequestError(f"{param} is empty; give at least one token", param)
        wrong = next((token for token in prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab} tokens", param)
        return list(prompt)

    def _check_input(self, longest: int) -> None:
        context = self.backend.info.context_length
        if longest > context:
            raise RequestError(
                f"an input has {longest} tokens, but the context is {context}; shorten it", "input"
            )

    def _grammar(self, request: EngineRequest, opened: bool) -> Grammar | None:
        """What the answers must match: the calls, the response format, or either."""
        reasoning = self._reasoning
        offered = tools.offered(request.tools, request.tool_choice)
        form = request.grammar
        if not offered:
            if form is None or reasoning is None:
                return form
            return tools.structural(tools.after_reasoning(tools.as_format(form), reasoning, opened))
        if form is None or request.tool_choice.mode == "required" or request.tool_choice.name is not None:
            return tools.call_grammar(offered, request.tool_choice, self._calls, reasoning, opened)
        required = tools.call_grammar(offered, ToolChoice("required"), self._calls, None, False)
        either = {"type": "or", "elements": [tools.as_format(required), tools.as_format(form)]}
        return tools.structural(tools.after_reasoning(either, reasoning, opened))

    def _limit(self, request: EngineRequest, prompt: Seq[int]) -> int:
        """Tokens that an answer to the prompt may have. 0 asked for (with echo) still takes a step."""
        room = self.backend.info.context_length - len(prompt)
        return room if request.max_tokens is None else max(min(request.max_tokens, room), 1)

    def _token_request(
        self, prepared: Prepared, prompt: tuple[int, ...], index: int, number: int
    ) -> TokenRequest:
        request = prepared.request
        sampling = request.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + number) & (2**64 - 1))
        eos = () if request.ignore_eos else self.backend.info.eos_token_ids
        return TokenRequest(
            id=f"{request.id}-{index}",
            tokens=prompt,
            max_tokens=self._limit(request, prompt),
            sampling=sampling,
            stop_token_ids=frozenset((*eos, *request.stop_token_ids)),
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            grammar=prepared.grammar,
            priority=request.priority,
            salt=request.tenant.salt,
        )

    def _choice(self, prepared: Prepared, index: int, prompt: tuple[int, ...], events: Any) -> Choice:
        request = prepared.request
        calls = self._calls if tools.offered(request.tools, request.tool_choice) else None
        reasoning = self._reasoning if request.chat and request.split_reasoning else None
        splitter = None
        if calls or reasoning:
            splitter = MarkupSplitter(reasoning, calls, reasoning_open=prepared.reasoning_open)
        context = () if request.chat and not request.continue_last else prompt
        stream = TextStream(self.codec, request.stop, context)
        required = request.tool_choice.mode == "required" or request.tool_choice.name is not None
        echo = self._echo(request, index, prompt)
        return Choice(
            index, events, self.codec, stream, splitter, calls, echo, calls_only=bool(calls) and required
        )

    def _echo(self, request: EngineRequest, index: int, prompt: tuple[int, ...]) -> Echo | None:
        if not request.echo:
            return None
        given = request.prompts[index // request.n]
        text = given if isinstance(given, str) else self.codec.decode(prompt)
        return Echo(text, prompt, answer=request.max_tokens != 0)


def _marks(setting: str, template: str) -> Marks | None:
    if setting == "off":
        return None
    if setting == "auto":
        return THINK if THINK.end in template or THINK.begin in template else None
    begin, comma, end = setting.partition(",")
    if not (begin and comma and end):
        raise RequestError(f"reasoning must be auto, off or BEGIN,END, not {setting!r}", "reasoning")
    return Marks(begin, end)
