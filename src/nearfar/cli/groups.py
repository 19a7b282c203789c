"""Groups of options that several commands take: dataclasses whose fields Typer sees as options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass by parameters for its fields. The command gets a
    dataclass made of the given options.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        assert isinstance(kind, type)
        groups[parameter.name], inner = kind, get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(field.name, parameter.kind, default=default, annotation=inner[field.name])
            )

    def called(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **made)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called
