"""Takes the pictures of docs/dashboard.md and README.md from the sample traces: python docs/screenshots.py

Three pages, light and dark, at 1440 and 1000 pixels; needs Chromium (see tests/dashboard/browser.py).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from stepscope.dashboard.server import HOST, make

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dashboard"))
import browser

HERE = Path(__file__).resolve().parent

SAMPLES = HERE.parent / "sample_traces"
IMAGES = HERE / "images"
RUN = "dp2_pp2_1f1b"
HEIGHT = 1080


def runs(page: Page) -> None:
    """All runs, two of them picked."""
    page.wait_for_function("() => document.querySelectorAll('.ss-bar-cell').length === 4", timeout=120_000)
    for name in ("dp2_pp2_gpipe", RUN):
        page.get_by_label(f"compare {name}").check()


def run(page: Page) -> None:
    """One step, and in it the gradient reduction whose parts lie furthest apart."""
    page.evaluate("() => { const T = stepscope.primary(); T.showStep(T.meta.steps[3]); }")
    page.evaluate(
        """async () => {
          const T = stepscope.primary(), step = T.meta.steps[3];
          const lane = T.meta.ranks[0].tracks.find((t) => t[2] === 'dp')[0];
          const count = T.meta.ranks[0].tracks.find((t) => t[0] === lane)[3];
          let best = null, spread = -1;
          for (let i = 0; i < count; i++) {
            const event = await stepscope.json(`/api/event/${stepscope.runPath(T.run)}?track=${lane}&index=${i}`);
            const starts = event.parts.map((p) => p.start), wide = Math.max(...starts) - Math.min(...starts);
            if (event.start >= step.start && event.end <= step.end && wide > spread) { best = event; spread = wide; }
          }
          if (best) T.select(best, false);
          const length = step.end - step.start;
          T.view.set(step.end - 0.5 * length, step.end + 0.02 * length);
        }"""
    )


def compare(page: Page) -> None:
    """The waterfall and both timelines as they open."""
    page.wait_for_selector(".ss-chart .bars", timeout=60_000)


PAGES = (
    ("runs", "/", ".ss-run-table", runs),
    ("run", f"/run/{RUN}", ".ss-timeline[data-ready]", run),
    ("compare", f"/compare?runs=dp2_pp2_gpipe,{RUN}", ".ss-timeline[data-ready] >> nth=1", compare),
)


def main() -> None:
    """Serve the samples and take every picture."""
    server = make(SAMPLES, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = browser.launch(playwright)
        for theme in ("light", "dark"):
            for width in (1440, 1000):
                context = chromium.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=theme)  # type: ignore[arg-type]
                page = context.new_page()
                for name, path, ready, prepare in PAGES:
                    page.goto(f"http://{HOST}:{server.server_port}{path}")
                    page.wait_for_selector(ready, timeout=120_000)
                    prepare(page)
                    page.wait_for_timeout(1500)
                    page.mouse.move(0, 0)
                    page.screenshot(path=IMAGES / f"{name}-{theme}-{width}.png", full_page=name == "compare")
                context.close()
        chromium.close()
    server.shutdown()


if __name__ == "__main__":
    main()
