"""One way to start Debian's Chromium for tests, screenshots and the benchmark: quiet, offline, a fresh user directory."""

from __future__ import annotations

import os
import shutil

from playwright.sync_api import Browser, Playwright

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def executable() -> str | None:
    """The browser, by $STEPSCOPE_CHROMIUM or from PATH; None where there is none."""
    return os.environ.get("STEPSCOPE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def launch(playwright: Playwright) -> Browser:
    """A browser of its own; RuntimeError where none is installed."""
    path = executable()
    if path is None:
        raise RuntimeError("no chromium found: install Debian's package chromium, or set STEPSCOPE_CHROMIUM")
    return playwright.chromium.launch(executable_path=path, args=list(FLAGS))
