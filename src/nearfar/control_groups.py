"""Finds the control groups of this process, in which Linux limits what a container may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class ControlGroups:
    """Folders of the groups that limit this process: its own groups and the groups above them.

    `unified`: folders of control groups v2. `legacy`: folders of one controller of control groups v1.
    """

    unified: tuple[Path, ...] = ()
    legacy: tuple[Path, ...] = ()


def control_groups(
    controller: str, membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS, mounted: tuple[str, ...] = ()
) -> ControlGroups:
    """Find the groups of a controller. `mounted`: further names of the controller's folder.

    `membership` names the group in each hierarchy. A container may see another name there than its own, so
    the groups above count too, up to the root. Where the system says nothing, there are no groups.
    """
    try:
        lines = membership.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return ControlGroups()
    unified: list[Path] = []
    legacy: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            unified += _upwards(cgroups, path) + _upwards(cgroups / "unified", path)
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller, *mounted)):
                legacy += _upwards(cgroups / name, path)
    return ControlGroups(tuple(unified), tuple(legacy))


def words_of(file: Path, count: int) -> list[str]:
    """The first `count` words of a file; empty words where the file has fewer."""
    try:
        words = file.read_text().split()
    except (OSError, UnicodeDecodeError):
        words = []
    return [*words, *[""] * count][:count]


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a group and those above it, up to the root of the hierarchy."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
