"""A copy of the repository that mutations are applied to, one at a time."""

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
    """A worktree of git with what was not committed, too."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._folder = folder

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Tree]:
        """The worktree in an empty folder, gone afterwards."""
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
        """What npm has installed, and the web package as it was built last."""
        packages, built = ROOT / "web" / "node_modules", ROOT / "web" / "dist"
        if packages.exists():
            (self.root / "web" / "node_modules").symlink_to(packages.resolve())
        if built.exists():
            shutil.copytree(built, self.root / "web" / "dist")

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """The tree with a mutation. PatchError where it does not apply."""
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
        """Web/dist made of the mutated sources, where tests see the mutation there alone."""
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
        """Python takes a file of the same size and second for the one that it has compiled."""
        for name in mutation.files:
            file = self.root / name
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()


def environment(folder: Path, tree: Path, turns: str | None) -> dict[str, str]:
    """What tests of a mutation run with: nothing that is compiled of mutated code stays for others."""
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
