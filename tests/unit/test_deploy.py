"""The files under deploy/ describe the server correctly, and everything that they refer to exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main

from nearfar.cli.serve import serve
from nearfar.fallback_server.backend import BackendStats
from nearfar.fallback_server.engines.base import TokenUsage
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.prices import Price
from nearfar.fallback_server.serve import ServeOptions
from tests.support.servers import RunningServer, tiny_engine

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "nearfar"
TEMPLATES = sorted(CHART.glob("templates/*"))
ACTION = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}", re.DOTALL)


def exported() -> dict[str, set[str]]:
    """Names of all series that the server exports, with their labels."""
    metrics = Metrics(lambda: ["m"], lambda: BackendStats(*([0] * 10), memory=1), {"m": Price(1, 1, 1)})
    metrics.of("m").used("k", TokenUsage(1), {"queue": 1.0})
    metrics.of("m").finished("stop")
    metrics.of("m").outcome("ok")
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([a-z0-9_:]+)\{(.*?)\} ", metrics.text().decode(), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return found


def queried(text: str) -> set[str]:
    return set(re.findall(r"nearfar:\w+", text))


def values() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return made


def test_the_dashboard_and_the_autoscaler_ask_for_metrics_that_exist() -> None:
    series = exported()
    board = json.loads((DEPLOY / "grafana" / "nearfar.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) >= 15
    for expression in expressions:
        names = queried(expression)
        assert names
        assert names <= series.keys()
        for group in re.findall(r"by \((\w+)\)", expression):
            assert any(group in series[name] for name in names)
    shown = {
        re.sub(r"_(bucket|sum|count|total)$", "", name) for text in expressions for name in queried(text)
    }
    known = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in series}
    assert shown == known
    assert queried((CHART / "templates" / "_helpers.tpl").read_text()) == {
        "nearfar:num_requests_running",
        "nearfar:num_requests_waiting",
    }
    assert queried(board["templating"]["list"][1]["query"]["query"]) <= series.keys()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_value_that_the_chart_uses_is_there_and_every_value_is_used() -> None:
    used = set()
    for file in TEMPLATES:
        text = file.read_text(encoding="utf-8")
        used |= set(re.findall(r"\.Values\.([\w.]+)", text))
        used |= {f"autoscaling.{name}" for name in re.findall(r"\$scaling\.(\w+)", text)}
    for path in used:
        node: Any = values()
        for part in path.split("."):
            assert isinstance(node, dict), path
            assert part in node, f"{path} is not in values.yaml"
            node = node[part]

    def leaves(node: Any, path: str) -> list[str]:
        if not isinstance(node, dict) or not node or any(path == one for one in used):
            return [path]
        return [
            leaf for key, child in node.items() for leaf in leaves(child, f"{path}.{key}" if path else key)
        ]

    assert [leaf for leaf in leaves(values(), "") if leaf not in used] == []


def test_the_blocks_of_the_templates_close_and_what_they_include_is_defined() -> None:
    defined, included = set(), set()
    for file in TEMPLATES:
        text, depth = file.read_text(encoding="utf-8"), 0
        assert text.count("{{") == len(ACTION.findall(text)), file
        for action in ACTION.findall(text):
            assert action.count("(") == action.count(")"), action
            word = action.split()[0]
            depth += word in ("if", "range", "with", "define")
            depth -= word == "end"
            assert depth >= 0, f"{file}: {action}"
            assert word not in ("else",) or depth > 0, f"{file}: {action}"
            included |= set(re.findall(r'include "([\w.]+)"', action))
            defined |= set(re.findall(r'define "([\w.]+)"', action))
        assert depth == 0, file
    assert included == defined


@pytest.mark.parametrize(
    "file", [file for file in TEMPLATES if file.suffix == ".yaml"], ids=lambda file: file.name
)
def test_the_templates_are_yaml_around_their_actions(file: Path) -> None:
    """Lines that are only a template action are removed; actions inside a line become a word. The rest must
    be Kubernetes objects.
    """
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if re.fullmatch(r"\s*\{\{.*\}\}", line):
            continue
        line = re.sub(r"\{\{-[^}]*nindent[^}]*\}\}", "{word: word}", line)
        kept.append(ACTION.sub("1", line))
    documents = [
        document
        for document in re.split(r"^(?:---$|(?=# The rule))", "\n".join(kept), flags=re.MULTILINE)
        if document.strip()
    ]
    assert documents
    for document in documents:
        made = yaml.safe_load(document)
        assert {"apiVersion", "kind", "metadata"} <= made.keys()


def serving() -> typer.Typer:
    app = typer.Typer()
    app.command()(serve)
    return app


def options_of_serve() -> set[str]:
    return {name for parameter in typer.main.get_command(serving()).params for name in parameter.opts}


def test_what_is_started_has_the_options_that_it_is_given() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    command = services["nearfar"]["command"]
    front = (CHART / "templates" / "front.yaml").read_text(encoding="utf-8")
    given = {word for word in command if word.startswith("--")} | set(re.findall(r"- (--[\w-]+)", front))
    assert given <= options_of_serve()
    assert "- --fronts={{ .Values.replicas }}" in front  # the number of fronts that share the keys
    assert "- --limits-store={{ . }}" in front
    variable = next(
        parameter.envvar
        for parameter in typer.main.get_command(serving()).params
        if parameter.name == "limits_store"
    )
    assert f"- name: {variable}\n" in front
    assert {"url", "existingSecret", "port", "pods"} == values()["limitsStore"].keys()
    addresses = [word for word in command if word.startswith("http://")]
    assert {address.removeprefix("http://").removesuffix(":8000") for address in addresses} == {
        "vllm-1",
        "vllm-2",
    }
    for service in services.values():
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        assert set(service.get("networks", ())) <= compose["networks"].keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "compose" / source).exists(), volume
    drain = int(command[command.index("--drain") + 1])
    assert int(services["nearfar"]["stop_grace_period"].removesuffix("s")) > drain
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text(encoding="utf-8"))[
        "scrape_configs"
    ]
    targets = {
        target.split(":")[0] for job in scraped for one in job["static_configs"] for target in one["targets"]
    }
    assert targets <= services.keys()
    assert {Path(job["authorization"]["credentials_file"]).name for job in scraped} <= set(
        services["prometheus"]["secrets"]
    )


@pytest.mark.parametrize(
    ("name", "builder", "configs"),
    [
        ("serve.yaml", "build_openai_app", lambda args: args["llm_configs"]),
        (
            "serve-pd.yaml",
            "build_pd_openai_app",
            lambda args: [args["prefill_config"], args["decode_config"]],
        ),
    ],
)
def test_ray_serve_llm_gets_fields_that_it_has(name: str, builder: str, configs: Any) -> None:
    """Ray's own classes need packages that are not installed here, so the fields are read from
    their source.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed")
    folder = Path(spec.origin).parent
    deployed = yaml.safe_load((DEPLOY / "ray" / name).read_text(encoding="utf-8"))
    (application,) = deployed["applications"]
    assert application["import_path"] == f"ray.serve.llm:{builder}"
    assert f"def {builder}(" in (folder / "serve" / "llm" / "__init__.py").read_text(encoding="utf-8")
    source = folder / "llm" / "_internal" / "serve" / "core" / "configs" / "llm_config.py"
    fields = set(re.findall(r"^    (\w+): ", source.read_text(encoding="utf-8"), re.MULTILINE))
    for config in configs(application["args"]):
        assert set(config) <= fields
        assert set(config["model_loading_config"]) <= fields


