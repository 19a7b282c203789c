"""`nearfar route score`: how hard prompts look."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from nearfar.errors import RequestError
from nearfar.routing.difficulty import score as difficulty_of

STANDARD = Path("-")


def score(
    prompt: Annotated[str | None, typer.Argument(help="One prompt, instead of --input.")] = None,
    source: Annotated[
        Path | None, typer.Option("--input", "-i", help='A file of {"prompt": "…"} lines; `-` reads stdin.')
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; `-` is stdout.")
    ] = STANDARD,
) -> None:
    """Write how hard English prompts look: a `{"difficulty": 0..1}` line for the prompt, or for each
    `{"prompt": "…"}` line of a file, in order.

    0.7 means: harder than 70 % of the reference prompts. A client with difficulty="english" sends what
    reaches its policy's `difficulty_threshold` to the cloud; these figures say whether that suits your
    traffic. It knows English only, and only what a prompt looks like. Other keys of a line are ignored, empty
    lines skipped.

        nearfar route score "Prove that 2 is prime."

        echo '{"prompt": "Prove that 2 is prime."}' | nearfar route score --input -

    Lines are scored as they come; what was written before an error stays.
    """
    if (prompt is None) == (source is None):
        raise RequestError(
            'give one prompt, as in nearfar route score "Why is the sky blue?", or --input FILE (-: stdin)',
            "prompt",
        )
    if prompt is not None:
        with _opened(output, "wb") as sink:
            sink.write(_line(prompt))
        return
    assert source is not None
    if (
        source != STANDARD
        and output != STANDARD
        and output.exists()
        and source.exists()
        and output.samefile(source)
    ):
        raise RequestError(f"--output {output} is the input file: name another, or `-` for stdout", "output")
    with _opened(source, "rb") as lines, _opened(output, "wb") as sink:
        for each in _prompts(lines, "stdin" if source == STANDARD else str(source)):
            sink.write(_line(each))
            sink.flush()


def _line(prompt: str) -> bytes:
    return b'{"difficulty": %.6f}\n' % difficulty_of(prompt)


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[BinaryIO]:
    if path == STANDARD:
        yield sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
        return
    try:
        file = path.open(mode)
    except OSError as error:
        verb = "read" if mode == "rb" else "written"
        raise RequestError(
            f"{path} cannot be {verb}: {error.strerror}", "input" if mode == "rb" else "output"
        ) from None
    with file:
        yield file  # type: ignore[misc]


def _prompts(lines: BinaryIO, name: str) -> Iterator[str]:
    """Yield the prompts, line by line. Raises RequestError with file and line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{where}: not UTF-8 ({error.reason} at byte {error.start})", "input"
            ) from None
        except (ValueError, RecursionError) as error:
            raise RequestError(f'{where}: not JSON ({error}); a line is {{"prompt": "…"}}', "input") from None
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, str):
            found = _kind(prompt) if isinstance(record, dict) and "prompt" in record else "none"
            of = "a record" if isinstance(record, dict) else _kind(record)
            raise RequestError(f'{where}: {of} without a text "prompt" (found: {found})', "input")
        yield prompt


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}.get(
        type(value), "null" if value is None else "a number"
    )
