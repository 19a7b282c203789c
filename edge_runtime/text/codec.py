"""Converts between text and tokens: tokenizer and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.text.beside import LARGE
from nearfar.edge_runtime.text.files import NO_TEMPLATE, TEMPLATE_FILES, ChatTemplates, find_templates
from nearfar.edge_runtime.text.templates import ChatTemplate
from nearfar.edge_runtime.text.tokenizer import tokenizer_of
from nearfar.edge_runtime.tools.formats import shown_format
from nearfar.errors import ArtifactError, RequestError
from nearfar.format.answers import AnswerFormat, strings

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONVERSATION = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Template variables that belong to the request."""
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class TextCodec:
    """A tokenizer and its chat templates."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Mapping[str, Any],
        templates: ChatTemplates | str | None,
        bos: int | None,
        answers: AnswerFormat | None = None,
    ) -> None:
        self._templates = (
            templates if isinstance(templates, ChatTemplates) else ChatTemplates(templates or None)
        )
        self.tokenizer = tokenizer
        self.answers = answers or shown_format(self._templates.all, config)
        """The marks by which the model separates the parts of its answers."""
        self._bos = bos
        self.special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}
        """Texts of special tokens by role, for example eos_token."""
        self._compiled = {source: ChatTemplate(source) for source in self._templates.all}
        added = tokenizer.get_added_tokens_decoder()
        self.silent = frozenset(token for token, entry in added.items() if entry.special)
        """Tokens that add no text."""
        # Only the decoder is copied, as JSON by pickle's protocol: copying a whole large tokenizer takes 0.3
        # s and its size in memory.
        decoder = b"{}" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._replaced = _replaced_last(json.loads(decoder))

    @classmethod
    def open(cls, artifact: Artifact) -> TextCodec:
        """Load the tokenizer files of an artifact."""
        file = artifact.tokenizer_file("tokenizer.json")
        if file is None:
            raise ArtifactError(
                f"artifact {artifact.path} has no tokenizer.json; build it from a checkpoint that has one"
            )
        manifest = artifact.manifest
        return cls.open_directory(
            (artifact.path / file).parent, manifest.model.bos_token_id, manifest.answers
        )

    @classmethod
    def open_directory(cls, path: Path, bos: int | None, answers: AnswerFormat | None = None) -> TextCodec:
        """Load tokenizer.json, tokenizer_config.json and the chat templates of a directory.

        `answers`: the marks in the model's answers; None: derived from these files. Special tokens that occur
        in its marks are decoded as text.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ArtifactError(f"{path} has no tokenizer.json; save the model's fast tokenizer there")
        config = _read_config(path / "tokenizer_config.json")
        templates = _read_templates(path, config)
        answers = answers or shown_format(templates.all, config)
        try:
            tokenizer = _tokenizer(file.read_text(encoding="utf-8"), answers)
        except BaseException as error:
            raise _refusal(error, f"{path.name}/tokenizer.json of {path.parent} cannot be read") from error
        return cls(tokenizer, config, templates, bos, answers)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._templates.plain is not None

    def template_source(self, tools: bool) -> str | None:
        """The chat template of a conversation with tools, or without."""
        return self._templates.chosen(tools)

    def encode(self, text: str) -> list[int]:
        """The tokens of a raw prompt, with the special tokens that the tokenizer adds. An empty prompt is
        just BOS.
        """
        tokens = self.encode_text(text)
        return tokens if tokens or self._bos is None else [self._bos]

    def encode_text(self, text: str) -> list[int]:
        """The tokens of a text, with the special tokens that the tokenizer adds; an empty text may have
        none.
        """
        return self._encode(text, True)

    def encode_chat(self, messages: Seq[Mapping[str, Any]], *, continue_last: bool = False) -> list[int]:
        """The tokens of a conversation up to the place where the answer begins, or continues
        (`continue_last`).
        """
        return self.encode_raw(self.render_chat(messages, continue_last=continue_last))

    def encode_raw(self, text: str) -> list[int]:
        """The tokens of a text that already has all its special tokens."""
        return self._encode(text, False)

    def template_variables(self) -> list[str]:
        """The variables that the chat templates use, in addition to messages, tools and special tokens."""
        known = frozenset[str]().union(*(template.asks_for() for template in self._compiled.values()))
        return sorted(known - {*_SPECIAL, *_CONVERSATION})

    def render_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        continue_last: bool = False,
        begin_answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation by the model's own template.

        `continue_last`: the answer continues the last message. `begin_answer`: the prompt ends with the
        beginning of an answer. `variables`: further variables of the template (tools, …); they cannot replace
        the built-in ones.
        """
        source = self.template_source(bool((variables or {}).get("tools")))
        if source is None:
            raise RequestError(NO_TEMPLATE)
        shown = _marked(messages) if continue_last else list(messages)
        own = {**self.special, "messages": shown, "add_generation_prompt": begin_answer and not continue_last}
        text = self._compiled[source].render({**(variables or {}), **own})
        return _until_mark(text) if continue_last else text

    def behind_an_answer(self) -> str:
        """The text that the chat template writes after a complete answer.

        Empty if there is no template, or if it refuses a plain conversation.
        """
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        own = {**self.special, "messages": said, "add_generation_prompt": False}
        source = self.template_source(tools=False)
        try:
            text = "" if source is None else self._compiled[source].render(own)
        except RequestError:
            return ""
        return text.rpartition(_MARK)[2] if _MARK in text else ""

    def decode(self, tokens: Seq[int], special: bool = False) -> str:
        """The text of tokens. `special`: with special tokens, too."""
        try:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))
        except BaseException as error:
            raise _refusal(error, "the model's tokenizer.json cannot decode a text") from error

    def undecided(self, text: str) -> int:
        """The number of characters at the end of a decoded text that a following token may still change."""
        return max((overlap(text, part) for part in self._replaced), default=0)

    def name(self, token: int) -> str:
        """The token as tokenizer.json writes it; empty for a token without an entry there."""
        return str(self.tokenizer.id_to_token(token) or "")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if found := _BYTE_TOKEN.match(piece):
            return bytes([int(found[1], 16)])
        if self._byte_level:
            try:
                return str(piece).translate(_AS_LATIN).encode("latin-1")
            except UnicodeEncodeError:  # some of its characters stand for no byte
                pass
        return str(piece).replace("▁", " ").encode()

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: lone surrogate {text[error.start]!r} at character "
                f"{error.start}",
                "prompt",
            ) from error
        try:
            if len(text) < LARGE:
                return list(self.tokenizer.encode(text, add_special_tokens=special).ids)
            # `encode` holds the interpreter's lock until it is done (tokenizers 0.22: 0.44 s for 220 kB),
            # whichever thread calls it; `encode_batch_fast` does not.
            return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except BaseException as error:
            raise _refusal(error, "the model's tokenizer.json cannot encode a text") from error


def overlap(text: str, part: str) -> int:
    """The length of the longest end of a text that is a proper beginning of `part`."""
    longest = min(len(part) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(part[:n])), 0)


def _replaced_last(decoder: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns that a decoder replaces in the whole text, after all tokens are joined."""
    steps = decoder.get("decoders") or []
    fused = next((at for at, step in enumerate(steps) if step.get("type") == "Fuse"), len(steps))
    patterns = [step.get("pattern") or {} for step in steps[fused:] if step.get("type") == "Replace"]
    return tuple(pattern["String"] for pattern in patterns if pattern.get("String"))


