"""The static server behind `nearfar web`."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearfar.cli import typer_app
from nearfar.cli.page_server import PageServer, Site, open_server, origin_of
from nearfar.cli.web import for_browsers, offer
from nearfar.edge_runtime.artifact.finder import find_artifact
from nearfar.errors import ArtifactError, NearfarError
from tests.shared_data import shared_data
from tests.support.toy_artifact import copy_artifact, write_toy_artifact


@pytest.fixture
def site(tmp_path: Path) -> Site:
    page, artifact = tmp_path / "page", tmp_path / "artifact"
    (artifact / "weights").mkdir(parents=True)
    page.mkdir()
    (page / "index.html").write_text("<!doctype html>hello")
    (page / "page.js").write_text("export {};")
    (artifact / "manifest.json").write_text(json.dumps({"target": "webgpu"}))
    (artifact / "weights" / "00000.bin").write_bytes(bytes(range(256)) * 5000)
    (artifact / "k.wgsl").write_text("// shader")
    (tmp_path / "secret.txt").write_text("secret")
    return Site(page, artifact)


@contextmanager
def serving(site: Site) -> Iterator[PageServer]:
    with open_server("127.0.0.1", 0, site) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def server(site: Site) -> Iterator[PageServer]:
    with serving(site) as running:
        yield running


def ask(server: PageServer, method: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    return response, response.read()


@pytest.mark.parametrize(
    ("path", "mime"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/index.html", "text/html; charset=utf-8"),
        ("/?prompt=a%2Fb", "text/html; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/artifact/manifest.json", "application/json"),
        ("/artifact/k.wgsl", "text/wgsl; charset=utf-8"),
        ("/artifact/weights/00000.bin", "application/octet-stream"),
    ],
)
def test_files_come_with_their_type_and_isolation(server: PageServer, path: str, mime: str) -> None:
    response, body = ask(server, "GET", path)
    assert response.status == 200
    assert response.getheader("Content-Type") == mime
    assert response.getheader("Cross-Origin-Opener-Policy") == "same-origin"
    assert response.getheader("Cross-Origin-Embedder-Policy") == "require-corp"
    head, nothing = ask(server, "HEAD", path)
    assert (head.getheader("Content-Length"), nothing) == (str(len(body)), b"")


def test_the_bytes_arrive_whole(server: PageServer) -> None:
    assert ask(server, "GET", "/artifact/weights/00000.bin")[1] == bytes(range(256)) * 5000


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/artifact/../../secret.txt",
        "/artifact/%2e%2e/%2e%2e/secret.txt",
        "/artifact/..%2f..%2fsecret.txt",
        "/artifact/..\\..\\secret.txt",
        "/artifact//etc/passwd",
        "//etc/passwd",
        "/artifact/",
        "/artifact/weights",
        "/artifact/k.wgsl%00.bin",
        "/absent",
    ],
)
def test_nothing_outside_the_two_folders_is_served(server: PageServer, path: str) -> None:
    response, body = ask(server, "GET", path)
    assert response.status == 404
    assert b"secret" not in body


def test_a_symbolic_link_does_not_lead_out(server: PageServer, site: Site, tmp_path: Path) -> None:
    (site.artifact / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert ask(server, "GET", "/artifact/link.txt")[0].status == 404


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """An artifact as Hugging Face's cache stores it: a folder of links to files that are named by
    their hash.
    """
    blobs, folder = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "1f2e"
    files = {
        "manifest.json": json.dumps(
            {
                "target": "webgpu",
                "weights": {"shards": [{"file": "weights/00000.bin"}]},
                "programs": [
                    {
                        "functions": {"step": {"1": {"plan": "plans/step.1.json"}}},
                        "kernels": {"k": {"file": "k.wgsl"}},
                    }
                ],
                "tokenizer": {"files": [{"file": "tokenizer/tokenizer.json"}]},
                "license": {"file": "../../../secret.txt"},
            }
        ),
        "weights/00000.bin": "weights",
        "plans/step.1.json": "{}",
        "k.wgsl": "// shader",
        "tokenizer/tokenizer.json": "{}",
        "unlisted.txt": "unlisted",
    }
    blobs.mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_text(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        up = "/".join([".."] * (2 + name.count("/")))
        (folder / name).symlink_to(f"{up}/blobs/{number}")
    return folder


def test_an_artifact_of_links_is_served_as_its_manifest_lists_it(snapshot: Path, site: Site) -> None:
    with serving(Site(site.page, for_browsers(snapshot))) as server:
        for name in (
            "manifest.json",
            "weights/00000.bin",
            "plans/step.1.json",
            "k.wgsl",
            "tokenizer/tokenizer.json",
        ):
            response, body = ask(server, "GET", f"/artifact/{name}")
            assert (response.status, body) == (200, (snapshot / name).read_bytes()), name
        for name in ("unlisted.txt", "../../../secret.txt", "%2e%2e/%2e%2e/%2e%2e/secret.txt", "blobs/0"):
            assert ask(server, "GET", f"/artifact/{name}")[0].status == 404, name
        # The target of a link is resolved when the server starts.
        (snapshot / "k.wgsl").unlink()
        (snapshot / "k.wgsl").symlink_to(snapshot.parents[2] / "secret.txt")
        (snapshot / "new.txt").symlink_to(snapshot.parents[2] / "secret.txt")
        assert ask(server, "GET", "/artifact/k.wgsl")[1] == b"// shader"
        assert ask(server, "GET", "/artifact/new.txt")[0].status == 404


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """The OUT folder of a build for cpu, webgpu and wasm."""
    for name in ("cpu", "webgpu", "wasm"):
        (tmp_path / "out" / name / "kernels").mkdir(parents=True)
        manifest = {"target": name, "library": "kernels/model.wasm"}
        (tmp_path / "out" / name / "manifest.json").write_text(json.dumps(manifest))
        (tmp_path / "out" / name / "kernels" / "model.wasm").write_bytes(b"\0asm")
    return tmp_path / "out"


def test_artifacts_for_browsers_are_served_side_by_side(several: Path, site: Site) -> None:
    with serving(Site(site.page, for_browsers(several))) as server:
        for name in ("webgpu", "wasm"):
            assert json.loads(ask(server, "GET", f"/artifact/{name}/manifest.json")[1])["target"] == name
        response, body = ask(server, "GET", "/artifact/wasm/kernels/model.wasm")
        assert (response.getheader("Content-Type"), body) == ("application/wasm", b"\0asm")
        listed = {"format": "nearfar-targets", "targets": ["wasm", "webgpu"]}
        assert json.loads(ask(server, "GET", "/artifact/manifest.json")[1]) == listed
        for path in ("cpu/manifest.json", "webgpu/../cpu/manifest.json", "xmanifest.json", "wasm", "wasm/"):
            assert ask(server, "GET", f"/artifact/{path}")[0].status == 404, path


def test_several_targets_of_several_models_are_listed_by_folder(several: Path, site: Site) -> None:
    artifacts = {"one/wasm": several / "wasm", "one/webgpu": several / "webgpu", "two": several / "wasm"}
    with serving(Site(site.page, artifacts)) as server:
        listed = json.loads(ask(server, "GET", "/artifact/one/manifest.json")[1])
        assert listed == {"format": "nearfar-targets", "targets": ["wasm", "webgpu"]}
        assert json.loads(ask(server, "GET", "/artifact/two/manifest.json")[1])["target"] == "wasm"
        assert ask(server, "GET", "/artifact/three/manifest.json")[0].status == 404


def test_an_artifact_for_browsers_alone_is_served_as_the_artifact(several: Path, site: Site) -> None:
    for name in ("webgpu", "wasm"):
        for path in (several / name, several):
            with serving(Site(site.page, for_browsers(path))) as server:
                asked = "manifest.json" if path == several / name else f"{name}/manifest.json"
                assert json.loads(ask(server, "GET", f"/artifact/{asked}")[1])["target"] == name
    shutil.rmtree(several / "webgpu")
    with serving(Site(site.page, for_browsers(several))) as server:
        assert json.loads(ask(server, "GET", "/artifact/manifest.json")[1])["target"] == "wasm"


def test_several_models_are_served_with_the_list_to_choose_from(tmp_path: Path, site: Site) -> None:
    toy = write_toy_artifact(tmp_path / "toy", shared_data("models", "classics-7M"), [1, 2, 3])
    again = copy_artifact(toy, tmp_path / "again")
    offered = offer([toy / "webgpu", again])
    with serving(Site(site.page, offered.artifacts, models=offered.models)) as server:
        models = json.loads(ask(server, "GET", "/models.json")[1])["models"]
        assert [model["name"] for model in models] == ["toy none", "toy none (2)"]
        for model in models:
            manifest = json.loads(ask(server, "GET", f"/{model['model']}manifest.json")[1])
            parts = (*manifest["weights"]["shards"], *manifest["tokenizer"]["files"])
            assert model["bytes"] == sum(part["bytes"] for part in parts)
            assert model["needs"] == {"backends": ["webgpu"]}
            assert (model["contextLength"], model["license"]) == (1024, "Apache-2.0")
            assert ask(server, "GET", f"/{model['model']}{parts[0]['file']}")[0].status == 200


def test_one_model_needs_no_list_and_is_not_opened(site: Site) -> None:
    """The page reports what is wrong with the model."""
    assert isinstance(site.artifact, Path)
    offered = offer([site.artifact])
    with serving(Site(site.page, offered.artifacts, models=offered.models)) as server:
        assert json.loads(ask(server, "GET", "/models.json")[1]) == {"models": []}
        assert ask(server, "GET", "/artifact/manifest.json")[0].status == 200


def test_a_library_that_is_a_link_is_served(several: Path, tmp_path: Path, site: Site) -> None:
    library = several / "wasm" / "kernels" / "model.wasm"
    library.rename(tmp_path / "blob")
    library.symlink_to(tmp_path / "blob")
    with serving(Site(site.page, for_browsers(several / "wasm"))) as server:
        assert ask(server, "GET", "/artifact/kernels/model.wasm")[1] == b"\0asm"


def test_the_policy_lets_webassembly_compile_and_nothing_be_evaluated(server: PageServer) -> None:
    policy = (ask(server, "GET", "/")[0].getheader("Content-Security-Policy") or "").split("; ")
    assert "script-src 'self' 'wasm-unsafe-eval'" in policy
    assert not any("'unsafe-eval'" in rule for rule in policy)


def test_a_refusal_is_as_guarded_as_the_page(server: PageServer) -> None:
    page = ask(server, "GET", "/")[0]
    for method, path in (("GET", "/absent"), ("HEAD", "/absent"), ("POST", "/")):
        response = ask(server, method, path)[0]
        assert response.status in (404, 501)
        for name in ("Content-Security-Policy", "X-Content-Type-Options", "Cross-Origin-Resource-Policy"):
            assert response.getheader(name) == page.getheader(name) is not None


@pytest.mark.parametrize(
    "host", ["localhost:8080", "127.0.0.1", "LOCALHOST", "[::1]:80", "localhost.", "localhost.:80"]
)
def test_this_machines_names_are_answered(server: PageServer, host: str) -> None:
    assert ask(server, "GET", "/", Host=host)[0].status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_another_name_for_this_machine_is_not_answered(server: PageServer, host: str) -> None:
    """A page of another site whose name resolves to this machine could read the answer as its own."""
    for path in ("/", "/config.json", "/artifact/manifest.json"):
        response, body = ask(server, "GET", path, Host=host)
        assert response.status == 421
        assert b"--allowed-host" in body
        assert b"hello" not in body


def test_a_name_that_was_allowed_is_answered(site: Site) -> None:
    site.hosts = ("Models.example",)
    with serving(site) as server:
        assert ask(server, "GET", "/", Host="models.example:443")[0].status == 200
        assert ask(server, "GET", "/", Host="evil.example")[0].status == 421
    with open_server("0.0.0.0", 0, Site(site.page, site.artifact)) as reached_by_others:
        assert reached_by_others.answers_for("gpu-box.example:8080")


@pytest.mark.parametrize("cloud", [None, "http://gpu.example:8000/v1"])
def test_the_page_is_told_of_its_cloud_and_may_reach_it(
    server: PageServer, site: Site, cloud: str | None
) -> None:
    site.cloud = cloud
    response, body = ask(server, "GET", "/config.json")
    assert json.loads(body) == {"cloud": cloud}
    assert response.getheader("Content-Type") == "application/json"
    policy = (ask(server, "GET", "/")[0].getheader("Content-Security-Policy") or "").split("; ")
    connect = next(rule for rule in policy if rule.startswith("connect-src")).split()[1:]
    local = ["'self'", "https:", "http://localhost:*", "http://127.0.0.1:*"]
    assert connect == [*local, *(["http://gpu.example:8000"] if cloud else [])]


def test_what_is_no_address_cannot_become_part_of_the_policy() -> None:
    assert origin_of("https://Host.example/v1") == "https://host.example"
    for wrong in (
        "host:8000",
        "ftp://host",
        "http://",
        "http://a;b/",
        "http://a b/",
        "http://*",
        "http://host:x/",
    ):
        with pytest.raises(NearfarError, match="not the address"):
            origin_of(wrong)


def test_only_reading_is_allowed(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, method, "/")[0].status == 501


def test_an_unchanged_file_is_not_sent_again(server: PageServer, site: Site) -> None:
    first, _ = ask(server, "GET", "/artifact/k.wgsl")
    etag = first.getheader("ETag") or ""
    again, body = ask(server, "GET", "/artifact/k.wgsl", If_None_Match=etag)
    assert (again.status, body) == (304, b"")
    (site.artifact / "k.wgsl").write_text("// another shader")
    changed, body = ask(server, "GET", "/artifact/k.wgsl", If_None_Match=etag)
    assert (changed.status, body) == (200, b"// another shader")


def test_a_taken_port_gives_the_next_free_one(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with open_server("127.0.0.1", port, site) as server:
            assert port < server.server_port < port + 20
        with pytest.raises(NearfarError, match=f"{port} to {port} are all taken"):
            open_server("127.0.0.1", port, site, attempts=1)


def test_an_address_of_another_machine_is_refused(site: Site) -> None:
    with pytest.raises(NearfarError, match=r"cannot listen on 203\.0\.113\.1"):
        open_server("203.0.113.1", 0, site)


def artifact_for(folder: Path, target: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"target": target}))
    return folder


def test_the_artifact_is_found_in_a_builds_out_folder(tmp_path: Path) -> None:
    artifact_for(tmp_path / "cpu", "cpu")
    inner = artifact_for(tmp_path / "webgpu", "webgpu")
    assert for_browsers(tmp_path) == for_browsers(inner) == inner


def test_a_missing_webgpu_artifact_is_explained_as_it_is_for_every_command(tmp_path: Path) -> None:
    for command in (["web", "--no-open"], ["inspect"], ["run", "Hello", "--device", "webgpu"]):
        said = CliRunner().invoke(typer_app, [command[0], str(tmp_path), *command[1:]])
        assert (
            "holds no artifact (no manifest.json there or one level below). Make one with nearfar build"
            in str(said.exception)
        )
    cpu = artifact_for(tmp_path / "cpu", "cpu")
    for path in (tmp_path, cpu):
        for command, words in (
            (
                ["web", "--no-open"],
                "holds artifacts only for cpu, and browsers run those for webgpu and wasm",
            ),
            (["run", "Hello", "--device", "webgpu"], "holds no artifact for webgpu, only for cpu. Build it"),
        ):
            said = CliRunner().invoke(typer_app, [command[0], str(path), *command[1:]])
            assert words in str(said.exception)
            assert "nearfar build --target webgpu" in str(said.exception)
    artifact_for(tmp_path / "other", "cpu")
    with pytest.raises(ArtifactError, match=r"two artifacts for cpu, cpu and other: name the one"):
        find_artifact(tmp_path, "cpu")
    (cpu / "manifest.json").write_text("[]")
    with pytest.raises(ArtifactError, match="is not a manifest"):
        for_browsers(cpu)


def test_the_command_names_its_address_and_ctrl_c_ends_it_cleanly(site: Site) -> None:
    program = """
