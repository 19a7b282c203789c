"""Resolves a name to an artifact that this machine runs; a model that is not built yet is built into the
store once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nearfar.build.first_look import check_chats, first_look
from nearfar.build.options import BuildOptions
from nearfar.build.weights.foreign import folder_is
from nearfar.edge_runtime.artifact.finder import find_artifacts, holds_artifacts
from nearfar.edge_runtime.devices import AUTO, device, device_names, parse_device
from nearfar.errors import DeviceError, NearfarError, StoreError
from nearfar.format.adapters import DEVICE_CLASSES, class_of, suited
from nearfar.store.entries import Entry, Store, WantedEntry
from nearfar.store.fetching import Told, fetch, is_url
from nearfar.store.naming import GivenOptions, holds_checkpoint, mark_of, wanted_of

Build = Callable[[BuildOptions], object]
"""Function that builds and shows progress."""
Tell = Callable[[str], None]
Bar = Callable[[str], AbstractContextManager[Told]]
"""Function that shows the progress of a download under a title."""


@dataclass(frozen=True)
class TargetChoice:
    """The target to build for, and the GPU classes whose programs the machine may use. A first build for all
    four classes takes four times as long (measured for vulkan: 50.5 CPU seconds instead of 12.9).
    """

    target: str
    device_classes: tuple[str, ...] = DEVICE_CLASSES


@dataclass(frozen=True)
class Runner:
    """The devices that will run a model. Any artifact for one of `targets` will do; `best` chooses which one
    to build where there is none, and is called only then, because drivers are slow to answer. `every`: build
    all targets, for all classes of GPUs, because the device is not known yet. `chats`: refuse models without
    a chat template.
    """

    targets: Sequence[str]
    best: Callable[[], TargetChoice]
    every: bool = False
    chats: bool = False

    def runs(self, entry: Entry) -> bool:
        """Whether the entry has an artifact that this runner accepts."""
        if self.every:
            return not self.lacks(entry)[0]
        there = entry.targets
        return any(target in there for target in self.targets)

    def lacks(self, entry: Entry | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The targets that must still be built for an entry, and the classes of GPUs to build them for."""
        if self.every:
            there = set() if entry is None else {name for name in entry.targets if not entry.narrow(name)}
            return tuple(target for target in self.targets if target not in there), DEVICE_CLASSES
        best = self.best()
        there = set() if entry is None else {*entry.targets}
        return tuple({best.target} - there), best.device_classes


def for_device(wanted: str) -> Runner:
    """A runner for a device of this machine, as --device names it."""
    kind, which = parse_device(wanted)
    if kind != AUTO:
        return Runner((kind,), lambda: _of_machine(kind, which))
    names = device_names()
    return Runner(names, lambda: _of_machine(max(names, key=lambda name: device(name).preferred()), None))


def elsewhere(*targets: str) -> Runner:
    """A runner for unknown machines: all of these targets, for all classes of GPUs."""
    return Runner(targets, lambda: TargetChoice(targets[0]), every=True)


def _of_machine(kind: str, which: str | None) -> TargetChoice:
    """The target of a device of this machine, for programs of its class and of the neighbouring one."""
    with suppress(DeviceError, ModuleNotFoundError):  # a failure is reported when the device is opened
        if (adapter := device(kind).probe(which).adapter) is not None:
            return TargetChoice(kind, suited(class_of(adapter)))
    return TargetChoice(kind)


def artifacts_at(
    given: str,
    runner: Runner,
    build: Build,
    tell: Tell,
    bar: Bar,
    adapter: str | None = None,
    looked: bool = False,
) -> Path:
    """The folder of a path's or a name's artifacts; a model of the store is built for the runner if it has no
    suitable one. `looked`: `first_look` has accepted the checkpoint already.
    """
    path = Path(given).expanduser()
    if path.is_dir() and (holds_artifacts(path) or not holds_checkpoint(path)):
        if not holds_artifacts(path) and any(path.iterdir()) and (what := folder_is(path)):
            raise StoreError(f"{path} is {what}")
        if adapter is not None:
            raise StoreError(
                f"{path} is built already, and --adapter {adapter} is merged when a checkpoint is built: "
                "name the model that it was made of"
            )
        find_artifacts(path)  # find_artifacts reports what is missing
        return path
    store = Store()
    entry = made(
        store, wanted_of(given, store, GivenOptions(adapter=adapter)), runner, build, tell, bar, looked
    )
    entry.touch()
    return entry.folder


def made(
    store: Store,
    wanted: WantedEntry,
    runner: Runner,
    build: Build,
    tell: Tell,
    bar: Bar,
    looked: bool = False,
) -> Entry:
    """The entry with an artifact for the runner. It is built where there is none, or its checkpoint has
    changed; downloaded where its source is a URL. `looked`: `first_look` has accepted the checkpoint already.
    """
    fetched = is_url(wanted.source)
    if fetched:  # another process built these artifacts; any of them will do
        runner = replace(runner, every=False)
    found = _fresh(store, wanted)
    if found is not None and runner.runs(found):
        return found
    if fetched:
        tell(f"Fetching {wanted.name} (one time) …")
    else:
        if not looked:
            first_look(wanted.source, adapter=wanted.adapter)
        if runner.chats:
            check_chats(wanted.source)
        tell(f"Building {wanted.name} (one time) …")
    with store.locked(wanted, tell):
        # Another process may have made the entry since the last look, also if this one did not wait for the
        # lock.
        found = _fresh(store, wanted)
        if found is None or not runner.runs(found):
            if found is None and (stale := store.of(wanted)) is not None:
                store.remove(stale)
            store.sweep()
            with store.begun(wanted) as place:
                if fetched:
                    with bar(wanted.name) as told:
                        fetch(wanted.source, place, _best_first(runner), told)
                else:
                    _build(build, wanted, place, *runner.lacks(found))
                return store.keep(wanted, mark_of(wanted.source, wanted.adapter))
        return store.keep(wanted, mark_of(wanted.source, wanted.adapter))


def _build(
    build: Build, wanted: WantedEntry, place: Path, targets: tuple[str, ...], classes: tuple[str, ...]
) -> None:
    try:
        build(_options(wanted, place, targets, classes))
    except ModuleNotFoundError as error:
        raise NearfarError(
            f"{wanted.name} has to be built, which needs {error.name}, and that is not installed: "
            "pip install 'nearfar[build]'"
        ) from error


def _best_first(runner: Runner) -> Sequence[str]:
    if len(runner.targets) == 1:
        return runner.targets
    return tuple(dict.fromkeys((runner.best().target, *runner.targets)))


def _fresh(store: Store, wanted: WantedEntry) -> Entry | None:
    """The entry of `wanted`; None where its checkpoint has changed since."""
    found = store.of(wanted)
    return found if found is not None and found.mark == mark_of(wanted.source, wanted.adapter) else None


def _options(
    wanted: WantedEntry, out: Path, targets: tuple[str, ...], classes: tuple[str, ...]
) -> BuildOptions:
    """The options of a build for this machine's processor alone, and for these classes of GPUs."""
    native = ("native",) if "cpu" in targets else ()
    return BuildOptions(
        wanted.source,
        out,
        targets,
        wanted.quant,
        requantize=wanted.requantize,
        quality=wanted.quality,
        cpu_features=native,
        device_classes=classes,
        adapter=wanted.adapter,
    )
