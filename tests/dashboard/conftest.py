"""Synthetic runs behind a catalogue, and one browser for the session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import browser
import pytest
import synthetic
from playwright.sync_api import Browser, Page, sync_playwright

from stepscope.analysis.run import Run
from stepscope.dashboard.app import create_app
from stepscope.dashboard.catalogue import Catalogue
from stepscope.dashboard.loaded import LoadedRun, Progress, load
from stepscope.dashboard.server import HOST, QuietHandler
from stepscope.tracer.schema import RunMeta


def quiet(text: str, share: float) -> None:
    """Progress that nobody reads."""


RUNS: dict[str, Callable[[], Run]] = {
    "slow": lambda: synthetic.pipeline(run_id="slow"),
    "even": lambda: synthetic.pipeline(slow_rank=-1, seed=3, run_id="even"),
    "hostile": synthetic.hostile,
    "empty": lambda: synthetic.empty("empty"),
    "wide": lambda: synthetic.random_run(128, 300, run_id="wide"),
    "dense": lambda: synthetic.pipeline(2, 2, 64, 3, 24, -1, run_id="dense"),
}


@pytest.fixture(scope="session")
def slow() -> LoadedRun:
    """4 stages x 2 replicas, 1F1B, rank 5 slow: 6 steps."""
    return load("slow", RUNS["slow"](), quiet)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root directory whose run directories hold only run.json; and one broken run."""
    folder = tmp_path_factory.mktemp("runs")
    for name, make in RUNS.items():
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(make().meta.to_json(), "utf-8")
    for name in ("broken", "lengthy"):
        (folder / name).mkdir()
    (folder / "lengthy" / "run.json").write_text(RunMeta("lengthy", "lengthy").to_json(), "utf-8")
    (folder / "broken" / "run.json").write_text('{"run_id": <script>', "utf-8")
    return folder


def opener(run_id: str, path: Path, progress: Progress) -> LoadedRun:
    """Opens the synthetic run of that name; raises as a reader would for others."""
    for tenth in range(28 if run_id == "lengthy" else 0):
        progress("reading file 1 of 1", tenth / 28)
        time.sleep(0.1)
    if run_id == "lengthy":
        return load(run_id, RUNS["even"](), progress)
    if run_id not in RUNS:
        raise ValueError(f"{run_id} holds no rank file <i>at all</i>")
    return load(run_id, RUNS[run_id](), progress)


@pytest.fixture(scope="session")
def catalogue(root: Path) -> Catalogue:
    """The catalogue of the synthetic runs."""
    return Catalogue(root, opener)


@pytest.fixture(scope="session")
def address(catalogue: Catalogue) -> Iterator[str]:
    """A dashboard that is being served."""
    from werkzeug.serving import make_server

    server = make_server(HOST, 0, create_app(catalogue).server, threaded=True, request_handler=QuietHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    thread.join(5)
    server.server_close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for the session; without one, its tests are skipped."""
    if browser.executable() is None:
        pytest.skip("no chromium: install Debian's package chromium, or set STEPSCOPE_CHROMIUM")
    with sync_playwright() as playwright:
        found = browser.launch(playwright)
        yield found
        found.close()


class Watched:
    """A page, and everything that went wrong on it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.problems: list[str] = []
        self.abroad: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", self._request)
        page.on("response", self._response)

    def _console(self, message) -> None:  # type: ignore[no-untyped-def]
        if message.type == "error":
            self.problems.append(f"console: {message.text}")

    def _request(self, request) -> None:  # type: ignore[no-untyped-def]
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.abroad.append(request.url)

    def _response(self, response) -> None:  # type: ignore[no-untyped-def]
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def go(self, path: str, ready: str = ".ss-timeline[data-ready]") -> Page:
        """Open a path and wait until it is there."""
        self.page.goto(self.address + path)
        self.page.wait_for_selector(ready, timeout=60_000)
        self.quiet()
        return self.page

    def quiet(self) -> None:
        """Wait until no timeline waits for data or for a frame, and its address is written."""
        self.page.wait_for_function(
            "() => !window.stepscope || stepscope.timelines().every((t) => t.meta && !t.feed.busy && !t.queued)",
            timeout=30_000,
        )

    def evaluate(self, code: str):  # type: ignore[no-untyped-def]
        """Run code with `T`, the page's timeline."""
        return self.page.evaluate(
            f"() => {{ const T = stepscope.primary() || stepscope.timelines()[0]; return {code}; }}"
        )


@pytest.fixture
def watched(chromium: Browser, address: str) -> Iterator[Watched]:
    """A fresh page; the test fails where anything was wrong on it or any request left the machine."""
    context = chromium.new_context(viewport={"width": 1440, "height": 1000}, color_scheme="light")
    found = Watched(context.new_page(), address)
    yield found
    context.close()
    assert found.problems == []
    assert found.abroad == []
