"""The errors nearfar raises on purpose. Each message says what was wrong, with which value, and what to
do.
"""


class NearfarError(Exception):
    """Base of all errors with a message meant for the user."""


class NearfarWarning(UserWarning):
    """Something that goes on, and that the user may want to know."""


class CheckpointError(NearfarError):
    """The input model cannot be used as it is."""


class BuildError(NearfarError):
    """The build cannot go on: output directory, disk, options."""


class ArtifactError(NearfarError):
    """The artifact is corrupt, incomplete or of a newer format."""


class StoreError(NearfarError):
    """A name means no model, or the store of models cannot be changed."""


class SnapshotError(NearfarError):
    """A snapshot of the cache cannot be written, is damaged, or belongs to another model or cache."""


class DeviceError(NearfarError):
    """The device lacks a feature or memory that the artifact needs."""


class DeviceLost(DeviceError):
    """The driver gave the device up, and everything on it is gone. An engine opens it anew and computes
    its requests again.
    """


class OutOfMemory(DeviceError):
    """The device or the host has no memory left for what was asked. An engine goes on with smaller steps."""


class RequestError(NearfarError):
    """A request asks for something impossible: `param` names the parameter, `code` is for programs."""

    code: str = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code, by which clients shorten a conversation and ask again."""


class ContextError(RequestError):
    """A text of so many tokens that does not fit the context, the answer included where one is wanted.

    OpenAI's words begin the message: LiteLLM knows the error by them, and not by its code.
    """

    code = CONTEXT_CODE

    def __init__(
        self, tokens: int, context: int, param: str, *, what: str = "prompt", advice: str = ""
    ) -> None:
        answer = ", the answer included" if what == "prompt" else ""
        super().__init__(
            f"this model's maximum context length is {context} tokens{answer}, but the {what} has {tokens} "
            f"tokens: shorten it{advice}",
            param,
        )


class OverloadError(NearfarError):
    """The server has as much to do as it may take on; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(NearfarError):
    """The engine died or hung while the request was under way."""
