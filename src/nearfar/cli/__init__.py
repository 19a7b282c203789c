"""The command line: one file per command."""

from __future__ import annotations

from nearfar.cli import starting

# isort: split
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Never

import typer
from rich.console import Console
from typer.completion import completion_init  # type: ignore[attr-defined]  # there since typer 0.4

from nearfar.cli.streams import nobody_reads, prepare
from nearfar.errors import NearfarError
from nearfar.interruptible import CTRL_C
from nearfar.suggestions import suggested
from nearfar.version import __version__

starting.done()

# Commands, each a module of this package, with their lines in `nearfar --help`. A module is imported when
# its command is used, so that `nearfar run` starts without the build's dependencies, and `nearfar --help`
# without any.
COMMANDS = {
    "build": "Compile a checkpoint into artifacts for devices.",
    "inspect": "Show what an artifact holds and what it needs.",
    "run": "Answer one prompt.",
    "chat": "Chat in the terminal.",
    "pull": "Get a model and build it into the store.",
    "list": "List the models of the store.",
    "show": "Show the card of a model: licence, context, sampling.",
    "cp": "Copy a model out of the store.",
    "rm": "Remove models from the store.",
    "doctor": "Check what works on this machine, what is missing, and how to get it.",
    "devices": "List what each target would use on this machine.",
    "cache": "Save and load snapshots of the KV cache.",
    "web": "Serve the chat page with an artifact.",
    "serve": "Serve a model: OpenAI's interface for many clients at once.",
    "keys": "Add an API key to a keys file.",
    "top": "Watch a running server.",
    "bench": "Measure a server under load, or each kernel of a step.",
    "route": "Score how hard prompts are, and show routing decisions.",
    "synth": "Write a checkpoint of a published shape with random weights.",
    "completion": "Print the script with which bash, zsh or fish complete commands.",
}

PROGRAM = "nearfar"

MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT,
    errno.ENOTDIR, errno.EISDIR,
)  # fmt: skip
"""Errors of the machine or of a path, for which a traceback is of no use."""

EXTRAS = {
    "tvm": "build",
    "huggingface_hub": "build",
    "torch": "server",
    "ml_dtypes": "build",
    "fastapi": "server",
    "uvicorn": "server",
    "httpx": "server",
    "prometheus_client": "server",
    "pydantic": "server",
    "xgrammar": "server",
    "transformers": "server",
}


class LazyGroup(typer.core.TyperGroup):
    """Imports a command's module when the command is used.

    `table`: its commands, with their lines in the list; `path`: parent commands. Module names join path and
    command with "_" (bench_serve).
    """

    table: ClassVar[Mapping[str, str]] = COMMANDS
    path: ClassVar[tuple[str, ...]] = ()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order in which a user meets them."""
        return [*self.table]  # `list` names a module of this package after its command was used

    def get_command(self, ctx: Any, name: str) -> Any:
        """A stand-in with a command's line in the list; it imports no module."""
        if name not in self.table:
            return super().get_command(ctx, name)
        return typer.core.TyperCommand(name, help=self.table[name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, from `nearfar.cli.<name>`."""
        if args and not args[0].startswith("-") and args[0] not in self.table:
            meant = suggested(args[0], self.table) or f": there are {', '.join(self.table)}"
            ctx.fail(f"there is no command {args[0]}{meant}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, self._load(name) if name is not None and name in self.table else command, rest

    def _load(self, name: str) -> Any:
        try:
            module = self._import(f"nearfar.cli.{'_'.join((*self.path, name))}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("nearfar"):
                raise
            return self._unavailable(name, error)
        function: Callable[..., Any] | typer.Typer = getattr(module, name)
        if isinstance(function, typer.Typer):  # the command is a group of commands
            for registered in function.registered_commands:
                registered.cls = command_class()
            return typer.main.get_command(function)
        app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        app.command(name=name, cls=command_class(), help=function.__doc__ or self.table[name])(function)
        return typer.main.get_command(app)

    @staticmethod
    def _import(name: str) -> ModuleType:
        if (
            f"_{PROGRAM.upper()}_COMPLETE" in os.environ
        ):  # a shell's completion calls this while a line is typed
            return importlib.import_module(name)
        from nearfar.cli.progress import importing

        with importing("nearfar"):
            return importlib.import_module(name)

    def _unavailable(self, name: str, error: ModuleNotFoundError) -> Any:
        missing = (error.name or "").split(".")[0]
        extra = EXTRAS.get(missing, "edge")
        called = " ".join((*self.path, name))

        def command() -> None:
            raise NearfarError(
                f"`nearfar {called}` needs {missing}, which is not installed: pip install 'nearfar[{extra}]'"
            )

        app = typer.Typer(add_completion=False)
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name=name, help=self.table[name], context_settings=settings)(command)
        return typer.main.get_command(app)


def command_class() -> type[typer.core.TyperCommand]:
    """The class of commands, imported with the first command, as it imports the markdown renderer."""
    from nearfar.cli.help import Command

    return Command


typer_app = typer.Typer(
    cls=LazyGroup,
    help="One checkpoint in, one artifact per device out: language models on whatever device you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@typer_app.callback(invoke_without_command=True)
def _main(version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        print(f"nearfar {__version__}")
        raise typer.Exit


def app() -> None:
    """Entry point. Errors meant for the user are printed as one message, with exit code 1; Ctrl-C is 130; a
    reader that closes stdout early is not an error.
    """
    try:
        prepare()
        completion_init()
        try:
            typer_app(prog_name=PROGRAM)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _enough()
    except SystemExit as end:
        if end.code == CTRL_C:  # typer has caught the exception
            _stopped()
        # typer and rich end with 1 while they handle it
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _enough()
    except NearfarError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in MACHINE:
            raise
        _fail(_of_the_machine(error))
    except KeyboardInterrupt:
        _stopped()


def _stopped() -> Never:
    Console(stderr=True).print("stopped")
    sys.exit(CTRL_C)


def _enough() -> Never:
    with contextlib.suppress(OSError, ValueError):
        nobody_reads()
    sys.exit(0)


def _fail(message: str) -> Never:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_plain(message)}")
    with contextlib.suppress(OSError, ValueError):  # stdout or stderr may be closed
        nobody_reads()
    sys.exit(1)


def _of_the_machine(error: OSError) -> str:
    """The message for a full disk, or for a path of another kind than a command expected."""
    what = "the output" if error.filename is None else str(error.filename)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} cannot be written, the disk is full: free some space (nearfar list, nearfar rm NAME)"
    return f"{what}: {error.strerror}: check the path and its permissions"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
