"""A real browser for tests and for the pictures in the docs: the Chromium of the system, driven by Playwright."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """The program, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str:
    """Why no browser can be used; empty if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed: pip install --group browser"
    if find_chromium() is None:
        return "there is no Chromium here: apt install chromium, or name one in CHROMIUM"
    return ""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium. Call it in a thread of its own: Playwright's plain interface waits."""
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())  # of this thread; trio-asyncio has another one
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=options)
            try:
                yield browser
            finally:
                browser.close()
    finally:
        asyncio.set_event_loop_policy(None)
