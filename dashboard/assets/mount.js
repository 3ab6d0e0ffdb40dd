/* Joins the page that Dash draws with the timelines: mounting, findings, keys of the page, callbacks in the browser. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  S.timelines = () => [...document.querySelectorAll(".ss-timeline")].map((el) => el.timeline).filter(Boolean);
  S.primary = () => S.timelines().find((t) => t.primary) || null;

  // ---- mounting: Dash puts the elements there late, and replaces them when the page changes -------------------------
  function mount() {
    if (!S.Timeline || !S.View) return;
    for (const element of document.querySelectorAll(".ss-timeline:not([data-mounted])")) {
      element.dataset.mounted = "true";
      const place = element.closest("[data-linked]");
      const linked = place && (place.linked = place.linked || new S.Linked(place));
      const view = linked ? linked.view : new S.View();
      const timeline = (element.timeline = new S.Timeline(element, { run: element.dataset.run, view, primary: !linked }));
      timeline.loading.then(() => equip(element, timeline, linked)).catch((error) => {
        element.classList.add("ss-failed");
        element.textContent = `The timeline could not be loaded (${error.message}).`;
      });
    }
  }
  function equip(element, timeline, linked) {
    const panel = element.closest(".ss-panel"), find = (name) => panel && panel.querySelector(name);
    if (find(".ss-inspector")) new S.Inspector(find(".ss-inspector"), timeline);
    if (linked) { linked.join(); return; }
    if (find(".ss-tools")) new S.Toolbar(find(".ss-tools"), timeline);
    timeline.restore(S.url.read());
  }

  // ---- findings, keys and history of the page -----------------------------------------------------------------------
  const integer = (text) => (text === undefined || text === "" ? null : Number(text));
  document.addEventListener("click", (e) => {
    const finding = e.target.closest && e.target.closest("[data-finding]"), T = finding && S.primary();
    if (!T || !T.meta) return;
    const { rank, start, end, op } = finding.dataset;
    document.querySelectorAll("[data-finding]").forEach((f) => f.setAttribute("aria-pressed", String(f === finding)));
    T.show({ rank: integer(rank), start: integer(start), end: integer(end), op: integer(op) });
    T.element.scrollIntoView({ block: "nearest", behavior: "smooth" });
  });
  document.addEventListener("keydown", (e) => {
    if (S.isTyping() || e.ctrlKey || e.metaKey || e.altKey || !S.timelines().length) return;
    const box = document.querySelector(".ss-search");
    if (e.key === "/" && box) { e.preventDefault(); box.focus(); box.select(); }
    if (e.key === "?") { e.preventDefault(); S.toggleHelp(); }
  });
  window.addEventListener("popstate", () => {
    const T = S.primary();
    if (T && T.meta) T.restore(S.url.read());
    document.querySelectorAll("[data-linked]").forEach((place) => place.linked && place.linked.restore());
  });

  // ---- Dash's own callbacks in the browser --------------------------------------------------------------------------
  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.stepscope = {
    title(words) {
      if (words) document.title = words;
      return window.dash_clientside.no_update;
    },
    theme(clicks) {
      const now = clicks ? (S.isDark() ? "light" : "dark") : S.chosenTheme || "light";
      if (clicks) { try { localStorage.setItem("stepscope-theme", now); } catch (error) { /* not kept: storage is blocked */ } }
      document.documentElement.setAttribute("data-mantine-color-scheme", now);
      return [now, now];
    },
    /** The interval that the events table is of: the selected range, else what is in view. */
    range() {
      const T = S.primary();
      if (!T || !T.meta) return null;
      const clip = (t) => Math.round(Math.min(Math.max(t, 0), T.meta.span_ns));
      const [start, end] = T.range || [T.view.start + T.shift, T.view.end + T.shift];
      return { start: clip(start), end: clip(end), at: Date.now() };
    },
    row(rows) {
      const T = S.primary(), row = rows && rows[0];
      if (T && T.meta && row && row.track !== undefined) T.choose(row.track, row.index, true);
      return window.dash_clientside.no_update;
    },
  };

  new MutationObserver(mount).observe(document.documentElement, { childList: true, subtree: true });
  document.addEventListener("DOMContentLoaded", mount);
})();