import sys
from pathlib import Path
from nearfar.cli import app, web
page = Path(sys.argv.pop())
web.find_page = lambda: page
app()
"""
    command = [
        sys.executable,
        "-c",
        program,
        "web",
        str(site.artifact),
        "--no-open",
        "--port",
        "0",
        str(site.page),
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        assert "http://127.0.0.1:" in running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, complaints = running.communicate(timeout=20)
    assert running.returncode == 0
    assert complaints == ""


def test_the_rest_of_a_file_is_given_to_whoever_resumes(server: PageServer) -> None:
    path, content = "/artifact/weights/00000.bin", bytes(range(256)) * 5000
    whole, body = ask(server, "GET", path)
    assert (whole.status, whole.getheader("Accept-Ranges"), body) == (200, "bytes", content)
    rest, body = ask(server, "GET", path, Range="bytes=1279000-")
    assert (rest.status, body) == (206, content[1279000:])
    assert rest.getheader("Content-Range") == "bytes 1279000-1279999/1280000"
    assert rest.getheader("ETag") == whole.getheader("ETag")


@pytest.mark.parametrize(
    "headers",
    [
        {"Range": "bytes=1280000-"},
        {"Range": "bytes=5-9"},
        {"Range": "bytes=-5"},
        {"Range": "lines=5-"},
        {"Range": "bytes=5-", "If_Range": '"another"'},
    ],
)
def test_any_other_range_is_answered_with_the_whole_file(server: PageServer, headers: dict[str, str]) -> None:
    response, body = ask(server, "GET", "/artifact/weights/00000.bin", **headers)
    assert (response.status, len(body)) == (200, 1280000)