def test_an_artifact_in_a_container_is_started_as_the_page_says() -> None:
    """The image's user can write to NEARFAR_HOME, and the mounted path is the one in the command."""
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    user = re.findall(r"^USER (\d+)$", image, re.MULTILINE)[0]
    home = re.findall(r"NEARFAR_HOME=(\S+)", image)[0]
    assert re.search(rf"useradd --uid {user} .*install -d -o {user} {home}$", image, re.MULTILINE)
    page = (DEPLOY.parent / "docs" / "server.md").read_text(encoding="utf-8")
    section = page.split("## In a container\n")[1].split("\n## ")[0]
    lines = section.split("```")[1].replace("\\\n", "").splitlines()
    built, started = (shlex.split(line) for line in lines if line.startswith(("docker build", "docker run")))
    extras = built[built.index("--build-arg") + 1].removeprefix("EXTRAS=").split(",")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    tag = built[built.index("-t") + 1]
    at = started.index(tag)
    given, command = started[:at], started[at + 1 :]
    mounted = {volume.split(":")[1] for name, volume in pairwise(given) if name == "-v"}
    assert mounted == {command[1], command[command.index("--keys") + 1], home}
    assert given[given.index("-e") + 1] == "NEARFAR_TRUST=1"
    assert {word for word in command if word.startswith("--")} <= options_of_serve()
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert int(given[given.index("--stop-timeout") + 1]) > ServeOptions().drain


def test_the_health_check_wants_a_real_token(tmp_path: Path) -> None:
    probe = [sys.executable, str(DEPLOY / "compose" / "probe.py")]
    key = tmp_path / "key"
    key.write_text("any\n")
    server = RunningServer(lambda: tiny_engine(tmp_path / "model"))
    try:
        done = subprocess.run(
            [*probe, server.address, str(key)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert server.run(lambda: stats(server)).generated_tokens == 1
    finally:
        server.close()
    done = subprocess.run([*probe, server.address], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "generates nothing" in done.stderr


async def stats(server: RunningServer) -> BackendStats:
    return server.engine.stats()


def test_the_entrypoint_reads_the_key_from_its_file(tmp_path: Path) -> None:
    nearfar = tmp_path / "nearfar"
    nearfar.write_text('#!/bin/sh\necho "$NEARFAR_UPSTREAM_KEY|$*"\n')
    nearfar.chmod(0o755)
    (tmp_path / "key").write_text("secret\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NEARFAR_UPSTREAM_KEY_FILE": str(tmp_path / "key")}
    done = subprocess.run(
        [DEPLOY / "entrypoint.sh", "serve", "http://x"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout == "secret|serve http://x\n"
