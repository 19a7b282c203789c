"""OpenAI's request parameters, and their conversion to sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from enum import Enum
from typing import Any, TypedDict, cast

from nearfar.edge_runtime.engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.openai.context import ContextPolicy
from nearfar.edge_runtime.openai.formats import grammar_of
from nearfar.edge_runtime.openai.tooling import asked_choice, asked_tools
from nearfar.edge_runtime.tools.asking import ToolChoice
from nearfar.errors import RequestError
from nearfar.format.requests import MAX_CHOICES, MAX_LISTED, MAX_VARIABLES
from nearfar.format.sampling import NOTHING, SamplingDefaults
from nearfar.suggestions import advised


class SampledParams(TypedDict, total=False):
    """Parameters that say how tokens are chosen. None means the default: the artifact's `sampling` value if
    it has one, otherwise OpenAI's.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None


SAMPLING = tuple(SampledParams.__annotations__)


class SharedParams(SampledParams, total=False):
    """Parameters of completions and of responses.

    `model`: the name of the loaded model, or None. `user`: an account for billing; ignored here.
    """

    model: str | None
    user: str | None
    stop: str | Seq[str] | None


class TurnParams(SharedParams, total=False):
    """Parameters of an answer to messages: of a chat completion or a response.

    `context_policy`: a ContextPolicy for this request instead of the engine's. `chat_template_kwargs`:
    variables for the model's chat template, for example `{"enable_thinking": False}`; the template decides
    which of them it uses.
    """

    top_logprobs: int | None
    tools: Seq[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    context_policy: ContextPolicy | None
    chat_template_kwargs: Mapping[str, Any] | None


class CommonParams(SharedParams, total=False):
    """Parameters of chat and plain completions."""

    n: int | None
    max_tokens: int | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    ignore_eos: bool | None
    response_format: Mapping[str, Any] | None
    stream_options: Mapping[str, Any] | None


class ChatParams(TurnParams, CommonParams, total=False):
    """Parameters of chat completions.

    `continue_final_message`: the answer continues the last message, as in vLLM.
    """

    max_completion_tokens: int | None
    logprobs: bool | None
    continue_final_message: bool | None


class CompletionParams(CommonParams, total=False):
    """Parameters of plain completions.

    `echo`: the text begins with the prompt, and `max_tokens` may be 0. `suffix` and `best_of` are accepted
    only with values that change nothing: no suffix, and `best_of` equal to `n`.
    """

    logprobs: int | None
    echo: bool | None
    suffix: str | None
    best_of: int | None


def chat_sampling(params: ChatParams, defaults: SamplingDefaults = NOTHING) -> SamplingParams:
    """Sampling parameters of a chat completion; `defaults` apply to parameters that it does not set."""
    given = _given(cast(dict[str, Any], params), ChatParams)
    logprobs, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if top and not logprobs:
        raise RequestError("top_logprobs needs logprobs=True", "top_logprobs")
    if not isinstance(logprobs, bool):
        raise RequestError(f"logprobs must be true or false, not {logprobs!r}", "logprobs")
    most = given.get("max_completion_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise RequestError(
            f"max_completion_tokens must be a whole number, at least 1, not {most!r:.80}",
            "max_completion_tokens",
        )
    return _sampling(defaults.given | given, most or given.get("max_tokens"), top if logprobs else None)


def completion_sampling(params: CompletionParams, defaults: SamplingDefaults = NOTHING) -> SamplingParams:
    """Sampling parameters of a plain completion; `defaults` apply to parameters that it does not set."""
    given = _given(cast(dict[str, Any], params), CompletionParams)
    if given.get("suffix", "") != "":
        raise RequestError(f"suffix is not supported: leave {given['suffix']!r:.80} out", "suffix")
    best_of = given.get("best_of", 1)
    if isinstance(best_of, bool) or ("best_of" in given and best_of != given.get("n", 1)):
        raise RequestError(f"best_of must equal n, not be {best_of!r:.80}: answers are not ranked", "best_of")
    logprobs = given.get("logprobs")
    if logprobs is not None and not (type(logprobs) is int and 0 <= logprobs <= MAX_TOP_LOGPROBS):
        raise RequestError(
            f"logprobs must be a whole number from 0 to {MAX_TOP_LOGPROBS}, not {logprobs!r:.80}", "logprobs"
        )
    echo = asked_echo(params)
    if echo is not None and logprobs is not None:
        raise unscored_prompt()
    # The engine generates at least one token for each request, although no one reads it here.
    most = 1 if echo is Echo.ALONE else given.get("max_tokens")
    return _sampling(defaults.given | given, most, logprobs)


class Echo(Enum):
    """How an answer repeats its prompt: before its own text, or without any text of its own."""

    BEFORE = "before"
    ALONE = "alone"


def asked_echo(params: CompletionParams) -> Echo | None:
    """How the answers repeat the prompt; None if they do not."""
    if not _flag("echo", params.get("echo")):
        return None
    most = params.get("max_tokens")
    return Echo.ALONE if type(most) is int and most == 0 else Echo.BEFORE


def unscored_prompt() -> RequestError:
    """The error for echo with logprobs, which an engine in this process does not compute."""
    return RequestError(
        "the engine gives no log-probabilities of the prompt, which echo with logprobs asks for: leave one "
        "of them out, or ask nearfar serve, which gives them",
        "echo",
    )


def choices(params: CommonParams) -> int:
    """The number of requested answers; RequestError outside 1…MAX_CHOICES."""
    n = params.get("n")
    if n is None:
        return 1
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n must be a whole number from 1 to {MAX_CHOICES}, not {n!r}", "n")
    return n


def asked_grammar(params: CommonParams) -> Grammar | None:
    """The grammar that every answer must match; None if any text is allowed."""
    return grammar_of(params.get("response_format"))


def tools_and_choice(params: ChatParams) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice]:
    """The tools of a request, and whether an answer may, must or must not call them."""
    choice = asked_choice(params.get("tool_choice"), params.get("parallel_tool_calls"))
    return asked_tools(params.get("tools")), choice


