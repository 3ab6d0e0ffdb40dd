"""The dashboard in Chromium: zoom, pan, hover, click, search, theme, back and forward, hostile names.

Every test fails on a console error, a failed request, or a request that leaves the machine (fixture `watched`).
"""

from __future__ import annotations

import re

import pytest
from conftest import Watched
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser


def view(watched: Watched) -> list[float]:
    return watched.evaluate("[T.view.start, T.view.end]")  # type: ignore[no-any-return]


def box(page: Page) -> dict[str, float]:
    found = page.locator(".ss-timeline").first.bounding_box()
    assert found is not None
    return dict(found)


def spot(watched: Watched, track: int, time: str) -> tuple[float, float]:
    """Page coordinates of an instant on a lane, scrolled into the window."""
    watched.page.evaluate("() => document.querySelector('.ss-timeline').scrollIntoView({block: 'end'})")
    x, y = watched.evaluate(f"[T.x({time}), stepscope.rowTop(T, T.layout.byTrack.get({track})) + 5]")
    where = box(watched.page)
    return where["x"] + x, where["y"] + y


def lane(watched: Watched, rank: int, label: str) -> int:
    return int(
        watched.evaluate(f"T.meta.ranks.find((r) => r.rank === {rank}).tracks.find((t) => t[2] === '{label}')[0]")
    )


def test_runs_page_lists_every_run_and_keeps_a_broken_one_to_itself(watched: Watched):
    page = watched.go("/", ".ss-run-table")
    for name in ("slow", "even", "dense"):
        expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()
    row = page.locator("tr", has_text="broken").first
    expect(row).to_contain_text("not JSON", timeout=60_000)
    expect(row).to_contain_text("holds no rank file")
    expect(page.locator("tr", has=page.get_by_role("link", name="slow", exact=True)).locator(".ss-bar")).to_be_visible(
        timeout=60_000
    )


def test_two_runs_are_picked_and_compared(watched: Watched):
    page = watched.go("/", ".ss-run-table")
    page.get_by_label("compare slow").check()
    expect(page.locator("#picked-text")).to_have_text("Pick one more to compare")
    page.get_by_label("compare even").check()
    page.locator("#compare-link").click()
    page.wait_for_selector(".ss-timeline[data-ready] >> nth=1", timeout=60_000)
    assert "/compare?runs=" in page.url
    expect(page.get_by_text("The deltas of the terms add up")).to_be_visible()
    expect(page.locator(".ss-verdict")).to_contain_text("a step")
    assert watched.evaluate(
        "stepscope.timelines().every((t) => t.view === T.view && t.shift === t.meta.steps[1].start)"
    )
    before = view(watched)
    page.locator(".ss-timeline").nth(1).focus()
    page.keyboard.press("w")
    watched.quiet()
    after = view(watched)
    assert after[1] - after[0] < before[1] - before[0]


