"""Reads and checks a manifest.json as a whole (format/manifest.schema.json, consistency.py), and
writes it.
"""

from __future__ import annotations

import functools
import json
import typing
from importlib import resources
from typing import Any

import jsonschema

from nearfar import strict_json
from nearfar.errors import ArtifactError
from nearfar.format import consistency
from nearfar.format.conversion import plain, record
from nearfar.format.manifest import FORMAT, OLDEST, VERSION, Manifest
from nearfar.format.seal import FIELD, is_sealed

LARGEST = 1e300  # the largest allowed number, because JSON can write numbers that float64 cannot hold


def document(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON, as a build writes it; fields that have their default are left out."""
    return typing.cast(dict[str, Any], plain(manifest))


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON Schema of the manifest."""
    text = resources.files("nearfar.format").joinpath("manifest.schema.json").read_text(encoding="utf-8")
    return typing.cast(dict[str, Any], json.loads(text))


@functools.cache
def _validator() -> Any:
    """A validator for JSON as Python reads it: 16.0 is not an integer, and a number must fit float64."""
    base = jsonschema.Draft202012Validator
    types = base.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int and abs(value) <= LARGEST
    )
    types = types.redefine("number", lambda _, value: type(value) in (int, float) and abs(value) <= LARGEST)
    return jsonschema.validators.extend(base, type_checker=types)(schema())


def read(text: str, where: str) -> tuple[Manifest, dict[str, Any]]:
    """Read a manifest's text as records and as JSON; ArtifactError if it is not as a build wrote it."""
    try:
        data = strict_json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{where} is not valid JSON ({error}). Build the artifact again") from error
    _check_version(data, where)
    if not is_sealed(text, data.get(FIELD)):
        raise ArtifactError(
            f"{where} is not as the build wrote it: its {FIELD} is not that of its bytes. Copy the artifact "
            "again, or build it again with what should be different"
        )
    return parse(data, where), data


def parse(data: object, where: str) -> Manifest:
    """Check a manifest's JSON and convert it to records; ArtifactError lists all problems. `where` names it
    in messages.
    """
    document = _check_version(data, where)
    errors = sorted(_validator().iter_errors(document), key=lambda e: e.json_path)
    found = [f"{e.json_path}: {e.message[:200]}" for e in errors]
    manifest = None if errors else typing.cast(Manifest, record(Manifest, document))
    if manifest is not None:
        found = list(consistency.problems(manifest))
    if manifest is None or found:
        more = f"; and {len(found) - 8} more" if len(found) > 8 else ""
        raise ArtifactError(
            f"{where} does not follow the artifact format: {'; '.join(found[:8])}{more}. Build the "
            "artifact again"
        )
    return manifest


def _check_version(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArtifactError(
            f"{where} is not the manifest of a nearfar artifact (it has no format {FORMAT!r})"
        )
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise ArtifactError(
            f"{where}: artifact format {version} is newer than this nearfar understands ({VERSION}). "
            "Upgrade nearfar (pip install -U nearfar), or build the artifact again with this version"
        )
    if type(version) is not int or version < OLDEST:
        raise ArtifactError(
            f"{where}: artifact format {repr(version)[:80]}; this nearfar reads {OLDEST} to {VERSION}. Build "
            "the artifact again with it"
        )
    return data
