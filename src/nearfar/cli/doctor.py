"""`nearfar doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from nearfar.cli import examination
from nearfar.cli.examination import Finding

MARKS = {"ok": "[green]ok[/]     ", "missing": "[yellow]missing[/]", "wrong": "[red]wrong[/]  "}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what works on this machine, what is missing, and how to get it: the extras that are installed,
    devices, the chat page, the store and its disk, and settings from the environment.

    Exit code 0: artifacts can be run here. 1: they cannot. What only some uses need may be missing.
    """
    findings: list[Finding] = []
    if as_json:
        findings += examination.examine()
        able = examination.able(findings)
        json.dump(
            {"able": able, "findings": [dataclasses.asdict(one) for one in findings]}, sys.stdout, indent=1
        )
        print()
    else:
        console = Console(soft_wrap=True, highlight=False)
        for finding in _told(console, examination.examine()):
            findings.append(finding)
        able = examination.able(findings)
        if not able:
            told = "No artifact can be run here: see above."
        elif examination.keeps(findings):
            told = "Artifacts can be run here."
        else:
            told = "Artifacts can be run here, but no models built and kept by their names: see above."
        console.print(told)
    if not able:
        raise typer.Exit(1)


def _told(console: Console, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Print findings, under a heading for each part, and yield each one."""
    part = ""
    for finding in findings:
        if finding.part != part:
            part = finding.part
            console.print(f"[bold]{part}[/]")
        console.print(f"  {MARKS[finding.state]} {finding.name}: {escape(finding.told)}")
        if finding.how:
            console.print(f"          → {escape(finding.how)}")
        yield finding
