"""A headless browser for pages, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Opened:
    """A page and every complaint of its console so far."""

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextmanager
def browser_page(*, dark: bool = False, width: int = 1400, height: int = 900) -> Iterator[Opened]:
    """An empty page; skips the test where there is no browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox, because tests may run as root, where Chromium refuses one.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        opened = Opened(page)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning") and opened.complaints.append(message.text)
            ),
        )
        yield opened
        browser.close()
