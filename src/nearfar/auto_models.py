"""The model name `auto`: chooses between a small and a large upstream model by the routing policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import EngineRequest
from nearfar.fallback_server.engines.choosing import AutoModels, Standing
from nearfar.fallback_server.http.json_words import read_json
from nearfar.routing.decision import decide
from nearfar.routing.difficulty.score import messages_to_prompt, score
from nearfar.routing.policy import Policy
from nearfar.routing.types import FEATURES, CloudState, DeviceState, RouteRequest

UNKNOWN = 2**31 - 1
"""Context length in tokens of a model whose server does not tell it."""


def auto_models(models: str, policy: Path | None) -> AutoModels:
    """Read `--auto SMALL,LARGE` and the policy's file. Raises RequestError where either is invalid."""
    small, comma, large = models.partition(",")
    if not (small and comma and large) or "," in large or small == large:
        raise RequestError(f"--auto takes two different models as SMALL,LARGE, not {models!r:.100}")
    return AutoModels(small, large, Chooser(_policy(policy)))


def _policy(path: Path | None) -> Policy:
    if path is None:
        return Policy()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"--auto-policy {path} cannot be read: {error}") from error
    try:
        policy = Policy.parse(read_json(data))
    except ValueError as error:
        raise RequestError(f"--auto-policy {path} is not valid JSON: {error}") from error
    except RequestError as error:
        raise RequestError(f"--auto-policy {path}: {error}", error.param) from error
    if policy.router is not None:
        raise RequestError(
            f"--auto-policy {path} has a router, which looks at a model on the device, and both models are "
            "at upstreams: remove router",
            "router",
        )
    return policy


class Chooser:
    """Chooses by `nearfar.routing.decision`, in which the small model stands for the device and the large one
    for the cloud.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, request: EngineRequest, tokens: int, small: Standing, large: Standing) -> bool | None:
        """Whether the large model answers; None where neither can.

        Lengths are estimates: where they leave no model, the one with the longer context answers, or says
        that the prompt is too long.
        """
        asked = RouteRequest(
            tokens,
            request.max_tokens or self._policy.default_max_tokens,
            difficulty=score(_prompt(request)),
        )
        anyhow = [(replace(small, context=0), large), (small, replace(large, context=0))]
        if (large.context or UNKNOWN) >= (small.context or UNKNOWN):
            anyhow.reverse()
        found = (self._chosen(asked, *standings) for standings in ((small, large), *anyhow))
        return next((each for each in found if each is not None), None)

    def _chosen(self, asked: RouteRequest, small: Standing, large: Standing) -> bool | None:
        """Whether the policy chooses the large model; None where it chooses none."""
        device = DeviceState(
            small.up, None if small.up else "down", small.context or UNKNOWN, UNKNOWN, FEATURES,
        )  # fmt: skip
        cloud = CloudState(
            large.up, None if large.up else "down", context=large.context or None, features=FEATURES
        )
        route = decide(asked, device, cloud, self._policy).route
        return None if route is None else route == "cloud"


def _prompt(request: EngineRequest) -> str:
    if request.chat:
        return messages_to_prompt(request.messages)
    return "\n".join(prompt for prompt in request.prompts if isinstance(prompt, str))
