"""Which targets are built for which runner: fake builds, real folders."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from nearfar.build.options import BuildOptions
from nearfar.edge_runtime.devices import device
from nearfar.edge_runtime.found import Found
from nearfar.errors import StoreError
from nearfar.format.adapters import DEVICE_CLASSES, Adapter, AdapterKind
from nearfar.store.entries import Store, WantedEntry
from nearfar.store.known import KNOWN
from nearfar.store.making import Runner, TargetChoice, artifacts_at, elsewhere, for_device
from nearfar.store.naming import GivenOptions, wanted_of
from tests.support import tiny
from tests.support.commands import nearfar
from tests.support.paths import ROOT

BROWSERS = ("webgpu", "wasm")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny.CONFIG))
    return []


def ask(
    checkpoint: Path,
    runner: Runner,
    built: list[tuple[str, ...]],
    classes: list[tuple[str, ...]] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    def build(options: BuildOptions) -> None:
        built.append(options.targets)
        if classes is not None:
            classes.append(options.device_classes)
        programs = [{"device_class": name} for name in options.device_classes]
        for target in options.targets:
            (options.out / target).mkdir(parents=True, exist_ok=True)
            manifest = {"target": target, "programs": programs}
            (options.out / target / "manifest.json").write_text(json.dumps(manifest))

    return artifacts_at(str(checkpoint), runner, build, tell, lambda _: nullcontext(lambda *_: None))


def test_a_browser_gets_what_it_may_need_beside_what_is_there(
    built: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Chrome on Linux has no WebGPU unless it is switched on: the page then runs WebAssembly."""
    model, browser = tmp_path / "model", elsewhere(*BROWSERS)
    place = ask(model, Runner(("webgpu",), lambda: TargetChoice("webgpu")), built)
    assert ask(model, browser, built) == place
    assert ask(model, browser, built) == place
    assert built == [("webgpu",), ("wasm",)]


def test_a_device_gets_its_best_alone(built: list[tuple[str, ...]], tmp_path: Path) -> None:
    here = Runner(("cpu", "vulkan"), lambda: TargetChoice("vulkan"))
    ask(tmp_path / "model", here, built)
    ask(tmp_path / "model", here, built)
    assert built == [("vulkan",)]


def test_what_another_process_makes_just_before_the_lock_is_kept(
    built: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """The other process may already run the model: it must not lose its files."""
    model, here = tmp_path / "model", Runner(("cpu",), lambda: TargetChoice("cpu"))
    others: list[tuple[Path, int]] = []

    def tell(line: str) -> None:
        assert line.startswith("Building model")
        place = ask(model, here, built)
        others.append((place, (place / "cpu" / "manifest.json").stat().st_ino))

    place = ask(model, here, built, tell=tell)
    assert [(place, (place / "cpu" / "manifest.json").stat().st_ino)] == others
    assert built == [("cpu",)]


@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("discrete", ("discrete", "integrated")),
        ("integrated", ("integrated", "discrete")),
        ("mobile", ("mobile", "integrated")),
        ("cpu", ("software",)),
        (None, DEVICE_CLASSES),
    ],
)
def test_a_machine_gets_programs_for_its_own_gpu_and_a_browser_for_all(
    built: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: AdapterKind | None,
    classes: tuple[str, ...],
) -> None:
    adapter = None if kind is None else Adapter("", "", "", "", kind)
    mine = dataclasses.replace(device("webgpu"), probe=lambda which=None: Found(frozenset(), adapter=adapter))
    monkeypatch.setattr("nearfar.edge_runtime.executors.webgpu.DEVICE", mine)
    model, asked = tmp_path / "model", []
    place = ask(model, for_device("webgpu"), built, asked)
    assert asked == [classes]
    ask(model, for_device("webgpu"), built, asked)
    ask(model, elsewhere("webgpu"), built, asked)
    ask(model, elsewhere("webgpu"), built, asked)
    assert asked == list(dict.fromkeys((classes, DEVICE_CLASSES)))
    assert (place / "webgpu").is_dir()


