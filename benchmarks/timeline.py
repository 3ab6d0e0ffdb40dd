"""How fast the timeline paints: 8 million events on 16 lanes, and 1024 ranks, in a real browser.

    python benchmarks/timeline.py [--events 8000000] [--ranks 1024] [--moves 60]

Reports, over random zooms and pans: the first paint after an input (from what is there), the refined paint (the server
has answered), the payload, and how long the server took to lay the run out. The rows are random; the ledger is a
stand-in (compute and idle), since only drawing is measured. Goals: first paint under 20 ms, refined 60 ms median and
100 ms at the 95th percentile, payload independent of the number of events.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from playwright.sync_api import Page, sync_playwright

from stepscope.analysis.run import Run
from stepscope.dashboard.app import create_app
from stepscope.dashboard.catalogue import Catalogue, Opening
from stepscope.dashboard.loaded import LoadedRun, lay_out
from stepscope.dashboard.server import HOST, QuietHandler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "dashboard"))
import browser
import synthetic

MOVES = """
async (moves) => {
  const T = stepscope.primary(), sleep = (ms) => new Promise((r) => setTimeout(r, ms));
  const found = [];
  for (const [kind, at, width] of moves) {
    const fetches = T.feed.fetches, began = performance.now();
    const middle = at * T.meta.span_ns, half = T.meta.span_ns * width / 2;
    if (kind === "zoom") T.view.set(middle - half, middle + half);
    else if (kind === "pan") T.view.pan(T.view.span * (at - 0.5));
    else T.scrollBy((at - 0.5) * 4000);
    while (T.queued) await sleep(0);
    const first = T.lastPaint - began, paint = T.paints[T.paints.length - 1];
    let refined = first;
    for (let i = 0; i < 2000 && (T.feed.busy || T.queued); i++) { await sleep(1); }
    refined = T.lastPaint - began;
    found.push([kind, first, refined, paint, T.feed.fetches > fetches ? T.feed.data.bytes : 0]);
    await sleep(30);
  }
  return found;
}
"""


def stand_in(run: Run) -> tuple[Any, Any]:
    """A ledger of compute and idle, and no matches: enough to draw."""

    def segments(rank: int) -> pd.DataFrame:
        events = run.rank(rank).events
        mine = events["kind"] == 0
        start, length = events["start_ns"][mine], events["dur_ns"][mine]
        edges = np.stack([start, start + length], 1).reshape(-1)
        term = np.tile(np.array([0, 1], np.int8), len(start))[:-1]
        frame = pd.DataFrame({"start_ns": edges[:-1], "end_ns": edges[1:]})
        frame["term"] = pd.Categorical.from_codes(term, categories=["compute", "idle"])
        tenth = max(1, len(frame) // 10)
        frame["step"] = np.arange(len(frame)) // tenth
        return frame[frame["end_ns"] > frame["start_ns"]]

    parts = pd.DataFrame({name: np.zeros(0, np.int64) for name in ("match_id", "rank", "row", "last_arrival_ns")})
    return SimpleNamespace(segments=segments), SimpleNamespace(parts=parts, clock=None, table=None)


class Prepared(Catalogue):
    """A catalogue of one run that is already laid out, shown by a page that has only the timeline."""

    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__(Path("."))
        self._opening = Opening((0,), loaded=loaded)
        self._opening.done.set()

    def open(self, run_id: str) -> Opening | None:
        return self._opening

    def loaded(self, run_id: str) -> LoadedRun | None:
        return self._opening.loaded


def moves(count: int, seed: int = 1) -> list[list[Any]]:
    """Zooms to every scale, pans and scrolls."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["zoom", "pan", "pan", "scroll"], count)
    return [[str(kind), float(rng.random()), float(10 ** rng.uniform(-5, 0))] for kind in kinds]


def measure(page: Page, count: int) -> pd.DataFrame:
    """One row a move, times in ms."""
    rows = page.evaluate(MOVES, moves(count))
    return pd.DataFrame(rows, columns=["kind", "first", "refined", "paint", "bytes"])


def report(title: str, frame: pd.DataFrame, laid_out_s: float) -> None:
    """Medians and 95th percentiles."""
    print(f"{title}: laid out in {laid_out_s:.1f} s; load average {os.getloadavg()[0]:.1f}")
    answered = frame[frame["bytes"] > 0]
    for name, rows, goal in (
        ("paint", frame, "20"),
        ("first", frame, "20 + a frame"),
        ("refined", answered, "60, 100"),
    ):
        median, p95 = rows[name].quantile([0.5, 0.95]) if len(rows) else (float("nan"), float("nan"))
        print(f"  {name:8s} median {median:6.1f} ms   p95 {p95:6.1f} ms   ({len(rows)} moves; goal {goal})")
    sent = answered["bytes"]
    if len(sent):
        print(
            f"  payload  median {sent.median() / 1e3:6.0f} kB   max {sent.max() / 1e3:6.0f} kB   ({len(sent)} answers)"
        )


def run_case(title: str, run: Run, count: int) -> pd.DataFrame:
    """Lay one run out, serve it, move about in a browser."""
    from werkzeug.serving import make_server

    began = time.perf_counter()
    decomposition, matches = stand_in(run)
    loaded = lay_out("bench", run, None, decomposition, matches, lambda text, share: None)
    laid_out_s = time.perf_counter() - began
    app = create_app(Prepared(loaded))
    body = '<div class="ss-panel"><div class="ss-timeline" tabindex="0" data-run="bench"></div></div>'
    scripts = ("base", "timeline", "timeline_data", "timeline_input", "timeline_layout", "timeline_overlay",
               "timeline_paint", "timeline_shares", "linked", "inspector", "toolbar", "help", "mount")  # fmt: skip
    tags = "".join(f'<script src="/assets/{name}.js"></script>' for name in scripts)
    html = f'<html><link rel="stylesheet" href="/theme.css"><link rel="stylesheet" href="/assets/app.css"><body>{body}{tags}'
    app.server.add_url_rule("/bench", "bench", lambda: html)
    server = make_server(HOST, 0, app.server, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        chromium = browser.launch(playwright)
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"http://{HOST}:{server.server_port}/bench")
        page.wait_for_selector(".ss-timeline[data-ready]", timeout=120_000)
        measure(page, 5)
        frame = measure(page, count)
        chromium.close()
    server.shutdown()
    report(title, frame, laid_out_s)
    return frame


def main() -> None:
    """Both cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=8_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--moves", type=int, default=60)
    chosen = parser.parse_args()
    deep = synthetic.random_run(8, chosen.events // 16)
    run_case(f"{chosen.events:,} events on 16 lanes", deep, chosen.moves)
    del deep
    per_lane = max(50, chosen.events // 4 // (2 * chosen.ranks))
    run_case(f"{chosen.ranks} ranks", synthetic.random_run(chosen.ranks, per_lane), chosen.moves)


if __name__ == "__main__":
    main()
