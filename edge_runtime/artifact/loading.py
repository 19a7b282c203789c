"""Loads an artifact from disk into an engine on a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from nearfar.edge_runtime.artifact.budget import check_buffers, longest, plan_pages
from nearfar.edge_runtime.artifact.finder import by_target, none_for
from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.artifact.trial import open_best
from nearfar.edge_runtime.artifact.trust import check_trust
from nearfar.edge_runtime.artifact.variants import ProgramChoice
from nearfar.edge_runtime.devices import (
    AUTO,
    Device,
    Settings,
    debug_choices,
    device,
    device_names,
    kv_bits_choices,
    parse_device,
)
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.executors.base import Executor
from nearfar.edge_runtime.found import Found
from nearfar.edge_runtime.progress import Teller
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import ArtifactError, DeviceError, RequestError
from nearfar.format.manifest import Program

DEFAULTS = LoadOptions()


def load(
    path: Path, options: LoadOptions = DEFAULTS, tell: Teller | None = None
) -> tuple[EngineCore, TextCodec]:
    """Open the artifact that suits the device, check it and load it; its kernels may still have to be
    compiled.
    """
    tell = tell or Teller(None)
    artifact, chosen = checked(path, options, tell)
    tell("loading")
    codec = TextCodec.open(artifact)
    found = chosen.probe(parse_device(options.device)[1])
    own = options.kv_bits if not chosen.kv_bits else None
    programs = artifact.able_programs(found, options.precision, options.program, own)

    planned: dict[str, Settings] = {}

    def plan(program: Program) -> Settings:
        # Pages are planned once for each program: loading weights changes the free memory, and the scheduler
        # must have the same pages as the executor.
        if program.name not in planned:
            planned[program.name] = _settings(artifact, program, found, options)
        return planned[program.name]

    def open_one(program: Program) -> Executor:
        return open_executor(chosen, artifact, program, plan(program))

    if options.program is None:
        executor, program, choice = open_best(
            artifact, programs, found.adapter, chosen, open_one, lambda each: plan(each).context, tell
        )
    else:
        program, choice = programs[0], ProgramChoice(programs[0].name, "pinned")
        executor = open_one(program)
    settings = plan(program)
    reopen = partial(open_executor, chosen, artifact, program, settings)
    core = EngineCore(
        executor,
        artifact.manifest,
        program,
        settings.pages,
        context=settings.context,
        pipelined=chosen.pipelined,
        reopen=reopen,
    )
    core.choice = choice
    return core, codec


def checked(path: Path, options: LoadOptions, tell: Teller | None = None) -> tuple[Artifact, Device]:
    """The artifact that suits the device, after its files and its trust are checked, and the device."""
    tell = tell or Teller(None)
    tell("checking")
    artifact, chosen = choose(path, options.device)
    _check_able(options, artifact.target, chosen)
    if options.verify:
        artifact.verify(partial(tell, "checking"))
    check_trust(artifact, options.trust)
    return artifact, chosen


def _settings(artifact: Artifact, program: Program, found: Found, options: LoadOptions) -> Settings:
    """The settings with which the device is opened for a program: pages, context, threads and bits of the
    cache.
    """
    manifest, which = artifact.manifest, parse_device(options.device)[1]
    bits = options.kv_bits if device(artifact.target).kv_bits else None
    pages = plan_pages(manifest, program, options.kv_memory, found.largest_buffer(), bits, found.memory)
    context = min(longest(manifest, pages), options.context or manifest.model.context_length)
    check_buffers(manifest, program, pages, context, found.memory)
    return Settings(pages, context, options.threads, bits, which, options.debug)


def open_executor(chosen: Device, artifact: Artifact, program: Program, settings: Settings) -> Executor:
    """Load an artifact on a device. An error that only the device's runtime finds becomes an
    ArtifactError.
    """
    try:
        return chosen.open(artifact, program, settings)
    except MemoryError as error:
        raise DeviceError(
            f"there is not enough memory to load {artifact.path}: give the cache less (--kv-memory)"
        ) from error
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        OSError,
        RecursionError,
        StopIteration,
    ) as error:
        raise ArtifactError(
            f"{artifact.path} cannot be loaded ({type(error).__name__}: {error}): copy it "
            "again, or build it again"
        ) from error


def _check_able(options: LoadOptions, target: str, chosen: Device) -> None:
    """Raise RequestError for options that only other kinds of devices support."""
    if options.debug and not chosen.debug:
        raise RequestError(
            f"{target} has no validation layer to check calls with (debug, --debug); {debug_choices()} has",
            "debug",
        )
    if chosen.kv_bits and options.kv_bits not in (None, *chosen.kv_bits):
        raise RequestError(
            f"{target} cannot keep the KV cache in {options.kv_bits} bits (kv_bits, --kv-bits); "
            f"{kv_bits_choices()} can. Leave it out for a cache as the model computes",
            "kv_bits",
        )


def choose(path: Path, wanted: str) -> tuple[Artifact, Device]:
    """Choose the artifact at `path`, or the best one a level below, and the device to run it."""
    kind, _ = parse_device(wanted)
    there = by_target(path)
    able = [name for name in device_names() if name in there and kind in (AUTO, name)]
    if not able and kind == AUTO:
        raise DeviceError(
            f"{path} holds artifacts only for {', '.join(there)}, which Python does not run: open them in a "
            "browser (nearfar web), or build one for this machine with nearfar build --target cpu"
        )
    if not able:
        raise DeviceError(none_for(path, kind, there))
    # A device is probed only if there are several to choose from: opening a GPU's driver takes time.
    best = max(able, key=lambda name: device(name).preferred()) if len(able) > 1 else able[0]
    return Artifact.open(there[best]), device(best)
