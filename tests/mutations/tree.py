"""A copy of the repository to which mutations are applied one at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutations.patches import Mutation, PatchError
from tests.support.paths import ROOT


class Tree:
    """A git worktree that also has the uncommitted changes."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._folder = folder

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Tree]:
        """Make the worktree in an empty folder; it is removed afterwards."""
        tree = cls(folder)
        _git(ROOT, "worktree", "add", "--quiet", "--detach", str(tree.root), "HEAD")
        try:
            tree._bring_what_is_not_committed()
            tree._link_packages()
            yield tree
        finally:
            _git(ROOT, "worktree", "remove", "--force", str(tree.root))

    def _bring_what_is_not_committed(self) -> None:
        changed = _git(ROOT, "diff", "--binary", "HEAD")
        if changed:
            _git(self.root, "apply", "--whitespace=nowarn", "-", given=changed)
        for name in _git(ROOT, "ls-files", "-z", "--others", "--exclude-standard").split("\0"):
            if name and not (ROOT / name).is_symlink():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def _link_packages(self) -> None:
        """Link npm's installed packages, and copy the web package as it was built last."""
        packages, built = ROOT / "web" / "node_modules", ROOT / "web" / "dist"
        if packages.exists():
            (self.root / "web" / "node_modules").symlink_to(packages.resolve())
        if built.exists():
            shutil.copytree(built, self.root / "web" / "dist")

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Apply a mutation while the block runs. Raises PatchError where it does not apply."""
        try:
            _git(self.root, "apply", str(mutation.file))
        except subprocess.CalledProcessError as error:
            raise PatchError(
                f"{mutation.file} does not apply any more: change it to what {', '.join(mutation.files)} now "
                f"says ({error.stderr.strip()})"
            ) from error
        self._forget_compiled(mutation)
        try:
            with self._built_anew(mutation):
                yield
        finally:
            _git(self.root, "apply", "--reverse", str(mutation.file))
            self._forget_compiled(mutation)

    @contextmanager
    def _built_anew(self, mutation: Mutation) -> Iterator[None]:
        """Build web/dist from the mutated sources, for mutations that tests see only there."""
        if not mutation.builds_web:
            yield
            return
        web, before = self.root / "web", self._folder / "dist"
        shutil.copytree(web / "dist", before)
        try:
            subprocess.run(
                ["npm", "run", "--silent", "build"], cwd=web, check=True, stdout=subprocess.DEVNULL
            )
            yield
        finally:
            shutil.rmtree(web / "dist")
            shutil.move(before, web / "dist")

    def _forget_compiled(self, mutation: Mutation) -> None:
        """Remove Python's compiled files: Python takes a changed file of the same size and second for the
        compiled one.
        """
        for name in mutation.files:
            file = self.root / name
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()


def environment(folder: Path, tree: Path, turns: str | None) -> dict[str, str]:
    """The environment for tests of a mutation: nothing compiled from mutated code is kept for others."""
    given = {
        "PYTHONPATH": str(tree / "src"),
        "NEARFAR_KERNEL_CACHE": str(folder / "kernels"),
        "NEARFAR_TEST_ARTIFACTS": str(folder / "artifacts"),
        "NEARFAR_SHARED": os.environ.get("NEARFAR_SHARED", str(ROOT.parent / "shared" / "data")),
    }
    for name in ("NEARFAR_KERNEL_CACHE", "NEARFAR_TEST_ARTIFACTS"):
        Path(given[name]).mkdir()
    return os.environ | given | ({} if turns is None else {"NEARFAR_TURN": turns})


def _git(folder: Path, *arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, input=given, capture_output=True, text=True, check=True
    )
    return done.stdout
