"""Puts the built chat page (web/dist/page, from `npm run build`) into the wheel as nearfar/web_dist/page,
when it is there.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WebPage(BuildHookInterface):  # type: ignore[type-arg]
    """A hook, because hatch's own force-include fails where the page has not been built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the page; an editable install finds it in the repository."""
        page = Path(self.root) / "web" / "dist" / "page"
        if version != "editable" and page.is_dir():
            build_data["force_include"][str(page)] = "nearfar/web_dist/page"
