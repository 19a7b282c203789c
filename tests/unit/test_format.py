"""The format's definitions: generated files are up to date, and both languages compute the same table of
buffers.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from nearfar.errors import NearfarError
from nearfar.format import generate, tables
from nearfar.format.buffers import buffers
from nearfar.format.manifest import Cache, Group, KvCache

VECTOR = Path(__file__).parents[1] / "vectors" / "format" / "buffers.json"
GENERATED = (
    "web/src/format/constants.ts",
    "web/src/grammar/keywords.ts",
    "web/src/routing/service-fields.ts",
    "docs/artifact.md",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the generated files of the repository."""
    for name in GENERATED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(generate.ROOT / name, tmp_path / name)
    return tmp_path


def test_what_is_generated_is_what_the_format_says() -> None:
    assert generate.stale(generate.ROOT) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("web/src/format/constants.ts", "feed: 5", "feed: 6"),
        ("web/src/grammar/keywords.ts", '"$comment",', ""),
        ("web/src/routing/service-fields.ts", '"metadata",', ""),
        ("web/src/format/constants.ts", "readonly kv_heads: number;\n", ""),
        ("docs/artifact.md", "| int32 [256] | token id", "| int32 [128] | token id"),
    ],
)
def test_a_changed_file_fails_the_check_until_it_is_written_again(
    checkout: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str
) -> None:
    path = checkout / name
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
    assert generate.main(["--check"], checkout) == 1
    assert f"{name} is not what nearfar.format says. Run: {generate.COMMAND}" in capsys.readouterr().err
    assert generate.main([], checkout) == 0
    assert path.read_text() == before
    assert generate.main(["--check"], checkout) == 0


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(NearfarError, match="markers for the tables"):
        tables.filled("# The artifact\n")


def test_the_table_of_buffers_filled_in() -> None:
    """web/test/format.test.ts reads the same file."""
    vector = json.loads(VECTOR.read_text())
    facts, model = vector["facts"], vector["facts"]["model"]
    ropes = {name: 2 * size for name, size in facts["frequencies"].items()}
    made = buffers(
        model["vocab_size"],
        model["context_length"],
        Cache(**facts["cache"]),
        tuple(Group(**group) for group in facts["groups"]),
        tuple(KvCache(**cache) for cache in facts["caches"]),
        ropes,
    )
    assert json.loads(json.dumps([asdict(buffer) for buffer in made])) == vector["buffers"]
