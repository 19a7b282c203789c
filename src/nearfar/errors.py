"""The errors nearfar raises on purpose. Each message says what was wrong, with which value, and what to
do.
"""


class NearfarError(Exception):
    """Base of all errors with a message meant for the user."""


class NearfarWarning(UserWarning):
    """A warning for the user about something that does not stop the work."""


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
    """The driver has lost the device with everything on it. An engine opens it again and recomputes its
    requests.
    """


class OutOfMemory(DeviceError):
    """The device or the host has too little memory for a request. An engine continues with smaller steps."""


class RequestError(NearfarError):
    """A request asks for something impossible: `param` names the parameter, `code` is for programs."""

    code: str = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code, by which clients shorten a conversation and ask again."""


class ContextError(RequestError):
    """A text that does not fit the context, together with an answer where one is wanted.

    The message has OpenAI's words and Anthropic's ("prompt is too long"): LiteLLM recognizes the error by the
    former and LangChain by the latter, not by the code. `place`: where the request has the text, if `param`
    is a list.
    """

    code = CONTEXT_CODE

    def __init__(
        self,
        tokens: int,
        context: int,
        param: str,
        *,
        what: str = "prompt",
        advice: str = "",
        place: str = "",
    ) -> None:
        answer = ", the answer included" if what == "prompt" else ""
        begins = f"{place}: " if place not in ("", param) else ""
        super().__init__(
            f"{begins}this model's maximum context length is {context} tokens{answer}, but the {what} has "
            f"{tokens} tokens: the {what} is too long, shorten it{advice}",
            param,
        )


class OverloadError(NearfarError):
    """The server has as many requests as it accepts; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineError(NearfarError):
    """The engine died or hung while the request was under way."""