def _tokenizer(text: str, answers: AnswerFormat) -> Tokenizer:
    """The tokenizer of a tokenizer.json; tokens that occur in an answer's marks are not special in it."""
    made = tokenizer_of(text)
    marks = set(strings(answers))
    special = {entry.content for entry in made.get_added_tokens_decoder().values() if entry.special}
    visible = {token for token in special if any(token in mark for mark in marks)}
    if not visible:
        return made
    data = json.loads(text)
    for token in data.get("added_tokens") or ():
        token["special"] = token["special"] and token["content"] not in visible
    return tokenizer_of(json.dumps(data))


_MARK = "[the-answer-goes-on-here]"
"""Marks the end of the content to continue: a search for a short content itself might find the template's own
words.
"""


def _marked(messages: Seq[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{_MARK}"}]


def _until_mark(text: str) -> str:
    """A rendered conversation up to the end of its last message's content."""
    if (at := text.rfind(_MARK)) < 0:
        raise RequestError(
            "the chat template leaves out the last message, so it cannot be continued", "messages"
        )
    return text[:at]


def _unreadable(file: Path, error: BaseException) -> ArtifactError:
    name = f"{file.parent.name}/{file.name} of {file.parent.parent}"
    return ArtifactError(
        f"{name} cannot be read: {error or type(error).__name__}. Correct it, or copy or build it again"
    )


def _refusal(error: BaseException, what: str) -> BaseException:
    """The exception to raise for an error of the tokenizers library.

    It raises plain Exceptions, and a BaseException if its Rust code panics.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ArtifactError(f"{what}: {error}. Correct it, or copy or build it again")
    return error


def _read(file: Path) -> str | None:
    """The text of an optional file; None if there is no file."""
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(_read(file) or "{}")
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(config, dict):
        raise _unreadable(file, TypeError(f"it holds a {type(config).__name__}, not an object"))
    return config


def check_templates(path: Path) -> None:
    """Raise ArtifactError if the chat templates of a directory cannot be read.

    This check comes before the tokenizer is read, which takes longer, and does not need it.
    """
    for source in _read_templates(path, _read_config(path / "tokenizer_config.json")).all:
        ChatTemplate(source)


def _read_templates(path: Path, config: Mapping[str, Any]) -> ChatTemplates:
    """The chat templates of a directory, and of its tokenizer_config.json."""
    texts = {name: text for name in TEMPLATE_FILES if (text := _read(path / name)) is not None}
    try:
        return find_templates(config, texts)
    except ArtifactError as error:
        raise _unreadable(path / "tokenizer_config.json", error) from error


def _content(value: object) -> str | None:
    """The text of a special token, which may be stored as a record."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _byte_table() -> dict[str, int]:
    """GPT-2's printable characters for bytes: printable bytes are themselves, the others U+0100 and up."""
    table, other = {}, 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            table[chr(byte)] = byte
        else:
            table[chr(other)] = byte
            other += 1
    return table


_BYTES = _byte_table()
# Each character that stands for a byte becomes the Latin-1 character of that byte, others become none: a
# vocabulary of 150,000 tokens takes twice as long character by character.
_AS_LATIN = {number: "\uffff" for number in range(256)} | {
    ord(char): chr(byte) for char, byte in _BYTES.items()
}