def test_each_quality_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Without options any existing model is used; models that an earlier version built are found."""
    store, hub = Store(tmp_path), "owner/tales"
    assert (
        wanted_of(hub, store, GivenOptions(quality="fast"))
        == wanted_of(hub, store)
        == WantedEntry("tales", hub)
    )
    assert wanted_of(hub, store, GivenOptions("q3", "best")) == WantedEntry(
        "tales:q3-best", hub, "q3", "best"
    )
    assert wanted_of("phi4-mini", store, GivenOptions(quality="good")).name == "phi4-mini-good"
    good = wanted_of(hub, store, GivenOptions(quality="good"))
    assert good.folder != wanted_of(hub, store).folder
    (tmp_path / good.folder).mkdir()
    store.keep(good, None)
    assert wanted_of("tales:good", store) == wanted_of(hub, store) == good
    assert wanted_of(hub, store, GivenOptions(quality="fast")).quality == "fast"
    assert wanted_of("tales:good", store, GivenOptions("q8")) == WantedEntry("tales:q8", hub, "q8")
    assert wanted_of("tales:good", store, GivenOptions(quality="best")) == WantedEntry(
        "tales:best", hub, None, "best"
    )
    entry = tmp_path / good.folder / "entry.json"
    record = json.loads(entry.read_text())
    entry.write_text(json.dumps({name: value for name, value in record.items() if name != "quality"}))
    assert wanted_of("tales:good", store).quality == "fast"
    with pytest.raises(StoreError, match="quantized when it was built: leave --quality out"):
        wanted_of("https://host/tales/", store, GivenOptions(quality="good"))


def test_codes_that_are_made_anew_are_a_model_of_their_own(tmp_path: Path) -> None:
    store, hub = Store(tmp_path), "owner/tales-AWQ"
    anew = wanted_of(hub, store, GivenOptions(requantize="q3", quality="good"))
    assert anew == WantedEntry("tales-AWQ:q3-good", hub, None, "good", "q3")
    alike = anew, WantedEntry(anew.name, hub, "q3", "good"), WantedEntry(anew.name, hub, None, "good")
    assert len({each.folder for each in alike}) == 3
    (tmp_path / anew.folder).mkdir()
    store.keep(anew, None)
    assert (
        wanted_of("tales-AWQ:q3-good", store) == wanted_of(hub, store, GivenOptions(requantize="q3")) == anew
    )
    better = wanted_of("tales-AWQ:q3-good", store, GivenOptions(quality="best"))
    assert better == WantedEntry("tales-AWQ:q3-best", hub, None, "best", "q3")
    assert wanted_of("tales-AWQ:q3-good", store, GivenOptions("q4")) == WantedEntry("tales-AWQ:q4", hub, "q4")


def test_what_a_dead_build_left_is_seen_removed_and_swept(tmp_path: Path) -> None:
    """The state after kill -9: the folder has no entry, its lock is free, and it holds half an artifact."""
    home = tmp_path / "home"
    store = Store(home / "cache" / "models")
    for name in ("tales", "songs"):
        wanted = WantedEntry(name, f"owner/{name}")
        with store.locked(wanted, print), store.begun(wanted) as place:
            (place / ".cpu.partial-1").mkdir()
            (place / ".cpu.partial-1" / "weights").write_bytes(bytes(2000))
    (store.root / ".songs.making").touch()
    # an entry of a version without records
    (store.root / "earlier-12345678" / ".mlx.partial-1").mkdir(parents=True)
    (store.root / ".poems-1.gone-1").mkdir()
    assert store.entries() == []
    done = nearfar("list", NEARFAR_HOME=str(home))
    lines = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert set(lines) == {"tales", "songs", "earlier-12345678"}
    assert "unfinished" in lines["tales"]
    assert "2.1 kB" in lines["tales"]
    assert "nearfar rm NAME removes it" in done.stderr
    listed = json.loads(nearfar("list", "--json", NEARFAR_HOME=str(home)).stdout)
    assert [entry["finished"] for entry in listed] == [False] * 3
    with store.locked(WantedEntry("songs", "owner/songs"), print):
        assert "being made" in nearfar("list", NEARFAR_HOME=str(home)).stdout
        refused = nearfar("rm", "songs", NEARFAR_HOME=str(home))
        assert (refused.returncode, "another process is making songs: wait" in refused.stderr) == (1, True)
        store.sweep()
        assert [path.parent.name for path in store.root.glob("*/.*.partial-*")] == [
            WantedEntry("songs", "owner/songs").folder
        ]
    assert nearfar("rm", "songs", "earlier-12345678", NEARFAR_HOME=str(home)).returncode == 0
    assert sorted(path.name for path in store.root.glob("*")) == [WantedEntry("tales", "owner/tales").folder]
    assert [path.name for path in store.root.glob(".*")] == []  # there is no lock, and nothing was removed


def test_a_removed_model_is_gone_at_once_and_its_bytes_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal is interrupted by Ctrl-C, or kill -9, between the renaming and the end of the deletion."""
    home = tmp_path / "home"
    store = Store(home / "cache" / "models")
    wanted = WantedEntry("tales", "owner/tales")
    for command in ("list", "rm"):
        with store.begun(wanted) as place:
            (place / "weights").write_bytes(bytes(2000))
            entry = store.keep(wanted, None)
        with monkeypatch.context() as cut:
            cut.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.remove(entry)
        assert [path.name.startswith(f".{wanted.folder}.gone-") for path in store.root.iterdir()] == [True]
        assert (store.entries(), store.unfinished(), store.find("tales")) == ([], [], None)
        nearfar(command, *(["tales"] if command == "rm" else []), NEARFAR_HOME=str(home))
        assert list(store.root.iterdir()) == []
    # An entry that another process removes while this one lists it.
    assert (entry.bytes, entry.targets, entry.scheme, entry.used.year) == (0, {}, None, 1970)


def test_the_short_names_are_documented() -> None:
    page = (ROOT / "docs" / "store.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.:-]+)` \| (\S+ \| [\d,]+ \| [\w ]+) \|$", page, re.MULTILINE))
    assert rows == {
        name: f"{known.source} | {known.millions:,} | {known.quant or 'as published'}"
        for name, known in KNOWN.items()
    }


def test_a_build_that_fails_at_once_leaves_nothing(tmp_path: Path) -> None:
    store, wanted = Store(tmp_path), WantedEntry("tales", "owner/tales")
    with pytest.raises(StoreError), store.locked(wanted, print), store.begun(wanted):
        raise StoreError("no such model")
    assert [*tmp_path.iterdir()] == []


def test_the_folders_of_an_earlier_version_are_found() -> None:
    assert WantedEntry("tales", "owner/tales", "q8").folder == "tales-a62bcfde"


def gguf_without_template(file: Path) -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"]])
def test_a_model_without_a_chat_template_is_not_built_for_a_question(
    command: list[str], kind: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if kind == "folder":
        shutil.copytree(ROOT / "examples" / "sample-model", model)
        (model / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((model / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        model = gguf_without_template(tmp_path / "base.gguf")
    done = nearfar(command[0], model, *command[1:], NEARFAR_HOME=str(tmp_path / "home"))
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert f"{model}: this model has no chat template" in said
    assert "--raw" in said
    assert "Building" not in said
