"""The Helm chart: Helm's own SDK renders it for several values, and the result fits Kubernetes' schemas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paths import ROOT

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

CHART = str(ROOT / "deploy" / "helm" / "nearfar")
KEYS = {"keys": {"existingSecret": "keys"}}
LARGE = {"name": "large", "model": "Qwen/Qwen3-8B"}
ALONE = {"autoscaling": {"kind": "none"}}
SELECTED = {"podSelector": {"matchLabels": {"a": "b"}}}
OF_OPERATORS = ("ScaledObject", "ServiceMonitor")
"""Kinds whose schemas belong to operators, not to Kubernetes."""

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "secrets of its own": {"keys": {"file": "[k]\n"}, "upstreamKey": {"value": "secret"}},
    "servers that run": {
        "vllm": {"enabled": False}, "upstreams": ["http://vllm:8000"], "upstreamPods": [SELECTED], **ALONE,
    },
    "an HPA": {"autoscaling": {"kind": "hpa"}, "upstreamKey": {"existingSecret": "upstream"}},
    "models": {
        "models": [{**LARGE, "gpus": 2, "tensorParallel": 2, "args": ["--x"]}],
        "vllm": {
            "lora": {"enabled": True, "modules": ["a=/m/a"]}, "huggingFace": {"value": "t"},
            "extraEnv": [{"name": "A", "value": "b"}], "nodeSelector": {"gpu": "1"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    },
    "closed": {
        "networkPolicy": {"clients": [SELECTED], "download": False}, "serviceMonitor": {"enabled": False},
        "service": {"type": "LoadBalancer", "port": 8080}, **ALONE,
    },
    "a store": {
        "networkPolicy": {"enabled": False}, "limitsStore": {"existingSecret": "redis", "pods": [SELECTED]},
    },
}  # fmt: skip


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything that the chart makes."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render({**KEYS, **values}, name="llm", namespace="prod")
    return [made for text in files.values() for made in yaml.safe_load_all(text) if made]


def named(made: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(each for each in made if (each["kind"], each["metadata"]["name"]) == (kind, name))


def arguments(made: dict[str, Any]) -> list[str]:
    found: list[str] = made["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_helm_finds_no_fault() -> None:
    found = helm.lint(CHART)
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_it_makes_fits_the_schemas(values: dict[str, Any]) -> None:
    made = rendered(values)
    assert len({(each["kind"], each["metadata"]["name"]) for each in made}) == len(made) > 3
    for each in made:
        if each["kind"] not in OF_OPERATORS:
            kubernetes.validate(each, kubernetes.latest_version(), strict=True)


def test_a_model_takes_its_own_settings_also_false_ones_and_empty_ones() -> None:
    own = {
        **LARGE,
        "priorities": False,
        "replicas": 0,
        "args": [],
        "image": {"tag": "v1"},
        "lora": {"enabled": False},
    }
    made = rendered({"models": [own], "vllm": {"lora": {"enabled": True, "modules": ["a=b"]}}})
    large = named(made, "StatefulSet", "llm-nearfar-vllm-large")
    assert arguments(large) == ["Qwen/Qwen3-8B", "--port=8000"]
    assert large["spec"]["replicas"] == 0
    assert large["spec"]["template"]["spec"]["containers"][0]["image"] == "vllm/vllm-openai:v1"


def test_nearfar_knows_every_pod_of_a_model() -> None:
    for own, count in (({}, 3), ({"replicas": 2}, 2), ({"replicas": 0}, 0)):
        made = rendered({"models": [{**LARGE, **own}], "vllm": {"replicas": 3}, **ALONE})
        known = [
            each for each in arguments(named(made, "Deployment", "llm-nearfar")) if "-vllm-large-" in each
        ]
        assert len(known) == count == named(made, "StatefulSet", "llm-nearfar-vllm-large")["spec"]["replicas"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keys": {}}, "give keys.file or keys.existingSecret"),
        ({"models": [{"name": "large"}]}, "each of models needs a name and a model"),
        ({"vllm": {"tensorParallel": 2}}, "tensorParallel is 2, but gpus is 1"),
        ({"models": [{**LARGE, "gpus": 4, "tensorParallel": 2}]}, "tensorParallel is 2, but gpus is 4"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm.HelmRenderError, match=words):
        rendered(values)
