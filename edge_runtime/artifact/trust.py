"""Decides whose native code runs here: the shared library of a CPU artifact can do anything in
this process.

The hashes in an artifact detect damage, not who made it. So each user has a list of artifacts that were built
or trusted on this machine, by the SHA-256 of the manifest. The manifest has the library's hash, so an
artifact may be moved and copied, but not altered.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from nearfar.edge_runtime.artifact.finder import MANIFEST
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.devices import device, device_names
from nearfar.errors import ArtifactError, NearfarWarning
from nearfar.folders import HOME, data_folder

VARIABLE = "NEARFAR_TRUST"
"""Environment variable that trusts every artifact if it is 1, for example in a container that
includes them.
"""


def check_trust(artifact: Artifact, trust: bool) -> None:
    """Raise ArtifactError for native code that was neither built nor trusted here; `trust` adds it to the
    list.
    """
    if not _is_native(artifact) or os.environ.get(VARIABLE) == "1":
        return
    if trust:
        remember(artifact.path)
    elif not (artifact.digest(MANIFEST) in _known() and _unaltered(artifact)):
        made = artifact.manifest.provenance
        names = [Path(program.library).name for program in artifact.manifest.programs if program.library]
        raise ArtifactError(
            f"{artifact.path} holds native code ({', '.join(dict.fromkeys(names))}), which would run in this "
            f"process with all your rights, and {_where()} does not say that you have built or trusted it. "
            "The artifact says of itself: "
            f"{made.get('checkpoint', 'an unnamed checkpoint')}, made by nearfar "
            f"{made.get('nearfar', 'of unknown version')}. If you trust who gave it to you, say so once with "
            f"--trust (Engine.load(…, trust=True); {VARIABLE}=1 in a container); else build it here with "
            "nearfar build"
        )


def remember(artifact: Path) -> None:
    """Add an artifact folder to the list if it is native code; warn if the list cannot be written."""
    opened = Artifact.open(artifact)
    digest = opened.digest(MANIFEST)
    if not _is_native(opened) or digest in _known():
        return
    try:
        file = _list()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(
                f"{digest}  {opened.manifest.model.name!r} {str(artifact.resolve())!r}\n"
            )  # the file system appends a single write as a whole
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"cannot note that {artifact} is trusted ({error}): running it later will ask for --trust "
            f"or {VARIABLE}=1",
            NearfarWarning,
            stacklevel=2,
        )


def _list() -> Path:
    return data_folder() / "trusted"


def _where() -> str:
    try:
        return f"the list {_list()} (of this user; {HOME} moves it)"
    except RuntimeError:
        return f"no list (there is no home directory; {HOME} names one)"


def _known() -> frozenset[str]:
    try:
        lines = _list().read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):  # there is no list yet, or no home directory
        return frozenset()
    return frozenset(line.split(" ")[0] for line in lines)


def _is_native(artifact: Artifact) -> bool:
    """Whether the artifact is native code for a device here. Shaders run in the driver's sandbox, MLX
    artifacts are data.
    """
    return artifact.target in device_names() and device(artifact.target).native


def _unaltered(artifact: Artifact) -> bool:
    """Whether the libraries match the manifest's hashes, checked even if the other files are not."""
    programs = artifact.manifest.programs
    return all(p.library is None or artifact.digest(p.library) == p.library_sha256 for p in programs)