def streams(stream: object) -> bool:
    """Whether the answer comes in chunks."""
    return _flag("stream", stream)


def include_usage(params: CommonParams) -> bool:
    """Whether a stream ends with a chunk of token counts."""
    options = params.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping) or set(options) - {"include_usage"}:
        raise RequestError(
            f"stream_options must be {{'include_usage': …}}, not {options!r:.80}", "stream_options"
        )
    return _flag("stream_options", options.get("include_usage"))


def continues_last(params: ChatParams, messages: Seq[Mapping[str, Any]]) -> bool:
    """Whether the answer continues the last message, which must be the assistant's."""
    goes_on = _flag("continue_final_message", params.get("continue_final_message"))
    if goes_on and messages[-1]["role"] != "assistant":
        raise RequestError("continue_final_message needs a last message of the role assistant", "messages")
    return goes_on


_VARIABLE = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def template_variables(params: ChatParams) -> dict[str, Any]:
    """Variables for the chat template, by name: numbers, texts, booleans, or lists of them."""
    given = params.get("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MAX_VARIABLES:
        raise RequestError(
            f"chat_template_kwargs must be at most {MAX_VARIABLES} variables by name, not {given!r:.80}",
            "chat_template_kwargs",
        )
    for name, value in given.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise RequestError(
                f"chat_template_kwargs has {name!r:.80}, which is not the name of a variable: use up to 64 "
                "letters, digits, _, . and -",
                "chat_template_kwargs",
            )
        listed = value if isinstance(value, list | tuple) else [value]
        if len(listed) > MAX_LISTED or not all(isinstance(one, bool | int | float | str) for one in listed):
            raise RequestError(
                f"chat_template_kwargs.{name} must be a number, a text, a boolean or a list of at most "
                f"{MAX_LISTED} of them, not {value!r:.80}",
                "chat_template_kwargs",
            )
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def check_model(params: CommonParams, loaded: str) -> None:
    """Raise RequestError for another model than the loaded one."""
    if (model := params.get("model")) is not None and model != loaded:
        raise RequestError(f"model {model!r} is not loaded here, but {loaded!r} is: leave model out", "model")


def token_prompt(prompt: object) -> list[int]:
    """A prompt of token ids; the engine checks that the model has them."""
    if not isinstance(prompt, Seq) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise RequestError(f"prompt must be a string or a list of token ids, not {prompt!r:.80}", "prompt")
    return list(prompt)


def _given(params: dict[str, Any], known: Any) -> dict[str, Any]:
    """The parameters that are set; RequestError for unknown names."""
    names = set(known.__annotations__)
    if unknown := sorted(set(params) - names):
        raise RequestError(f"unknown parameter {', '.join(unknown)}{advised(unknown, names)}", unknown[0])
    if not isinstance(params.get("user"), str | None):
        raise RequestError(f"user must be a string, not {params['user']!r}", "user")
    _flag("ignore_eos", params.get("ignore_eos"))
    return {name: value for name, value in params.items() if value is not None}


def _flag(name: str, value: object) -> bool:
    """A boolean parameter; None is false. RequestError for other types."""
    if not isinstance(value, bool | None):
        raise RequestError(f"{name} must be true or false, not {value!r:.80}", name)
    return bool(value)


def _sampling(given: dict[str, Any], max_tokens: Any, logprobs: Any) -> SamplingParams:
    stop = given.get("stop", ())
    if not isinstance(stop, str | list | tuple):
        raise RequestError(f"stop must be a string or a list of strings, not {stop!r}", "stop")
    return SamplingParams(
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logit_bias=_bias(given.get("logit_bias", {})),
        logprobs=logprobs,
        **{name: given[name] for name in (*SAMPLING, "ignore_eos") if name in given},
    )


def _bias(bias: object) -> dict[int, float]:
    """A logit bias by token id; ids may be strings, as in JSON."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {bias!r:.80}", "logit_bias")
    out: dict[int, float] = {}
    for token, value in bias.items():
        try:
            out[int(token) if isinstance(token, str) else token] = value
        except (TypeError, ValueError) as error:
            raise RequestError(f"logit_bias: {token!r} is not a token id", "logit_bias") from error
    return out
