"""Finds the artifacts at a path: one artifact, or a folder of them as `nearfar build` writes it.

Of each manifest only the target is read.
"""

from __future__ import annotations

from pathlib import Path

from nearfar import strict_json
from nearfar.errors import ArtifactError

MANIFEST = "manifest.json"


def holds_artifacts(path: Path) -> bool:
    """Whether `path` is an artifact or has one a level below."""
    return bool(_found(path))


def find_artifacts(path: Path) -> list[Path]:
    """The artifact at `path`, or the artifacts one level below; ArtifactError if there is none."""
    found = _found(path)
    if not found:
        what = (
            f"holds no artifact (no {MANIFEST} there or one level below)"
            if path.exists()
            else "does not exist"
        )
        raise ArtifactError(f"{path} {what}. Make one with nearfar build")
    return found


def by_target(path: Path) -> dict[str, Path]:
    """The artifacts at `path` by target; ArtifactError if two artifacts have the same target."""
    out: dict[str, Path] = {}
    for found in find_artifacts(path):
        target = _target(found / MANIFEST)
        if target in out:
            raise ArtifactError(
                f"{path} holds two artifacts for {target}, {out[target].name} and {found.name}: "
                "name the one to run"
            )
        out[target] = found
    return out


def find_artifact(path: Path, target: str) -> Path:
    """The artifact for a target at `path`; ArtifactError if there is none."""
    there = by_target(path)
    if target not in there:
        raise ArtifactError(none_for(path, target, there))
    return there[target]


def none_for(path: Path, target: str, there: dict[str, Path]) -> str:
    """The message for a path that has artifacts, but none for `target`."""
    return (
        f"{path} holds no artifact for {target}, only for {', '.join(sorted(there))}. "
        f"Build it with nearfar build --target {target}, or choose another device"
    )


def _found(path: Path) -> list[Path]:
    if (path / MANIFEST).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{MANIFEST}") if file.is_file())


def _target(manifest: Path) -> str:
    try:
        target = strict_json.loads(manifest.read_text(encoding="utf-8"))["target"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = str(error) if isinstance(error, OSError | ValueError) else "it names no target"
        raise ArtifactError(
            f"{manifest} is not a manifest ({why}). Copy the artifact again, or build it again"
        ) from error
    return str(target)[:80]