def test_compared_timelines_have_one_left_edge_and_one_instant_lies_at_one_place(watched: Watched):
    page = watched.go("/compare?runs=slow,wide", ".ss-timeline[data-ready] >> nth=1")
    assert watched.evaluate("new Set(stepscope.timelines().map((t) => t.gutterWidth())).size") == 2, "labels differ"
    assert watched.evaluate("new Set(stepscope.timelines().map((t) => t.x(t.shift))).size") == 1
    page.goto(page.url.split("/compare")[0] + "/compare?runs=slow,even,dense")
    page.wait_for_selector(".ss-timeline[data-ready] >> nth=1", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_headline_ends_at_exactly_one_hundred_per_cent(watched: Watched):
    page = watched.go("/run/slow")
    widths = page.locator(".ss-bar-big .ss-bar-piece").evaluate_all("(e) => e.map((p) => p.getBoundingClientRect())")
    bar = page.locator(".ss-bar-big").bounding_box()
    assert bar is not None
    assert widths[-1]["x"] + widths[-1]["width"] == pytest.approx(bar["x"] + bar["width"], abs=0.6)
    page.wait_for_selector(".ss-chart .bars .point", timeout=60_000)
    ends = page.evaluate(
        "() => document.querySelector('.ss-chart .js-plotly-plot').data.reduce((sum, t) => t.x.map((v, i) => v + (sum[i] || 0)), [])"
    )
    assert ends == pytest.approx([100] * 8)


def test_zoom_with_wheel_keeps_the_instant_under_the_cursor(watched: Watched):
    page = watched.go("/run/slow")
    where = box(page)
    x = where["x"] + 600
    page.mouse.move(x, where["y"] + 130)
    before, at = view(watched), watched.evaluate(f"T.time({x - where['x']})")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    watched.quiet()
    after = view(watched)
    assert after[1] - after[0] < 0.6 * (before[1] - before[0])
    assert watched.evaluate(f"T.time({x - where['x']})") == pytest.approx(at, abs=2000)
    assert watched.evaluate("T.feed.data.binNs") <= (after[1] - after[0]) / 1000


def test_drag_pans_and_keys_move(watched: Watched):
    page = watched.go("/run/slow")
    page.locator(".ss-timeline").focus()
    for _ in range(4):
        page.keyboard.press("w")
    before, where = view(watched), box(page)
    page.mouse.move(where["x"] + 700, where["y"] + 150)
    page.mouse.down()
    page.mouse.move(where["x"] + 500, where["y"] + 150, steps=4)
    page.mouse.up()
    after = view(watched)
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
    assert watched.evaluate("T.selected") is None
    page.keyboard.press("a")
    assert view(watched)[0] < after[0]
    page.keyboard.press("f")
    assert view(watched)[1] - view(watched)[0] > watched.evaluate("T.meta.span_ns")


def test_hover_gives_exact_figures(watched: Watched):
    page = watched.go("/run/slow")
    watched.evaluate("T.showStep(T.meta.steps[2])")
    watched.quiet()
    track = lane(watched, 4, "dp")
    event = page.evaluate(f"() => fetch('/api/event/slow?track={track}&index=20').then((r) => r.json())")
    watched.evaluate(f"T.reveal(4, {event['start']}, {event['end']})")
    watched.quiet()
    x, y = spot(watched, track, f"({event['start']} + {event['end']}) / 2")
    page.mouse.move(x, y)
    tip = page.locator(".ss-tip")
    expect(tip).to_contain_text("all_reduce bucket")
    expect(tip).to_contain_text("26.21 MB")
    expect(tip).to_contain_text("rank 5 arrives last")


def test_click_joins_an_operation_on_all_its_ranks(watched: Watched):
    page = watched.go("/run/slow")
    watched.evaluate("T.showStep(T.meta.steps[2])")
    watched.quiet()
    track = lane(watched, 4, "dp")
    event = page.evaluate(f"() => fetch('/api/event/slow?track={track}&index=20').then((r) => r.json())")
    watched.evaluate(f"T.reveal(4, {event['start']}, {event['end']})")
    watched.quiet()
    page.mouse.click(*spot(watched, track, f"({event['start']} + {event['end']}) / 2"))
    parts = page.get_by_label("Parts on all ranks")
    expect(parts).to_contain_text("On 2 ranks: rank 5 arrives last")
    expect(parts.locator("tr.ss-last")).to_contain_text("rank 5")
    expect(page.get_by_label("Selected operation")).to_contain_text("bus")
    expect(page.locator(".ss-inspector [aria-live]")).to_contain_text("rank 5 arrives last")
    expect(page.locator("[data-finding]").first).to_be_visible()  # findings stay while something is selected
    page.locator(".ss-timeline").focus()
    first = watched.evaluate("T.selected.start")
    page.keyboard.press("]")
    page.wait_for_function(f"() => stepscope.primary().selected.start > {first}")
    page.keyboard.press("Escape")
    expect(parts).to_have_count(0)


def test_a_range_gives_sums_of_every_term(watched: Watched):
    page = watched.go("/run/slow")
    where = box(page)
    page.keyboard.down("Shift")
    page.mouse.move(where["x"] + 400, where["y"] + 150)
    page.mouse.down()
    page.mouse.move(where["x"] + 900, where["y"] + 160, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    sums = page.get_by_label("Sums of the selected range")
    expect(sums).to_contain_text("mean over 8 ranks")
    for term in ("compute", "visible communication", "bubble", "imbalance", "memory copy", "idle"):
        expect(sums).to_contain_text(term)


def test_search_marks_hits_over_the_whole_run_and_enter_goes_to_the_next(watched: Watched):
    page = watched.go("/run/slow")
    page.keyboard.press("/")
    page.keyboard.type("gradient norm")
    expect(page.locator(".ss-status")).to_contain_text("48 found")
    assert watched.evaluate("T.found.bins.length") > 3
    page.keyboard.press("Enter")
    expect(page.get_by_label("Selected operation")).to_contain_text("all_reduce gradient norm")
    page.keyboard.press("Escape")
    expect(page.locator(".ss-status")).to_contain_text("one by one")


def test_a_finding_shows_its_evidence(watched: Watched):
    page = watched.go("/run/slow")
    finding = page.locator("[data-finding]", has_text="Rank 5").first
    before = view(watched)
    finding.click()
    expect(finding).to_have_attribute("aria-pressed", "true")
    page.wait_for_function("() => stepscope.primary().selected !== null || stepscope.primary().range !== null")
    watched.quiet()
    assert view(watched) != before
    expect(finding).to_be_visible()


def test_the_address_holds_the_view_and_back_and_forward_work(watched: Watched):
    page = watched.go("/run/slow")
    page.wait_for_timeout(500)
    track = lane(watched, 0, "dp")
    watched.evaluate("T.showStep(T.meta.steps[1])")
    page.wait_for_function("() => location.hash.includes('t=')")
    second = view(watched)
    watched.evaluate("T.showStep(T.meta.steps[3])")
    page.wait_for_function(f"() => !location.hash.includes('t={round(second[0])}-')")
    third = view(watched)
    page.go_back()
    page.wait_for_function(f"() => Math.abs(stepscope.primary().view.start - {second[0]}) < 2")
    page.go_forward()
    page.wait_for_function(f"() => Math.abs(stepscope.primary().view.start - {third[0]}) < 2")
    watched.evaluate(f"T.choose({track}, 5, false)")
    page.locator(".ss-filter").fill("pp0, 5")
    page.wait_for_function("() => location.hash.includes('sel=') && location.hash.includes('ranks=')")
    shared = page.url
    page.goto("about:blank")
    page.goto(shared)
    page.wait_for_selector(".ss-timeline[data-ready]", timeout=60_000)
    page.wait_for_function("() => stepscope.primary().selected !== null")
    assert view(watched) == pytest.approx(third, abs=2)
    assert watched.evaluate("T.layout.shownRanks().map((r) => r.rank)") == [0, 1, 5]
    assert watched.evaluate("T.selected.index") == 5


def test_pages_change_without_reload_and_back_returns(watched: Watched):
    page = watched.go("/", ".ss-run-table")
    page.evaluate("() => { window.kept = true; }")
    page.get_by_role("link", name="slow", exact=True).click()
    page.wait_for_selector(".ss-timeline[data-ready]", timeout=60_000)
    page.go_back()
    page.wait_for_selector(".ss-run-table")
    page.go_forward()
    page.wait_for_selector(".ss-timeline[data-ready]", timeout=60_000)
    assert page.evaluate("() => window.kept") is True


def test_ranks_are_folded_pinned_and_filtered(watched: Watched):
    page = watched.go("/run/slow")
    rows = watched.evaluate("T.layout.rows.filter((r) => r.rank === 0).length")
    assert rows > 2
    where = box(page)
    y = where["y"] + watched.evaluate("stepscope.rowTop(T, T.layout.rows[0])") + 8
    page.mouse.click(where["x"] + 30, y)
    assert watched.evaluate("T.layout.rows.filter((r) => r.rank === 0).length") == 1
    page.mouse.click(where["x"] + watched.evaluate("T.gutter") - 10, y)
    assert watched.evaluate("T.layout.pinRows.map((r) => r.rank)") == [0]
    page.locator(".ss-filter").fill("pp3")
    assert watched.evaluate("T.layout.shownRanks().map((r) => r.rank)") == [0, 6, 7]
    page.get_by_role("button", name="Show the host's rows: annotations and operators").click()
    assert watched.evaluate("T.layout.rows.filter((r) => r.role === 'host').length") > 1


def test_theme_is_switched_and_kept(watched: Watched):
    page = watched.go("/run/slow")
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.locator("#theme-button").click()
    page.wait_for_function(f"() => getComputedStyle(document.body).backgroundColor !== '{light}'")
    pixel = "T.base.getImageData(T.canvas.width - 3, T.canvas.height - 3, 1, 1).data[0]"
    page.wait_for_function(f"() => {{ const T = stepscope.primary(); return {pixel} < 60; }}")
    page.reload()
    page.wait_for_selector(".ss-timeline[data-ready]", timeout=60_000)
    assert page.evaluate("() => document.documentElement.getAttribute('data-mantine-color-scheme')") == "dark"


def test_dense_areas_are_shares_and_a_click_zooms_in(watched: Watched):
    page = watched.go("/run/dense")
    assert watched.evaluate("T.feed.data.hasShares")
    expect(page.locator(".ss-status")).to_contain_text("merged into shares of")
    where, before = box(page), view(watched)
    y = where["y"] + watched.evaluate("stepscope.rowTop(T, T.layout.rows[0])") + 8
    page.mouse.move(where["x"] + 700, y)
    expect(page.locator(".ss-tip")).to_contain_text("%")
    page.mouse.click(where["x"] + 700, y)
    watched.quiet()
    assert view(watched)[1] - view(watched)[0] == pytest.approx((before[1] - before[0]) / 5, rel=0.01)


def test_one_request_at_a_time_and_the_latest_wish_wins(watched: Watched):
    page = watched.go("/run/dense")
    page.evaluate(
        """() => {
          const real = window.fetch; window.flying = 0; window.most = 0;
          window.fetch = async (...a) => {
            if (!String(a[0]).includes('/api/view')) return real(...a);
            window.flying++; window.most = Math.max(window.most, window.flying);
            await new Promise((r) => setTimeout(r, 30));
            try { return await real(...a); } finally { window.flying--; }
          };
        }"""
    )
    page.locator(".ss-timeline").focus()
    for key in "wwwwwddddwwaass":
        page.keyboard.press(key)
    watched.quiet()
    assert page.evaluate("() => window.most") == 1
    assert watched.evaluate("T.feed.covers(T.wish())")


def test_tabs_show_their_tables(watched: Watched):
    page = watched.go("/run/slow")
    for name, words in (
        ("Overlap", "Overlap efficiency of each rank and step"),
        ("Stragglers", "Who made the others wait"),
        ("Pipeline", "of the ideal work"),
        ("Rank × step", "One value over ranks and steps"),
    ):
        page.get_by_role("tab", name=name).click()
        expect(page.locator("#tab-body")).to_contain_text(words)
    page.get_by_role("tab", name="Events").click()
    page.locator("#events-search").fill("bucket 2")
    expect(page.locator("#events-count")).to_contain_text("48 operations")
    page.locator(".ag-row", has_text="bucket 2").first.click()
    expect(page.get_by_label("Selected operation")).to_contain_text("all_reduce bucket 2")


def test_hostile_names_are_text_and_never_run(watched: Watched):
    page = watched.go("/run/hostile")
    title = 'hostile<b>&"name · stepscope'
    expect(page).to_have_title(title)
    expect(page.locator(".ss-crumbs")).to_contain_text('hostile<b>&"name')
    for track in range(watched.evaluate("T.meta.ranks[0].tracks.length")):
        watched.evaluate(f"T.choose(T.meta.ranks[0].tracks[{track}][0], 1, false)")
        page.wait_for_function(
            f"() => {{ const T = stepscope.primary(); return T.selected && T.selected.track === T.meta.ranks[0].tracks[{track}][0]; }}"
        )
        name = watched.evaluate("T.selected.name")
        assert len(name) <= 160
        expect(page.get_by_label("Selected operation").locator("h3")).to_have_text(re.sub(r"\s+", " ", name).strip())
    page.get_by_role("tab", name="Events").click()
    page.wait_for_selector(".ag-row")
    for word in ("<b>bold", "long long", "🚀"):
        watched.evaluate(f"T.search('{word}')")
        page.wait_for_function("() => stepscope.primary().found !== null")
    where = box(page)
    for y in range(110, 260, 14):
        page.mouse.move(where["x"] + 500, where["y"] + y)
    page.go_back()
    expect(page).to_have_title(title)
    assert page.locator("img[src='x']").count() == 0


def test_the_title_names_what_the_page_shows(watched: Watched):
    page = watched.go("/", ".ss-run-table")
    expect(page).to_have_title("Runs · stepscope")
    page.get_by_role("link", name="slow", exact=True).click()
    expect(page).to_have_title("slow · stepscope", timeout=60_000)
    page.go_back()
    expect(page).to_have_title("Runs · stepscope")
    for path, title in (("/compare?runs=slow,even", "slow / even · Compare"), ("/run/nothing", "No such run")):
        page.goto(watched.address + path)
        expect(page).to_have_title(f"{title} · stepscope", timeout=60_000)


def test_a_name_is_shown_in_its_own_letters(watched: Watched):
    # Inter's contextual alternates would draw the x of 0x9a as a multiplication sign, which is wider
    page = watched.go("/run/slow")
    widths = page.evaluate("""() => {
      const width = (text, style) => {
        const span = document.createElement("span");
        span.style.font = style; span.textContent = text;
        document.body.append(span);
        const found = span.getBoundingClientRect().width;
        span.remove();
        return found;
      };
      const canvas = document.querySelector(".ss-timeline canvas").getContext("2d");
      canvas.save();
      canvas.font = "400 40px Inter";
      const drawn = ["0x9a", "0\u200cx\u200c9a", "0×9a"].map((text) => canvas.measureText(text).width);
      canvas.restore();
      return [["0x9a", "0\u200cx\u200c9a", "0×9a"].map((text) => width(text, "400 40px Inter")), drawn];
    }""")
    for plain, apart, times in widths:
        assert plain == pytest.approx(apart) and abs(plain - times) > 1


def test_the_mesh_stays_on_its_line(watched: Watched):
    watched.page.set_viewport_size({"width": 1000, "height": 900})
    page = watched.go("/", ".ss-run-table")
    lines = page.evaluate(
        "() => [...document.querySelectorAll('.ss-run-table .ss-whole')].map((e) => e.getClientRects().length)"
    )
    assert len(lines) > 5 and set(lines) == {1}


def test_names_of_runs_and_errors_are_text(watched: Watched):
    page = watched.go("/", ".ss-run-table")
    expect(page.get_by_role("link", name='hostile<b>&"name', exact=True)).to_be_visible()
    assert page.locator("td b").filter(has_text="name").count() == 0
    assert page.locator("script", has_text="owned").count() == 0


def test_the_page_fits_its_window(watched: Watched):
    for width in (1440, 1000):
        watched.page.set_viewport_size({"width": width, "height": 900})
        for path, ready in (
            ("/", ".ss-run-table"),
            ("/run/slow", ".ss-timeline[data-ready]"),
            ("/compare?runs=slow,even", ".ss-timeline[data-ready] >> nth=1"),
        ):
            page = watched.go(path, ready)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, (path, width)


def test_addresses_that_lead_nowhere_say_so(watched: Watched):
    for path, words in (
        ("/run/nothing", "No such run"),
        ("/run/../../etc", "No such page"),
        ("/run/broken", "This run cannot be shown"),
        ("/compare?runs=slow", "Compare needs two runs"),
        ("/compare?runs=slow,broken", "cannot be compared"),
        ("/elsewhere", "No such page"),
    ):
        page = watched.go(path, ".ss-message")
        expect(page.locator(".ss-message")).to_contain_text(words)


def test_long_work_says_how_far_it_is_and_can_be_cancelled(watched: Watched):
    page = watched.go("/run/lengthy", "#opening-cancel")
    expect(page.locator("#opening-text")).to_contain_text("reading file 1 of 1", timeout=10_000)
    page.locator("#opening-cancel").click()
    page.wait_for_selector(".ss-run-table")
    page.go_back()
    page.wait_for_selector("#opening-cancel, .ss-message")
    page.goto(watched.address + "/run/lengthy")
    page.wait_for_selector(".ss-timeline[data-ready]", timeout=60_000)


def test_a_run_that_recorded_nothing_opens_and_says_so(watched: Watched):
    page = watched.go("/run/empty")
    expect(page.locator(".ss-headline")).to_contain_text("No whole step")
    for name in ("Rank × step", "Overlap", "Stragglers", "Events"):
        page.get_by_role("tab", name=name).click()
        expect(page.locator("#tab-body h3").first).to_be_visible()
    watched.quiet()


def test_many_ranks_are_folded_and_only_what_is_in_view_is_asked_for(watched: Watched):
    page = watched.go("/run/wide")
    assert watched.evaluate("T.layout.rows.length") == 128
    assert watched.evaluate("T.feed.data.lanes.size") < 60
    before = watched.evaluate("T.feed.fetches")
    page.locator(".ss-timeline").focus()
    for _ in range(6):
        page.keyboard.press("PageDown")
    watched.quiet()
    assert watched.evaluate("T.scroll") > 0 and watched.evaluate("T.feed.fetches") > before
    page.locator(".ss-filter").fill("120-121")
    watched.quiet()
    assert watched.evaluate("T.layout.rows.map((r) => r.rank)") == [120, 121]


def test_exports_hand_over_files(watched: Watched):
    page = watched.go("/run/slow")
    for button, ending in (("Save what is shown as a picture", ".png"), ("Report", ".html")):
        with page.expect_download() as told:
            page.get_by_text("Report", exact=True).click() if ending == ".html" else page.get_by_role(
                "button", name=button
            ).click()
        assert told.value.suggested_filename.endswith(ending)
    page.get_by_role("tab", name="Events").click()
    page.wait_for_selector(".ag-row")
    with page.expect_download() as told:
        page.locator("#events-csv").click()
    assert told.value.suggested_filename == "operations.csv"
