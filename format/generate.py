"""Writes what is generated from the format: constants and types for the browser, the keywords that its
grammars keep to, fields that its router leaves out, tables for docs/artifact.md.

python -m nearfar.format.generate            writes them
python -m nearfar.format.generate --check    fails where a file is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nearfar.format import tables, typescript

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python -m nearfar.format.generate"


def generated(root: Path) -> dict[Path, str]:
    """The right content of every file with generated parts, by its path."""
    page = root / "docs" / "artifact.md"
    return {
        root / "web" / "src" / "format" / "constants.ts": typescript.module(COMMAND),
        root / "web" / "src" / "grammar" / "keywords.ts": typescript.keyword_module(COMMAND),
        root / "web" / "src" / "routing" / "service-fields.ts": typescript.service_module(COMMAND),
        page: tables.filled(page.read_text(encoding="utf-8")),
    }


def stale(root: Path) -> list[str]:
    """The files whose content is out of date, as paths in the repository."""
    return [
        path.relative_to(root).as_posix()
        for path, text in generated(root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write the generated files, or with --check compare them; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is stale")
    if not parser.parse_args(arguments).check:
        for path, text in generated(root).items():
            path.write_text(text, encoding="utf-8")
        return 0
    found = stale(root)
    for name in found:
        print(f"{name} is not what nearfar.format says. Run: {COMMAND}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
