"""Takes new pictures for the documentation: `.venv/bin/python scripts/take_pictures.py`.

The terminal session is what the real commands print to a terminal, as an SVG; the page is what `nearfar web`
shows in headless Chromium. Both are of the sample model in out/sample (`make demo` builds it), greedy, so
that the texts are the same each time.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.demo import CHROMIUM, CHROMIUM_ARGUMENTS, running  # noqa: E402

COLUMNS = 96
SESSION = (
    ("run", "{out}/cpu", "What is nearfar?", "--temperature", "0"),
    ("run", "{out}/cpu", "What is 17 + 25?", "--temperature", "0"),
    ("run", "{out}/cpu", "As JSON: Ida is 34 years old and lives in Oslo.", "--temperature", "0"),
)
STATE = "() => ['%s', 'error'].includes(document.body.dataset.state)"
QUESTION = "Tell me a story about the fox."
# rich's own format without the web font that it would load: a picture uses no network.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def in_terminal(command: list[str]) -> str:
    """The output of a command in a terminal of COLUMNS columns, with its control sequences."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # on Linux, the other side is closed
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {process.returncode}: {said.decode()}")
    return said.decode().replace("\r\n", "\n")


def left_on_screen(text: str) -> str:
    """The visible text after all control sequences: carriage returns, lines up and erased lines are carried
    out; colours stay.
    """
    lines, row, fresh = [""], 0, False
    for piece in re.split(r"(\n|\r|\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[lh])", text):
        if piece == "\n":
            row, fresh = row + 1, False
            lines += [""] * (row == len(lines))
        elif piece == "\r":
            fresh = True
        elif piece.endswith("A") and piece.startswith("\x1b["):
            row = max(row - int(piece[2:-1] or 1), 0)
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece and not piece.startswith("\x1b[?25"):
            lines[row], fresh = piece if fresh else lines[row] + piece, False
    return "\n".join(lines).strip("\n")


def terminal(out: Path, picture: Path) -> None:
    """Write the terminal session as an SVG."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for words in SESSION:
        arguments = [word.format(out=os.path.relpath(out)) for word in words]
        shown = " ".join(f'"{word}"' if " " in word else word for word in arguments)
        console.print(Text.assemble(("$ ", "bold green"), f"nearfar {shown}"))
        said = in_terminal([sys.executable, "-m", "nearfar", *arguments])
        console.print(Text.from_ansi(left_on_screen(said)))
        console.print()
    picture.write_text(
        console.export_svg(title="nearfar", theme=MONOKAI, code_format=SVG, unique_id="terminal")
    )


def page(out: Path, picture: Path) -> None:
    """Write the chat page with an answer as a PNG of 1,000 × 640."""
    with running("web", out, "--no-open", "--port", 0) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        tab = browser.new_page(viewport={"width": 1000, "height": 640}, color_scheme="light")
        tab.goto(f"{address}/?{urlencode({'prompt': QUESTION, 'max_tokens': 120, 'temperature': 0})}")
        tab.wait_for_function(STATE % "idle", timeout=300_000)
        tab.press("#prompt", "Enter")
        tab.wait_for_function(STATE % "done", timeout=300_000)
        if tab.evaluate("document.body.dataset.state") == "error":
            raise SystemExit(f"error: the page says: {tab.locator('body').inner_text()}")
        tab.screenshot(path=picture)
        browser.close()


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifacts", type=Path, default=ROOT / "out" / "sample")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    arguments.to.mkdir(exist_ok=True)
    terminal(arguments.artifacts, arguments.to / "terminal.svg")
    page(arguments.artifacts, arguments.to / "page.png")


if __name__ == "__main__":
    main()
