"""OpenAI's Decisions API: typed questions about an input, answered by the probabilities of their labels.

Each question becomes the last message of the conversation, and each of its answers a label after it. No text
is generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, ValidatorFunctionWrapHandler, field_validator

from nearfar.edge_runtime.openai.label_odds import Odds, label_odds
from nearfar.edge_runtime.openai.responses.asking import ITEMS, TEXTS, messages_of, with_one_system
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import Question, Scores
from nearfar.fallback_server.http.apis.asking import Record, known_of, longest_of
from nearfar.fallback_server.http.apis.responses import Item, ReferenceItem, items_of, parts_of, typed
from nearfar.fallback_server.http.fields import MAX_PARTS, SILENT, Strict, Text, by, few, many, one_of
from nearfar.fallback_server.http.places import differing
from nearfar.fallback_server.http.schemas import MAX_MESSAGES, ModelName, SilentFields, TemplateVariables
from nearfar.fallback_server.http.words import shown
from nearfar.format.requests import MAX_LABEL_CHARS, MAX_LABELS

MAX_QUESTIONS = 400
"""The most questions of a request: OpenAI's limit."""
YES, NO = "Yes", "No"
ONE_WORD = f"Is this true? Answer with one word, {YES} or {NO}."
ONE_OF = "Answer with one of the following and nothing else:"

Message = Mapping[str, Any]

Label = Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]


class TextPart(Strict):
    """A part of the instructions of a question; this server reads text only."""

    place = "questions.instructions."
    type: Literal["input_text"]
    text: str


Instructions = Annotated[
    Text | Annotated[list[TextPart], many(MAX_PARTS, 1), few(MAX_PARTS), Tag("list[part]")],
    one_of({dict: "list[part]", TextPart: "list[part]"}, "this must be a string or a list of parts"),
]


class QuestionFields(Strict):
    """What all questions have."""

    place = "questions."
    name: Annotated[str | None, Field(max_length=256)] = None
    instructions: Instructions

    @field_validator("instructions")
    @classmethod
    def _not_empty(cls, given: str | list[TextPart]) -> str | list[TextPart]:
        if not _text(given):
            raise ValueError("this must not be empty")
        return given

    @property
    def said(self) -> str:
        """The instructions as one text."""
        return _text(self.instructions)

    def texts(self) -> list[str]:
        """The answers as text, in order."""
        return [YES, NO]

    def described(self) -> list[str | None]:
        """What the request says of each answer."""
        return [None, None]

    @property
    def labels(self) -> list[str]:
        """The labels of the answers: their texts, or their numbers where two texts are equal."""
        texts = self.texts()
        return texts if len(set(texts)) == len(texts) else [str(at + 1) for at in range(len(texts))]

    @property
    def message(self) -> str:
        """The question as the model reads it."""
        listed = zip(self.labels, self.texts(), self.described(), strict=True)
        return "\n".join([self.said, "", ONE_OF, *(_line(*each) for each in listed)])


class Predicate(QuestionFields):
    """How likely it is that a statement about the input is true."""

    type: Literal["predicate"]

    @property
    def message(self) -> str:
        """The question as the model reads it."""
        return f"{self.said}\n\n{ONE_WORD}"


class ChoiceValue(Strict):
    """One of the values to choose from; a string and a boolean of the same text are different values."""

    place = "questions.choices."
    value: Label | bool
    description: str | None = None


class ChoiceQuestion(QuestionFields):
    """Which of the given values fits the input."""

    type: Literal["choice"]
    choices: Annotated[list[ChoiceValue], many(MAX_LABELS, 2), few(MAX_LABELS)]

    @field_validator("choices")
    @classmethod
    def _differ(cls, given: list[ChoiceValue]) -> list[ChoiceValue]:
        differing(given, "an earlier choice has this value: give each its own", "value")
        return given

    def texts(self) -> list[str]:
        """The values as text."""
        return [
            str(each.value).lower() if isinstance(each.value, bool) else each.value for each in self.choices
        ]

    def described(self) -> list[str | None]:
        """The descriptions of the values."""
        return [each.description for each in self.choices]


class Level(Strict):
    """A level of a rating, the lowest first."""

    place = "questions.levels."
    label: Label
    description: str | None = None


class Rating(QuestionFields):
    """How the input rates on ordered levels."""

    type: Literal["score"]
    levels: Annotated[list[Level], many(MAX_LABELS, 2), few(MAX_LABELS)]

    @field_validator("levels")
    @classmethod
    def _differ(cls, given: list[Level]) -> list[Level]:
        differing(given, "an earlier level has this label: give each its own", "label")
        return given

    def texts(self) -> list[str]:
        """The labels of the levels."""
        return [each.label for each in self.levels]

    def described(self) -> list[str | None]:
        """The descriptions of the levels."""
        return [each.description for each in self.levels]


AskedQuestion = Annotated[
    Annotated[Predicate, Tag("predicate")]
    | Annotated[ChoiceQuestion, Tag("choice")]
    | Annotated[Rating, Tag("score")],
    by("type"),
]


