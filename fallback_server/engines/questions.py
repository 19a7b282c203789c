"""Questions as tokens: the prompt of each, and its labels as the tokenizer continues the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from nearfar.edge_runtime.engine.requests import outside
from nearfar.edge_runtime.openai.decisions import OPENED, TAIL_TOKENS
from nearfar.edge_runtime.tools.reading import reasoning_opened
from nearfar.errors import ContextError, RequestError
from nearfar.fallback_server.backend import Backend
from nearfar.fallback_server.engines.base import EngineRequest, Prepared, Question
from nearfar.fallback_server.sandbox import ChildPool
from nearfar.format.answers import AnswerFormat

Tokens = tuple[int, ...]


class Texts(Protocol):
    """What questions need of an engine: its processes for text, and the job that renders a conversation."""

    text: ChildPool
    form: AnswerFormat
    backend: Backend

    def chat_job(self, request: EngineRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the job for a text process, and the hints that the chat template does not follow."""
        ...


class Questions:
    """Turns the questions of requests into tokens."""

    def __init__(self, engine: Texts) -> None:
        self._engine = engine

    async def prepare(self, request: EngineRequest) -> Prepared:
        """Render, tokenize and check the questions of a request."""
        info = self._engine.backend.info
        prompts, every = list[Tokens](), list[tuple[Tokens, ...]]()
        for question in request.questions:
            places = _places(question)
            for place, given in zip(places, (question.prompt, *question.labels), strict=True):
                if not isinstance(given, str):
                    self._check(given, place)
            prompt, labels = await self._tokens(request, question)
            for place, tokens in zip(places, (prompt, *labels), strict=True):
                if not tokens:
                    raise _wrong(place, "this has no tokens: give at least one")
            longest = len(prompt) + max(map(len, labels))
            if longest >= info.context_length:
                place = question.longest or question.place
                field = _field(place)
                what = field if place == field else f"text of {place}"
                raise ContextError(longest, info.context_length, field, what=what)
            prompts.append(prompt)
            every.append(labels)
        total = sum(map(len, prompts)) + sum(len(label) for labels in every for label in labels)
        return Prepared(request, tuple(prompts), total, labels=tuple(every))

    def _check(self, tokens: Tokens, place: str) -> None:
        vocab = self._engine.backend.info.vocab_size
        if (wrong := outside(tokens, vocab)) is not None:
            raise _wrong(place, f"token id {tokens[wrong]} is outside the vocabulary of {vocab} tokens")

    async def _tokens(self, request: EngineRequest, question: Question) -> tuple[Tokens, tuple[Tokens, ...]]:
        """Return the tokens of a prompt, and of its labels."""
        engine, most = self._engine, self._engine.backend.info.context_length
        texts = [label for label in question.labels if isinstance(label, str)]
        if question.messages:
            job, _ = engine.chat_job(replace(request, messages=question.messages))
            answer = await engine.text.run({**job, "most": most, "labels": texts})
            if reasoning_opened(engine.form, answer["tail"]):
                raise RequestError(OPENED, "chat_template_kwargs")
        elif isinstance(question.prompt, str):
            text = {"op": "encode", "text": question.prompt, "most": most, "labels": texts}
            answer = await engine.text.run(text)
        else:
            answer = {"tokens": list(question.prompt)}
            if texts:
                end = list(question.prompt[-TAIL_TOKENS:])
                answer |= await engine.text.run({"op": "labels", "tokens": end, "labels": texts})
        return counted(answer["tokens"]), _labels(question, answer)


def _places(question: Question) -> list[str]:
    """Return the places of a question's prompt and of its labels in the request."""
    return [question.place, *(f"{question.labels_place}.{at}" for at in range(len(question.labels)))]


def _wrong(place: str, message: str) -> RequestError:
    return RequestError(f"{place}: {message}", _field(place))


def _field(place: str) -> str:
    """Return the field of the request that has a place."""
    return place.partition(".")[0]


def _labels(question: Question, answer: Mapping[str, Any]) -> tuple[Tokens, ...]:
    made = iter(answer.get("labels", ()))
    return tuple(tuple(next(made)) if isinstance(each, str) else each for each in question.labels)


def counted(tokens: list[int] | int) -> tuple[int, ...]:
    """Convert the token list of a text process. For a prompt longer than the context it gives only the count;
    zeros stand in for the tokens, since the request is rejected for its length.
    """
    return tuple(tokens) if isinstance(tokens, list) else (0,) * tokens
