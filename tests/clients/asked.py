"""What the client programs of this folder share.

Each program asks a server as its users do, at its defaults, and prints what it got as JSON. The programs run
in environments of their own (`make clients`), so they import nothing of nearfar.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
for name in ("OPENAI", "ANTHROPIC"):
    os.environ[f"{name}_API_KEY"] = "none"
os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"] = f"{URL}/v1", URL
HELLO = "Hello"
LONG = "word " * 3000
"""A prompt that is longer than the server's context."""


City = Literal["Oslo", "Rome"]


class Trip(BaseModel):
    """A trip to a city."""

    city: City
    days: Literal[1, 2, 3]


def weather(city: City) -> str:
    """Tells the weather of a city.

    Args:
        city: The city.
    """
    CALLED.append(city)
    return f"rain in {city}"


CALLED: list[str] = []
"""The cities for which the model has called `weather`."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def told(error: Exception) -> str:
    """Names the error's classes and gives its message."""
    return f"{' '.join(each.__name__ for each in type(error).__mro__)}: {error}"


def raised(call: Callable[[], object]) -> str:
    """Run `call` and describe the exception that it raises, as `told` does."""
    try:
        call()
    except Exception as error:
        return told(error)
    return "nothing"


def tell(**found: Any) -> None:
    """Print what a client got, as JSON."""
    print(json.dumps({**found, "called": CALLED}, default=str))