class DecisionRequest(SilentFields):
    """/v1/decisions. `neutral` is an extension of nearfar: a text without content that stands for the input
    in a second prompt, to take out of the probabilities what the model prefers for any input.
    """

    model: ModelName = None
    input: str | Annotated[list[Item], many(MAX_MESSAGES), few(MAX_MESSAGES)]
    questions: Annotated[list[AskedQuestion], many(MAX_QUESTIONS, 1), few(MAX_QUESTIONS)]
    neutral: Annotated[str | None, Field(max_length=MAX_LABEL_CHARS)] = None
    chat_template_kwargs: TemplateVariables | None = None
    prompt_cache_options: Annotated[dict[str, str] | None, Field(max_length=16), few(16), SILENT] = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _readable(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return known_of(typed(given), "input", ITEMS, handler)

    @field_validator("questions")
    @classmethod
    def _named_apart(cls, given: list[QuestionFields]) -> list[QuestionFields]:
        differing(given, "an earlier question has this name: give each its own", "name")
        return given


def questions_of(body: DecisionRequest, before: Seq[Message]) -> list[Question]:
    """Return what the engine is asked: each question after the input, then each after the neutral text.
    `before`: the input as messages of a chat completion.
    """
    length = sum(len(text) for message in before for text in _texts_of(message))
    made = [_question(each, before, "input", at, length) for at, each in enumerate(body.questions)]
    if body.neutral is None:
        return made
    neutral = [{"role": "user", "content": body.neutral}]
    length = len(body.neutral)
    return made + [_question(each, neutral, "neutral", at, length) for at, each in enumerate(body.questions)]


def _question(asked: QuestionFields, before: Seq[Message], place: str, at: int, length: int) -> Question:
    """Return a question after `before`, which is at `place` in the request and has `length` characters."""
    labels = f"questions.{at}.{'levels' if isinstance(asked, Rating) else 'choices'}"
    said = len(asked.said)
    parts = {place: length, f"questions.{at}.instructions": said, labels: len(asked.message) - said}
    return Question(tuple(asked.labels), _asked(before, asked.message), "", place, labels, longest_of(parts))


def _texts_of(message: Message) -> list[str]:
    """Return the texts of a message of a chat."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text") or "" for part in content]


def input_messages(body: DecisionRequest) -> list[Record]:
    """Return the input as messages of a chat completion. Raises RequestError for an item by reference, and
    for a part other than text.
    """
    if not isinstance(body.input, str) and any(isinstance(item, ReferenceItem) for item in body.input):
        raise RequestError("decisions refer to no stored items: send the items themselves", "input")
    for part in parts_of(body.input):
        if part.type not in (*TEXTS, "refusal"):
            raise RequestError(
                f"input: decisions take text alone, not a part of type {shown(part.type)}", "input"
            )
    return with_one_system(messages_of(items_of(body.input)))


def _asked(before: Seq[Message], question: str) -> tuple[Message, ...]:
    """Return the messages with a question at the end. Many chat templates refuse two turns of the user in a
    row, so it joins a last message of text.
    """
    last: Message = before[-1] if before else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        return (*before[:-1], {**last, "content": f"{last['content']}\n\n{question}"})
    return (*before, {"role": "user", "content": question})


def decision(body: DecisionRequest, model: str, scores: Scores) -> Record:
    """Return the answers in OpenAI's shape."""
    count, answers = len(body.questions), list[Record]()
    for at, asked in enumerate(body.questions):
        sums = [sum(each) for each in scores.found[at]]
        neutral = None if body.neutral is None else [sum(each) for each in scores.found[count + at]]
        answers.append(_answer(asked, label_odds(scores.labels[at], sums, neutral)))
    usage = {  # an answer counts as one output token, as in vLLM; no text is generated
        "input_tokens": scores.tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": scores.tokens + count,
    }
    return {"model": model, "answers": answers, "usage": usage}


def _answer(asked: QuestionFields, odds: Odds) -> Record:
    shares = odds.probabilities
    if isinstance(asked, ChoiceQuestion):
        values = [each.value for each in asked.choices]
        listed = [{"value": v, "probability": share} for v, share in zip(values, shares, strict=True)]
        chosen = {"choice": values[odds.choice], "confidence": odds.confidence, "probabilities": listed}
        return {"type": "choice", "name": asked.name, **chosen}
    if isinstance(asked, Rating):
        labels = enumerate(zip(asked.texts(), shares, strict=True))
        rated = [{"value": at, "label": label, "probability": share} for at, (label, share) in labels]
        mean = sum(at * share for at, share in enumerate(shares))
        made = {"score": mean, "confidence": odds.confidence, "probabilities": rated}
        return {"type": "score", "name": asked.name, **made}
    return {"type": "predicate", "name": asked.name, "probability": shares[0]}


def _text(given: str | list[TextPart]) -> str:
    return given if isinstance(given, str) else "".join(part.text for part in given)


def _line(label: str, text: str, description: str | None) -> str:
    said = f"{label}: {text}" if label != text else label
    return f"- {said}" + (f" ({description})" if description else "")
