"""The commands of a conversation: one table, which `/help` prints and the line editor completes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from nearfar.cli.messages import read_messages, write_messages
from nearfar.cli.session.input import HOW, fenced, without_fences
from nearfar.cli.session.session import Handler, Session
from nearfar.cli.session.settings import DEFAULT, SETTINGS
from nearfar.errors import NearfarError, RequestError


class Leave(Exception):
    """Raised to end the conversation."""


@dataclass(frozen=True)
class SessionCommand:
    """A command: its arguments, its line of help, and its function."""

    argument: str
    help: str
    run: Handler


def run(session: Session, text: str) -> None:
    """Carry out typed input: a command, or a question. Errors are printed. Raises Leave at the end."""
    try:
        name, argument = parsed(text)
        if name is not None:
            COMMANDS[name].run(session, argument)
        elif argument.strip():
            session.ask(argument)
        else:
            session.tell("type a question and press Enter; /help lists the commands, /exit leaves")
    except NearfarError as error:
        session.fail(error)


def parsed(text: str) -> tuple[str | None, str]:
    """A command's name and its arguments; None and the text for a question. Raises RequestError for a single
    line that begins with a slash and is not a command; several lines that do, such as pasted code, are a
    question.
    """
    if fenced(text) or not text.startswith("/"):
        return None, without_fences(text)
    name, _, argument = text[1:].partition(" ")
    name = NICKNAMES.get(name, name)
    if name in COMMANDS:
        return name, argument.strip()
    if "\n" in text.strip():
        return None, text
    raise RequestError(
        f'no command /{name}; /help lists them. A question that begins with a slash goes between """ and """'
    )


def _help(session: Session, argument: str) -> None:
    table = Table.grid(padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.argument}".rstrip(), command.help)
    session.console.print(table, soft_wrap=False)
    session.tell(f"{HOW} In a terminal, Alt-Enter begins a new line too. Ctrl-C stops an answer.")


def _reset(session: Session, argument: str) -> None:
    session.messages.clear()


def _retry(session: Session, argument: str) -> None:
    session.retry()


def _system(session: Session, argument: str) -> None:
    if not argument:
        session.tell(session.system or "no system prompt")
        return
    session.system = None if argument == DEFAULT else without_fences(argument)
    if session.messages:
        session.note("the conversation starts afresh")
    session.messages.clear()


def _set(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name and name not in SETTINGS:
        raise RequestError(f"there is no setting {name}; there are {', '.join(SETTINGS)}")
    if value.strip():
        SETTINGS[name].change(session, value.strip())
        return
    table = Table.grid(padding=(0, 2))
    for each in [name] if name else SETTINGS:
        table.add_row(each, SETTINGS[each].show(session), SETTINGS[each].help)
    session.console.print(table, soft_wrap=False)


def _stats(session: Session, argument: str) -> None:
    if argument:
        SETTINGS["stats"].change(session, argument)
    else:
        session.show_stats()


def _save(session: Session, argument: str) -> None:
    if not session.conversation:
        raise RequestError("there is nothing to save yet")
    path = _path("save", argument)
    write_messages(path, session.conversation)
    session.tell(f"saved {len(session.conversation)} messages to {path}")


def _load(session: Session, argument: str) -> None:
    path = _path("load", argument)
    first, *rest = read_messages(path)
    own = first["role"] == "system"
    session.system = first["content"] if own else None
    session.messages = rest if own else [first, *rest]
    open_question = "; the last question has no answer: /retry gives one" if session.unanswered else ""
    session.tell(f"loaded {len(rest) + 1} messages of {path}{open_question}")


def _exit(session: Session, argument: str) -> None:
    raise Leave


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise RequestError(f"/{command} needs a file: /{command} FILE")
    return Path(argument).expanduser()


COMMANDS = {
    "help": SessionCommand("", "list the commands", _help),
    "retry": SessionCommand("", "answer the last question again", _retry),
    "reset": SessionCommand("", "forget the conversation; the system prompt stays", _reset),
    "system": SessionCommand(
        "[TEXT]", f"show the system prompt, or set it ({DEFAULT}: none) and start afresh", _system
    ),
    "set": SessionCommand(
        "[NAME [VALUE]]", f"show the settings, or change one ({DEFAULT}: back again)", _set
    ),
    "stats": SessionCommand("[on|off]", "speeds of the last answer; on: after each answer", _stats),
    "save": SessionCommand("FILE", "write the conversation as JSON", _save),
    "load": SessionCommand("FILE", "continue a conversation that was saved", _load),
    "exit": SessionCommand("", "leave; so does Ctrl-D", _exit),
}
NICKNAMES = {"quit": "exit", "bye": "exit", "?": "help"}
FILES = ("save", "load")
"""Commands whose argument is a file."""
