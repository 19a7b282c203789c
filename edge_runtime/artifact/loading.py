"""From an artifact on disk to an engine on a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from nearfar.edge_runtime.artifact.budget import check_buffers, longest, plan_pages
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.artifact.trust import check_trust
from nearfar.edge_runtime.devices import DEVICES, Device, Settings, parse_device
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.executors.base import Executor
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import ArtifactError, DeviceError, RequestError
from nearfar.format.manifest import Program


def load(
    path: Path,
    device: str,
    kv_memory: int | str | None,
    threads: int | None,
    verify: bool,
    kv_bits: int | None = None,
    precision: str | None = None,
    debug: bool = False,
    trust: bool = False,
) -> tuple[EngineCore, TextCodec]:
    """Open the artifact that suits the device, check it, put it on the device. The options are those of AsyncEngine.load."""
    if threads is not None and threads < 1:
        raise RequestError(f"threads must be at least 1, not {threads}", "threads")
    artifact, chosen = choose(path, device)
    _check_kv_bits(kv_bits, artifact.target, chosen)
    if verify:
        artifact.verify()
    check_trust(artifact, trust)
    codec = TextCodec.open(artifact)
    which = parse_device(device)[1]
    found = chosen.probe(which)
    program = artifact.choose_program(found.features, found.limits, precision)
    manifest = artifact.manifest
    pages = plan_pages(manifest, program, kv_memory, found.largest_buffer(), kv_bits, found.memory)
    context = longest(manifest, pages)
    check_buffers(manifest, program, pages, context, found.memory)
    reopen = partial(_open, chosen, artifact, program, Settings(pages, context, threads, kv_bits, which, debug))
    executor = reopen()
    try:
        return EngineCore(executor, manifest, program, pages, pipelined=chosen.pipelined, reopen=reopen), codec
    except BaseException:
        executor.close()
        raise


def _open(device: Device, artifact: Artifact, program: Program, settings: Settings) -> Executor:
    """Put an artifact on a device. Whatever of it makes no sense only there is an ArtifactError, too."""
    try:
        return device.open(artifact, program, settings)
    except MemoryError as error:
        raise DeviceError(f"there is not enough memory to load {artifact.path}: give the cache less (--kv-memory)") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError, RecursionError, StopIteration) as error:
        raise ArtifactError(
            f"{artifact.path} does not make sense to its runtime ({type(error).__name__}: {error}): copy it again, or build it again"
        ) from error


def _check_kv_bits(kv_bits: int | None, target: str, device: Device) -> None:
    if kv_bits is None or kv_bits in device.kv_bits:
        return
    able = ", ".join(f"{name} ({' or '.join(map(str, d.kv_bits))})" for name, d in DEVICES.items() if d.kv_bits)
    raise RequestError(
        f"{target} cannot keep the KV cache in {kv_bits} bits (kv_bits, --kv-bits); {able} can. Leave it out for "
        "a cache as the model computes",
        "kv_bits",
    )


def choose(path: Path, device: str) -> tuple[Artifact, Device]:
    """The artifact at `path`, or the best of those one level below, and the device to run it."""
    target, _ = parse_device(device)
    artifacts = _artifacts(path)
    wanted = [name for name in DEVICES if name in artifacts and target in ("auto", name)]
    if wanted:
        # A device is asked only where it is one of several: opening a GPU's driver takes a while.
        best = max(wanted, key=lambda name: DEVICES[name].preferred()) if len(wanted) > 1 else wanted[0]
        return artifacts[best], DEVICES[best]
    raise DeviceError(
        f"{path} holds no artifact for {target}, only for {', '.join(sorted(artifacts))}. "
        f"Build it with nearfar build --target {target}, or choose another device"
    )


def _artifacts(path: Path) -> dict[str, Artifact]:
    """Artifacts by target."""
    if (path / "manifest.json").is_file():
        found = [Artifact.open(path)]
    else:
        found = [Artifact.open(file.parent) for file in sorted(path.glob("*/manifest.json"))]
    if not found:
        what = (
            "does not exist" if not path.exists() else "holds no artifact (no manifest.json there or one level below)"
        )
        raise ArtifactError(f"{path} {what}. Make one with nearfar build")
    return {artifact.target: artifact for artifact in found}
